"""floor_sum against the sum written out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fake_workers.pricing.floorsum import floor_sum

_numbers = st.one_of(st.integers(-50, 50), st.integers(-(10**12), 10**12))


@given(st.integers(0, 200), st.one_of(st.integers(1, 60), st.integers(1, 1 << 40)), _numbers, _numbers)
def test_equals_the_sum(n: int, m: int, a: int, b: int) -> None:
    assert floor_sum(n, m, a, b) == sum((a * i + b) // m for i in range(n))


def test_many_terms_at_once() -> None:
    # floor(i / 3) over 0 .. 3n-1 is 3 * (0 + 1 + ... + n-1).
    n = 10**12
    assert floor_sum(3 * n, 3, 1, 0) == 3 * n * (n - 1) // 2
