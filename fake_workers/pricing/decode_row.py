"""Decode attention of one batch size as a function of the total context: exact integer lines."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

# Lines are kept in units of 2**-20 ns. One common denominator for all cells and batch sizes makes the largest
# of several ranks' prices a comparison of integers, and the sum of a leap one floor_sum. Flooring a slope to
# that unit moves a price by less than (cell width in tokens) * 2**-20 ns: below 0.3 us for the widest cell of
# the largest batch.
FRACTION_BITS = 20


class DecodeRow:
    """price_ns(S) for integer S (sum of the contexts of `batch` decodes), piecewise linear, never falling.

    contexts  grid of S, strictly increasing
    lines     per cell the value at its left end and the slope, both times 2**FRACTION_BITS

    Below the grid the first price holds; beyond it the last line goes on. `on_flagged` is told of every
    lookup in a cell at or beyond `first_flagged_cell` (the source tables extrapolate there).
    """

    __slots__ = ("batch", "contexts", "first_flagged_cell", "intercepts", "on_flagged", "slopes")

    def __init__(
        self,
        batch: int,
        contexts: Sequence[int],
        prices_ns: Sequence[int],
        first_flagged_cell: int | None = None,
        on_flagged: Callable[[int, int], None] | None = None,
    ) -> None:
        if len(contexts) < 2 or len(contexts) != len(prices_ns):
            raise ValueError("a decode row needs at least two grid points and one price for each")
        self.batch = batch
        self.contexts = list(contexts)
        self.intercepts: list[int] = []
        self.slopes: list[int] = []
        for j in range(len(contexts) - 1):
            width, rise = contexts[j + 1] - contexts[j], prices_ns[j + 1] - prices_ns[j]
            if width <= 0 or rise < 0 or prices_ns[j] < 0:
                raise ValueError(f"decode row of batch {batch} is not monotone at cell {j}")
            self.intercepts.append(prices_ns[j] << FRACTION_BITS)
            self.slopes.append((rise << FRACTION_BITS) // width)
        self.first_flagged_cell = len(self.slopes) if first_flagged_cell is None else first_flagged_cell
        self.on_flagged = on_flagged

    def line(self, context_tokens: int) -> tuple[int, int, int | None]:
        """(value at context_tokens, slope per token, first S of the next line or None), values scaled."""
        contexts = self.contexts
        j = bisect_right(contexts, context_tokens) - 1
        last = len(self.slopes) - 1
        if j < 0:
            # A line carried on below the grid could fall under zero: the first price holds there.
            return self.intercepts[0], 0, contexts[0]
        if j >= self.first_flagged_cell and self.on_flagged is not None:
            self.on_flagged(self.batch, context_tokens)
        if j >= last:
            j = last
            end = None
        else:
            end = contexts[j + 1]
        slope = self.slopes[j]
        return self.intercepts[j] + slope * (context_tokens - contexts[j]), slope, end

    def price_ns(self, context_tokens: int) -> int:
        """Decode attention of one step whose contexts sum to context_tokens (this step's tokens included)."""
        return self.line(context_tokens)[0] >> FRACTION_BITS
