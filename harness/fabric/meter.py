"""What a link carried: exact totals, and bytes per interval for mean and percentile load."""

from __future__ import annotations

from dataclasses import dataclass, field

NS_PER_S = 1_000_000_000


@dataclass(slots=True)
class LinkMeter:
    """Integral of one link's rate. A nanobyte is 1e-9 byte: bytes/s times ns, so all sums are exact integers."""

    bin_ns: int
    rate: int = 0
    """Bytes per second now."""
    nanobytes: int = 0
    busy_ns: int = 0
    since_ns: int = 0
    bins: dict[int, int] = field(default_factory=dict)
    """Nanobytes by interval number; intervals without traffic are absent."""

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
        self.nanobytes += rate * (now_ns - start)
        self.busy_ns += now_ns - start
        width, bins = self.bin_ns, self.bins
        while start < now_ns:
            number = start // width
            end = min(now_ns, (number + 1) * width)
            bins[number] = bins.get(number, 0) + rate * (end - start)
            start = end

    def take_back(self, nanobytes: int) -> None:
        """A flow ended within the last nanosecond: what its rate counted beyond its last byte did not happen."""
        self.nanobytes -= nanobytes
        last = (self.since_ns - 1) // self.bin_ns
        self.bins[last] = self.bins.get(last, 0) - nanobytes

    def series_bytes_per_s(self, end_ns: int) -> list[float]:
        """Mean rate of each whole or begun interval from 0 to end_ns."""
        self.integrate(end_ns)
        scale = self.bin_ns / NS_PER_S
        return [self.bins.get(i, 0) / NS_PER_S / scale for i in range(-(-end_ns // self.bin_ns))]
