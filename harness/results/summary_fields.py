"""Which fields a summary may have, whatever the run: the summary of no calls, with every section that there is."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from typing import Any, Final

import polars as pl

from harness.disagg.handoff import HandoffTotals
from harness.results.records import to_frame
from harness.results.runinfo import LoadFacts, Prices, RunInfo
from harness.results.summary import summarise
from harness.results.tier_data import LINK_COLUMNS, RESTORE_COLUMNS, SERIES_COLUMNS, TierData

TIER_FACTS: Final = (
    "read_bytes_per_s_mean",
    "read_bytes_per_s_p99",
    "write_bytes_per_s_mean",
    "write_bytes_per_s_p99",
    "resident_bytes_per_node_max",
    "interval_s",
    "kv_bytes_per_token",
    "computed_again_tokens",
)
"""Numbers that harness.tier_facts counts over a whole run with tiers (its lists of tiers and links apart)."""


@cache
def every_field() -> dict[str, Any]:
    """Keys as in summary.json; the values are those of a run without calls."""
    info = RunInfo(
        experiment={},
        experiment_yaml="",
        router={**dict.fromkeys(("kind", "release", "sha256", "config"), ""), "unmodified": True},
        load=LoadFacts(0, 0, 0, 0),
        endpoint_nodes=[0],
        virtual_ns=0,
        cache=dict.fromkeys(("kind", "release", "mode"), ""),
        prices=Prices("", 0.0, 0.0, 0.0),
        tier={**dict.fromkeys(TIER_FACTS, 0), "tiers": [], "links": []},
        kv_transfer={"protocol": "", **asdict(HandoffTotals())},
    )
    columns = (SERIES_COLUMNS, LINK_COLUMNS, RESTORE_COLUMNS)
    return summarise(to_frame([]), info, None, "", TierData(*(pl.DataFrame(schema=schema) for schema in columns)))
