"""Session arrivals."""

from __future__ import annotations

import pytest

from harness.clock import NS_PER_S
from harness.errors import InputError
from harness.experiment import Load
from harness.load.arrivals import in_order, session_starts_ns
from harness.trace.model import Session

SESSIONS = [Session(str(i), 64, []) for i in range(2000)]


def test_poisson_has_the_rate_and_depends_on_the_seed_alone() -> None:
    load = Load(arrivals="poisson", sessions_per_hour_per_node=4.75)
    starts = session_starts_ns(load, SESSIONS, 8, 3, "x")
    assert starts == sorted(starts) == session_starts_ns(load, SESSIONS, 8, 3, "x")
    assert starts != session_starts_ns(load, SESSIONS, 8, 4, "x")
    mean_s = starts[-1] / len(starts) / NS_PER_S
    assert mean_s == pytest.approx(3600 / (4.75 * 8), rel=0.08)  # 3.6 standard errors of 2,000 exponential gaps


def test_uniform_is_even_and_at_once_is_zero() -> None:
    load = Load(arrivals="uniform", sessions_per_hour_per_node=3600)
    assert session_starts_ns(load, SESSIONS[:3], 1, 1, "x") == [0, NS_PER_S, 2 * NS_PER_S]
    assert session_starts_ns(Load(arrivals="at_once"), SESSIONS[:3], 1, 1, "x") == [0, 0, 0]


def test_recorded_needs_recorded_starts() -> None:
    load = Load(arrivals="recorded")
    assert session_starts_ns(load, [Session("a", 64, [], start_s=1.5)], 1, 1, "x") == [1_500_000_000]
    with pytest.raises(InputError, match="no start time"):
        session_starts_ns(load, [Session("a", 64, [])], 1, 1, "x")


def test_shuffling_is_seeded() -> None:
    load = Load(order="shuffled")
    once = [s.id for s in in_order(load, SESSIONS, 1)]
    assert once == [s.id for s in in_order(load, SESSIONS, 1)] != [s.id for s in SESSIONS]
    assert sorted(once) == sorted(s.id for s in SESSIONS)
