"""Results in other tools' formats: `harness export DIR --format llmd|perfetto|csv`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from harness.results.exports import calls_csv, llmd, perfetto
from harness.results.store import Run

FORMATS: Final[dict[str, tuple[str, Callable[[Run, Path], None]]]] = {
    "csv": ("calls.csv", calls_csv.write),
    "perfetto": ("trace.perfetto.json.gz", perfetto.write),
    "llmd": ("benchmark_report.yaml", llmd.write),
}
"""Per format the file's name and what writes it."""
