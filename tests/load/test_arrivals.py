"""Session arrivals."""

from __future__ import annotations

import pytest

from harness.clock import NS_PER_S
from harness.errors import InputError
from harness.experiment import Load
from harness.load.arrivals import arriving, in_order, session_starts_ns
from harness.trace.model import Call, Session

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


def _session(name: str, *times_s: float) -> Session:
    """One chain; every call adds ten blocks to the one before."""
    calls = [
        Call(i, t_s, 1.0, "main", 640 * (i + 1), 5, i - 1, 10 * i, 10, (i - 1,) if i else (), gap_s=2.0 if i else 0.0)
        for i, t_s in enumerate(times_s)
    ]
    return Session(name, 64, calls)


def test_a_run_with_a_history_begins_in_the_middle() -> None:
    load = Load(arrivals="uniform", sessions_per_hour_per_node=360, history_s=25)  # one per 10 s: at -25, -15, -5, 5
    sessions = [_session("over", 0, 20), _session("half", 0, 14, 18, 40), _session("b", 0, 7), _session("c", 0, 9)]
    some, starts = arriving(load, sessions, 1, 1, "x")
    assert [s.id for s in some] == ["half", "b", "c"]
    assert starts == [3 * NS_PER_S, 2 * NS_PER_S, 5 * NS_PER_S], "with the first call that is left"
    assert [len(s.calls) for s in some] == [2, 1, 2]
    first, second = some[0].calls
    assert (first.ref, first.new_blocks, first.deps, first.gap_s) == (-1, 30, (), 0.0), "all of it is computed"
    assert (second.ref, second.keep_blocks, second.deps, second.gap_s) == (0, 30, (0,), 2.0)
    assert some[2] is sessions[3]


def test_without_a_history_nothing_changes() -> None:
    load = Load(arrivals="poisson")
    assert arriving(load, SESSIONS, 8, 3, "x") == (SESSIONS, session_starts_ns(load, SESSIONS, 8, 3, "x"))


def test_with_a_history_calls_come_at_the_rate_of_whole_sessions() -> None:
    """Arrivals of one session a minute, of 100 calls in 99 minutes: 100 calls a minute from the first minute on."""
    sessions = [_session(f"s{i}", *(60.0 * n for n in range(100))) for i in range(300)]
    load = Load(arrivals="uniform", sessions_per_hour_per_node=60, history_s=6000)
    some, starts = arriving(load, sessions, 1, 1, "x")
    at_s = [
        start / NS_PER_S + call.t_s - session.calls[0].t_s
        for session, start in zip(some, starts, strict=True)
        for call in session.calls
    ]
    assert {sum(60 * n <= t < 60 * n + 60 for t in at_s) for n in range(60)} == {100}


@pytest.mark.parametrize("sessions", [[], [_session("over", 0, 5)], [_session("long", 0, 1e6)]])
def test_a_history_beyond_the_last_arrival_is_named(sessions: list[Session]) -> None:
    load = Load(arrivals="uniform", sessions_per_hour_per_node=60, history_s=7200)
    with pytest.raises(InputError, match=r"^load\.history_s: 7200: none of the . sessions arrives"):
        arriving(load, sessions, 1, 1, "x")


def test_a_history_needs_times_that_say_which_calls_are_over() -> None:
    load = Load(arrivals="uniform", sessions_per_hour_per_node=60, history_s=90)
    sessions = [_session("timed", 0, 5), _session("gaps alone", 0, 0), _session("late", 0, 5)]
    with pytest.raises(InputError, match=r"^load\.history_s: 90: .* session gaps alone have none: .*; .* leave load"):
        arriving(load, sessions, 1, 1, "x")
    at_once = [Session(name, 64, [_session(name, 0).calls[0]] * 2) for name in "abc"]
    some, _ = arriving(load, at_once, 1, 1, "x")
    assert [s.id for s in some] == ["c"], "calls that wait for nothing and are all at 0 begin with their session"


@pytest.mark.parametrize("more", [{"arrivals": "at_once"}, {"gap_cap_s": 10}])
def test_a_history_needs_a_rate_and_recorded_gaps(more: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="history_s"):
        Load.model_validate({"history_s": 60, **more})
