"""Longest common prefixes of block id lists: how importers turn explicit ids into (ref, keep, new)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class PrefixIndex:
    """Finds, for each new call, an earlier call that its prompt has the longest common prefix with."""

    def __init__(self) -> None:
        self._owner: dict[int, int] = {}
        """Block id -> latest call that has it."""
        self._ids: list[NDArray[np.int64]] = []

    def add(self, ids: NDArray[np.int64]) -> tuple[int, int]:
        """Take in the next call; returns (ref, keep): -1, 0 where it has nothing in common with any earlier
        one.

        With chained ids membership in `_owner` holds for a prefix of `ids` and nowhere else, so it is found
        by bisection and then held against the owner's own ids; a source that breaks the chain is searched
        call by call.
        """
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high) // 2
            if int(ids[middle]) in self._owner:
                low = middle + 1
            else:
                high = middle
        ref, keep = (self._owner[int(ids[low - 1])], low) if low else (-1, 0)
        if keep and not np.array_equal(self._ids[ref][:keep], ids[:keep]):
            ref, keep = self._search(ids)
        index = len(self._ids)
        self._ids.append(ids)
        self._owner.update(dict.fromkeys(ids[max(keep - 1, 0) :].tolist(), index))
        return ref, keep

    def _search(self, ids: NDArray[np.int64]) -> tuple[int, int]:
        best, best_keep = -1, 0
        for index in range(len(self._ids) - 1, -1, -1):
            keep = common_length(self._ids[index], ids)
            if keep > best_keep:
                best, best_keep = index, keep
        return best, best_keep


def common_length(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """Length of the longest common prefix of two id lists."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n
