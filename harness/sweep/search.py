"""The highest load that is still fast enough: bisection over rates that form a fixed ladder.

All seeds and arms probe rungs of one ladder, so that points coincide, names are stable and a search that was stopped
finds its points again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Final

from harness.errors import InputError

_LOWEST: Final = 1e-6
_HIGHEST: Final = 1e9
"""Rates that load.sessions_per_hour_per_node takes."""


@dataclass(frozen=True, slots=True)
class RateLadder:
    """Rates start * (1 + tolerance)^k for whole k, within [lowest, highest], sessions/h/node."""

    start: float
    tolerance: float
    lowest: float
    highest: float

    def __post_init__(self) -> None:
        if not 0.005 <= self.tolerance <= 1:
            raise InputError("--tolerance", f"{self.tolerance:g} is not within 0.005 to 1", "0.05 means 5 %")
        if not self.lowest <= self.start <= self.highest:
            raise InputError(
                "--start",
                f"{self.start:g} is not within --low {self.lowest:g} and --high {self.highest:g}",
                "widen them",
            )
        if not (self.lowest >= _LOWEST and self.highest <= _HIGHEST):
            raise InputError(
                "--low, --high, --start",
                f"{self.lowest:g} to {self.highest:g} sessions/h/node go beyond {_LOWEST:g} to {_HIGHEST:g}",
                "keep within what load.sessions_per_hour_per_node takes",
            )

    def rate(self, rung: int) -> float:
        """The rate of a rung, to four digits, so that it can be typed."""
        return float(f"{self.start * (1 + self.tolerance) ** rung:.4g}")

    @property
    def bottom(self) -> int:
        """Lowest rung."""
        return math.ceil(math.log(self.lowest / self.start) / math.log1p(self.tolerance) - 1e-9)

    @property
    def top(self) -> int:
        """Highest rung."""
        return math.floor(math.log(self.highest / self.start) / math.log1p(self.tolerance) + 1e-9)

    @property
    def doubling(self) -> int:
        """Rungs in a factor of about two."""
        return max(1, round(math.log(2) / math.log1p(self.tolerance)))


class Search:
    """One bisection. Ask `rung` which rate to try next, tell it with `answer`; None: the end is found.

    A rung that cannot be judged bounds the search like one that missed, and `blind` says so if it is the last bound.
    """

    def __init__(self, ladder: RateLadder) -> None:
        self.ladder = ladder
        self.rung: int | None = 0
        self.met: int | None = None
        """Highest rung that was fast enough."""
        self.missed: int | None = None
        """Lowest rung that was not."""
        self._unjudged: set[int] = set()
        self._step = ladder.doubling

    def answer(self, met: bool | None) -> None:
        """Whether the service level was met at `rung`; None: it cannot be told."""
        assert self.rung is not None
        if met:
            self.met = self.rung
        else:
            self.missed = self.rung
        if met is None:
            self._unjudged.add(self.rung)
        self.rung = self._next()

    @property
    def blind(self) -> bool:
        """Whether the rung above the answer (the lowest of all if there is none) could not be judged."""
        return self.missed in self._unjudged

    def _next(self) -> int | None:
        if self.missed is None:
            assert self.met is not None
            return self._beyond(self.met, +1)
        if self.met is None:
            return self._beyond(self.missed, -1)
        return (self.met + self.missed) // 2 if self.missed - self.met > 1 else None

    def _beyond(self, rung: int, way: int) -> int | None:
        """A rung further out, in growing steps; None at the end of the ladder."""
        end = self.ladder.top if way > 0 else self.ladder.bottom
        if rung == end:
            return None
        step, self._step = self._step, self._step * 2
        return min(rung + step, end) if way > 0 else max(rung - step, end)

    @property
    def capacity(self) -> float | None:
        """Highest rate that met the service level; None: not even the lowest did."""
        return None if self.met is None else self.ladder.rate(self.met)

    @property
    def at_the_end(self) -> str:
        """ "above" or "below" where the ladder ended before the answer was found, else empty."""
        if self.rung is not None:
            return ""
        if self.missed is None:
            return "above"
        return "below" if self.met is None else ""


_T_975: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5 % quantiles of Student's t for 1 to 10 degrees of freedom."""


def interval(values: Sequence[float], step: float = 0.0) -> tuple[float, float] | None:
    """95 % confidence interval of the mean from a few seeds, on logarithms (rates are ratios); None below two.

    `step`: by how much more than its value each may be, as a share (0.05: it lies up to 5 % above).
    """
    if len(values) < 2 or any(value <= 0 for value in values):
        return None
    logs = [math.log(value) for value in values]
    quantile = _T_975[len(logs) - 2] if len(logs) - 2 < len(_T_975) else 1.96
    half = quantile * stdev(logs) / math.sqrt(len(logs))
    middle = fmean(logs)
    return math.exp(middle - half), math.exp(middle + half) * (1 + step)


def typical(values: Sequence[float]) -> float:
    """Geometric mean."""
    return math.exp(fmean(math.log(value) for value in values))
