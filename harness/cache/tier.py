"""A tier behind all nodes: which chunks it holds, for how long, and how full it is. Knows nothing of LMCache or time.

Chunks count as bytes from the moment their store is accepted, so the capacity holds while stores are on their way; they
can be found from the moment they have arrived.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.bins import LevelBins
from harness.cache.base import TierStats
from harness.cache.retention import Retention


@dataclass(slots=True)
class TierCounts:
    """Chunks, over the run."""

    read: int = 0
    written: int = 0
    evicted: int = 0
    expired: int = 0
    dropped_unread: int = 0
    skipped: int = 0
    peak: int = 0
    lookups: int = 0
    asked: int = 0
    hit: int = 0


@dataclass(slots=True, eq=False)
class SharedTier:
    """State of one shared tier. Keys are opaque."""

    name: str
    chunk_bytes: int
    """Modelled bytes of one chunk."""
    capacity: int | None = None
    """Chunks; None: unlimited."""
    retention: Retention[Any] | None = None
    use_on_lookup: bool = True
    objects: dict[Any, int] = field(default_factory=dict)
    """Key -> the node that wrote it."""
    counts: TierCounts = field(default_factory=TierCounts)
    on_stored: list[Callable[[list[Any]], None]] = field(default_factory=list)
    on_used: list[Callable[[list[Any]], None]] = field(default_factory=list)
    """Told of loads: LMCache's own adapters count those, not lookups, as use for their eviction policy."""
    on_deleted: list[Callable[[list[Any]], None]] = field(default_factory=list)
    before_use: Callable[[int], None] | None = None
    """Runs whatever is due (watermark checks) before the tier is used at a time."""
    level: LevelBins = field(default_factory=LevelBins)
    """Resident chunks over time."""
    _now_ns: int = 0
    _locks: Counter[Any] = field(default_factory=Counter)
    _unread: set[Hashable] = field(default_factory=set)
    _arriving: int = 0

    def accept(self, keys: Sequence[Any], now_ns: int) -> list[Any]:
        """Which of the keys will be stored: not held yet, and as many as fit, in order."""
        self.sweep(now_ns)
        new = [key for key in keys if key not in self.objects]
        if self.capacity is not None:
            room = max(0, self.capacity - len(self.objects) - self._arriving)
            self.counts.skipped += len(new) - len(new[:room])
            new = new[:room]
        self._arriving += len(new)
        return new

    def arrive(self, keys: Sequence[Any], node: int, now_ns: int) -> list[Any]:
        """Accepted keys are here; returns those that no other store brought meanwhile."""
        self.sweep(now_ns)
        self._arriving -= len(keys)
        new = [key for key in keys if key not in self.objects]
        for key in new:
            self.objects[key] = node
        self.level.change(now_ns, len(new))
        self._unread.update(new)
        self.counts.written += len(new)
        self.counts.peak = max(self.counts.peak, len(self.objects))
        if self.retention is not None:
            self.retention.add(keys, now_ns)
        if new:
            for told in self.on_stored:
                told(new)
        return new

    def give_up(self, keys: Sequence[Any]) -> None:
        """Accepted keys will not come."""
        self._arriving -= len(keys)

    def lock_found(self, keys: Sequence[Any], now_ns: int) -> list[int]:
        """Indexes of the keys that are held; each gets a lock that keeps it from being dropped."""
        self.sweep(now_ns)
        objects = self.objects
        found = [index for index, key in enumerate(keys) if key in objects]
        held = keys if len(found) == len(keys) else [keys[index] for index in found]
        self._locks.update(held)
        if self.use_on_lookup and self.retention is not None:
            self.retention.touch(held, now_ns)
        return found

    def unlock(self, keys: Sequence[Any]) -> None:
        """One lock less on each key."""
        locks = self._locks
        for key in keys:
            count = locks.get(key, 0)
            if count > 1:
                locks[key] = count - 1
            elif count:
                locks.pop(key)  # Counter takes its own del through Python

    def read(self, keys: Sequence[Any], now_ns: int) -> list[int]:
        """Indexes of the keys that a load which ends now has brought."""
        self.sweep(now_ns)
        held = [index for index, key in enumerate(keys) if key in self.objects]
        self.counts.read += len(held)
        self._unread.difference_update(keys)
        if self.retention is not None:
            self.retention.touch(keys, now_ns)
        if held:
            for told in self.on_used:
                told([keys[index] for index in held])
        return held

    def evict(self, keys: Sequence[Any]) -> list[Any]:
        """Drop keys that are not locked; returns those dropped."""
        gone = self._drop(keys)
        self.level.change(self._now_ns, -len(gone))
        self.counts.evicted += len(gone)
        return gone

    def sweep(self, now_ns: int) -> list[Any]:
        """Run what is due and drop what the retention window ends; locked keys are in use and stay."""
        if self.before_use is not None:
            self.before_use(now_ns)
        return self.expire(now_ns)

    def expire(self, now_ns: int) -> list[Any]:
        """Drop what the retention window ends by now."""
        self._now_ns = now_ns
        retention = self.retention
        if retention is None:
            return []
        due = retention.expired(now_ns)
        if not due:
            return []
        gone = self._drop(due, expired=True)
        self.counts.expired += len(gone)
        retention.add([key for key in due if key in self._locks], now_ns)
        return gone

    def _drop(self, keys: Sequence[Any], expired: bool = False) -> list[Any]:
        objects, locks, unread = self.objects, self._locks, self._unread
        gone = [key for key in keys if key in objects and key not in locks]
        for key in gone:
            del objects[key]
            if key in unread:
                unread.remove(key)
                self.counts.dropped_unread += 1
        if self.retention is not None:
            if expired:
                self.retention.leave(self.level, gone, self._now_ns)
            self.retention.forget(gone)
        if gone:
            for told in self.on_deleted:
                told(gone)
        return gone

    @property
    def locked(self) -> int:
        """Keys that carry locks."""
        return len(self._locks)

    @property
    def arriving(self) -> int:
        """Accepted chunks that are still on their way."""
        return self._arriving

    def stats(self, chunk_tokens: int) -> TierStats:
        """The account in modelled bytes."""
        counts, size = self.counts, self.chunk_bytes
        return TierStats(
            name=self.name,
            capacity_bytes=None if self.capacity is None else self.capacity * size,
            resident_bytes=len(self.objects) * size,
            peak_bytes=counts.peak * size,
            read_bytes=counts.read * size,
            written_bytes=counts.written * size,
            evicted_bytes=counts.evicted * size,
            evicted_unread_bytes=counts.dropped_unread * size,
            expired_bytes=counts.expired * size,
            skipped_bytes=counts.skipped * size,
            lookups=counts.lookups,
            asked_tokens=counts.asked * chunk_tokens,
            hit_tokens=counts.hit * chunk_tokens,
        )
