"""Chunks of prompts: which chunk is which, without touching blocks one by one.

A chunk is named (origin of its last block, chunk index): blocks have chained identities, so the last block says what
the whole prefix up to it is. Two prompts share a chunk exactly if they share that name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from harness.cache.base import Run

Key = TypeVar("Key")


def chunk_runs(runs: Sequence[Run], blocks_per_chunk: int) -> list[Run]:
    """Runs in engine blocks -> runs in whole chunks: (origin, first chunk, end chunk)."""
    out: list[Run] = []
    for origin, start, end in runs:
        first, last = start // blocks_per_chunk, end // blocks_per_chunk
        if last > first:
            if out and out[-1][0] == origin and out[-1][2] == first:
                out[-1] = (origin, out[-1][1], last)
            else:
                out.append((origin, first, last))
    return out


class ChunkKeys(Generic[Key]):
    """Keys by (origin, chunk index), made once and kept, so that a lookup is a join of list slices."""

    def __init__(self, blocks_per_chunk: int, make: Callable[[int, int], Key]) -> None:
        self.blocks_per_chunk = blocks_per_chunk
        self._make = make
        self._known: dict[int, tuple[int, list[Key]]] = {}

    def of(self, runs: Sequence[Run]) -> list[Key]:
        """Keys of the whole chunks that the runs cover, in order."""
        out: list[Key] = []
        for origin, first, end in chunk_runs(runs, self.blocks_per_chunk):
            out += self._slice(origin, first, end)
        return out

    def forget(self, origin: int) -> None:
        """Drop the keys of an origin that no prompt will name again."""
        self._known.pop(origin, None)

    def _slice(self, origin: int, first: int, end: int) -> list[Key]:
        base, keys = self._known.get(origin, (first, []))
        if first < base:
            keys = [self._make(origin, index) for index in range(first, base)] + keys
            base = first
        if end > base + len(keys):
            keys.extend(self._make(origin, index) for index in range(base + len(keys), end))
        self._known[origin] = (base, keys)
        return keys[first - base : end - base]
