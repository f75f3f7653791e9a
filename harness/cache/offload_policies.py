"""Which chunk leaves a CPU tier: the LRU and ARC policies of vLLM 0.32's OffloadingConnector.

Same decisions as vllm/v1/kv_offload/cpu/policies (lru.py, arc.py) call by call; tests/differential holds the two equal.
Keys are opaque.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

Key = int


@dataclass(slots=True)
class Chunk:
    """A chunk in the tier. `users`: loads that read it; -1 while it is being written."""

    users: int = -1

    @property
    def ready(self) -> bool:
        """Whether it can be read."""
        return self.users >= 0


class Policy(Protocol):
    """What is held and what goes first."""

    def get(self, key: Key) -> Chunk | None:
        """The chunk, if it is held."""

    def insert(self, key: Key, chunk: Chunk) -> None:
        """A chunk that is about to be written."""

    def missed(self, keys: Iterable[Key]) -> None:
        """These will be stored and were not held (on_store_miss); once per request and key."""

    def request_over(self, keys: Sequence[Key], only_inserted: set[Key], reused: set[Key]) -> None:
        """All that a request saw, in the order of its prompt (on_request_finished)."""

    def evict(self, count: int, protected: set[Key]) -> list[Key] | None:
        """Drops so many chunks that nobody uses; None, and nothing changed, where there are fewer."""

    def mark(self, key: Key, evictable: bool) -> None:
        """The chunk's last user let go of it, or its first came."""


class LruPolicy:
    """Recency is a rank that a request gives at its end, whatever loads and stores are under way."""

    def __init__(self, capacity: int) -> None:
        self.chunks: dict[Key, Chunk] = {}
        self._ranks: dict[Key, int] = {}
        self._evictable: set[Key] = set()
        self._heap: list[tuple[int, Key]] = []
        """Evictable chunks by rank; entries of old ranks are passed over."""
        self._next_rank = 0

    def get(self, key: Key) -> Chunk | None:
        """See Policy."""
        return self.chunks.get(key)

    def insert(self, key: Key, chunk: Chunk) -> None:
        """See Policy."""
        self.chunks[key] = chunk
        self._next_rank += 1
        self._ranks[key] = self._next_rank

    def missed(self, keys: Iterable[Key]) -> None:
        """See Policy: a touch, which moves nothing that is not held."""

    def request_over(self, keys: Sequence[Key], only_inserted: set[Key], reused: set[Key]) -> None:
        """See Policy: from the end of the prompt on, so that the end goes first."""
        moved: list[Key] = []
        for key in reversed(keys):
            if key in self.chunks:
                self._next_rank += 1
                self._ranks[key] = self._next_rank
                if key in self._evictable:
                    moved.append(key)
        if len(moved) >= max(64, len(self._evictable) // 4):
            self._rebuild()
        else:
            for key in moved:
                heapq.heappush(self._heap, (self._ranks[key], key))
            self._compact()

    def evict(self, count: int, protected: set[Key]) -> list[Key] | None:
        """See Policy."""
        heap, chosen, kept = self._heap, dict[Key, tuple[int, Key]](), list[tuple[int, Key]]()
        while heap and len(chosen) < count:
            entry = heapq.heappop(heap)
            rank, key = entry
            if key in chosen or key not in self._evictable or self._ranks[key] != rank:
                continue
            if key in protected:
                kept.append(entry)
            else:
                chosen[key] = entry
        for entry in kept:
            heapq.heappush(heap, entry)
        if len(chosen) < count:
            for entry in chosen.values():
                heapq.heappush(heap, entry)
            return None
        for key in chosen:
            self._evictable.remove(key)
            del self.chunks[key]
            del self._ranks[key]
        self._compact()
        return list(chosen)

    def mark(self, key: Key, evictable: bool) -> None:
        """See Policy."""
        if evictable:
            self._evictable.add(key)
            heapq.heappush(self._heap, (self._ranks[key], key))
            self._compact()
        else:
            self._evictable.remove(key)

    def _compact(self) -> None:
        if len(self._heap) >= max(64, 2 * len(self._evictable)):
            self._rebuild()

    def _rebuild(self) -> None:
        self._heap = [(self._ranks[key], key) for key in self._evictable]
        heapq.heapify(self._heap)


class ArcPolicy:
    """Seen once (`t1`) and more often (`t2`), each with the names of what left it lately; the target size adapts."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.target = 0.0
        self.t1: OrderedDict[Key, Chunk] = OrderedDict()
        self.t2: OrderedDict[Key, Chunk] = OrderedDict()
        self.b1: OrderedDict[Key, None] = OrderedDict()
        self.b2: OrderedDict[Key, None] = OrderedDict()

    def get(self, key: Key) -> Chunk | None:
        """See Policy."""
        chunk = self.t1.get(key)
        return self.t2.get(key) if chunk is None else chunk

    def insert(self, key: Key, chunk: Chunk) -> None:
        """See Policy."""
        self.t1[key] = chunk
        self.b1.pop(key, None)
        self.b2.pop(key, None)

    def missed(self, keys: Iterable[Key]) -> None:
        """See Policy: what left lately and is wanted again moves the target."""
        for key in reversed(list(keys)):
            if key in self.b1:
                self.target = min(self.target + max(1, len(self.b2) / len(self.b1)), self.capacity)
                self.b1.move_to_end(key)
            elif key in self.b2:
                self.target = max(self.target - max(1, len(self.b1) / len(self.b2)), 0)
                self.b2.move_to_end(key)

    def request_over(self, keys: Sequence[Key], only_inserted: set[Key], reused: set[Key]) -> None:
        """See Policy: what was reused has now been seen more than once."""
        for key in reversed(keys):
            if key in only_inserted:
                for held in (self.t1, self.t2):
                    if key in held:
                        held.move_to_end(key)
                        break
            elif key in reused:
                if key in self.t1:
                    self.t2[key] = self.t1.pop(key)
                elif key in self.t2:
                    self.t2.move_to_end(key)

    def evict(self, count: int, protected: set[Key]) -> list[Key] | None:
        """See Policy."""
        left = len(self.t1)
        first, second = self._candidates(self.t1, protected), self._candidates(self.t2, protected)
        chosen: list[tuple[Key, bool]] = []
        for _ in range(count):
            key = next(first, None) if left >= int(self.target) else None
            from_first = key is not None
            if key is None:
                key = next(second, None)
            if key is None:
                key = next(first, None)
                from_first = True
            if key is None:
                return None
            left -= from_first
            chosen.append((key, from_first))
        for key, from_first in chosen:
            if from_first:
                del self.t1[key]
                self.b1[key] = None
            else:
                del self.t2[key]
                self.b2[key] = None
        for ghosts in (self.b1, self.b2):
            while len(ghosts) > self.capacity:
                ghosts.popitem(last=False)
        return [key for key, _ in chosen]

    def mark(self, key: Key, evictable: bool) -> None:
        """See Policy: looked up at eviction."""

    @staticmethod
    def _candidates(held: OrderedDict[Key, Chunk], protected: set[Key]) -> Iterator[Key]:
        for key, chunk in held.items():
            if chunk.users == 0 and key not in protected:
                yield key


POLICIES: dict[str, type[LruPolicy] | type[ArcPolicy]] = {"lru": LruPolicy, "arc": ArcPolicy}
