"""A made-up price for tests that are not about prices: linear, summed by brute force."""

from __future__ import annotations

from fake_workers.pricing.steps import RankBatch


def step_ns(ranks: list[RankBatch]) -> int:
    """5 us plus the slowest rank's 3 ns per context token, 1 us per decode, 50 ns per prompt token."""
    return 5_000 + max(
        rank.decode_context_tokens * 3 + rank.decodes * 1_000 + sum(50 * new + cached for new, cached in rank.prefills)
        for rank in ranks
    )


class SimpleLeap:
    """The decode steps that start with `ranks`."""

    def __init__(self, ranks: list[RankBatch]) -> None:
        self._ranks = ranks
        self._sums = [0]

    def cumulative_ns(self, steps: int) -> int:
        while len(self._sums) <= steps:
            grown = len(self._sums) - 1
            ranks = [r._replace(decode_context_tokens=r.decode_context_tokens + grown * r.decodes) for r in self._ranks]
            self._sums.append(self._sums[-1] + step_ns(ranks))
        return self._sums[steps]

    def step_ns(self, i: int) -> int:
        return self.cumulative_ns(i) - self.cumulative_ns(i - 1)

    def steps_until(self, duration_ns: int) -> int:
        steps = 0
        while self.cumulative_ns(steps + 1) <= duration_ns:
            steps += 1
        return steps


class SimplePrice:
    """Offers both to a node."""

    def step_ns(self, ranks: list[RankBatch]) -> int:
        return step_ns(ranks)

    def leap(self, ranks: list[RankBatch]) -> SimpleLeap:
        return SimpleLeap(ranks)
