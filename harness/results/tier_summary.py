"""The `tier` part of summary.json: what the tiers served, how long restores took, what was lost.

Restores count by their end in the measured window; traffic, residency and links are of the whole run.
"""

from __future__ import annotations

from typing import Any, Final

import polars as pl

from harness.results.numbers import ratio, seconds, spread
from harness.results.tier_data import CANCELLED, FAILED, LOADED, TierData

SOURCES: Final = ("gpu", "dram", "shared", "peer", "computed")
_WITHOUT: Final[dict[str, Any]] = {
    "read_bytes_per_s_mean": None,
    "read_bytes_per_s_p99": None,
    "resident_bytes_per_node_max": None,
}

FETCH: Final = pl.col("answered_ns") - pl.col("asked_ns")
"""From a shared tier to node DRAM; the lookup's own time where node DRAM held everything."""
COPY: Final = pl.col("ended_ns") - pl.col("started_ns")
"""From node DRAM to the GPU."""
RESTORE: Final = FETCH + COPY


def tier_summary(
    calls: pl.DataFrame,
    window: pl.DataFrame,
    window_ns: tuple[int, int],
    facts: dict[str, Any] | None,
    data: TierData | None,
) -> dict[str, Any]:
    """`window`: those of `calls` that ended in the measured window; `facts` and `data` of a run with tiers."""
    if facts is None:
        return dict(_WITHOUT)
    if data is None:
        return _WITHOUT | facts
    token_bytes = int(facts["kv_bytes_per_token"])
    tokens = {name: int(window[f"{name}_tokens"].sum()) for name in SOURCES}
    looked_up = window.filter(pl.col("admitted_ns").is_not_null())
    computing = calls.filter(pl.col("first_token_ns").is_not_null())
    ended = data.restores.filter(pl.col("ended_ns").is_between(*window_ns))
    loaded = ended.filter(pl.col("outcome") == LOADED)
    return {
        **facts,
        "token_share": ratio(
            float(tokens["dram"] + tokens["shared"] + tokens["peer"]), float(looked_up["input_tokens"].sum())
        ),
        "bytes_by_source": {name: count * token_bytes for name, count in tokens.items()},
        "computed_again_share": ratio(facts["computed_again_tokens"], float(computing["input_tokens"].sum())),
        "restores": {
            **{name: int((ended["outcome"] == name).sum()) for name in (LOADED, FAILED, CANCELLED)},
            "bytes": spread(loaded["bytes"].cast(pl.Float64).to_numpy()),
            "s": spread(seconds(loaded, RESTORE)),
            "fetch_s": spread(seconds(loaded, FETCH)),
            "copy_s": spread(seconds(loaded, COPY)),
        },
        "tiers": [tier | _served(tier["name"], loaded) for tier in facts["tiers"]],
    }


def _served(name: str, loaded: pl.DataFrame) -> dict[str, Any]:
    """What one tier brought to GPUs; times of the restores that reached down to it and no further.

    A load's bytes are those that were moved: of layers with a window fewer than its tokens have. Where several tiers
    had a part of it, each has its tokens' share of them.
    """
    column = f"{name}_tokens"
    parts = [part for part in loaded.columns if part.endswith("_tokens")]
    some = loaded.filter(pl.col(column) > 0) if column in parts else loaded.clear()
    tokens = some[column] if column in parts else pl.Series([], dtype=pl.Int64)
    nbytes = some["bytes"] * tokens // some.select(pl.sum_horizontal(parts).alias("v"))["v"]
    return {
        "served_tokens": int(tokens.sum()),
        "served_bytes": int(nbytes.sum()),
        "restores": {
            "loaded": len(some),
            "bytes": spread(nbytes.cast(pl.Float64).to_numpy()),
            "s": spread(seconds(loaded.filter(pl.col("tier") == name), RESTORE)),
        },
    }
