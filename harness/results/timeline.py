"""Load per endpoint over virtual time, kept in a bounded number of equal bins while the run's length is still
unknown.

The simulation reports step changes (`level`) and busy intervals (`busy`); the bin width starts small and
doubles whenever the run outgrows `max_bins`, so memory stays constant. All integrals but the one of KV usage
are integers: the same events give the same bins exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import polars as pl
from numpy.typing import NDArray

from harness.errors import InputError
from harness.folders import whole

TIMELINE_SCHEMA: Final = 1
_METADATA_KEY: Final = "harness.timeline"
_SERIES: Final = ("running_ns", "waiting_ns", "kv_usage_ns", "busy_ns", "computed_tokens", "output_tokens")


@dataclass(slots=True)
class _Level:
    """What an endpoint has been at since `since_ns`."""

    since_ns: int = 0
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0


class TimelineRecorder:
    """Collects the load of `len(nodes)` endpoints; `nodes[e]` is the node of endpoint e.

    Times of one endpoint must not go back; different endpoints may be at different times (engines advance
    lazily).
    """

    def __init__(self, nodes: list[int], max_bins: int = 400, first_bin_ns: int = 1_000_000_000) -> None:
        if max_bins < 2 or max_bins % 2:
            raise ValueError(f"max_bins must be even and at least 2, not {max_bins}")
        self.nodes = list(nodes)
        self.max_bins = max_bins
        self.bin_ns = first_bin_ns
        n = len(self.nodes)
        self._levels = [_Level() for _ in range(n)]
        self._running = [[0] * max_bins for _ in range(n)]
        self._waiting = [[0] * max_bins for _ in range(n)]
        self._kv = [[0.0] * max_bins for _ in range(n)]
        self._busy = [[0] * max_bins for _ in range(n)]
        self._computed = [[0] * max_bins for _ in range(n)]
        self._output = [[0] * max_bins for _ in range(n)]
        self._end_ns = 0

    def level(self, endpoint: int, t_ns: int, running: int, waiting: int, kv_usage: float) -> None:
        """From `t_ns` on the endpoint runs `running` requests, holds `waiting` in its queue and uses that
        share of its KV.
        """
        self._close(endpoint, t_ns)
        level = self._levels[endpoint]
        level.running, level.waiting, level.kv_usage = running, waiting, kv_usage

    def busy(self, endpoint: int, start_ns: int, end_ns: int, computed_tokens: int = 0, output_tokens: int = 0) -> None:
        """The endpoint's GPUs worked from start to end and did so many prompt and output tokens, evenly
        spread.
        """
        self._fit(end_ns)
        width, total = self.bin_ns, end_ns - start_ns
        busy, computed, output = self._busy[endpoint], self._computed[endpoint], self._output[endpoint]
        if total <= 0:
            at = min(start_ns // width, self.max_bins - 1)
            computed[at] += computed_tokens
            output[at] += output_tokens
            return
        left_computed, left_output, t = computed_tokens, output_tokens, start_ns
        while t < end_ns:
            b = t // width
            upto = min((b + 1) * width, end_ns)
            busy[b] += upto - t
            # What is left after this slice, rounded down: slices always add up to the whole.
            rest = end_ns - upto
            keep_computed, keep_output = computed_tokens * rest // total, output_tokens * rest // total
            computed[b] += left_computed - keep_computed
            output[b] += left_output - keep_output
            left_computed, left_output, t = keep_computed, keep_output, upto

    def finish(self, end_ns: int) -> Timeline:
        """Close all levels at the end of the run and return the bins up to it."""
        self._fit(end_ns)
        for endpoint in range(len(self.nodes)):
            self._close(endpoint, max(end_ns, self._levels[endpoint].since_ns))
        bins = max(1, -(-max(end_ns, self._end_ns) // self.bin_ns))

        def table(rows: list[list[int]] | list[list[float]], dtype: type) -> NDArray[np.float64]:
            return np.array([row[:bins] for row in rows], dtype=dtype).reshape(len(rows), bins)

        return Timeline(
            nodes=list(self.nodes),
            bin_ns=self.bin_ns,
            end_ns=max(end_ns, self._end_ns),
            running_ns=table(self._running, np.int64),
            waiting_ns=table(self._waiting, np.int64),
            kv_usage_ns=table(self._kv, np.float64),
            busy_ns=table(self._busy, np.int64),
            computed_tokens=table(self._computed, np.int64),
            output_tokens=table(self._output, np.int64),
        )

    def _close(self, endpoint: int, t_ns: int) -> None:
        level = self._levels[endpoint]
        t = level.since_ns
        if t_ns < t:
            raise ValueError(f"endpoint {endpoint}: time went back from {t} to {t_ns} ns")
        level.since_ns = t_ns
        if not (level.running or level.waiting or level.kv_usage):
            return
        self._fit(t_ns)
        width = self.bin_ns
        running, waiting, kv = self._running[endpoint], self._waiting[endpoint], self._kv[endpoint]
        while t < t_ns:
            b = t // width
            upto = min((b + 1) * width, t_ns)
            span = upto - t
            running[b] += level.running * span
            waiting[b] += level.waiting * span
            kv[b] += level.kv_usage * span
            t = upto

    def _fit(self, t_ns: int) -> None:
        if t_ns > self._end_ns:
            self._end_ns = t_ns
            while t_ns > self.bin_ns * self.max_bins:
                self._double()

    def _double(self) -> None:
        half = self.max_bins // 2
        for rows in (self._running, self._waiting, self._busy, self._computed, self._output):
            for row in rows:
                row[:] = [row[2 * i] + row[2 * i + 1] for i in range(half)] + [0] * half
        for series in self._kv:
            series[:] = [series[2 * i] + series[2 * i + 1] for i in range(half)] + [0.0] * half
        self.bin_ns *= 2


@dataclass(slots=True)
class Timeline:
    """Bins of equal width (the last one may be cut by `end_ns`); arrays are [endpoint, bin].

    `*_ns` arrays are integrals over the bin (level times ns); divide by `widths_ns` for means.
    """

    nodes: list[int]
    bin_ns: int
    end_ns: int
    running_ns: NDArray[np.float64]
    waiting_ns: NDArray[np.float64]
    kv_usage_ns: NDArray[np.float64]
    busy_ns: NDArray[np.float64]
    computed_tokens: NDArray[np.float64]
    output_tokens: NDArray[np.float64]

    @property
    def bins(self) -> int:
        return int(self.running_ns.shape[1])

    @property
    def widths_ns(self) -> NDArray[np.float64]:
        """Covered width of each bin, ns."""
        edges = np.minimum(np.arange(self.bins + 1) * self.bin_ns, max(self.end_ns, 1))
        widths: NDArray[np.float64] = np.maximum(np.diff(edges), 1).astype(np.float64)
        return widths

    def busy_by_node_ns(self) -> list[int]:
        """GPU-busy time of each node: the sum over its endpoints, in order of the node's number."""
        per_endpoint = self.busy_ns.sum(axis=1)
        return [
            int(sum(per_endpoint[e] for e, node in enumerate(self.nodes) if node == wanted))
            for wanted in sorted(set(self.nodes))
        ]

    def coarsened(self, max_bins: int) -> Timeline:
        """The same data in at most `max_bins` bins, each a whole number of the present ones."""
        factor = max(1, -(-self.bins // max_bins))
        if factor == 1:
            return self
        starts = np.arange(0, self.bins, factor)
        values = {name: np.add.reduceat(getattr(self, name), starts, axis=1) for name in _SERIES}
        return Timeline(nodes=self.nodes, bin_ns=self.bin_ns * factor, end_ns=self.end_ns, **values)

    def write(self, path: Path) -> None:
        """timeline.parquet: one row per endpoint and bin."""
        n = len(self.nodes)
        frame = pl.DataFrame(
            {
                "endpoint": np.repeat(np.arange(n), self.bins),
                "node": np.repeat(np.array(self.nodes, dtype=np.int64), self.bins),
                "bin": np.tile(np.arange(self.bins), n),
                "start_ns": np.tile(np.arange(self.bins) * self.bin_ns, n),
                **{name: getattr(self, name).reshape(-1) for name in _SERIES},
            }
        )
        meta = f"{TIMELINE_SCHEMA} {self.bin_ns} {self.end_ns} {n} {self.bins}"
        with whole(path) as part:
            frame.write_parquet(part, compression="zstd", metadata={_METADATA_KEY: meta})

    @classmethod
    def read(cls, path: Path) -> Timeline:
        """The inverse of `write`; a foreign or broken file is an input error."""
        try:
            meta = pl.read_parquet_metadata(path)[_METADATA_KEY]
            schema, bin_ns, end_ns, n, bins = (int(v) for v in meta.split())
            frame = pl.read_parquet(path).sort("endpoint", "bin")
        except (pl.exceptions.PolarsError, OSError, KeyError, ValueError) as error:
            raise InputError(str(path), f"not a readable timeline ({error})", "repeat the run") from None
        if schema != TIMELINE_SCHEMA:
            what = f"timeline of schema {schema}, this harness reads {TIMELINE_SCHEMA}"
            raise InputError(str(path), what, "use the version of the harness that wrote it")
        return cls(
            nodes=frame.filter(pl.col("bin") == 0)["node"].to_list(),
            bin_ns=bin_ns,
            end_ns=end_ns,
            **{name: frame[name].to_numpy().reshape(n, bins) for name in _SERIES},
        )
