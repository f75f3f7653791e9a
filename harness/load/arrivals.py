"""When sessions arrive: an open loop, so that a slow cluster does not slow its own load down."""

from __future__ import annotations

import random
from collections.abc import Sequence

from harness.clock import NS_PER_S, to_ns
from harness.errors import InputError
from harness.experiment import Load
from harness.load.midway import has_times, under_way
from harness.trace.model import Session


def session_starts_ns(load: Load, sessions: Sequence[Session], nodes: int, seed: int, where: str) -> list[int]:
    """Arrival time of each session in ns, in the given order of sessions.

    `poisson`: exponential gaps at rate sessions_per_hour_per_node * nodes, the first session after one gap.
    `uniform`: equal gaps at that rate. `at_once`: all at 0. `recorded`: as the trace says. With `load.history_s`,
    arrivals at a rate begin that long before 0.
    """
    if load.arrivals == "at_once":
        return [0] * len(sessions)
    if load.arrivals == "recorded":
        missing = next((s.id for s in sessions if s.start_s is None), None)
        if missing is not None:
            raise InputError(
                where,
                f"load.arrivals is recorded, but session {missing} has no start time",
                "use poisson, uniform or at_once with this trace",
            )
        return [to_ns(s.start_s or 0.0) for s in sessions]
    assert load.sessions_per_hour_per_node is not None
    rate_per_s = load.sessions_per_hour_per_node * nodes / 3600.0
    before_ns = to_ns(load.history_s)
    if load.arrivals == "uniform":
        return [round(i * NS_PER_S / rate_per_s) - before_ns for i in range(len(sessions))]
    rng = random.Random(f"arrivals/{seed}")
    starts, t = [], 0.0
    for _ in sessions:
        t += rng.expovariate(rate_per_s)
        starts.append(to_ns(t) - before_ns)
    return starts


def arriving(
    load: Load, sessions: Sequence[Session], nodes: int, seed: int, where: str
) -> tuple[list[Session], list[int]]:
    """Sessions as a run sends them, and when each arrives in ns; with `load.history_s`, some are cut or left out.

    InputError where all arrive before the run begins: what is left of them is no load in its steady state; and where a
    session's calls carry no times: what of it is left depends on them.
    """
    starts = session_starts_ns(load, sessions, nodes, seed, where)
    if not load.history_s:
        return list(sessions), starts
    untimed = next((s.id for s in sessions if not has_times(s)), None)
    if untimed is not None:
        raise InputError(
            f"load.history_s: {load.history_s:g}",
            f"goes by the recorded times of calls, and those of session {untimed} have none: all its t are 0, although "
            "calls follow others",
            "give a trace whose calls have their t, or leave load.history_s out",
        )
    if max(starts, default=0) <= 0:
        raise InputError(
            f"load.history_s: {load.history_s:g}",
            f"none of the {len(sessions):,} sessions arrives after the run has begun, so the load only falls",
            "give a longer trace or a shorter history",
        )
    return under_way(sessions, starts)


def in_order(load: Load, sessions: Sequence[Session], seed: int) -> list[Session]:
    """Sessions in order of arrival, before start times are drawn."""
    ordered = list(sessions)
    if load.order == "shuffled":
        random.Random(f"order/{seed}").shuffle(ordered)
    return ordered
