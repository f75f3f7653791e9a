"""How far a run is, on standard error: one live line on a terminal, a plain line every few seconds elsewhere.

Standard output stays free for results.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text


def clock(seconds: float) -> str:
    """Seconds as 4 s, 3:07, 2:03:07 or 1 d 02:03:07."""
    whole = int(seconds)
    days, hours, minutes, rest = whole // 86400, whole // 3600 % 24, whole // 60 % 60, whole % 60
    if days:
        return f"{days} d {hours:02}:{minutes:02}:{rest:02}"
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"


def _rate(value: float) -> str:
    """A rate of live runs may be below one."""
    return f"{value:,.0f}" if value >= 10 or not value else f"{value:.2g}"


def share_done(calls: int, total: int, virtual_ns: int, until_s: float | None) -> float:
    """A run ends with its last call or at its end in virtual time: the nearer of the two."""
    by_calls = calls / total if total else 0.0
    by_time = virtual_ns / 1e9 / until_s if until_s else 0.0
    return min(1.0, max(by_calls, by_time))


class ProgressSink(Protocol):
    """What a run tells of how far it is."""

    def update(self, done: int, virtual_ns: int) -> None:
        """`done` calls have ended, the virtual clock stands at `virtual_ns`."""

    def close(self, note: str = "") -> None:
        """The run ended; safe to call twice."""

    def cancel(self) -> None:
        """Nothing came of the run."""


class Progress:
    """Feed it `update` as often as convenient (it is cheap and prints at its own pace) and close it at the
    end.

    At most `total` calls are expected (0: not known), and nothing after `until_s` of virtual time, whichever is
    reached first; `label` tells the runs of a comparison apart. `now` is the wall clock in seconds.
    """

    def __init__(
        self,
        label: str,
        total: int,
        until_s: float | None = None,
        *,
        stream: TextIO | None = None,
        plain_every_s: float = 10.0,
        live_every_s: float = 0.2,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.label, self.total, self._until_s = label, total, until_s
        self._stream = stream or sys.stderr
        self._now = now
        self._start_s = self._printed_s = now()
        self._done, self._virtual_ns, self._share, self._closed = 0, 0, 0.0, False
        self._recent: list[tuple[float, int, float]] = [(self._start_s, 0, 0.0)]
        console = Console(file=self._stream)
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._every_s = live_every_s if self._live else plain_every_s
        if self._live:
            self._live.start()

    def update(self, done: int, virtual_ns: int, share: float | None = None) -> None:
        """`done` calls have ended, the virtual clock stands at `virtual_ns`; `share` of the work, where it is known
        otherwise than by calls and virtual time."""
        self._done, self._virtual_ns = done, virtual_ns
        now = self._now()
        if now - self._printed_s < self._every_s:
            return
        self._printed_s = now
        self._share = share_done(done, self.total, virtual_ns, self._until_s) if share is None else share
        self._recent.append((now, done, self._share))
        while len(self._recent) > 2 and now - self._recent[0][0] > 60:
            self._recent.pop(0)
        self._print(self.line())

    def line(self) -> str:
        """What stands in the line now; the time left follows the pace of the last minute."""
        wall = self._now() - self._start_s
        then, calls_before, share_before = self._recent[0]
        span = self._now() - then
        pace, share_pace = (
            ((self._done - calls_before) / span, (self._share - share_before) / span) if span > 0 else (0.0, 0.0)
        )
        of = f"/{self.total:,}" if self.total and not self._until_s else ""
        parts = [
            f"{self.label}: {self._done:,}{of} calls ({f'{100 * self._share:.0f} %' if self._share else '-'})",
            *([f"virtual {clock(self._virtual_ns / 1e9)}"] if self._virtual_ns else []),
            f"{_rate(pace)} calls/s",
            f"wall {clock(wall)}",
        ]
        if share_pace > 0 and self._share < 1:
            parts.append(f"left {clock((1 - self._share) / share_pace)}")
        return "  ".join(parts)

    def close(self, note: str = "") -> None:
        """Print the last line for good; safe to call twice."""
        if self._closed:
            return
        wall = max(self._now() - self._start_s, 1e-9)
        if self._live:
            self._live.stop()
            self._live = None
        self._say(
            f"{self.label}: {self._done:,} calls in {clock(wall)} ({_rate(self._done / wall)} calls/s)"
            f"{f', virtual {clock(self._virtual_ns / 1e9)}' if self._virtual_ns else ''}{'; ' + note if note else ''}"
        )
        self._closed = True

    def cancel(self) -> None:
        """Nothing came of it: leave the terminal without a last line."""
        if self._live:
            self._live.stop()
            self._live = None
        self._closed = True

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("interrupted" if kind is KeyboardInterrupt else "failed" if kind else "")

    def _print(self, line: str) -> None:
        if self._live:
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        else:
            self._say(line)

    def _say(self, line: str) -> None:
        """A reader that has gone away costs the user lines of progress, never the run."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(line + "\n")
            self._stream.flush()
