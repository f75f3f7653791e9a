"""The virtual clock: a heap of events in integer nanoseconds. Time stands still while a real component works."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

NS_PER_S = 1_000_000_000


def to_ns(seconds: float) -> int:
    """Seconds to whole nanoseconds, half to even."""
    return round(seconds * NS_PER_S)


class VirtualClock:
    """Events run in order of (time, rank, order of their scheduling); equal inputs give equal orders."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.executed = 0
        self._heap: list[tuple[int, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = 0
        self._cancelled: set[int] = set()

    def call_at(self, t_ns: int, action: Callable[..., None], *args: Any, rank: int = 1) -> int:
        """Run `action(*args)` at t_ns; among events of one time lower ranks run first. Returns what `cancel` takes."""
        if t_ns < self.now_ns:
            raise ValueError(f"event at {t_ns} ns lies before now ({self.now_ns} ns)")
        self._serial += 1
        heapq.heappush(self._heap, (t_ns, rank, self._serial, action, args))
        return self._serial

    def call_later(self, delay_ns: int, action: Callable[..., None], *args: Any, rank: int = 1) -> int:
        """Run `action(*args)` delay_ns from now."""
        return self.call_at(self.now_ns + delay_ns, action, *args, rank=rank)

    def cancel(self, event: int) -> None:
        """An event that has not run yet shall not happen, nor time go on for its sake."""
        self._cancelled.add(event)

    def _drop_cancelled(self) -> None:
        heap, cancelled = self._heap, self._cancelled
        while heap and heap[0][2] in cancelled:
            cancelled.discard(heapq.heappop(heap)[2])

    @property
    def next_ns(self) -> int | None:
        """Time of the next event, None if there is none."""
        if self._cancelled:
            self._drop_cancelled()
        return self._heap[0][0] if self._heap else None

    def step(self) -> bool:
        """Run the next event; False if there is none."""
        if self._cancelled:
            self._drop_cancelled()
        if not self._heap:
            return False
        t_ns, _, _, action, args = heapq.heappop(self._heap)
        self.now_ns = t_ns
        self.executed += 1
        action(*args)
        return True
