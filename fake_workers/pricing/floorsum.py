"""Sum of a floored line over consecutive integers, exactly and in logarithmic time."""

from __future__ import annotations


def floor_sum(n: int, m: int, a: int, b: int) -> int:
    """Return sum(floor((a*i + b) / m) for i in range(n)), for n >= 0, m > 0 and any integers a, b.

    The Euclid-like reduction known from lattice point counting: take out the whole parts of the slope and of
    the offset (closed form), then swap the roles of the axes. The number of rounds is O(log min(n, m, a)).
    """
    total = 0
    if a < 0 or a >= m:
        q, a = divmod(a, m)
        total += n * (n - 1) // 2 * q
    if b < 0 or b >= m:
        q, b = divmod(b, m)
        total += n * q
    top = a * n + b
    while top >= m:
        n, b = divmod(top, m)
        m, a = a, m
        # a > m now (the roles were swapped), and b < the old m; take out whole parts again.
        q, a = divmod(a, m)
        total += n * (n - 1) // 2 * q
        if b >= m:
            q, b = divmod(b, m)
            total += n * q
        top = a * n + b
    return total
