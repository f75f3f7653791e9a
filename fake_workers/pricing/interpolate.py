"""Log-log interpolation on small grids in plain Python (an array library costs more than it saves here)."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

# Cached prefixes start at 0, which has no logarithm. Context attention of a chunk on a short prefix hardly
# differs from no prefix, so the axis is log(cached + 64): linear below 64 tokens, logarithmic far above.
CACHED_SHIFT_TOKENS = 64


def cell(axis: Sequence[float], x: float) -> tuple[int, float]:
    """Index of the grid cell holding x and the position inside (0..1); an x outside is taken to the end."""
    i = min(max(bisect_right(axis, x) - 1, 0), len(axis) - 2)
    return i, min(max((x - axis[i]) / (axis[i + 1] - axis[i]), 0.0), 1.0)


def beyond(axis: Sequence[float], x: float, low: float, high: float, most: float) -> float:
    """What to add to the logarithm of the last value for x beyond the last grid point (0 inside).

    low, high: values at the last two grid points. Their slope goes on, held between 0 and `most`, the
    exponent of the work in that argument, so that noise in the last cell cannot grow without bounds.
    """
    over = x - axis[-1]
    if over <= 0:
        return 0.0
    return over * min(max((high - low) / (axis[-1] - axis[-2]), 0.0), most)


class LogCurve:
    """A positive function of a positive integer, log-log linear between grid points.

    Below the first grid point the first value holds (a kernel has a floor); beyond the last point the last
    cell's slope goes on, at most in proportion to x.
    """

    __slots__ = ("_first", "_lx", "_ly")

    def __init__(self, xs: Sequence[int], ys: Sequence[int]) -> None:
        self._lx = [math.log(x) for x in xs]
        self._ly = [math.log(y) for y in ys]
        self._first = xs[0]

    def at(self, x: int) -> int:
        """Value at x, rounded to an integer."""
        if x <= self._first or len(self._lx) == 1:
            return round(math.exp(self._ly[0]))
        lx, ly = math.log(x), self._ly
        i, f = cell(self._lx, lx)
        return round(math.exp(ly[i] + f * (ly[i + 1] - ly[i]) + beyond(self._lx, lx, ly[-2], ly[-1], 1.0)))


class ContextSurface:
    """Context attention over (new, cached) tokens, bilinear in log(new), log(cached + shift), log(time).

    Beyond the grid the time grows at most with the square of the new tokens and in proportion to the cached.
    """

    __slots__ = ("_lc", "_ln", "_lz")

    def __init__(self, new: Sequence[int], cached: Sequence[int], values: Sequence[Sequence[int]]) -> None:
        self._ln = [math.log(n) for n in new]
        self._lc = [math.log(c + CACHED_SHIFT_TOKENS) for c in cached]
        self._lz = [[math.log(v) for v in row] for row in values]

    def at(self, new: int, cached: int) -> int:
        """Value rounded to an integer."""
        ln, lc = math.log(new), math.log(cached + CACHED_SHIFT_TOKENS)
        i, f = cell(self._ln, ln)
        j, g = cell(self._lc, lc)
        low, high = self._lz[i], self._lz[i + 1]
        u = low[j] + g * (low[j + 1] - low[j])
        v = high[j] + g * (high[j + 1] - high[j])
        z = u + f * (v - u)
        if ln > self._ln[-1]:
            z += beyond(self._ln, ln, u, v, 2.0)
        if lc > self._lc[-1]:
            before = low[-2] + f * (high[-2] - low[-2])
            z += beyond(self._lc, lc, before, low[-1] + f * (high[-1] - low[-1]), 1.0)
        return round(math.exp(z))
