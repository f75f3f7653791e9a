"""Tables of tiers reduced to the points that a plot can show; nothing here knows about plotly."""

from __future__ import annotations

import numpy as np
import polars as pl

from harness.results.numbers import Floats, seconds
from harness.results.series import Points, distribution
from harness.results.tier_data import LOADED, TierData
from harness.results.tier_summary import RESTORE

BINS = 130


def _coarse(data: TierData, kind: str, names: list[str]) -> pl.DataFrame:
    """At most BINS bins: middle (s), bytes of all names per s of width, mean and high bytes over the names."""
    rows = data.of(kind).filter(pl.col("name").is_in(names))
    if rows.is_empty():
        return pl.DataFrame(schema=dict.fromkeys(("middle_s", "rate", "mean", "high"), pl.Float64))
    bins = rows["start_ns"].n_unique()
    width = int(rows["width_ns"].max()) * max(1, -(-bins // BINS))  # type: ignore[arg-type]
    own = pl.col("width_ns").cast(pl.Float64)
    return (
        rows.with_columns(place=pl.col("start_ns") // width)
        .group_by("place")
        .agg(
            middle_s=(pl.col("start_ns").min() + (pl.col("start_ns") + pl.col("width_ns")).max()) / 2e9,
            rate=pl.col("bytes").sum() / (own.sum() / pl.col("name").n_unique()) * 1e9,
            mean=(pl.col("bytes") * own).sum() / own.sum(),
            high=pl.col("high_bytes").max().cast(pl.Float64),
        )
        .sort("place")
    )


def rate_over_time(data: TierData, kind: str, name: str) -> Points:
    """Bin middles in s; bytes/s of a "read", "write" or "link" series, bin means."""
    rows = _coarse(data, kind, [name])
    return rows["middle_s"].to_numpy(), rows["rate"].to_numpy()


def resident_over_time(data: TierData, names: list[str]) -> tuple[Floats, Floats, Floats]:
    """Bin middles in s; mean bytes over the bin and the names, and the highest of any of them."""
    rows = _coarse(data, "resident", names)
    return rows["middle_s"].to_numpy(), rows["mean"].to_numpy(), rows["high"].to_numpy()


def nodes_of(data: TierData, tier: str) -> list[str]:
    """Names of the resident series of a node tier, by node."""
    found = data.of("resident").filter(pl.col("name").str.starts_with(f"{tier}/"))["name"].unique().to_list()
    return sorted(found, key=lambda name: int(name.rsplit("/", 1)[1]))


def restore_distribution(data: TierData, tier: str, window_ns: tuple[int, int]) -> Points:
    """Time of the restores that reached down to the tier and no further, against the share of them."""
    rows = data.restores.filter(
        (pl.col("tier") == tier) & (pl.col("outcome") == LOADED) & pl.col("ended_ns").is_between(*window_ns)
    )
    times = seconds(rows, RESTORE)
    return distribution(np.maximum(times, 1e-6))
