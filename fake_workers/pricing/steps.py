"""The price of engine steps, one at a time and as leaps of many, in whole nanoseconds.

A node runs one rank (tensor parallel) or several ranks in lock-step (data-parallel attention with expert
parallel MoE). Its step lasts as long as the slowest rank's own part plus the part that all ranks do together:

    step = max over ranks (attention_r + dense_r) + moe(tokens of all ranks) + exchange(tokens of the fullest rank)
           + per-step overhead

Attention of a rank is that of its prefill chunks, each priced on its own cached prefix, plus one decode term
over (number of decodes, sum of their contexts), dearer beside a chunk where that was measured. Dense and MoE parts
run once over all tokens of the batch; a batch without prefill tokens uses the decode rows of the tables (CUDA
graphs), any other the prefill rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

from fake_workers.pricing.decode_row import FRACTION_BITS, DecodeRow
from fake_workers.pricing.floorsum import floor_sum
from fake_workers.pricing.profile import StepProfile

_ONE = 1 << FRACTION_BITS
_ENDLESS = 1 << 62


class RankBatch(NamedTuple):
    """What one rank computes in one step; the default is an idle rank.

    prefills               (new tokens, tokens already in the KV cache) of each request in its prompt
    decodes                number of requests that compute exactly one output token
    decode_context_tokens  sum over those of the context length, the token being computed included
    draft_tokens           drafts that those requests verify in the same step, over all of them
    """

    prefills: Sequence[tuple[int, int]] = ()
    decodes: int = 0
    decode_context_tokens: int = 0
    draft_tokens: int = 0


def step_ns(profile: StepProfile, ranks: Sequence[RankBatch]) -> int:
    """Duration of one step of a node; 0 when no rank has anything to do."""
    slowest = tokens = fullest = 0
    prefilling = False
    per_seq_ns = profile.calibration.per_seq_ns
    for prefills, decodes, context_tokens, drafts in ranks:
        own = decodes + drafts
        cost = 0
        if prefills:
            prefilling = True
            for new, _ in prefills:
                own += new
            cost = profile.context_attention_sum_ns(prefills)
        elif not decodes:
            continue
        if decodes:
            row = profile.mixed_decode_row(decodes) if prefills else profile.decode_row(decodes)
            cost += row.price_ns(context_tokens)
        cost += profile.dense_ns(own, not prefills) + per_seq_ns * (decodes + len(prefills))
        tokens += own
        if own > fullest:
            fullest = own
        if cost > slowest:
            slowest = cost
    if not tokens:
        return 0
    shared = profile.moe_ns(tokens, not prefilling) + profile.exchange_ns(fullest, not prefilling)
    return slowest + shared + profile.calibration.per_step_ns


class _Rank:
    """One decoding rank's line over the step index i (0-based): value(i) = base + rate * i, until `end`."""

    __slots__ = ("_context_tokens", "_fixed", "_row", "base", "decodes", "end", "rate")

    def __init__(self, row: DecodeRow, decodes: int, context_tokens: int, fixed_ns: int) -> None:
        self._row, self.decodes, self._context_tokens = row, decodes, context_tokens
        self._fixed = fixed_ns << FRACTION_BITS
        self.enter(0)

    def enter(self, i: int) -> None:
        """Take the line that holds at step i. `end` is the first step index that belongs to another cell."""
        decodes = self.decodes
        grown = decodes * i
        value, slope, end_tokens = self._row.line(self._context_tokens + grown)
        self.rate = slope * decodes
        self.base = self._fixed + value - slope * grown
        # ceil((end - S0) / decodes): at that step the sum has reached the next grid point.
        self.end = _ENDLESS if end_tokens is None else -((self._context_tokens - end_tokens) // decodes)


class DecodeLeap:
    """Sums of step prices while every rank only decodes (or idles) and its batch does not change.

    Step i (1-based) of a rank has contexts summing to decode_context_tokens + (i - 1) * decodes. The price of
    a step is a floor of the largest of the ranks' lines; a leap is cut into segments within which one rank's
    one line is the largest, and each segment is summed by floor_sum. Results equal the sum of step_ns over
    the same steps exactly.
    """

    __slots__ = ("_base", "_cached", "_covered", "_next", "_ranks", "_rates", "_shared", "_starts", "_sums")

    def __init__(self, profile: StepProfile, ranks: Sequence[RankBatch]) -> None:
        tokens = fullest = 0
        per_seq_ns = profile.calibration.per_seq_ns
        self._ranks: list[_Rank] = []
        for prefills, decodes, context_tokens, drafts in ranks:
            if prefills or drafts:
                raise ValueError("a decode leap cannot hold prefill chunks or drafts")
            if decodes:
                tokens += decodes
                fullest = max(fullest, decodes)
                fixed = profile.dense_ns(decodes, True) + per_seq_ns * decodes
                self._ranks.append(_Rank(profile.decode_row(decodes), decodes, context_tokens, fixed))
        if not tokens:
            raise ValueError("a decode leap needs at least one decoding rank")
        self._shared = (
            profile.moe_ns(tokens, True) + profile.exchange_ns(fullest, True) + profile.calibration.per_step_ns
        )
        # Parallel lists over segments: first step index, sum of all steps before it, and the line (base +
        # rate * i).
        self._starts: list[int] = []
        self._sums: list[int] = []
        self._base: list[int] = []
        self._rates: list[int] = []
        self._next = 0  # first step index that no segment covers yet
        self._covered = -1  # sum of all steps before that one, once it is known
        self._cached = (0, 0)  # last (k, cumulative_ns(k)): callers ask for the k that steps_until just found
        self._extend()

    def _extend(self) -> None:
        """Append the segment that begins at step index self._next."""
        i = self._next
        total = self._end_sum() if self._starts else 0
        best_value = best_rate = best_base = -1
        end = _ENDLESS
        for rank in self._ranks:
            if rank.end <= i:
                rank.enter(i)
            if rank.end < end:
                end = rank.end
            value = rank.base + rank.rate * i
            if value > best_value or (value == best_value and rank.rate > best_rate):
                best_value, best_rate, best_base = value, rank.rate, rank.base
        if len(self._ranks) > 1:
            for rank in self._ranks:
                if rank.rate > best_rate:
                    # First step at which the steeper line lies above the one that is largest now.
                    crossing = (best_base - rank.base) // (rank.rate - best_rate) + 1
                    if crossing < end:
                        end = crossing
        self._starts.append(i)
        self._sums.append(total)
        self._base.append(best_base)
        self._rates.append(best_rate)
        self._next = end
        self._covered = -1

    def _segment_ns(self, s: int, until: int) -> int:
        """Sum of the steps with index starts[s] .. until-1, all inside segment s."""
        i, rate = self._starts[s], self._rates[s]
        n = until - i
        return n * self._shared + floor_sum(n, _ONE, rate, self._base[s] + rate * i)

    def _price(self, s: int, i: int) -> int:
        """Price of the step with index i (0-based) inside segment s."""
        return self._shared + ((self._base[s] + self._rates[s] * i) >> FRACTION_BITS)

    def cumulative_ns(self, k: int) -> int:
        """Duration of the first k steps (k >= 0)."""
        if k == self._cached[0]:
            return self._cached[1]
        while k > self._next:
            self._extend()
        starts = self._starts
        s = len(starts) - 1
        if k < starts[s]:
            s = bisect_right(starts, k) - 1
        total = self._sums[s] + self._segment_ns(s, k)
        self._cached = (k, total)
        return total

    def step_ns(self, i: int) -> int:
        """Duration of step i (1-based)."""
        while i > self._next:
            self._extend()
        return self._price(bisect_right(self._starts, i - 1) - 1, i - 1)

    def steps_until(self, t_ns: int, limit: int = _ENDLESS) -> int:
        """Number of whole steps that end at or before t_ns after the leap's start; at most `limit`."""
        if t_ns < 0:
            return 0
        sums = self._sums
        while self._next < limit and self._end_sum() <= t_ns:
            self._extend()
        s = bisect_right(sums, t_ns) - 1
        start = self._starts[s]
        stop = self._starts[s + 1] if s + 1 < len(sums) else self._next
        if stop > limit:
            stop = limit
        if stop <= start:
            return stop
        k, total = self._solve(s, start, stop, t_ns - sums[s])
        self._cached = (k, sums[s] + total)
        return k

    def _end_sum(self) -> int:
        """Sum of all steps that segments cover so far (endless after the last line of every row)."""
        if self._covered < 0:
            endless = self._next >= _ENDLESS
            self._covered = _ENDLESS << FRACTION_BITS if endless else self._sums[-1] + self._segment_ns(-1, self._next)
        return self._covered

    def _solve(self, s: int, start: int, stop: int, rest_ns: int) -> tuple[int, int]:
        """Largest k in start..stop with the segment's sum up to k within rest_ns, and that sum.

        The sum is a quadratic in the number of steps but for the floors, so a guess from the quadratic is
        nearly always right at once; the bracket makes it exact in every case.
        """
        first = self._shared + (self._base[s] + self._rates[s] * start) / _ONE - 0.5
        growth = self._rates[s] / _ONE
        q = first - growth / 2
        root = q + sqrt(q * q + 2.0 * growth * rest_ns) if q > 0 else 0.0
        guess = int(2.0 * rest_ns / root) if root > 0 else 0
        low, high = start, stop  # low: known to fit; high: largest that could
        low_sum = 0
        k = min(max(start + guess, low), high)
        tries = 0
        while True:
            total = self._segment_ns(s, k) if k > start else 0
            if total <= rest_ns:
                price = self._price(s, k)
                if k == high or total + price > rest_ns:
                    return k, total
                low, low_sum = k, total
                k = k + max(1, (rest_ns - total) // price)
            else:
                high = k - 1
                if low == high:
                    return low, low_sum
                k = k - max(1, -((rest_ns - total) // self._price(s, k - 1)))
            tries += 1
            if tries > 4:
                k = (low + high + 1) // 2
            k = min(max(k, low + 1), high)
