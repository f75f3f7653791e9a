"""KV events of node DRAM: chunks as runs of engine blocks, under LMCache's medium name.

LMCache 0.5.6's server keeps a log of chunks that were written to L1 or evicted from it
(lmcache.v1.multiprocess.modules.kv_events); the connector of every engine subscribes to it and hands on, with medium
"CPU", stores of what it has not announced yet and removals of what it has.
"""

from __future__ import annotations

from typing import Any, Protocol

from fake_workers.engine.events import TierEvent
from harness.clock import VirtualClock

MEDIUM = "CPU"


class _Watched(Protocol):
    on_stored: list[Any]
    on_deleted: list[Any]


class EventLog:
    """Collects events until they are taken."""

    def __init__(self, watch: _Watched, clock: VirtualClock, blocks_per_chunk: int) -> None:
        self._clock = clock
        self._blocks = blocks_per_chunk
        self._events: list[TierEvent] = []
        self._held: set[Any] = set()
        watch.on_stored.append(self._stored)
        watch.on_deleted.append(self._deleted)

    def take(self) -> list[TierEvent]:
        """Events since the last call, oldest first."""
        events, self._events = self._events, []
        return events

    def holds(self, keys: list[Any]) -> list[bool]:
        """Which of the keys can be read."""
        held = self._held
        return [key in held for key in keys]

    def _stored(self, keys: list[Any], promoted: bool) -> None:
        new = [key for key in keys if key not in self._held]
        self._held.update(new)
        self._add(new, True)

    def _deleted(self, keys: list[Any]) -> None:
        gone = [key for key in keys if key in self._held]
        self._held.difference_update(gone)
        self._add(gone, False)

    def _add(self, keys: list[Any], stored: bool) -> None:
        now, blocks = self._clock.now_ns, self._blocks
        start = 0
        while start < len(keys):
            first = keys[start]
            end = start + 1
            while end < len(keys) and keys[end].origin == first.origin and keys[end].index == first.index + end - start:
                end += 1
            self._events.append(
                TierEvent(
                    now, MEDIUM, stored, first.origin, first.index * blocks, (end - start) * blocks, "chunk", blocks
                )
            )
            start = end
