"""What one rank did over a run: time, steps and the gaps between the tokens of its requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

BINS_PER_E = 100
"""Gaps are kept in bins that are 1 % wide."""
_MOST_PIECES = 4


@dataclass(frozen=True, slots=True)
class LeapGaps:
    """Decode steps of a leap, the same for all ranks of a node: `bins` are (bin, steps)."""

    steps: int
    duration_ns: int
    bins: list[tuple[int, int]]

    @classmethod
    def of(cls, steps: int, duration_ns: int, cumulative_ns: Callable[[int], int]) -> LeapGaps:
        """`duration_ns`: of all steps; `cumulative_ns(k)`: of the first k of them."""
        bins = []
        before = done = 0
        piece = -(-steps // _MOST_PIECES)
        while done < steps:
            upto = min(steps, done + piece)
            total = cumulative_ns(upto) if upto < steps else duration_ns
            mean = (total - before) / (upto - done)
            if mean > 0:
                bins.append((int(math.log(mean) * BINS_PER_E), upto - done))
            before, done = total, upto
        return cls(steps, duration_ns, bins)


@dataclass(slots=True)
class RankTotals:
    """Counts of one rank. `batch_ns` is the integral of requests in the batch over busy time."""

    busy_ns: int = 0
    batch_ns: int = 0
    scheduled_tokens: int = 0
    preemptions: int = 0
    decode_steps: int = 0
    """Steps in which a request got a token after its first."""
    mixed_steps: int = 0
    """Those among them that computed prompt chunks too."""
    decode_ns: int = 0
    mixed_ns: int = 0
    gaps: dict[int, int] = field(default_factory=dict, compare=False)
    """Tokens after a first one, by the bin of the step that brought them: the wait since the token before. A leap
    counts its steps in a few groups, so this alone may differ from single steps, by a bin or so.
    """

    def step(self, duration_ns: int, gaps: int, carries_prefill: bool) -> None:
        """One step that brought `gaps` requests a token after their first."""
        if not gaps or duration_ns <= 0:
            return
        self.decode_steps += 1
        self.decode_ns += duration_ns
        if carries_prefill:
            self.mixed_steps += 1
            self.mixed_ns += duration_ns
        bin_ = int(math.log(duration_ns) * BINS_PER_E)
        self.gaps[bin_] = self.gaps.get(bin_, 0) + gaps

    def leap(self, leap: LeapGaps, requests: int) -> None:
        """So many pure decode steps at once."""
        self.decode_steps += leap.steps
        self.decode_ns += leap.duration_ns
        for bin_, steps in leap.bins:
            self.gaps[bin_] = self.gaps.get(bin_, 0) + steps * requests


def gap_percentile_s(gaps: Mapping[int, int], q: float) -> float | None:
    """The q-th percentile (0..100) of gaps kept in bins, to 1 %, in seconds; None of none."""
    total = sum(gaps.values())
    if not total:
        return None
    wanted = total * q / 100.0
    seen = 0
    for bin_ in sorted(gaps):
        seen += gaps[bin_]
        if seen >= wanted:
            break
    return math.exp((bin_ + 0.5) / BINS_PER_E) / 1e9
