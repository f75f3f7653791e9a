"""A process of workers with cache tiers below them: `python -m harness.live.tiered_worker SPEC.json`.

The specification is `TieredSpec` as JSON. As with fake_workers.api.serving the process ends with 2 where it cannot
begin, and with 0 after SIGTERM or SIGINT.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from fake_workers.api.paced_clock import PacedClock
from fake_workers.api.serving import ServeSpec, begin, run
from harness.experiment import Experiment
from harness.live.tiers import LiveTiers


class TieredSpec(BaseModel):
    """What a process serves, and what lies below."""

    model_config = ConfigDict(extra="forbid")
    serve: ServeSpec
    experiment: dict[str, Any]
    groups: list[int]
    """Of each group of `serve` its number in the experiment's cluster."""
    results: str | None = None
    """A folder that gets the tiers' account at the end."""


def _serve(spec: TieredSpec) -> None:
    experiment = Experiment.model_validate(spec.experiment)
    results = Path(spec.results) if spec.results else None

    def below(clock: PacedClock) -> LiveTiers:
        return LiveTiers(clock, experiment, spec.groups, spec.serve.model, results)

    run(spec.serve, below)


def main(arguments: list[str]) -> int:
    """Entry point of the process."""
    return begin(arguments, "tiered_worker", TieredSpec, _serve)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
