"""Speculative decoding as far as it takes time: how many of a step's draft tokens the verification accepts.

A draft is accepted only if all before it were. With one chance p for each, at least i of k are accepted with p^i, and
the share of accepted ones among all drafted is (p + p^2 + ... + p^k) / k: p follows from the share that engines report.
Draws depend on the request's content and position alone, so equal runs accept equally.
"""

from __future__ import annotations

from functools import cache

_MASK = (1 << 64) - 1
_STEPS = 60


@cache
def chances(count: int, share: float) -> tuple[float, ...]:
    """Chances that at least 1, 2, ..., `count` drafts are accepted, if `share` of all drafted ones is."""
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        p = (low + high) / 2
        if sum(p**i for i in range(1, count + 1)) / count < share:
            low = p
        else:
            high = p
    return tuple(high**i for i in range(1, count + 1))


def accepted(origin: int, position: int, drafted: int, thresholds: tuple[float, ...]) -> int:
    """How many of `drafted` tokens are accepted in the step that verifies them."""
    if not drafted:
        return 0
    draw = _unit(origin, position)
    return sum(draw < chance for chance in thresholds[:drafted])


def _unit(origin: int, position: int) -> float:
    """A number in 0..1 from two whole ones (splitmix64)."""
    z = (origin * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return float((z ^ (z >> 31)) >> 11) / float(1 << 53)
