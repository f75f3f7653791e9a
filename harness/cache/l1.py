"""The account of one node's DRAM, and its retention window. Listens to LMCache's L1; counts chunks."""

from __future__ import annotations

from typing import Any, Protocol

from harness.bins import LevelBins
from harness.cache.base import NODE_DRAM, TierStats
from harness.cache.config import CacheConfig
from harness.cache.retention import Retention
from harness.clock import VirtualClock, to_ns

OBJECT_BYTES = 64
"""Real bytes of the object that stands for a chunk in LMCache's L1; its alignment, so that the capacity is exact."""


class _Watched(Protocol):
    on_stored: list[Any]
    on_deleted: list[Any]
    on_used: list[Any]


class _Ticking(Protocol):
    def tick(self) -> int: ...


class L1Account:
    """Counts of node DRAM; sees every chunk that enters, is used, or leaves."""

    def __init__(
        self,
        l1: Any,
        watch: _Watched,
        clock: VirtualClock,
        config: CacheConfig,
        chunk_bytes: int,
        capacity: int,
    ) -> None:
        self.name = NODE_DRAM
        self.capacity = capacity
        """Chunks."""
        self.lookups = 0
        self.asked = 0
        self.hit = 0
        self.skipped = 0
        self.saved = 0
        self.promoted = 0
        self.evicted = 0
        self.expired = 0
        self.dropped_unread = 0
        self.read_bytes = 0
        self.peak = 0
        self._l1 = l1
        self._clock = clock
        self._chunk_bytes = chunk_bytes
        self._chunk_tokens = config.chunk_size
        self._retention: Retention[Any] | None = (
            None if config.retention_s is None else Retention(to_ns(config.retention_s))
        )
        self._resident: set[Any] = set()
        self._unread: set[Any] = set()
        """Of those: not read since they came."""
        self.level = LevelBins()
        """Resident chunks over time."""
        self._cause = ""
        self._cause_ns = 0
        self._dropped = 0
        self.count_all_drops_as_evictions = False
        """Where nothing but eviction drops chunks (in-process mode)."""
        watch.on_stored.append(self._stored)
        watch.on_deleted.append(self._deleted)
        watch.on_used.append(self._used)

    def tick(self, evictor: _Ticking, t_ns: int) -> bool:
        """One watermark check at t_ns; whether it dropped anything."""
        self.expire(t_ns)
        self._cause, self._cause_ns, self._dropped = "evicted", t_ns, 0
        evictor.tick()
        self._cause = ""
        self.evicted += self._dropped
        return self._dropped > 0

    def expire(self, now_ns: int) -> None:
        """Drop what the retention window ends by now; what is being read stays, and its window restarts."""
        retention = self._retention
        if retention is None:
            return
        due = retention.expired(now_ns)
        if not due:
            return
        self._cause, self._cause_ns, self._dropped = "expired", now_ns, 0
        self._l1.delete(due)
        self._cause = ""
        self.expired += self._dropped
        retention.touch(due, now_ns)

    def loaded(self, keys: list[Any], nbytes: int) -> None:
        """Chunks were copied to a GPU."""
        self.read_bytes += nbytes
        self._unread.difference_update(keys)

    def stats(self) -> TierStats:
        """The account in modelled bytes; resident bytes include buffers that are being filled."""
        used, _ = self._l1.get_memory_usage()
        size = self._chunk_bytes
        return TierStats(
            name=self.name,
            capacity_bytes=self.capacity * size,
            resident_bytes=used // OBJECT_BYTES * size,
            peak_bytes=self.peak * size,
            read_bytes=self.read_bytes,
            written_bytes=self.saved * size,
            promoted_bytes=self.promoted * size,
            evicted_bytes=self.evicted * size,
            evicted_unread_bytes=self.dropped_unread * size,
            expired_bytes=self.expired * size,
            skipped_bytes=self.skipped * size,
            lookups=self.lookups,
            asked_tokens=self.asked * self._chunk_tokens,
            hit_tokens=self.hit * self._chunk_tokens,
        )

    @property
    def resident(self) -> int:
        """Chunks that readers can find."""
        return len(self._resident)

    def _stored(self, keys: list[Any], promoted: bool) -> None:
        if promoted:
            self.promoted += len(keys)
        else:
            self.saved += len(keys)
        before = len(self._resident)
        self._resident.update(keys)
        if promoted:
            self._unread.difference_update(keys)  # a chunk that was brought up is brought up to be read
        else:
            self._unread.update(keys)
        self.level.change(self._clock.now_ns, len(self._resident) - before)
        self.peak = max(self.peak, len(self._resident))
        if self._retention is not None:
            self._retention.add(keys, self._clock.now_ns)

    def _used(self, keys: list[Any]) -> None:
        if self._retention is not None:
            self._retention.touch(keys, self._clock.now_ns)

    def _deleted(self, keys: list[Any]) -> None:
        resident, unread = self._resident, self._unread
        chunks, new = len(resident), len(unread)
        resident.difference_update(keys)  # not all are there: a buffer may never have become a chunk
        unread.difference_update(keys)
        gone = chunks - len(resident)
        self._dropped += gone
        if self.count_all_drops_as_evictions:
            self.evicted += gone
        if self._cause or self.count_all_drops_as_evictions:
            self.dropped_unread += new - len(unread)
        if self._cause == "expired" and self._retention is not None:
            self._retention.leave(self.level, keys, self._cause_ns)
        else:
            self.level.change(self._cause_ns if self._cause else self._clock.now_ns, -gone)
        if self._retention is not None:
            self._retention.forget(keys)
