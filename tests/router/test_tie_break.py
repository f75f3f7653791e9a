"""The seeded order among equals: repeatable, complete, and neutral."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from harness.router.tie_break import TieBreak


def chi_square(counts: Counter[int], n: int) -> float:
    expected = sum(counts.values()) / n
    return sum((counts[i] - expected) ** 2 / expected for i in range(n))


@given(
    st.integers(1, 70),
    st.integers(),
    st.lists(st.tuples(st.integers(0, 69), st.sets(st.integers(0, 69))), max_size=30),
)
def test_ranks_stay_a_permutation_and_changes_are_told(n: int, seed: int, steps: list[tuple[int, set[int]]]) -> None:
    order = TieBreak(n, seed)
    for winner, pushed in steps:
        order.chosen(winner % n)
        before = list(order.ranks)
        told = order.deal({i % n for i in pushed})
        assert sorted(order.ranks) == list(range(n))
        assert {i for i in range(n) if order.ranks[i] != before[i]} <= set(told)
        assert {i % n for i in pushed} <= set(told)


def test_same_seed_same_order() -> None:
    a, b, c = TieBreak(8, 1), TieBreak(8, 1), TieBreak(8, 2)
    for k in range(50):
        for order in (a, b, c):
            order.chosen(k % 8)
            order.deal([(k * 3) % 8])
    assert a.ranks == b.ranks != c.ranks


def test_all_tied_is_uniform_and_forgets_the_last_winner() -> None:
    """8,000 picks among 8 equals: 7 and 63 degrees of freedom, limits at a chance of about one in a million."""
    order, n = TieBreak(8, 5), 8
    picks: Counter[int] = Counter()
    pairs: Counter[int] = Counter()
    last = None
    for _ in range(8000):
        winner = order.ranks.index(0)
        picks[winner] += 1
        if last is not None:
            pairs[last * n + winner] += 1
        last = winner
        order.chosen(winner)
        order.deal([])
    assert chi_square(picks, n) < 42
    assert chi_square(pairs, n * n) < 130


def test_few_tied_are_served_alike() -> None:
    """Three of eight are equal; nothing is pushed. Picks repeat for a while, but none is preferred in the
    long run.
    """
    wins: Counter[int] = Counter()
    for seed in range(300):
        order = TieBreak(8, seed)
        for _ in range(10):
            winner = min((2, 4, 5), key=lambda i: order.ranks[i])
            wins[winner] += 1
            order.chosen(winner)
            order.deal([])
    assert all(800 < wins[i] < 1200 for i in (2, 4, 5))
