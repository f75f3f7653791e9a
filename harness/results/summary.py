"""summary.json of one run. Every number is defined in docs/metrics.md; the keys are those of the contract,
and more.

Percentiles interpolate linearly between order statistics. Latencies are over calls that completed inside the
measured window; a time-out is a failure, not a latency.
"""

from __future__ import annotations

import json
from typing import Any, Final

import numpy as np
import polars as pl

from harness.results import split
from harness.results.numbers import Floats, percentile, ratio, seconds, spread
from harness.results.records import COMPLETED, FAILED, IN_FLIGHT, REJECTED, TIMED_OUT
from harness.results.runinfo import RunInfo
from harness.results.tier_data import TierData
from harness.results.tier_summary import SOURCES, tier_summary
from harness.results.timeline import Timeline

SUMMARY_SCHEMA: Final = 1


def percentile_with_failures(values: Floats, failures: int, q: float) -> float | None:
    """The q-th percentile if each failure were an infinite value; None where that makes the percentile
    infinite.
    """
    if len(values) + failures == 0:
        return None
    rank = (len(values) + failures - 1) * q / 100.0
    upper = int(np.ceil(rank))
    if upper >= len(values):
        return None
    ordered = np.sort(values)
    lower = int(np.floor(rank))
    return float(ordered[lower] + (ordered[upper] - ordered[lower]) * (rank - lower))


def window_of(info: RunInfo) -> tuple[int, int]:
    """Measured window in ns, its open end filled in."""
    start, end = info.window_ns
    return start, info.virtual_ns if end is None else end


def measured(calls: pl.DataFrame, info: RunInfo) -> pl.DataFrame:
    """The calls that ended, in whatever way, inside the measured window (both ends belong to it)."""
    start, end = window_of(info)
    return calls.filter(pl.col("finish_ns").is_between(start, end))


TTFT: Final = pl.col("first_token_ns") - pl.col("arrival_ns")
E2E: Final = pl.col("finish_ns") - pl.col("arrival_ns")
QUEUE: Final = pl.col("admitted_ns") - pl.col("arrival_ns") - pl.col("restore_ns")
PREFILL: Final = pl.col("first_token_ns") - pl.col("admitted_ns")
DECODE: Final = pl.col("finish_ns") - pl.col("first_token_ns")
REUSED: Final = pl.sum_horizontal("gpu_tokens", "dram_tokens", "shared_tokens", "peer_tokens")


def decoding(done: pl.DataFrame) -> pl.DataFrame:
    """Completed calls that have a decode phase: at least two output tokens and time between first and
    last.
    """
    return done.filter((pl.col("output_tokens") >= 2) & (DECODE > 0))


def output_rates(done: pl.DataFrame) -> Floats:
    """Output tokens / (finish - first token) of each call with a decode phase, tokens/s."""
    some = decoding(done)
    rates: Floats = some["output_tokens"].cast(pl.Float64).to_numpy() / np.maximum(seconds(some, DECODE), 1e-12)
    return rates


def truth_gaps(calls: pl.DataFrame, info: RunInfo) -> Floats:
    """believed - held prefix share (signed, -1..1) at each decision in the measured window where both are
    known.
    """
    decided = calls.filter(pl.col("routed_ns").is_between(*window_of(info)))
    known = decided.drop_nulls(["believed_share", "held_share"])
    return (known["believed_share"] - known["held_share"]).to_numpy()


def _busiest(per_node: list[float]) -> float | None:
    """The largest over the mean; all nodes count, idle ones too."""
    return ratio(max(per_node) * len(per_node), sum(per_node)) if per_node else None


def _per_node(calls: pl.DataFrame, info: RunInfo, value: pl.Expr) -> list[float]:
    by_node = dict(calls.drop_nulls("node").group_by("node").agg(value.alias("v")).iter_rows())
    return [float(by_node.get(node, 0)) for node in sorted(set(info.endpoint_nodes))]


def busy_by_endpoint_ns(info: RunInfo, timeline: Timeline | None) -> list[int] | None:
    """GPU-busy time of each endpoint over the whole run."""
    if info.busy_ns is not None:
        return info.busy_ns
    return None if timeline is None else [int(v) for v in timeline.busy_ns.sum(axis=1)]


def busy_by_node_ns(info: RunInfo, busy: list[int]) -> list[float]:
    """GPU-busy time summed over the endpoints of each node, in order of the nodes' numbers."""
    return [
        float(sum(b for b, node in zip(busy, info.endpoint_nodes, strict=True) if node == wanted))
        for wanted in sorted(set(info.endpoint_nodes))
    ]


def _load_balance(calls: pl.DataFrame, info: RunInfo, busy: list[int] | None) -> dict[str, Any]:
    return {
        "busiest_over_mean": None if busy is None else _busiest(busy_by_node_ns(info, busy)),
        "busiest_over_mean_calls": _busiest(_per_node(calls, info, pl.len())),
        "busiest_over_mean_input_tokens": _busiest(_per_node(calls, info, pl.col("input_tokens").sum())),
        "busiest_over_mean_computed_tokens": _busiest(_per_node(calls, info, pl.col("computed_tokens").sum())),
        "endpoints_used": calls["endpoint"].drop_nulls().n_unique(),
    }


def _sessions_paid(admitted: pl.DataFrame, info: RunInfo) -> float:
    """Of how many sessions the run is: those with a call in it. One that begins in the middle of its load holds parts
    of many; it is worth as many whole ones as arrive in its time, since in a steady state as many end."""
    rate = info.load.sessions_per_hour_per_node
    if rate and info.experiment.get("load", {}).get("history_s"):
        return rate * len(set(info.endpoint_nodes)) * info.virtual_ns / 3.6e12
    return admitted["session"].n_unique()


def _cost(calls: pl.DataFrame, info: RunInfo) -> dict[str, Any]:
    """Whole run: input priced by what was reused, output as generated."""
    prices = info.prices
    if prices is None:
        return {"per_million_input": None, "per_session": None, "priced_with": None}
    admitted = calls.filter(pl.col("admitted_ns").is_not_null())
    reused = int(admitted.select(REUSED.sum()).item())
    total_input = int(admitted["input_tokens"].sum())
    paid_input = ((total_input - reused) * prices.input_uncached + reused * prices.input_cached) / 1e6
    paid = paid_input + int(admitted["output_tokens"].sum()) * prices.output / 1e6
    return {
        "per_million_input": ratio(paid_input * 1e6, total_input),
        "per_session": ratio(paid, _sessions_paid(admitted, info)),
        "priced_with": prices.name,
        "currency": prices.currency,
    }


def _outcome(calls: pl.DataFrame) -> dict[str, int]:
    counts = dict(calls.group_by("outcome").len().iter_rows())
    rejected = counts.get(REJECTED, 0)
    return {
        "completed": counts.get(COMPLETED, 0),
        "timed_out": counts.get(TIMED_OUT, 0),
        "failed": counts.get(FAILED, 0) + rejected,
        "rejected": rejected,
        "in_flight": counts.get(IN_FLIGHT, 0),
    }


def _hit_rate(window: pl.DataFrame) -> dict[str, float | None]:
    """Over calls that an engine admitted: whatever became of them later, their prefix was looked up."""
    looked_up = window.filter(pl.col("admitted_ns").is_not_null())
    reused = looked_up.select(REUSED.alias("v"))["v"]
    return {
        "token": ratio(float(reused.sum()), float(looked_up["input_tokens"].sum())),
        "request": ratio(float((reused > 0).sum()), float(len(looked_up))),
    }


def summarise(
    calls: pl.DataFrame, info: RunInfo, timeline: Timeline | None, digest: str, tiers: TierData | None = None
) -> dict[str, Any]:
    """The whole of summary.json; `calls` as `records.to_frame` gives it."""
    window = measured(calls, info)
    done = window.filter(pl.col("outcome") == COMPLETED)
    failures = len(window) - len(done)
    start_ns, end_ns = window_of(info)
    ttft, rates, gaps = seconds(done, TTFT), output_rates(done), truth_gaps(calls, info)
    itl_ns = DECODE.cast(pl.Float64) / (pl.col("output_tokens") - 1)
    busy = busy_by_endpoint_ns(info, timeline)
    batch_mean = info.batch_mean
    if batch_mean is None and timeline is not None:
        batch_mean = ratio(float(timeline.running_ns.sum()), float(timeline.busy_ns.sum()))
    no_cache = info.cache.get("kind", "none") == "none"
    return {
        "schema": SUMMARY_SCHEMA,
        "experiment": info.name,
        "label": info.title,
        "settings": dict(info.settings),
        "seed": info.seed,
        "digest": digest,
        "validity": {
            "valid": not info.invalid and not info.interrupted,
            "reasons": [*info.invalid, *(["the run was interrupted"] if info.interrupted else [])],
            "notes": list(info.notes),
        },
        "router": {key: info.router.get(key) for key in ("kind", "release", "sha256", "config", "unmodified")},
        "cache": {key: info.cache.get(key) for key in ("kind", "release", "mode")},
        "load": {
            "sessions": info.load.sessions,
            "calls": info.load.calls,
            "input_tokens": info.load.input_tokens,
            "output_tokens": info.load.output_tokens,
            "sessions_per_hour_per_node": info.load.sessions_per_hour_per_node,
        },
        "outcome": {"arrived": len(calls), **_outcome(calls)},
        "measured": {
            "start_s": start_ns / 1e9,
            "end_s": end_ns / 1e9,
            "calls": len(window),
            **_outcome(window),
        },
        "ttft_s": spread(ttft),
        "ttft_with_failures_s": {f"p{q}": percentile_with_failures(ttft, failures, q) for q in (50, 90, 99)},
        "e2e_s": spread(seconds(done, E2E)),
        "queue_s": spread(seconds(done, QUEUE)),
        "restore_s": spread(np.empty(0) if no_cache else seconds(done, pl.col("restore_ns"))),
        "prefill_s": spread(seconds(done, PREFILL)),
        "itl_s": spread(seconds(decoding(done), itl_ns)),
        "output_rate_tok_s": {
            "p10": percentile(rates, 10),
            "p50": percentile(rates, 50),
            "mean": float(rates.mean()) if len(rates) else None,
        },
        "throughput": {
            "calls_per_s": ratio(float(len(done)), (end_ns - start_ns) / 1e9),
            "input_tokens_per_s": ratio(float(done["input_tokens"].sum()), (end_ns - start_ns) / 1e9),
            "output_tokens_per_s": ratio(float(done["output_tokens"].sum()), (end_ns - start_ns) / 1e9),
        },
        "hit_rate": _hit_rate(window),
        "tokens_by_source": {name: int(window[f"{name}_tokens"].sum()) for name in SOURCES},
        "preemptions": int(window["preemptions"].sum()),
        "load_balance": _load_balance(calls, info, busy),
        "batch_mean": batch_mean,
        "gpu_busy": None if busy is None else ratio(float(sum(busy)), float(len(busy) * info.virtual_ns)),
        "tier": tier_summary(calls, window, (start_ns, end_ns), info.tier, tiers),
        "router_truth_gap": {
            "mean": float(np.abs(gaps).mean()) if len(gaps) else None,
            "p99": percentile(np.abs(gaps), 99),
            "signed_mean": float(gaps.mean()) if len(gaps) else None,
            "decisions": len(gaps),
        },
        "cost": _cost(calls, info),
        "itl_token_s": split.token_gaps(info.workers),
        "interference": split.interference(info.workers),
        "pools": split.pools(info.workers, info.virtual_ns),
        "disaggregation": split.disaggregation(done, info.kv_transfer, info.virtual_ns),
        "virtual_s": info.virtual_ns / 1e9,
        "wall_s": info.wall_s,
        "cpu_s": info.cpu_s,
        "peak_rss_bytes": info.peak_rss_bytes,
        "decisions": info.decisions,
        "events": info.events,
        "steps": info.steps,
    }


def to_json(summary: dict[str, Any]) -> str:
    """Pretty, in the summary's own key order; a number that is not finite is a fault and refused."""
    return json.dumps(summary, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
