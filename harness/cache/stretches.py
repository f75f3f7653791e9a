"""Which tier served which chunks of a prompt, as stretches: a prompt of thousands of chunks has one or a few."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Stretch = tuple[str, int, int]
"""(tier, first chunk, end chunk), end exclusive; stretches follow each other without gaps."""


def stretches(chunks: int, from_below: Sequence[int], dram: str, tier_of: Callable[[int], str] | str) -> list[Stretch]:
    """Stretches of the first `chunks` chunks: those at `from_below` (ascending) came from a tier, the rest from `dram`.

    `tier_of` names the tier of a chunk, or is the name where all came from one.
    """
    out: list[Stretch] = []
    done = start = 0
    count = len(from_below)
    while start < count:
        first = from_below[start]
        if first > done:
            out.append((dram, done, first))
        name = tier_of if isinstance(tier_of, str) else tier_of(first)
        end = start + 1
        if isinstance(tier_of, str) and from_below[-1] - first == count - 1 - start:
            end = count  # no hole up to the last one
        while end < count and from_below[end] == from_below[end - 1] + 1:
            if not isinstance(tier_of, str) and tier_of(from_below[end]) != name:
                break
            end += 1
        done = first + end - start
        out.append((name, first, done))
        start = end
    if chunks > done:
        out.append((dram, done, chunks))
    return out


def tokens_by_tier(served: Sequence[Stretch], chunk_tokens: int, first_token: int) -> dict[str, int]:
    """Tokens from `first_token` on by tier, in the order in which the prompt meets the tiers."""
    out: dict[str, int] = {}
    for name, first, end in served:
        tokens = end * chunk_tokens - max(first_token, first * chunk_tokens)
        if tokens > 0:
            out[name] = out.get(name, 0) + tokens
    return out


def chunks_by_tier(served: Sequence[Stretch]) -> dict[str, int]:
    """Chunks by tier, in the order in which the prompt meets the tiers."""
    out: dict[str, int] = {}
    for name, first, end in served:
        out[name] = out.get(name, 0) + end - first
    return out
