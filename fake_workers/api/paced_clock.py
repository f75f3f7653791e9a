"""Virtual time that follows the wall: all engines of a process, and what lies below them, live on one such clock.

Events run in their order as soon as the wall has reached their time. Where the process falls behind, they run late but
see their own times, so that durations stay the engine's. Time is wall time since the start, times `speed`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from fake_workers.clock import VirtualClock


class PacedClock(VirtualClock):
    """Call `start` inside the event loop. `now_ns` moves only in `pump`."""

    def __init__(self, speed: float = 1.0) -> None:
        super().__init__()
        self.speed = speed
        self.on_failure: Callable[[BaseException], None] | None = None
        """Told of an error that an event ended with; None: it is raised."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._origin_ns = time.monotonic_ns()
        self._pumping = False

    def start(self) -> None:
        """Begin: now is time zero."""
        self._loop = asyncio.get_running_loop()
        self._origin_ns = time.monotonic_ns()
        self._arm()

    def close(self) -> None:
        """No event runs any more by itself."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop = None

    @property
    def wall_ns(self) -> int:
        """What the wall says; `now_ns` is at most this."""
        return int((time.monotonic_ns() - self._origin_ns) * self.speed)

    def pump(self) -> None:
        """Run all that is due by now, and wake up again for what follows. Inside an event it does nothing."""
        if self._pumping:
            return
        self._pumping = True
        try:
            now = self.wall_ns
            while (t_ns := self.next_ns) is not None and t_ns <= now:
                self.step()
            self.now_ns = max(self.now_ns, now)
        except Exception as error:
            if self.on_failure is None:
                raise
            self.on_failure(error)
        finally:
            self._pumping = False
            self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        t_ns = self.next_ns
        if self._loop is not None and t_ns is not None:
            wait_s = max(0.0, (t_ns - self.wall_ns) / self.speed / 1e9)
            self._timer = self._loop.call_later(wait_s, self.pump)
