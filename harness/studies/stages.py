"""Figures per stage as inference-perf defines them, from call records.

Output tokens/s: output tokens of the stage over the time from its first request to its last answer's end. TTFT: mean
and linearly interpolated 90th percentile over requests. ITL: mean over all gaps between tokens of the stage. ITL here
is the engine's; a client that receives several tokens in one chunk counts zero gaps, with the same mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from harness.results.records import COMPLETED, CallRecord
from harness.studies.ladder import ALL_METRICS, Stage

SATURATED_P90_S = 5.0
"""An arm counts as saturated where the p90 of TTFT exceeds this: above any unsaturated stage, below any queue's."""


@dataclass(slots=True)
class StageResult:
    """One stage of one run."""

    rate: float
    requests: int
    completed: int
    span_s: float
    output_tok_s: float
    ttft_mean_s: float
    ttft_p90_s: float
    itl_mean_s: float
    hit_share: float
    """Share of prompt tokens found in the GPU's cache."""
    tier_share: float = 0.0
    """Share of prompt tokens loaded from a tier below it."""
    total_tok_s: float = math.nan
    e2e_mean_s: float = math.nan
    e2e_p90_s: float = math.nan

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def stage_results(
    records: Sequence[CallRecord], stage_of: Sequence[int], stages: Sequence[Stage], warmup: int
) -> list[StageResult]:
    """Results of the stages after the warm-up, in order."""
    groups: list[list[CallRecord]] = [[] for _ in stages]
    for record in records:
        groups[stage_of[record.index]].append(record)
    return [_result(stage, group) for stage, group in zip(stages[warmup:], groups[warmup:], strict=True)]


def _result(stage: Stage, records: Sequence[CallRecord]) -> StageResult:
    done = [r for r in records if r.outcome == COMPLETED and r.first_token_ns is not None and r.finish_ns is not None]
    if not done:
        return StageResult(stage.rate, len(records), 0, *(math.nan for _ in range(6)))
    ttft = np.array([(r.first_token_ns or 0) - r.arrival_ns for r in done]) / 1e9
    span_s = (max(r.finish_ns or 0 for r in done) - min(r.arrival_ns for r in records)) / 1e9
    e2e = np.array([(r.finish_ns or 0) - r.arrival_ns for r in done]) / 1e9
    input_tokens = sum(r.input_tokens for r in done)
    gaps = sum(r.output_tokens - 1 for r in done)
    streaming_s = sum((r.finish_ns or 0) - (r.first_token_ns or 0) for r in done) / 1e9
    return StageResult(
        rate=stage.rate,
        requests=len(records),
        completed=len(done),
        span_s=span_s,
        output_tok_s=sum(r.output_tokens for r in done) / span_s,
        ttft_mean_s=float(ttft.mean()),
        ttft_p90_s=float(np.percentile(ttft, 90)),
        itl_mean_s=streaming_s / gaps if gaps else math.nan,
        hit_share=sum(r.gpu_tokens for r in done) / input_tokens,
        tier_share=sum(r.dram_tokens + r.shared_tokens for r in done) / input_tokens,
        total_tok_s=(input_tokens + sum(r.output_tokens for r in done)) / span_s,
        e2e_mean_s=float(e2e.mean()),
        e2e_p90_s=float(np.percentile(e2e, 90)),
    )


def mean_over_seeds(runs: Sequence[Sequence[StageResult]]) -> list[dict[str, float]]:
    """Per stage: rate and the mean of each metric over runs with different seeds."""
    rows = []
    for stage in zip(*runs, strict=True):
        row = {"rate": stage[0].rate}
        for metric in (*ALL_METRICS, "hit_share", "tier_share"):
            row[metric] = float(np.mean([getattr(result, metric) for result in stage]))
        rows.append(row)
    return rows


def saturation_rate(points: Sequence[tuple[float, float]], bar_s: float = SATURATED_P90_S) -> float | None:
    """Where TTFT p90 first crosses the bar: (rate, p90) in order of rate; log-linear between stages. None: never."""
    before: tuple[float, float] | None = None
    for rate, p90_s in points:
        if p90_s > bar_s:
            if before is None:
                return rate
            low = math.log(before[1])
            return before[0] + (rate - before[0]) * (math.log(bar_s) - low) / (math.log(p90_s) - low)
        before = rate, p90_s
    return None
