"""LMCache looks at its watermarks once a second (`time.sleep(1)`); here at whole virtual ticks, caught up when needed.

A tick that evicts nothing changes nothing, and nothing else happens between two uses of a tier, so the ticks after it
can be skipped: the state at the next use is the same as if every tick had run.
"""

from __future__ import annotations

from collections.abc import Callable


class Ticks:
    """Runs `tick(t_ns)`, which says whether it evicted anything, at phase, phase + interval, ..."""

    def __init__(self, interval_ns: int, phase_ns: int, tick: Callable[[int], bool]) -> None:
        self.interval_ns = interval_ns
        self._next_ns = phase_ns
        self._tick = tick

    def catch_up(self, now_ns: int) -> None:
        """All ticks up to and including now."""
        if now_ns < self._next_ns:
            return
        while self._next_ns <= now_ns:
            changed = self._tick(self._next_ns)
            self._next_ns += self.interval_ns
            if not changed:
                behind = now_ns - self._next_ns
                if behind >= 0:
                    self._next_ns += (behind // self.interval_ns + 1) * self.interval_ns
                return
