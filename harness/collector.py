"""Python's cyclic garbage collector during a run: what a run is built of is left alone, and full passes are rare.

A run makes millions of objects that die by their reference count; only the few in cycles (gRPC calls, tracebacks) need
the collector. At Python's own thresholds it walks over everything that is alive again and again: a quarter of the CPU
of a replay with LMCache. So what exists when a run begins is frozen, young objects are looked at in larger lots, and
old ones when the process has grown by `GROWTH_BYTES`, which bounds what dead cycles can hold. The outcome of a run does
not depend on when the collector works.
"""

from __future__ import annotations

import gc
import resource
from pathlib import Path
from types import TracebackType

YOUNG = (20_000, 20, 1_000_000)
"""Thresholds: net new containers, young passes, and for old objects a number that is never reached."""

GROWTH_BYTES = 512 << 20
"""Resident memory may grow by this much before old objects are looked at."""

_PAGE_BYTES = resource.getpagesize()


def resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return 0


class RareCollections:
    """The policy above for the time of a `with`. Where the collector is off, it stays off."""

    def __init__(self, growth_bytes: int = GROWTH_BYTES, every: int = 256) -> None:
        """`every`: one of so many calls of `look` reads the process's memory."""
        self.full_passes = 0
        self._growth = growth_bytes
        self._every = every
        self._looks = 0
        self._floor = 0
        self._before: tuple[int, int, int] | None = None

    def __enter__(self) -> RareCollections:
        if gc.isenabled():
            self._before = gc.get_threshold()
            gc.collect()
            gc.freeze()
            gc.set_threshold(*YOUNG)
            self._floor = resident_bytes()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._before is not None:
            gc.set_threshold(*self._before)
            gc.unfreeze()
            self._before = None

    def look(self) -> None:
        """Called now and then: a full pass if memory has grown enough since the last one."""
        self._looks += 1
        if self._before is None or self._looks % self._every:
            return
        if resident_bytes() - self._floor >= self._growth:
            gc.collect()
            self.full_passes += 1
            self._floor = resident_bytes()
