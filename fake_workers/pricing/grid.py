"""Grids and clean-up for tables: geometric axes, monotone regression, the fewest points that keep a curve."""

from __future__ import annotations

import math
from collections.abc import Sequence


def geometric(low: int, high: int, per_octave: int) -> list[int]:
    """Integers from low to high, about `per_octave` of them per doubling, both ends included."""
    n = math.ceil(per_octave * math.log2(high / low))
    return sorted({min(high, round(low * 2 ** (i / per_octave))) for i in range(n)} | {low, high})


def token_samples(high: int) -> list[int]:
    """Token counts at which to ask for a one-dimensional curve: all small ones, then ever wider steps."""
    bands = ((1, 1088, 1), (1088, 5120, 4), (5120, 16_384, 16), (16_384, 1 << 30, 64))
    points = {high}
    for start, stop, step in bands:
        points |= set(range(start, min(stop, high) + 1, step))
    return sorted(points)


def monotone(values: Sequence[float]) -> list[float]:
    """Closest never-falling sequence in least squares of the logarithms (pool adjacent violators)."""
    sums: list[float] = []
    counts: list[int] = []
    for value in values:
        sums.append(math.log(value))
        counts.append(1)
        while len(sums) > 1 and sums[-2] / counts[-2] > sums[-1] / counts[-1]:
            total, count = sums.pop(), counts.pop()
            sums[-1] += total
            counts[-1] += count
    out: list[float] = []
    for total, count in zip(sums, counts, strict=True):
        out += [math.exp(total / count)] * count
    return out


def thin(xs: Sequence[int], ys: Sequence[int], tolerance: float) -> tuple[list[int], list[int]]:
    """The points from which log-log interpolation gives every sample back within `tolerance` (relative)."""
    lx, ly = [math.log(x) for x in xs], [math.log(y) for y in ys]
    keep = {0, len(xs) - 1}
    spans = [(0, len(xs) - 1)]
    while spans:
        a, b = spans.pop()
        worst, at = tolerance, -1
        for i in range(a + 1, b):
            guess = ly[a] + (lx[i] - lx[a]) / (lx[b] - lx[a]) * (ly[b] - ly[a])
            off = abs(math.expm1(guess - ly[i]))
            if off > worst:
                worst, at = off, i
        if at >= 0:
            keep.add(at)
            spans += [(a, at), (at, b)]
    order = sorted(keep)
    return [xs[i] for i in order], [ys[i] for i in order]
