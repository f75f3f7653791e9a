"""What is in a trace: the statistics that the published analyses of agentic traces give, in one pass over its
sessions.

Conventions: calls in order of t; a call ends at t + api (at t where no duration was recorded). An arrival is
every call but a session's first; its gap is zero if it starts before the latest end of the session's earlier
calls, else it is idle for start - latest end. Percentiles interpolate linearly. Block hits are those of a
cache inside the session, counted in blocks: kept / (kept + new); token hits are the tokens of those blocks against
all input tokens, partial tails included. In flight: ends come before starts at equal
times. The busiest minutes of a session are one-minute bins from its first call on, counted against the
minutes from its first start to its last end.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.trace.chains import MAIN, end_s
from harness.trace.model import Call, Session
from harness.trace.retention import WINDOWS_S, session_hits

LONG_CONTEXT_TOKENS = 100_000
LONG_GAP_S = 1_800.0


def trace_stats(sessions: Iterable[Session]) -> dict[str, Any]:
    """All statistics of a stream of sessions as plain data (numbers, dicts, lists)."""
    totals = _Totals()
    for session in sessions:
        totals.add(session)
    return totals.result()


def _ints() -> array[int]:
    return array("q")


def _floats() -> array[float]:
    return array("d")


@dataclass(slots=True)
class _Totals:
    """Running sums, and one number per call or session where a percentile needs it."""

    input: array[int] = field(default_factory=_ints)
    output: array[int] = field(default_factory=_ints)
    new: array[int] = field(default_factory=_ints)
    input_of_main: array[int] = field(default_factory=_ints)
    input_of_sub: array[int] = field(default_factory=_ints)
    output_of_main: array[int] = field(default_factory=_ints)
    output_of_sub: array[int] = field(default_factory=_ints)
    api: array[float] = field(default_factory=_floats)
    idle: array[float] = field(default_factory=_floats)
    root_gap: array[float] = field(default_factory=_floats)
    chain_gap: array[float] = field(default_factory=_floats)
    calls: array[int] = field(default_factory=_ints)
    main_calls: array[int] = field(default_factory=_ints)
    peak: array[int] = field(default_factory=_ints)
    unique: array[int] = field(default_factory=_ints)
    reuse: array[float] = field(default_factory=_floats)
    life: array[float] = field(default_factory=_floats)
    in_flight: array[int] = field(default_factory=_ints)
    half: array[float] = field(default_factory=_floats)
    most: array[float] = field(default_factory=_floats)
    minutes: Counter[int] = field(default_factory=Counter)
    """Number of one-minute bins, over all sessions, by the calls in them; idle minutes under 0."""
    group_calls: array[int] = field(default_factory=_ints)
    group_life: array[float] = field(default_factory=_floats)
    groups_in_session: array[int] = field(default_factory=_ints)
    groups_at_once: array[int] = field(default_factory=_ints)
    sessions: int = 0
    kept: int = 0
    new_blocks: int = 0
    zero: int = 0
    flat_chains: int = 0
    flat_calls: int = 0
    chains: int = 0
    without_api: int = 0
    hits: list[int] = field(default_factory=lambda: [0] * len(WINDOWS_S))
    hit_tokens: list[int] = field(default_factory=lambda: [0] * len(WINDOWS_S))
    models: Counter[str] = field(default_factory=Counter)

    def add(self, session: Session) -> None:
        """Take in one session."""
        self.sessions += 1
        calls = session.calls
        self.calls.append(len(calls))
        if not calls:
            self.in_flight.append(0)
            return
        block = session.block_tokens
        latest = -math.inf
        chain_end: dict[str, float] = {}
        new_blocks = 0
        for call in calls:
            self._add_call(call, block)
            new_blocks += call.new_blocks
            if call.index:
                if call.t_s < latest:
                    self.zero += 1
                else:
                    self.idle.append(call.t_s - latest)
            latest = max(latest, end_s(call))
            if "." not in call.chain:
                if call.chain in chain_end:
                    gap = max(0.0, call.t_s - chain_end[call.chain])
                    self.chain_gap.append(gap)
                    if call.chain == MAIN:
                        self.root_gap.append(gap)
                chain_end[call.chain] = end_s(call)
        blocks = sum(call.blocks for call in calls)
        self.kept += blocks - new_blocks
        self.new_blocks += new_blocks
        self.unique.append(new_blocks * block)
        if new_blocks:
            self.reuse.append(blocks / new_blocks)
        self.peak.append(max(call.input_tokens for call in calls))
        self._add_shape(calls, latest - calls[0].t_s)
        self._add_groups(calls)
        for window, blocks_hit in enumerate(session_hits(session)):
            self.hits[window] += blocks_hit
            self.hit_tokens[window] += blocks_hit * block

    def _add_call(self, call: Call, block_tokens: int) -> None:
        self.input.append(call.input_tokens)
        self.output.append(call.output_tokens)
        self.new.append(call.new_blocks * block_tokens)
        if call.api_s is None:
            self.without_api += 1
        else:
            self.api.append(call.api_s)
        if call.model is not None:
            self.models[call.model] += 1
        if "." in call.chain:
            self.input_of_sub.append(call.input_tokens)
            self.output_of_sub.append(call.output_tokens)
        else:
            self.input_of_main.append(call.input_tokens)
            self.output_of_main.append(call.output_tokens)
            self.flat_calls += call.chain != MAIN

    def _add_shape(self, calls: Sequence[Call], life_s: float) -> None:
        self.life.append(life_s)
        self.in_flight.append(most_at_once((call.t_s, end_s(call)) for call in calls))
        bins = minute_bins(calls, life_s)
        half, most = busiest_share(bins, bins.total())
        self.minutes.update(bins)
        self.half.append(half)
        self.most.append(most)
        names = {call.chain for call in calls}
        self.chains += len(names)
        self.flat_chains += sum("." not in name and name != MAIN for name in names)
        self.main_calls.append(sum("." not in call.chain for call in calls))

    def _add_groups(self, calls: Sequence[Call]) -> None:
        spans: dict[str, tuple[int, float, float]] = {}
        for call in calls:
            group, dot, _ = call.chain.partition(".")
            if dot:
                count, first, last = spans.get(group, (0, call.t_s, 0.0))
                spans[group] = (count + 1, first, max(last, end_s(call)))
        for count, first, last in spans.values():
            self.group_calls.append(count)
            self.group_life.append(last - first)
        if spans:
            self.groups_in_session.append(len(spans))
            self.groups_at_once.append(most_at_once((first, last) for _, first, last in spans.values()))

    def result(self) -> dict[str, Any]:
        """The statistics; null where there is nothing to take them of."""
        inputs, outputs = np.asarray(self.input), np.asarray(self.output)
        total_in, total_out, total_new = (
            int(inputs.sum()),
            int(outputs.sum()),
            int(np.asarray(self.new).sum()),
        )
        arrivals = len(self.idle) + self.zero
        idle = np.asarray(self.idle)
        long_calls = inputs > LONG_CONTEXT_TOKENS
        minutes = self.minutes.total()
        pooled = busiest_share(self.minutes, minutes) if minutes else (None, None)
        return {
            "sessions": self.sessions,
            "calls": len(self.input),
            "top_level_calls": len(self.input_of_main),
            "input_tokens": total_in,
            "output_tokens": total_out,
            "input_to_output": _share(total_in, total_out),
            "calls_per_session": _spread(self.calls, 50, 99, extra=("mean", "max")),
            "top_level_calls_per_session": _spread(self.main_calls, 50, 90),
            "input_per_call": _spread(self.input, 50, 90, 99, extra=("mean", "max")),
            "input_per_top_level_call": _spread(self.input_of_main, 50, 90, 99, extra=("mean",)),
            "input_per_sub_agent_call": _spread(self.input_of_sub, 50, 90, extra=("mean",)),
            "output_per_call": _spread(self.output, 50, 90, 99, extra=("mean",)),
            "output_per_top_level_call": _spread(self.output_of_main, 50, 90, extra=("mean",)),
            "output_per_sub_agent_call": _spread(self.output_of_sub, 50, 90, extra=("mean",)),
            "over_100k": {
                "call_share": _share(int(long_calls.sum()), len(inputs)),
                "input_share": _share(int(inputs[long_calls].sum()), total_in),
            },
            "input_per_session": _spread(self._input_per_session(), 50, extra=("mean",)),
            "peak_context": {
                **_spread(self.peak, 50),
                **{f"to_{k}k_share": _at_most(self.peak, k * 1000) for k in (64, 128, 256, 400)},
            },
            "blocks": {"kept": self.kept, "new": self.new_blocks},
            "block_hit_infinite": _share(self.kept, self.kept + self.new_blocks),
            "block_hit_by_window": [
                {"window_s": None if math.isinf(w) else w, "hit": _share(hits, self.kept + self.new_blocks)}
                for w, hits in zip(WINDOWS_S, self.hits, strict=True)
            ],
            "token_hit_by_window": [
                {"window_s": None if math.isinf(w) else w, "hit": _share(tokens, total_in)}
                for w, tokens in zip(WINDOWS_S, self.hit_tokens, strict=True)
            ],
            "new_tokens_per_call": _spread(self.new, 50, 90, 99, extra=("mean",)),
            "unique_tokens": {"total": total_new, **_spread(self.unique, 50, extra=("mean",))},
            "cumulative_to_unique": {
                **_spread(self.reuse, 50, extra=("mean",)),
                "ratio_of_sums": _share(self.kept + self.new_blocks, self.new_blocks),
            },
            "gaps": {
                "arrivals": arrivals,
                "zero_share": _share(self.zero, arrivals),
                "idle_median_s": _percentile(idle, 50),
                "idle_p90_s": _percentile(idle, 90),
                "idle_p99_s": _percentile(idle, 99),
                "idle_total_s": float(idle.sum()),
                "ge_1800s_arrival_share": _share(int((idle >= LONG_GAP_S).sum()), arrivals),
                "ge_1800s_idle_share": _share(float(idle[idle >= LONG_GAP_S].sum()), float(idle.sum())),
            },
            "gap_in_main_chain_s": _gap_spread(self.root_gap),
            "gap_in_top_level_chain_s": _gap_spread(self.chain_gap),
            "in_flight": {
                "max": max(self.in_flight, default=0),
                "sessions_with_2_or_more": _share(sum(n >= 2 for n in self.in_flight), self.sessions),
            },
            "busiest_minutes": {
                "half_of_calls": {**_spread(self.half, 50, extra=("mean",)), "pooled": pooled[0]},
                "90_percent_of_calls": {**_spread(self.most, 50, extra=("mean",)), "pooled": pooled[1]},
            },
            "life_s": _spread(self.life, 50, 90, extra=("mean", "max")),
            "api_s": {**_spread(self.api, 50, 90, 99, extra=("mean",)), "not_recorded": self.without_api},
            "sub_agents": {
                "session_share": _share(len(self.groups_in_session), self.sessions),
                "groups": len(self.group_calls),
                "calls": len(self.input_of_sub),
                "groups_per_session": _spread(self.groups_in_session, 50, extra=("mean", "max")),
                "calls_per_group": _spread(self.group_calls, 50, extra=("mean", "max")),
                "group_life_s": _spread(self.group_life, 50, 95, extra=("mean",)),
                "groups_at_once": _spread(self.groups_at_once, 50, extra=("max",)),
            },
            "chains": {"all": self.chains, "flat": self.flat_chains,
                       "flat_share_of_top_level_calls": _share(self.flat_calls, len(self.input_of_main))},
            "models": dict(sorted(self.models.items())),
        }  # fmt: skip

    def _input_per_session(self) -> NDArray[np.int64]:
        ends = np.cumsum(np.asarray(self.calls, dtype=np.int64))
        sums = np.concatenate(([0], np.cumsum(np.asarray(self.input, dtype=np.int64))))
        return np.diff(sums[np.concatenate(([0], ends))])


def most_at_once(spans: Iterable[tuple[float, float]]) -> int:
    """Largest number of spans (start, end) that are open at one time; an end comes before a start of the same
    time.
    """
    events = sorted((time, step) for start, end in spans for time, step in ((start, 1), (end, -1)))
    level = most = 0
    for _, step in events:
        level += step
        most = max(most, level)
    return most


def minute_bins(calls: Sequence[Call], life_s: float) -> Counter[int]:
    """Number of a session's minutes by the calls that start in them; idle minutes under 0."""
    minutes = max(1, math.ceil(life_s / 60))
    counts = Counter(min(int((call.t_s - calls[0].t_s) // 60), minutes - 1) for call in calls)
    bins = Counter(counts.values())
    bins[0] = minutes - len(counts)
    return bins


def busiest_share(bins: Counter[int], total: int, levels: Sequence[float] = (0.5, 0.9)) -> tuple[float, ...]:
    """Share of `total` bins that hold so much of all calls (`levels`, 0..1), fullest first; `bins`: number of
    bins by their calls.
    """
    sizes = sorted((size for size in bins if size), reverse=True)
    calls = sum(size * bins[size] for size in sizes)
    found = []
    for level in levels:
        wanted, used = level * calls - 1e-9, 0
        for size in sizes:
            need = math.ceil(wanted / size - 1e-9)
            used += min(need, bins[size])
            wanted -= size * bins[size]
            if need <= bins[size]:
                break
        found.append(used / total)
    return tuple(found)


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _percentile(values: Sequence[float] | NDArray[Any], level: float) -> float | None:
    return float(np.percentile(np.asarray(values), level)) if len(values) else None


def _at_most(values: Sequence[float], limit: float) -> float | None:
    return _share(sum(value <= limit for value in values), len(values))


def _gap_spread(gaps: Sequence[float]) -> dict[str, float | None]:
    """Spread of end-to-start gaps inside a chain (s)."""
    return {
        **_spread(gaps, 50, 90, 99, extra=("mean",)),
        "gt_300s_share": _share(sum(gap > 300 for gap in gaps), len(gaps)),
        "gt_1800s_share": _share(sum(gap > LONG_GAP_S for gap in gaps), len(gaps)),
    }


def _spread(
    values: Sequence[float] | NDArray[Any], *levels: int, extra: tuple[str, ...] = ()
) -> dict[str, float | None]:
    """Mean and maximum where asked for, and the given percentiles (50 is named median)."""
    found: dict[str, float | None] = {}
    if "mean" in extra:
        found["mean"] = float(np.mean(np.asarray(values))) if len(values) else None
    for level in levels:
        found["median" if level == 50 else f"p{level}"] = _percentile(values, level)
    if "max" in extra:
        found["max"] = float(np.max(np.asarray(values))) if len(values) else None
    return found
