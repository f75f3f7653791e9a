"""Calls and timelines reduced to the few hundred points that a plot can show; nothing here knows about
plotly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl
from numpy.typing import NDArray

from harness.results.numbers import seconds
from harness.results.records import COMPLETED
from harness.results.runinfo import RunInfo
from harness.results.summary import (
    E2E,
    TTFT,
    decoding,
    measured,
    output_rates,
    truth_gaps,
)
from harness.results.timeline import Timeline

Floats = NDArray[np.float64]
Points = tuple[Floats, Floats]

_LEVELS: Final = np.unique(np.concatenate([np.linspace(0, 0.9, 121), 1 - np.logspace(-1, -4, 61), [1.0]]))
"""Shares at which a distribution is drawn: even up to 90 %, then ever finer into the tail."""

MIN_CALLS: Final = 20
"""Fewer calls than this make no point of a percentile curve."""


def completed(calls: pl.DataFrame, info: RunInfo) -> pl.DataFrame:
    """The calls that completed inside the measured window."""
    return measured(calls, info).filter(pl.col("outcome") == COMPLETED)


def distribution(values: Floats, total: int | None = None) -> Points:
    """Values against the share (0..1) of `total` things that are no larger; `total` counts those that have no
    value, too.
    """
    if not len(values):
        return np.empty(0), np.empty(0)
    levels = _LEVELS if len(values) > len(_LEVELS) else np.linspace(0, 1, max(2, len(values)))
    quantiles: Floats = np.quantile(values, levels).astype(np.float64)
    shares: Floats = (levels * (len(values) / total if total else 1.0)).astype(np.float64)
    return quantiles, shares


def ttft_distribution(calls: pl.DataFrame, info: RunInfo) -> Points:
    """TTFT of completed calls against the share of all calls that ended in the window: failures keep it below
    1.
    """
    return distribution(seconds(completed(calls, info), TTFT), len(measured(calls, info)))


def e2e_distribution(calls: pl.DataFrame, info: RunInfo) -> Points:
    return distribution(seconds(completed(calls, info), E2E), len(measured(calls, info)))


def gap_distribution(calls: pl.DataFrame, info: RunInfo) -> Points:
    """|believed - held| in points of the prompt (0..100) against the share of decisions with a larger gap."""
    gaps = np.abs(truth_gaps(calls, info)) * 100
    if not len(gaps):
        return np.empty(0), np.empty(0)
    at = np.unique(np.concatenate([np.linspace(0, 5, 51), np.linspace(5, 100, 96)]))
    larger = 1 - np.searchsorted(np.sort(gaps), at, side="right") / len(gaps)
    keep = np.append(True, larger[:-1] > 0)
    return at[keep], larger[keep]


def percentile_over_time(calls: pl.DataFrame, q: float, buckets: int = 48) -> Points:
    """The q-th percentile of TTFT by arrival: bucket middles in s, values in s. Completed calls, warm-up
    included.
    """
    done = calls.filter(pl.col("outcome") == COMPLETED)
    if len(done) < MIN_CALLS:
        return np.empty(0), np.empty(0)
    arrival, ttft = seconds(done, pl.col("arrival_ns")), seconds(done, TTFT)
    count = max(1, min(buckets, len(done) // (2 * MIN_CALLS)))
    edges = np.linspace(0, arrival.max() * (1 + 1e-9) + 1e-9, count + 1)
    bucket = np.digitize(arrival, edges) - 1
    kept = [b for b in range(count) if (bucket == b).sum() >= MIN_CALLS]
    middles = (edges[:-1] + edges[1:]) / 2
    return middles[kept], np.array([np.percentile(ttft[bucket == b], q) for b in kept])


@dataclass(slots=True)
class RateByBatch:
    """Output rate of calls grouped by the mean batch of their endpoint while they decoded."""

    batch: Floats
    p50: Floats
    p10: Floats
    calls: NDArray[np.int64]


def rate_by_batch(calls: pl.DataFrame, info: RunInfo, groups: int = 14) -> RateByBatch:
    """Groups of equally many calls, in order of the batch; the batch of a call is the mean number of calls, itself
    included, that its endpoint decoded between its first and its last token.
    """
    some = decoding(completed(calls, info))
    rates = output_rates(some)
    if len(rates) < MIN_CALLS:
        return RateByBatch(np.empty(0), np.empty(0), np.empty(0), np.empty(0, dtype=np.int64))
    endpoint = some["endpoint"].to_numpy()
    first, finish = some["first_token_ns"].to_numpy(), some["finish_ns"].to_numpy()
    batch = np.empty(len(some))
    for e in np.unique(endpoint):
        mine = endpoint == e
        # The running count is a step function of these calls' starts and ends; its integral is exact between them.
        times = np.concatenate([first[mine], finish[mine]])
        steps = np.concatenate([np.ones(mine.sum()), -np.ones(mine.sum())])
        order = np.argsort(times, kind="stable")
        times, running = times[order].astype(np.float64), np.cumsum(steps[order])
        integral = np.concatenate([[0.0], np.cumsum(running[:-1] * np.diff(times))])
        area = np.interp(finish[mine], times, integral) - np.interp(first[mine], times, integral)
        batch[mine] = area / (finish[mine] - first[mine])
    order = np.argsort(batch, kind="stable")
    parts = [p for p in np.array_split(order, min(groups, max(1, len(order) // MIN_CALLS))) if len(p)]
    return RateByBatch(
        batch=np.array([batch[p].mean() for p in parts]),
        p50=np.array([np.percentile(rates[p], 50) for p in parts]),
        p10=np.array([np.percentile(rates[p], 10) for p in parts]),
        calls=np.array([len(p) for p in parts]),
    )


def cluster_load(timeline: Timeline, bins: int = 130) -> tuple[Floats, Floats, Floats]:
    """Bin middles in s; running and waiting requests of the whole cluster, bin means."""
    coarse = timeline.coarsened(bins)
    middles = (np.arange(coarse.bins) * coarse.bin_ns + coarse.widths_ns / 2) / 1e9
    return (
        middles,
        coarse.running_ns.sum(axis=0) / coarse.widths_ns,
        coarse.waiting_ns.sum(axis=0) / coarse.widths_ns,
    )


@dataclass(slots=True)
class LoadMap:
    """Requests (running and waiting, bin means) at each row over time; rows are endpoints, or nodes where
    there are many.
    """

    edges_s: Floats
    requests: Floats
    row_names: list[str]


def load_map(timeline: Timeline, bins: int = 150, max_rows: int = 128) -> LoadMap:
    coarse = timeline.coarsened(bins)
    requests = (coarse.running_ns + coarse.waiting_ns) / coarse.widths_ns
    names = [f"endpoint {e}, node {node}" for e, node in enumerate(coarse.nodes)]
    if len(names) > max_rows:
        nodes = np.array(coarse.nodes)
        numbers = sorted(set(coarse.nodes))
        requests = np.stack([requests[nodes == n].sum(axis=0) for n in numbers])
        names = [f"node {n}" for n in numbers]
    edges = np.minimum(np.arange(coarse.bins + 1) * coarse.bin_ns, coarse.end_ns) / 1e9
    return LoadMap(edges, requests, names)
