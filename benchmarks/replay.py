"""A whole replay: virtual seconds per wall second, calls per second, memory, and what one decision costs.

    python -m benchmarks.replay [--trace FILE] [--sessions N] [--release v0.7.1]

Runs the load-only and the precise config on the same sessions, each twice with one seed and once with another: equal
seeds must give equal digests, different ones different digests. Without --trace the shipped trace is replayed.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.arms import with_router
from harness.experiment import Experiment, load_experiment
from harness.runner import run_experiment
from harness.workload import load_sessions

EXAMPLE = Path(__file__).parents[1] / "examples" / "compare.yaml"


def main() -> None:
    """Print two tables: the replay as a whole, and the router's share per decision."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trace")
    parser.add_argument("--sessions", type=int, default=10)
    parser.add_argument("--release", default="v0.7.1")
    options = parser.parse_args()
    overrides = [f"router.release={options.release}", "output.report=false"]
    if options.sessions:
        overrides.append(f"trace.sessions={options.sessions}")
    base = load_experiment(EXAMPLE, overrides, options.trace)
    replay = Table(title=f"replay of {Path(base.trace.path).name}", box=None)
    for heading in (
        "config", "calls", "virtual s / wall s", "calls/s", "CPU s", "peak MiB", "output tokens / engine event",
        "same seed, same digest", "other seed, other digest",
    ):  # fmt: skip
        replay.add_column(heading, justify="left" if heading == "config" else "right")
    cost = Table(title="milliseconds of wall time per decision", box=None)
    for heading in ("config", "decisions", "gauge push", "KV barrier", "ext_proc", "answer passed back", "router CPU"):
        cost.add_column(heading, justify="left" if heading == "config" else "right")
    for config in ("load", "precise"):
        first, again = _run(base, config, 1), _run(base, config, 1)
        other = _run(base, config, 2)
        summary, stats = first
        calls = summary["load"]["calls"]
        replay.add_row(
            config,
            f"{calls:,}",
            f"{summary['virtual_s'] / summary['wall_s']:,.0f}",
            f"{calls / summary['wall_s']:.0f}",
            f"{summary['cpu_s']:.1f}",
            f"{summary['peak_rss_bytes'] / 2**20:,.0f}",
            f"{summary['load']['output_tokens'] / max(1, summary['events']):.1f}",
            "yes" if summary["digest"] == again[0]["digest"] else "NO",
            "yes" if summary["digest"] != other[0]["digest"] else "NO",
        )
        n = max(1, stats["decisions"])
        cost.add_row(
            config,
            f"{n:,}",
            *(
                f"{stats[key] / n * 1e3:.2f}"
                for key in ("push_s", "barrier_s", "ext_proc_s", "response_s", "router_cpu_s")
            ),
        )
    console = Console(width=150)
    console.print(replay)
    console.print(cost)


def _run(base: Experiment, config: str, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    experiment = with_router(base, config).model_copy(update={"seed": seed})
    with tempfile.TemporaryDirectory() as folder:
        run = run_experiment(experiment, Path(folder), loaded=load_sessions(experiment), show_progress=False)
    return run.summary, run.info.router_stats


if __name__ == "__main__":
    main()
