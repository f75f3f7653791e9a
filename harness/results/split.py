"""What disaggregation is judged by: the parts of the time to first token, gaps between tokens, KV moved, pools.

A call is split where its prompt was computed on another worker than its answer. The parts of its TTFT are, in order:
router (arrival to decision), prefill queue (to admission), prefill (to the prefill worker's answer), transfer (KV on
the wires), decode queue (waiting for blocks before it, and for a step after it), first step (to the client's first
token). They sum to TTFT.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import polars as pl

from fake_workers.engine.totals import gap_percentile_s
from harness.results.numbers import spread


@dataclass(slots=True)
class WorkerFacts:
    """One endpoint: its role (empty: none given), GPUs, and what its engine counted over the whole run."""

    role: str
    gpus: int
    busy_ns: int = 0
    batch_ns: int = 0
    scheduled_tokens: int = 0
    preemptions: int = 0
    decode_steps: int = 0
    mixed_steps: int = 0
    decode_ns: int = 0
    mixed_ns: int = 0
    gaps: dict[int, int] = field(default_factory=dict)
    """Gaps between tokens by bin (fake_workers.engine.totals)."""


_MOVED = pl.coalesce(pl.col("transfer_end_ns") - pl.col("transfer_start_ns"), pl.lit(0))

TTFT_PARTS = {
    "router": pl.col("routed_ns") - pl.col("arrival_ns"),
    "prefill_queue": pl.col("admitted_ns") - pl.col("routed_ns"),
    "prefill": pl.col("prefill_done_ns") - pl.col("admitted_ns"),
    "transfer": _MOVED,
    "decode_queue": pl.col("decode_admitted_ns") - pl.col("prefill_done_ns") - _MOVED,
    "first_step": pl.col("first_token_ns") - pl.col("decode_admitted_ns"),
}
"""Of split calls, in order."""


def split_calls(done: pl.DataFrame) -> pl.DataFrame:
    """The completed calls whose prompt was computed elsewhere."""
    return done.filter(pl.col("prefill_endpoint").is_not_null() & pl.col("decode_admitted_ns").is_not_null())


def disaggregation(done: pl.DataFrame, facts: dict[str, Any] | None, virtual_ns: int) -> dict[str, Any] | None:
    """The summary's section; None in a cluster without prefill workers. `facts`: account of the KV exchange."""
    if facts is None:
        return None
    split = split_calls(done)
    parts = {
        name: spread(split.select(part.alias("v"))["v"].cast(pl.Float64).to_numpy() / 1e9)
        for name, part in TTFT_PARTS.items()
    }
    moved = split.filter(pl.col("transfer_end_ns").is_not_null())
    seconds = moved.select(_MOVED.alias("v"))["v"].cast(pl.Float64).to_numpy() / 1e9
    nbytes = moved["transfer_bytes"].cast(pl.Float64).to_numpy()
    rates = nbytes[seconds > 0] / seconds[seconds > 0]
    asked = int(split["input_tokens"].sum())
    return {
        "calls": len(split),
        "share": len(split) / len(done) if len(done) else None,
        "ttft_parts_s": parts,
        "transfer_bytes": spread(nbytes),
        "transfer_bytes_per_s": spread(rates),
        "kv_bytes_per_s_mean": facts["bytes"] / max(virtual_ns / 1e9, 1e-9),
        "decode_hit_rate": int(split["decode_hit_tokens"].sum() or 0) / asked if asked else None,
        **facts,
    }


def token_gaps(workers: list[WorkerFacts]) -> dict[str, float | None]:
    """Gaps between a request's tokens, over all tokens of all workers and the whole run, to 1 %."""
    gaps: dict[int, int] = {}
    for worker in workers:
        for bin_, count in worker.gaps.items():
            gaps[bin_] = gaps.get(bin_, 0) + count
    return {f"p{q}": gap_percentile_s(gaps, q) for q in (50, 90, 99)}


def interference(workers: list[WorkerFacts]) -> dict[str, float | None]:
    """Share of the steps in which requests got tokens that computed prompts of others too; by number and by time."""
    steps, mixed = sum(w.decode_steps for w in workers), sum(w.mixed_steps for w in workers)
    time, mixed_time = sum(w.decode_ns for w in workers), sum(w.mixed_ns for w in workers)
    return {"steps": mixed / steps if steps else None, "time": mixed_time / time if time else None}


def pools(workers: list[WorkerFacts], virtual_ns: int) -> list[dict[str, Any]]:
    """Per role: endpoints, GPUs, share of the run that they were busy, running requests while busy."""
    out = []
    for role in dict.fromkeys(worker.role for worker in workers):
        mine = [worker for worker in workers if worker.role == role]
        busy, batch = sum(w.busy_ns for w in mine), sum(w.batch_ns for w in mine)
        out.append(
            {
                "role": role or "both",
                "endpoints": len(mine),
                "gpus": sum(w.gpus for w in mine),
                "busy": busy / (len(mine) * virtual_ns) if virtual_ns else None,
                "batch_mean": batch / busy if busy else None,
                "scheduled_tokens": sum(w.scheduled_tokens for w in mine),
                "preemptions": sum(w.preemptions for w in mine),
                "itl_token_s": token_gaps(mine),
                "interference": interference(mine),
            }
        )
    return out
