"""Service levels and whether a run met them: `e2e_p90_s=300`, `ttft_p99_s=5`, `output_rate_p10_tok_s=8`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from harness.errors import InputError
from harness.results.numbers import Floats, seconds
from harness.results.records import COMPLETED, IN_FLIGHT
from harness.results.summary import E2E, TTFT, output_rates, percentile_with_failures

_TIMES: Final = {"e2e": E2E, "ttft": TTFT}
_MOST: Final = 1e9
_NAME: Final = re.compile(r"(e2e|ttft)_p(\d{1,2})_s|(output_rate)_p(\d{1,2})_tok_s")


@dataclass(frozen=True, slots=True)
class Slo:
    """One bar: a percentile of a time that must not be above `limit`, or of the output rate that must not be below."""

    name: str
    metric: str
    percentile: int
    limit: float

    @property
    def at_most(self) -> bool:
        """Whether smaller is better."""
        return self.metric in _TIMES


def parse_slo(text: str) -> Slo:
    """`NAME=LIMIT`; names as in the module's first line, any percentile."""
    name, sep, raw = text.partition("=")
    matched = _NAME.fullmatch(name.strip())
    try:
        limit = float(raw)
    except ValueError:
        limit = float("nan")
    if not sep or matched is None or not 0 < limit <= _MOST:
        raise InputError(
            f"--slo {text}",
            "not a service level",
            "write e2e_p90_s=300, ttft_p90_s=5 or output_rate_p10_tok_s=8 (any percentile, limit above 0, at most 1e9)",
        )
    metric = matched[1] or matched[3]
    return Slo(name.strip(), metric, int(matched[2] or matched[4]), limit)


@dataclass(frozen=True, slots=True)
class Reached:
    """What a run reached against one bar; `value` None: more calls were lost than the percentile allows."""

    slo: Slo
    value: float | None

    @property
    def met(self) -> bool:
        """Whether the bar was met."""
        if self.value is None:
            return False
        return self.value <= self.slo.limit if self.slo.at_most else self.value >= self.slo.limit


def reached(calls: pl.DataFrame, start_ns: int, end_ns: int, slos: Sequence[Slo]) -> list[Reached]:
    """What the calls of the window [start_ns, end_ns] reached.

    The window's calls are those that ended in it. Calls that were not completed count as infinitely late, and so does
    a call still open at the window's end that has been open for longer than the bar: leaving it out would make an
    overloaded cluster look well. For an output rate, lost calls count as rate 0.
    """
    ended = calls.filter(pl.col("finish_ns").is_between(start_ns, end_ns))
    done = ended.filter(pl.col("outcome") == COMPLETED)
    lost = len(ended) - len(done)
    found = []
    for slo in slos:
        if slo.metric in _TIMES:
            late = lost + _overdue(calls, slo, end_ns)
            value = percentile_with_failures(seconds(done, _TIMES[slo.metric]), late, slo.percentile)
        else:
            rates = np.concatenate([np.zeros(lost), output_rates(done)])
            value = float(np.percentile(rates, slo.percentile)) if len(rates) else None
        found.append(Reached(slo, value))
    return found


def overdue(calls: pl.DataFrame, end_ns: int, slos: Sequence[Slo]) -> int:
    """Open calls that have missed one of the bars at least (the most over the bars)."""
    return max((_overdue(calls, slo, end_ns) for slo in slos if slo.at_most), default=0)


def _overdue(calls: pl.DataFrame, slo: Slo, end_ns: int) -> int:
    """Open calls that have missed the bar already."""
    limit_ns = round(slo.limit * 1e9)
    some = calls.filter((pl.col("outcome") == IN_FLIGHT) & (pl.lit(end_ns) - pl.col("arrival_ns") > limit_ns))
    if slo.metric == "ttft":
        some = some.filter(pl.col("first_token_ns").is_null())
    return len(some)


@dataclass(frozen=True, slots=True)
class Drift:
    """Whether the number of calls in the system grew over the window."""

    first: float
    """Mean number of calls in the system in the window's first fifth."""
    last: float
    """The same in its last fifth."""
    slope_t: float
    """t statistic of a straight line through the batches' means."""

    @property
    def stationary(self) -> bool:
        """False where the line rises beyond doubt (t > 3) and by more than half: the load had not settled."""
        return not (self.slope_t > 3.0 and self.last > 1.5 * self.first)


_BATCHES: Final = 20


def drift(calls: pl.DataFrame, start_ns: int, end_ns: int) -> Drift:
    """Batch means of the number of calls in the system over the window, and their trend."""
    level = in_system(calls, np.linspace(start_ns, end_ns, _BATCHES + 1, dtype=np.float64))
    x = np.arange(_BATCHES, dtype=float)
    slope, level0 = np.polyfit(x, level, 1)
    rest = level - (slope * x + level0)
    error = float(np.sqrt((rest**2).sum() / (_BATCHES - 2) / ((x - x.mean()) ** 2).sum()))
    t = float(slope) / error if error > 0 else (np.inf if slope > 0 else 0.0)
    fifth = _BATCHES // 5
    return Drift(float(level[:fifth].mean()), float(level[-fifth:].mean()), float(t))


def in_system(calls: pl.DataFrame, edges_ns: Floats) -> Floats:
    """Time mean of the number of calls between arrival and end in each interval between neighbouring edges."""
    arrival = calls["arrival_ns"].cast(pl.Float64).to_numpy()
    finish = calls["finish_ns"].cast(pl.Float64).fill_null(float("inf")).to_numpy()
    spent = [
        np.clip(np.minimum(finish, right) - np.maximum(arrival, left), 0, None).sum() / (right - left)
        for left, right in itertools.pairwise(edges_ns)
    ]
    return np.array(spent)
