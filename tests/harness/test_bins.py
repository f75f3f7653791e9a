"""Bins, levels and tallies against plain lists."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.bins import LevelBins, SumBins, Tally


def test_a_sum_is_spread_over_the_bins_it_touches_and_survives_wider_bins():
    bins = SumBins(first_bin_ns=10, max_bins=4)
    bins.spread(5, 25, 3)
    assert bins.until(40) == [15, 30, 15, 0]
    bins.add(39, 7)
    assert bins.until(41) == [45, 22, 0]
    assert bins.bin_ns == 20


def test_a_level_has_means_and_highs():
    level = LevelBins(first_bin_ns=10, max_bins=4)
    level.change(5, 4)
    level.change(12, -3)
    level.change(12, 5)
    level.change(12, -6)
    level.change(30, 2)
    assert level.until(40) == ([20, 8, 0, 20], [4, 6, 0, 2])
    assert level.peak == 6
    assert level.until(50) == ([28, 20, 20], [6, 2, 2])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 400), st.integers(-5, 5)), max_size=40), st.integers(1, 500))
def test_levels_and_sums_are_those_of_a_plain_list(changes, end):
    """Every nanosecond by itself: integral, sum and highest value of each bin, whatever the bins' width became."""
    changes = sorted((t, by) for t, by in changes if t < end)
    level, sums = LevelBins(1, 8), SumBins(1, 8)
    plain, highs, at, since = [0] * end, [0] * end, 0, 0
    for t, by in changes:
        if at > 0:
            sums.spread(since, t, at)
        plain[since:t] = [at] * (t - since)
        highs[since:t] = [max(h, at) for h in highs[since:t]]
        by = max(by, -at)
        level.change(t, by)
        at, since = at + by, t
        highs[t] = max(highs[t], at)
    if at > 0:
        sums.spread(since, end, at)
    plain[since:] = [at] * (end - since)
    highs[since:] = [max(h, at) for h in highs[since:]]
    width = level.bin_ns
    integrals, tops = level.until(end)
    width = level.bin_ns
    assert len(integrals) <= 8
    assert integrals == [sum(plain[i : i + width]) for i in range(0, end, width)]
    assert tops == [max(highs[i : i + width]) for i in range(0, end, width)]
    assert sum(sums.until(end)) == sum(plain)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 10**21), min_size=1, max_size=200), st.integers(0, 300), st.floats(0, 100))
def test_a_tallys_percentile_is_numpys_within_its_buckets(values, zeros, q):
    tally = Tally()
    for value in values:
        tally.add(value)
    exact = float(np.percentile(np.array([*values, *[0] * zeros], dtype=float), q))
    found = tally.percentile(q, zeros)
    assert found is not None
    assert abs(found - exact) <= 0.008 * max(values) and (exact == 0 or found / exact < 1.02 or zeros)


def test_equal_numbers_give_exact_percentiles():
    tally = Tally()
    tally.add(123_456_789_012_345, 5)
    assert tally.percentile(99) == 123_456_789_012_345
    assert tally.percentile(50, zeros=6) == 0
    assert tally.percentile(50, zeros=4) == 123_456_789_012_345
    assert Tally().percentile(50) is None
