"""What a link or a tier carried: exact totals, bytes over time, and percentiles of its rate, in bounded memory."""

from __future__ import annotations

from harness.bins import SumBins, Tally

NS_PER_S = 1_000_000_000
FULL_PERCENT = 99
"""From this share of its capacity a link is full. Rates are rounded down, so a full link may lack a few bytes."""


class RateMeter:
    """Integral of a rate. A nanobyte is 1e-9 byte: bytes/s times ns, so all sums are exact integers.

    Percentiles are of the mean rates of intervals of `interval_ns`, however long the run gets; the series over time has
    wider bins in a longer run.
    """

    __slots__ = (
        "_full_rate",
        "_interval",
        "_intervals",
        "_moved",
        "busy_ns",
        "full_ns",
        "interval_ns",
        "nanobytes",
        "rate",
        "series",
        "since_ns",
    )

    def __init__(self, interval_ns: int = NS_PER_S, capacity_bytes_per_s: int | None = None) -> None:
        self.interval_ns = interval_ns
        self.rate = 0
        """Bytes per second now."""
        self.nanobytes = 0
        self.busy_ns = 0
        self.full_ns = 0
        """Time at FULL_PERCENT of the capacity or more."""
        self.since_ns = 0
        self.series = SumBins(interval_ns)
        self._full_rate = None if capacity_bytes_per_s is None else capacity_bytes_per_s * FULL_PERCENT
        self._interval = 0
        """The last interval in which anything moved."""
        self._moved = 0
        """Nanobytes in it so far."""
        self._intervals = Tally()
        """Nanobytes of the intervals before it in which anything moved."""

    def set_rate(self, now_ns: int, rate: int) -> None:
        """The rate from now on."""
        self.integrate(now_ns)
        self.rate = rate

    def integrate(self, now_ns: int) -> None:
        """Bring the totals up to now."""
        start, rate = self.since_ns, self.rate
        self.since_ns = now_ns
        if not rate or now_ns <= start:
            return
        span = now_ns - start
        moved = rate * span
        self.nanobytes += moved
        self.busy_ns += span
        if self._full_rate is not None and rate * 100 >= self._full_rate:
            self.full_ns += span
        series = self.series
        number = start // series.bin_ns
        if now_ns <= (number + 1) * series.bin_ns and number < len(series.sums):
            series.sums[number] += moved  # what spread would do, most of the time
        else:
            series.spread(start, now_ns, rate)
        width = self.interval_ns
        first, last = start // width, (now_ns - 1) // width
        if first != self._interval:
            self._next(first)
        if first == last:
            self._moved += moved
            return
        self._moved += rate * ((first + 1) * width - start)
        self._next(last)
        if last - first > 1:
            self._intervals.add(rate * width, last - first - 1)
        self._moved = rate * (now_ns - last * width)

    def add(self, now_ns: int, nbytes: int) -> None:
        """Bytes that moved in no time."""
        self.integrate(now_ns)
        moved = nbytes * NS_PER_S
        self.nanobytes += moved
        self.series.add(now_ns, moved)
        interval = now_ns // self.interval_ns
        if interval != self._interval:
            self._next(interval)
        self._moved += moved

    def take_back(self, nanobytes: int) -> None:
        """A flow ended within the last nanosecond: what its rate counted beyond its last byte did not happen."""
        self.nanobytes -= nanobytes
        self.series.add(self.since_ns - 1, -nanobytes)
        self._moved -= nanobytes

    def mean_bytes_per_s(self, end_ns: int) -> float:
        """From 0 to end_ns."""
        self.integrate(end_ns)
        return self.nanobytes / end_ns if end_ns else 0.0

    def percentile_bytes_per_s(self, q: float, end_ns: int) -> float | None:
        """Of the mean rates of the whole intervals from 0 to end_ns, idle ones included; None if there is none."""
        self.integrate(end_ns)
        intervals = end_ns // self.interval_ns
        tally = self._intervals.copy()
        if self._moved and self._interval < intervals:
            tally.add(self._moved)
        value = tally.percentile(q, intervals - tally.count)
        return None if value is None else value / self.interval_ns

    def _next(self, interval: int) -> None:
        """What has moved so far is all that its interval gets; the next one begins."""
        if self._moved:
            self._intervals.add(self._moved)
        self._interval = interval
        self._moved = 0
