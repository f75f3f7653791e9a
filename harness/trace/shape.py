"""What the plots of a trace are drawn from: distributions and curves, in one pass over its sessions.

Conventions are those of harness/trace/stats.py, which gives the numbers that these curves pass through.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from harness.trace.chains import MAIN, end_s
from harness.trace.model import Call, Session
from harness.trace.retention import session_hits
from harness.trace.stats import busiest_share, minute_bins

LEVELS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
"""Shares of the calls at which the burstiness curve is taken."""
CURVE_S: tuple[float, ...] = (*(float(10 ** (k / 8)) for k in range(48)), 300.0, 3600.0, 86400.0, 604800.0)
"""Retention windows of the hit rate curve (s), eight to a decade from 1 s on, and those that people speak of."""

Floats = NDArray[np.float64]


def _windows() -> tuple[float, ...]:
    return (*sorted(CURVE_S), math.inf)


@dataclass(slots=True)
class Shape:
    """The distributions of a trace; filled by `watch`."""

    windows_s: tuple[float, ...] = field(default_factory=_windows)
    idle_s: array[float] = field(default_factory=lambda: array("d"))
    """Idle gaps before arrivals."""
    zero: int = 0
    """Arrivals while their session was busy."""
    contexts: list[array[int]] = field(default_factory=list)
    """Per session, input tokens of the main conversation's calls in order."""
    minutes: list[tuple[float, ...]] = field(default_factory=list)
    """Per session, share of its minutes that holds each of LEVELS."""
    pooled: Counter[int] = field(default_factory=Counter)
    """Number of minutes, over all sessions, by the calls in them."""
    most: Counter[int] = field(default_factory=Counter)
    """Sessions by the most calls that they have in flight."""
    starts: Counter[int] = field(default_factory=Counter)
    """Calls by the number in flight in their session when they start, themselves included."""
    busy_s: dict[int, float] = field(default_factory=dict)
    """Session time by the number of calls in flight; nothing for 0."""
    hits: list[int] = field(default_factory=list)
    blocks: int = 0

    def watch(self, sessions: Iterable[Session]) -> Iterator[Session]:
        """The sessions, unchanged, each noted as it passes."""
        for session in sessions:
            if session.calls:
                self.add(session)
            yield session

    def add(self, session: Session) -> None:
        """Take in one session that has calls."""
        calls = session.calls
        latest = end_s(calls[0])
        for call in calls[1:]:
            if call.t_s < latest:
                self.zero += 1
            else:
                self.idle_s.append(call.t_s - latest)
            latest = max(latest, end_s(call))
        self.contexts.append(array("q", (call.input_tokens for call in calls if call.chain == MAIN)))
        bins = minute_bins(calls, latest - calls[0].t_s)
        self.minutes.append(busiest_share(bins, bins.total(), LEVELS))
        self.pooled.update(bins)
        self._add_flight(calls)
        found = session_hits(session, self.windows_s)
        self.hits = [a + b for a, b in zip(self.hits or [0] * len(found), found, strict=True)]
        self.blocks += sum(call.blocks for call in calls)

    def _add_flight(self, calls: Sequence[Call]) -> None:
        # An end (-1) sorts before a start (1) of the same time.
        events = sorted((time, step) for call in calls for time, step in ((call.t_s, 1), (end_s(call), -1)))
        level = most = 0
        before = events[0][0]
        for time, step in events:
            if level > 0 and time > before:
                self.busy_s[level] = self.busy_s.get(level, 0.0) + time - before
            level, before = level + step, time
            if step > 0:
                self.starts[level] += 1
            most = max(most, level)
        self.most[most] += 1

    def hit_curve(self) -> tuple[Floats, Floats]:
        """(finite windows in s, share of blocks held)."""
        return np.array(self.windows_s[:-1]), np.array(self.hits[:-1]) / self.blocks

    def hit_infinite(self) -> float:
        """Share of blocks held by a cache that forgets nothing."""
        return self.hits[-1] / self.blocks

    def burst_curves(self) -> tuple[Floats, Floats]:
        """Share of minutes that holds each of LEVELS: median over sessions, and all minutes together."""
        return np.median(np.array(self.minutes), axis=0), np.array(
            busiest_share(self.pooled, self.pooled.total(), LEVELS)
        )

    def context_curves(self) -> tuple[NDArray[np.int64], Floats]:
        """(call numbers from 1 on, 10th, 50th and 90th percentile of the sessions that have such a call).

        Shape of the second: calls x 3, tokens. Ends where fewer than twenty sessions (or all, of fewer) are left.
        """
        lengths = sorted((len(context) for context in self.contexts), reverse=True)
        enough = lengths[min(20, len(lengths)) - 1]
        numbers = np.unique(np.geomspace(1, enough, 60).round().astype(np.int64)) if enough else np.arange(0)
        rows = [
            np.percentile([c[number - 1] for c in self.contexts if len(c) >= number], (10, 50, 90))
            for number in numbers.tolist()
        ]
        return numbers, np.array(rows).reshape(len(rows), 3)


def at_least(counts: Counter[int] | dict[int, float], top: int) -> Floats:
    """Share of the total weight at 1, 2, .. `top` or above."""
    weights = np.array([counts.get(n, 0) for n in range(1, top + 1)], dtype=float)
    total = sum(counts.values())
    return np.cumsum(weights[::-1])[::-1] / total if total else np.zeros(top)
