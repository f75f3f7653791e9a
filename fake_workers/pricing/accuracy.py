"""How far a profile's interpolation lies from the database it was tabulated from, at random points.

This is the error of the tables' grids alone. How far the database lies from silicon is another question
(docs/fidelity.md).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Protocol

from fake_workers.pricing.profile import StepProfile
from fake_workers.pricing.steps import RankBatch, step_ns

POINTS = 400
MAX_CHUNK_TOKENS = 8192
MAX_BATCH = 256


class _Parts(Protocol):
    @property
    def attention(self) -> float: ...
    @property
    def dense(self) -> float: ...
    @property
    def moe(self) -> float: ...


class Reference(Protocol):
    """What is compared with: step parts in milliseconds."""

    def prefill(self, new: int, cached: int = 0, batch: int = 1) -> _Parts:
        """A step of equal prefill chunks."""
        ...

    def context_attention(self, new: int, cached: int = 0, batch: int = 1) -> float:
        """Attention of such a step, as the tables take it."""
        ...

    def decode(self, batch: int, context: int) -> _Parts:
        """A step of equal decodes."""
        ...


def measure_accuracy(profile: StepProfile, source: Reference, seed: int = 1) -> dict[str, dict[str, float]]:
    """Mean, 95th percentile and maximum of |profile / source - 1| per class and for whole steps.

    Points are log-uniform: chunks of 1..8192 tokens, every third without cached prefix, prefixes up to the
    model's context length, batches 1..256, contexts 16 up to the model's context length. `same_chunks` are
    steps of 2, 4 or 8 equal chunks that fit a budget of 8192 tokens. Whole steps are compared without dispatch and
    combine where those are rows of their own: nothing is known between the rows.
    """
    rng = random.Random(seed)
    longest = min(profile.max_model_len, 1 << 20)
    dp = profile.layout.dp

    def log_uniform(low: int, high: int) -> int:
        return round(math.exp(rng.uniform(math.log(low), math.log(high))))

    def chunk(high: int = MAX_CHUNK_TOKENS) -> tuple[int, int]:
        new = log_uniform(1, high)
        return new, 0 if rng.random() < 1 / 3 else min(log_uniform(64, longest), longest - new)

    def errors(point: Callable[[], tuple[float, float]]) -> dict[str, float]:
        return summary([abs(got * 1e-6 / want - 1) for got, want in (point() for _ in range(POINTS)) if want > 0])

    def attention() -> tuple[float, float]:
        new, cached = chunk()
        return profile.context_attention_ns(new, cached), source.context_attention(new, cached)

    def same_chunks() -> tuple[float, float]:
        count = rng.choice((2, 4, 8))
        new, cached = chunk(MAX_CHUNK_TOKENS // count)
        return profile.context_attention_sum_ns([(new, cached)] * count), source.context_attention(new, cached, count)

    def dense() -> tuple[float, float]:
        n = log_uniform(1, MAX_CHUNK_TOKENS)
        return profile.dense_ns(n, False), source.prefill(n).dense

    def moe() -> tuple[float, float]:
        n = log_uniform(1, MAX_CHUNK_TOKENS)
        return profile.moe_ns(n * dp, False), source.prefill(n).moe

    def decode_attention() -> tuple[float, float]:
        b, c = log_uniform(1, MAX_BATCH), log_uniform(16, longest)
        return profile.decode_row(b).price_ns(b * c), source.decode(b, c).attention

    def prefill_step() -> tuple[float, float]:
        new, cached = chunk()
        parts = source.prefill(new, cached)
        want = source.context_attention(new, cached) + parts.dense + parts.moe
        got = step_ns(profile, [RankBatch(((new, cached),))] * dp) - profile.exchange_ns(new, False)
        return got, want

    def decode_step() -> tuple[float, float]:
        b, c = log_uniform(1, MAX_BATCH), log_uniform(16, longest)
        parts = source.decode(b, c)
        got = step_ns(profile, [RankBatch((), b, b * c)] * dp) - profile.exchange_ns(b, True)
        return got, parts.attention + parts.dense + parts.moe

    classes = [attention, same_chunks, dense, decode_attention, prefill_step, decode_step]
    if profile.tables.moe_tokens:
        classes.insert(3, moe)
    result = {point.__name__: errors(point) for point in classes}
    profile.out_of_grid.clear()
    return result


def summary(errors: Sequence[float]) -> dict[str, float]:
    """Mean, 95th percentile, maximum, rounded to 1e-5."""
    ordered = sorted(errors)
    return {
        "mean": round(sum(ordered) / len(ordered), 5),
        "p95": round(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], 5),
        "max": round(ordered[-1], 5),
    }
