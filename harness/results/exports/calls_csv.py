"""One row per call, columns as in calls.parquet (docs/metrics.md); times in nanoseconds."""

from __future__ import annotations

from pathlib import Path

from harness.folders import whole
from harness.results.store import Run


def write(run: Run, path: Path) -> None:
    """Write the file."""
    with whole(path) as part:
        run.calls.sort("call_id").write_csv(part)
