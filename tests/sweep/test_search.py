"""The bisection finds the highest rung, whatever it is, and asks few questions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import InputError
from harness.sweep.search import RateLadder, Search, interval, typical


@given(st.floats(0.1, 100), st.floats(0.02, 0.5), st.floats(1e-3, 1e4))
def test_finds_the_highest_rate_below_the_threshold(start: float, tolerance: float, threshold: float) -> None:
    ladder = RateLadder(start, tolerance, min(start, 0.01), max(start, 1000.0))
    search, asked = Search(ladder), []
    while search.rung is not None:
        assert search.rung not in asked, "no rung is tried twice"
        asked.append(search.rung)
        search.answer(ladder.rate(search.rung) <= threshold)
    rungs = range(ladder.bottom, ladder.top + 1)
    met = [rung for rung in rungs if ladder.rate(rung) <= threshold]
    assert search.met == (max(met) if met else None)
    assert search.at_the_end == ("above" if len(met) == len(rungs) else "" if met else "below")
    assert len(asked) <= 2 * math.ceil(math.log2(len(rungs) + 1)) + 3


def test_a_ladder_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(InputError, match="--tolerance"):
        RateLadder(1, 0.0, 0.1, 10)
    with pytest.raises(InputError, match="--start"):
        RateLadder(20, 0.05, 0.1, 10)


def test_interval_is_student_s_on_logarithms() -> None:
    values = [2.0, 4.0, 8.0]
    low, high = interval(values) or (0, 0)
    # mean log 2 = 2, standard deviation 1, t(2) = 4.303, over the root of 3
    half = 4.303 / math.sqrt(3)
    assert math.log2(low) == pytest.approx(2 - half, rel=1e-3)
    assert math.log2(high) == pytest.approx(2 + half, rel=1e-3)
    assert typical(values) == pytest.approx(4.0)
    assert interval(values, 0.05) == (low, pytest.approx(high * 1.05))
    assert interval([3.5, 3.5], 0.05) == pytest.approx((3.5, 3.675)), "seeds that agree know no more than the ladder"
    assert interval([3.0]) is None


@pytest.mark.parametrize(("low", "start", "high"), [(1, 1e300, 1e308), (1e-300, 1, 10), (1, 1, math.inf), (0, 1, 2)])
def test_rates_that_no_experiment_takes_are_refused(low: float, start: float, high: float) -> None:
    with pytest.raises(InputError, match="go beyond"):
        RateLadder(start, 0.05, low, high)


def test_a_rate_that_cannot_be_judged_bounds_the_search_and_is_told() -> None:
    search = Search(RateLadder(1.0, 1.0, 0.1, 64.0))
    while search.rung is not None:
        search.answer(None if search.rung >= 4 else True)
    assert search.met == 3 and search.blind
    search = Search(RateLadder(1.0, 1.0, 0.1, 64.0))
    while search.rung is not None:
        search.answer(None if search.rung >= 4 else search.rung < 2)
    assert search.met == 1 and not search.blind
