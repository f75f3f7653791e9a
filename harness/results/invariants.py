"""Cheap invariants, checked on the records at the end of every run. Numbers and statements:
docs/invariants.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import polars as pl

from harness.results.records import COMPLETED, IN_FLIGHT, OUTCOMES, REJECTED
from harness.results.summary import REUSED

_PATH: Final = ("arrival_ns", "routed_ns", "admitted_ns", "first_token_ns", "finish_ns")
_SOURCES: Final = ("gpu_tokens", "dram_tokens", "shared_tokens", "peer_tokens", "computed_tokens")

Finding = tuple[str, str, pl.DataFrame]
"""Number of the invariant, what is wrong, the rows it is wrong for (none: it holds)."""


def _conserved(calls: pl.DataFrame, drained: bool) -> Iterator[Finding]:
    yield "INV-1", "recorded more than once", calls.filter(pl.col("call_id").is_duplicated())
    yield "INV-1", "unknown outcome", calls.filter(~pl.col("outcome").is_in(OUTCOMES))
    if drained:
        yield "INV-1", "still in flight at the end", calls.filter(pl.col("outcome") == IN_FLIGHT)


def _ordered(calls: pl.DataFrame) -> Iterator[Finding]:
    yield "INV-2", "arrival before the start of the run", calls.filter(pl.col("arrival_ns") < 0)
    for i, name in enumerate(_PATH[1:], start=1):
        earlier = calls.filter(pl.col(name) < pl.max_horizontal(_PATH[:i]))
        yield "INV-2", f"{name} before an earlier station", earlier


_SPLIT: Final = (
    ("admitted_ns", "prefill_done_ns"),
    ("transfer_start_ns", "transfer_end_ns"),
    ("prefill_done_ns", "decode_admitted_ns"),
    ("transfer_end_ns", "decode_admitted_ns"),
    ("decode_admitted_ns", "first_token_ns"),
)
"""Stations of a call whose prompt was computed elsewhere: (earlier, later). A transfer layer by layer begins before the
prompt is done.
"""


def _split(calls: pl.DataFrame) -> Iterator[Finding]:
    split = calls.filter(pl.col("prefill_endpoint").is_not_null())
    for earlier, later in _SPLIT:
        yield "INV-2", f"{later} before {earlier}", split.filter(pl.col(later) < pl.col(earlier))
    moved = pl.col("transfer_tokens") + pl.col("decode_hit_tokens")
    done = split.filter((pl.col("outcome") == COMPLETED) & pl.col("transfer_tokens").is_not_null())
    more = done.filter((pl.col("preemptions") == 0) & (moved > pl.col("input_tokens")))
    yield "INV-4", "more tokens moved and found at the decode worker than the prompt has", more


def _complete(calls: pl.DataFrame) -> Iterator[Finding]:
    stations = pl.col(*_PATH, "endpoint", "node")
    done = calls.filter(pl.col("outcome") == COMPLETED)
    yield "INV-3", "completed but a station is missing", done.filter(pl.any_horizontal(stations.is_null()))
    flying, ended = pl.col("outcome") == IN_FLIGHT, pl.col("finish_ns").is_not_null()
    yield "INV-3", "ended without a time", calls.filter(~flying & ~ended)
    yield "INV-3", "in flight but ended", calls.filter(flying & ended)
    admitted = pl.col("admitted_ns").is_not_null()
    yield "INV-3", "rejected but admitted", calls.filter((pl.col("outcome") == REJECTED) & admitted)
    yield "INV-3", "admitted nowhere", calls.filter(admitted & pl.col("endpoint").is_null())


def _tokens(calls: pl.DataFrame, live: bool) -> Iterator[Finding]:
    total = pl.sum_horizontal(*_SOURCES)
    prompt_done = pl.col("outcome") == COMPLETED if live else pl.col("first_token_ns").is_not_null()
    negative = pl.any_horizontal(pl.col(*_SOURCES, "input_tokens", "output_tokens") < 0)
    yield "INV-4", "negative token count", calls.filter(negative)
    yield (
        "INV-4",
        "input tokens are not the sum over sources",
        calls.filter(prompt_done & (total != pl.col("input_tokens"))),
    )
    yield "INV-4", "more tokens from sources than in the prompt", calls.filter(total > pl.col("input_tokens"))
    yield (
        "INV-4",
        "more output than requested",
        calls.filter(pl.col("output_tokens") > pl.col("requested_output_tokens")),
    )


def _shares(calls: pl.DataFrame) -> Iterator[Finding]:
    for name in ("believed_share", "held_share"):
        yield "INV-5", f"{name} outside 0..1", calls.filter(~pl.col(name).is_between(0.0, 1.0))
    whole = calls.filter((pl.col("input_tokens") > 0) & (pl.col("input_tokens") <= REUSED))
    yield "INV-5", "the whole prompt reused (an engine always computes its last token)", whole


def violations(
    calls: pl.DataFrame, arrived: int | None = None, drained: bool = False, limit: int = 3, live: bool = False
) -> list[str]:
    """Broken invariants, one line each: number, what is wrong, the first `limit` calls; empty where all hold.

    `arrived`: calls that the load released, where the caller counted them. `drained`: the run ended because
    everything had ended, so nothing may be in flight. `live`: seen from a client, which learns where a prompt came from
    only with the end of the answer, so that a stream that broke has no sources.
    """
    found: list[str] = []
    if arrived is not None and arrived != len(calls):
        found.append(f"INV-1: {arrived} calls arrived, {len(calls)} are recorded")
    for check in (
        _conserved(calls, drained),
        _ordered(calls),
        _split(calls),
        _complete(calls),
        _tokens(calls, live),
        _shares(calls),
    ):
        for number, what, broken in check:
            if len(broken):
                some = ", ".join(broken["call_id"].head(limit).to_list())
                more = f" and {len(broken) - limit} more" if len(broken) > limit else ""
                found.append(f"{number}: {what}: {some}{more}")
    return found
