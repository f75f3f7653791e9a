"""What a run is, beside its call records: everything that the summary and the report need, kept as
run.json.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from harness.errors import InputError
from harness.folders import write_whole
from harness.results.split import WorkerFacts

RUN_SCHEMA: Final = 1


@dataclass(slots=True)
class LoadFacts:
    """The offered load: what the trace and the arrival process bring, whatever became of it."""

    sessions: int
    calls: int
    input_tokens: int
    output_tokens: int
    sessions_per_hour_per_node: float | None = None


@dataclass(slots=True)
class Prices:
    """Prices per million tokens, in one currency; `name` says whose."""

    name: str
    input_uncached: float
    input_cached: float
    output: float
    currency: str = "USD"


@dataclass(slots=True)
class RunInfo:
    """All facts of one run that are not per call.

    Free-form dictionaries (`workload`, `cluster`, `profile`, `versions`) are shown in the report as they are,
    one line per key, so write keys for readers ("GPUs per node", not "gpn").
    """

    experiment: dict[str, Any]
    """The resolved experiment."""
    experiment_yaml: str
    """The same as text, as experiment.resolved.yaml has it."""
    router: dict[str, Any]
    """`Router.identity()`: kind, release, sha256, config (name), config_text, added, unmodified."""
    load: LoadFacts
    endpoint_nodes: list[int]
    """Node of each endpoint."""
    virtual_ns: int
    """Virtual length of the run."""
    name: str = ""
    """The experiment's name."""
    label: str = ""
    """How this run is called in tables and plots; the router config's name where empty."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of the experiment in which this run differs from those beside it, `a.b: value`; empty where only the
    router config does."""
    seed: int | None = None
    window_ns: tuple[int, int | None] = (0, None)
    """Measured window: from the end of the warm-up to the given end, or to the end of the run."""
    cache: dict[str, Any] = field(default_factory=lambda: {"kind": "none", "release": None, "mode": None})
    router_stats: dict[str, Any] = field(default_factory=dict)
    """`Router.stats()`."""
    workload: dict[str, Any] = field(default_factory=dict)
    cluster: dict[str, Any] = field(default_factory=dict)
    profile: dict[str, Any] = field(default_factory=dict)
    """Step-time profile: provenance and how much lay outside its grid."""
    front_end: dict[str, Any] = field(default_factory=dict)
    """What stands around the GPU: each part that is not zero, with its source."""
    workers: list[WorkerFacts] = field(default_factory=list)
    """What each endpoint's engine counted, with its role."""
    kv_transfer: dict[str, Any] | None = None
    """Account of the KV that moved from prefill to decode workers; None in a cluster without roles."""
    prices: Prices | None = None
    tier: dict[str, Any] | None = None
    busy_ns: list[int] | None = None
    """GPU-busy time of each endpoint; taken from the timeline where None."""
    batch_mean: float | None = None
    """Mean running requests per busy endpoint over busy time; taken from the timeline where None."""
    wall_s: float | None = None
    cpu_s: float | None = None
    peak_rss_bytes: int | None = None
    decisions: int | None = None
    events: int | None = None
    steps: int | None = None
    invalid: list[str] = field(default_factory=list)
    """Reasons why the numbers must not be used (a silent fall-back of the router, a broken invariant)."""
    notes: list[str] = field(default_factory=list)
    """What a reader has to know to use them (capped gaps, step times outside the profile's grid)."""
    interrupted: bool = False
    command: str = ""
    """The exact command that repeats the run."""
    versions: dict[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Label of the run in tables and plots, without marks."""
        return self.label or str(self.router.get("config") or self.name or "run")

    @property
    def is_baseline(self) -> bool:
        """Whether the placement came from one of the harness's own baselines instead of the real router."""
        return self.router.get("kind") == "baseline"

    @property
    def nodes(self) -> int:
        return len(set(self.endpoint_nodes))


def write_info(path: Path, info: RunInfo) -> None:
    """run.json: pretty, in the order of the fields."""
    document = {"schema": RUN_SCHEMA, **msgspec.to_builtins(info, enc_hook=str)}
    write_whole(path, msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")


def read_info(path: Path) -> RunInfo:
    """The inverse of `write_info`; a missing or broken file is an input error."""
    try:
        document = msgspec.json.decode(path.read_bytes())
        schema = document.pop("schema", None) if isinstance(document, dict) else None
        if schema != RUN_SCHEMA:
            raise InputError(
                str(path),
                f"schema {schema}, this harness reads {RUN_SCHEMA}",
                "use the version that wrote it",
            )
        return msgspec.convert(document, RunInfo, str_keys=True)
    except FileNotFoundError:
        raise InputError(str(path), "no such file", "give the folder that a run wrote") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise InputError(str(path), f"not a run record ({error})", "repeat the run") from None
