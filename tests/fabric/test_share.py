"""The fair-share solver against a brute-force reference and against the definition of max-min fairness."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from harness.fabric.share import max_min_rates

LINKS = 6

paths_strategy = st.lists(
    st.tuples(st.sets(st.integers(0, LINKS - 1), min_size=1, max_size=4), st.none() | st.integers(1, 10**9)),
    min_size=1,
    max_size=12,
)
capacities = st.lists(st.integers(10**6, 10**9), min_size=LINKS, max_size=LINKS)


def water_filling(paths, caps, capacity):
    """By the definition: raise every unfrozen flow by the largest step that no link and no cap forbids; repeat."""
    rates = [Fraction(0)] * len(paths)
    frozen = [False] * len(paths)
    while not all(frozen):
        steps = []
        for link, size in capacity.items():
            users = [i for i, path in enumerate(paths) if link in path]
            rising = [i for i in users if not frozen[i]]
            if rising:
                steps.append((Fraction(size) - sum(rates[i] for i in users)) / len(rising))
        steps += [caps[i] - rates[i] for i in range(len(paths)) if not frozen[i] and caps[i] is not None]
        step = min(steps)
        for i in range(len(paths)):
            if not frozen[i]:
                rates[i] += step
        for link, size in capacity.items():
            users = [i for i, path in enumerate(paths) if link in path]
            if users and sum(rates[i] for i in users) == size:
                for i in users:
                    frozen[i] = True
        for i, cap in enumerate(caps):
            if cap is not None and rates[i] == cap:
                frozen[i] = True
    return rates


@settings(max_examples=300, deadline=None)
@given(paths_strategy, capacities)
def test_exact_division_gives_the_brute_force_rates(flows, sizes):
    paths = [tuple(sorted(links)) for links, _ in flows]
    caps = [cap for _, cap in flows]
    capacity = dict(enumerate(sizes))
    assert max_min_rates(paths, caps, capacity, divide=Fraction) == water_filling(paths, caps, capacity)


@settings(max_examples=300, deadline=None)
@given(paths_strategy, capacities)
def test_whole_bytes_per_second_stay_within_rounding_of_the_exact_rates(flows, sizes):
    paths = [tuple(sorted(links)) for links, _ in flows]
    caps = [cap for _, cap in flows]
    capacity = dict(enumerate(sizes))
    whole = max_min_rates(paths, caps, capacity)
    exact = water_filling(paths, caps, capacity)
    for link, size in capacity.items():
        assert sum(rate for rate, path in zip(whole, paths, strict=True) if link in path) <= size
    assert all(isinstance(rate, int) and rate >= 1 for rate in whole)
    # a share loses less than 1 to rounding; what is lost upstream can only be passed on, once per flow and link
    assert all(abs(a - b) < len(paths) + LINKS for a, b in zip(whole, exact, strict=True))


@settings(max_examples=200, deadline=None)
@given(paths_strategy, capacities)
def test_every_flow_has_a_bottleneck(flows, sizes):
    """Work conserving and fair: at its cap, or on a full link where nobody has more (up to the rounding of a share)."""
    paths = [tuple(sorted(links)) for links, _ in flows]
    caps = [cap for _, cap in flows]
    rates = max_min_rates(paths, caps, dict(enumerate(sizes)))
    for rate, path, cap in zip(rates, paths, caps, strict=True):
        assert cap is None or rate <= cap
        if rate == cap:
            continue
        assert any(
            sizes[link] - sum(r for r, p in zip(rates, paths, strict=True) if link in p) < len(paths)
            and all(r <= rate for r, p in zip(rates, paths, strict=True) if link in p)
            for link in path
        )


@settings(max_examples=300, deadline=None)
@given(paths_strategy, capacities, st.data())
def test_flows_counted_in_one_entry_get_what_they_get_one_by_one(flows, sizes, data):
    numbers = data.draw(st.lists(st.integers(1, 9), min_size=len(flows), max_size=len(flows)))
    paths = [tuple(sorted(links)) for links, _ in flows]
    caps = [cap for _, cap in flows]
    order = data.draw(st.permutations([entry for entry, number in enumerate(numbers) for _ in range(number)]))
    single = max_min_rates([paths[i] for i in order], [caps[i] for i in order], dict(enumerate(sizes)))
    counted = max_min_rates(paths, caps, dict(enumerate(sizes)), flows=numbers)
    assert single == [counted[i] for i in order]


def test_a_textbook_case():
    """Bertsekas and Gallager's figure 6.17: five sessions on four links of capacity 1 give 1/3, 1/3, 1/3, 2/3, 1."""
    paths = [(0, 1), (1,), (1, 2), (2,), (3,)]
    rates = max_min_rates(paths, [None] * 5, dict.fromkeys(range(4), 1), divide=Fraction)
    assert rates == [Fraction(1, 3)] * 3 + [Fraction(2, 3), Fraction(1)]
