"""Sums, levels and percentiles over virtual time in bounded memory, while the run's length is still unknown.

Bins have equal widths; the width starts small and doubles whenever the run outgrows the bins. Sums and integrals are
whole numbers, so equal events give equal bins and nothing is lost when the width doubles.
"""

from __future__ import annotations

from collections.abc import Callable

NS_PER_S = 1_000_000_000
MAX_BINS = 400
"""As the timeline of the endpoints has."""

_SIGNIFICANT_BITS = 8


def _halve(values: list[int], join: Callable[[int, int], int]) -> None:
    """Two neighbours become one."""
    if len(values) % 2:
        values.append(0)
    values[:] = [join(values[i], values[i + 1]) for i in range(0, len(values), 2)]


class SumBins:
    """What came in each bin: `spread` over a stretch of time, or `add` at an instant."""

    __slots__ = ("bin_ns", "max_bins", "sums")

    def __init__(self, first_bin_ns: int = NS_PER_S, max_bins: int = MAX_BINS) -> None:
        self.bin_ns = first_bin_ns
        self.max_bins = max_bins
        self.sums: list[int] = []

    def spread(self, start_ns: int, end_ns: int, per_ns: int) -> None:
        """So much in each nanosecond from start to end."""
        self.fit(end_ns)
        width, sums = self.bin_ns, self.sums
        while start_ns < end_ns:
            number = start_ns // width
            upto = min(end_ns, (number + 1) * width)
            sums[number] += per_ns * (upto - start_ns)
            start_ns = upto

    def add(self, t_ns: int, amount: int) -> None:
        """So much in the bin that t_ns lies in."""
        self.fit(t_ns + 1)
        self.sums[t_ns // self.bin_ns] += amount

    def until(self, end_ns: int) -> list[int]:
        """The sums of the bins that begin before end_ns, at least one; their width is `bin_ns` afterwards."""
        self.fit(end_ns)
        return self.sums[: max(1, -(-end_ns // self.bin_ns))] or [0]

    def fit(self, end_ns: int) -> None:
        """Have bins up to end_ns."""
        while end_ns > self.bin_ns * self.max_bins:
            _halve(self.sums, int.__add__)
            self.bin_ns *= 2
        more = -(-end_ns // self.bin_ns) - len(self.sums)
        if more > 0:
            self.sums.extend([0] * more)


class LevelBins:
    """A level that changes in steps: its integral and its highest value in each bin, and the highest of all."""

    __slots__ = ("bin_ns", "highs", "level", "max_bins", "peak", "since_ns", "sums")

    def __init__(self, first_bin_ns: int = NS_PER_S, max_bins: int = MAX_BINS) -> None:
        self.bin_ns = first_bin_ns
        self.max_bins = max_bins
        self.sums: list[int] = []
        self.highs: list[int] = []
        self.level = 0
        self.peak = 0
        self.since_ns = 0

    def change(self, t_ns: int, by: int) -> None:
        """The level rises or falls at t_ns. Times do not go back: what lies before the last change counts as then."""
        t_ns = max(t_ns, self.since_ns)
        self._close(t_ns)
        self.level += by
        self.peak = max(self.peak, self.level)
        self._fit(t_ns + 1)
        number = t_ns // self.bin_ns
        self.highs[number] = max(self.highs[number], self.level)

    def until(self, end_ns: int) -> tuple[list[int], list[int]]:
        """Integrals (level x ns) and highest levels of the bins that begin before end_ns, at least one."""
        self._close(max(end_ns, self.since_ns))
        self._fit(end_ns)
        bins = max(1, -(-end_ns // self.bin_ns))
        return self.sums[:bins] or [0], self.highs[:bins] or [self.peak]

    def _close(self, t_ns: int) -> None:
        """Count the present level up to t_ns."""
        start, self.since_ns = self.since_ns, t_ns
        level = self.level
        if t_ns <= start or not level:
            return
        self._fit(t_ns)
        width, sums, highs = self.bin_ns, self.sums, self.highs
        while start < t_ns:
            number = start // width
            upto = min(t_ns, (number + 1) * width)
            sums[number] += level * (upto - start)
            if level > highs[number]:
                highs[number] = level
            start = upto

    def _fit(self, end_ns: int) -> None:
        while end_ns > self.bin_ns * self.max_bins:
            _halve(self.sums, int.__add__)
            _halve(self.highs, max)
            self.bin_ns *= 2
        more = -(-end_ns // self.bin_ns) - len(self.sums)
        if more > 0:
            self.sums.extend([0] * more)
            self.highs.extend([0] * more)


class Tally:
    """Many whole numbers by size, for percentiles: buckets of less than 1 % width that know their mean.

    A percentile is exact where the numbers around it are equal, and within 0.8 % elsewhere.
    """

    __slots__ = ("_buckets", "count")

    def __init__(self) -> None:
        self._buckets: dict[int, list[int]] = {}
        """(exponent, leading bits) as one number -> [count, sum]."""
        self.count = 0

    def add(self, value: int, times: int = 1) -> None:
        """The number, which is not negative, came so many times."""
        shift = max(0, value.bit_length() - _SIGNIFICANT_BITS)
        bucket = self._buckets.setdefault((shift << _SIGNIFICANT_BITS) | (value >> shift), [0, 0])
        bucket[0] += times
        bucket[1] += value * times
        self.count += times

    def copy(self) -> Tally:
        """Another one with the same numbers."""
        other = Tally()
        other._buckets = {key: list(bucket) for key, bucket in self._buckets.items()}
        other.count = self.count
        return other

    def percentile(self, q: float, zeros: int = 0) -> float | None:
        """The q-th percentile (0..100) of the numbers and so many zeros, linear between ranks; None of nothing."""
        total = self.count + zeros
        if total <= 0:
            return None
        rank = (total - 1) * q / 100
        lower = int(rank)
        low, high = self._at(lower - zeros), self._at(min(lower + 1, total - 1) - zeros)
        return low + (high - low) * (rank - lower)

    def _at(self, rank: int) -> float:
        """The number of that rank, counted from 0; below 0 it is one of the zeros."""
        if rank < 0:
            return 0.0
        for key in sorted(self._buckets):
            count, total = self._buckets[key]
            if rank < count:
                return total / count
            rank -= count
        raise IndexError("rank beyond the numbers")
