"""What cache tiers and links did over time, and each restore: kept beside the run's other files, read back from them.

Three tables. `series`: one row per series and bin; kind "read" and "write" (bytes that left or entered a tier in the
bin, on all nodes), "resident" (mean and highest bytes; node DRAM by node, as "dram/3"), "link" (bytes over a link;
the busiest of each kind of link). `links`: one row per link, whole run. `restores`: one row per load into a GPU.
docs/metrics.md defines every column.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import polars as pl

from harness.errors import InputError
from harness.folders import whole

TIER_SCHEMA: Final = 1
_METADATA_KEY: Final = "harness.tiers"

SERIES_COLUMNS: Final[dict[str, Any]] = {
    "kind": pl.String,
    "name": pl.String,
    "start_ns": pl.Int64,
    "width_ns": pl.Int64,
    "bytes": pl.Int64,
    "high_bytes": pl.Int64,
}
LINK_COLUMNS: Final[dict[str, Any]] = {
    "link": pl.String,
    "kind": pl.String,
    "capacity_bytes_per_s": pl.Int64,
    "bytes": pl.Int64,
    "utilisation_mean": pl.Float64,
    "utilisation_p99": pl.Float64,
    "busy_share": pl.Float64,
    "full_share": pl.Float64,
}
RESTORE_COLUMNS: Final[dict[str, Any]] = {
    "call_id": pl.String,
    "node": pl.Int64,
    "outcome": pl.String,
    "tier": pl.String,
    "bytes": pl.Int64,
    "asked_ns": pl.Int64,
    "answered_ns": pl.Int64,
    "started_ns": pl.Int64,
    "ended_ns": pl.Int64,
}
"""And one column `NAME_tokens` per tier."""

LOADED: Final = "loaded"
FAILED: Final = "failed"
CANCELLED: Final = "cancelled"
"""Outcomes of a restore."""

FILES: Final = {"series": "tiers.parquet", "links": "links.parquet", "restores": "restores.parquet"}


@dataclass(slots=True)
class TierData:
    """The three tables of one run."""

    series: pl.DataFrame
    links: pl.DataFrame
    restores: pl.DataFrame

    def write(self, dir: Path) -> None:
        """The three files into a run's folder."""
        for table, file in FILES.items():
            frame: pl.DataFrame = getattr(self, table)
            with whole(dir / file) as part:
                frame.write_parquet(part, compression="zstd", metadata={_METADATA_KEY: str(TIER_SCHEMA)})

    @classmethod
    def read(cls, dir: Path) -> TierData | None:
        """The inverse of `write`; None for a run without tiers. A foreign or broken file is an input error."""
        if not (dir / FILES["series"]).exists():
            return None
        return cls(**{table: _read(dir / file) for table, file in FILES.items()})

    def of(self, kind: str) -> pl.DataFrame:
        """The series of one kind."""
        return self.series.filter(pl.col("kind") == kind)


def _read(path: Path) -> pl.DataFrame:
    try:
        version = pl.read_parquet_metadata(path).get(_METADATA_KEY)
        frame = pl.read_parquet(path)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise InputError(str(path), f"not a readable table of tiers ({error})", "repeat the run") from None
    if version != str(TIER_SCHEMA):
        what = f"tiers of schema {version or 'unknown'}, this harness reads {TIER_SCHEMA}"
        raise InputError(str(path), what, "use the version of the harness that wrote it")
    return frame
