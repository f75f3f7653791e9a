"""Release of calls: closed over dependencies, open over everything else."""

from __future__ import annotations

from dataclasses import replace

from harness.clock import VirtualClock, to_ns
from harness.load.prompts import Origins
from harness.load.session import SessionRun
from harness.trace.model import Call, Session


def _call(index: int, deps: tuple[int, ...] = (), on_start: int | None = None, gap_s: float = 0.0) -> Call:
    return Call(index, 0.0, None, "main", 64, 1, -1, 0, 1, deps, on_start, gap_s)


def _play(
    calls: list[Call], length_s: float, gap_cap_s: float | None = None, longest_tokens: int | None = None
) -> dict[int, float]:
    """Every call lasts `length_s`; returns when each was released, in seconds."""
    clock = VirtualClock()
    released: dict[int, float] = {}

    def release(session: SessionRun, index: int) -> None:
        released[index] = clock.now_ns / 1e9
        session.call_started(index)
        clock.call_later(to_ns(length_s), session.call_ended, index)

    run = SessionRun(Session("s", 64, calls), clock, release, gap_cap_s, 64, Origins(), longest_tokens)
    clock.call_at(to_ns(100), run.start)
    while clock.step():
        pass
    assert longest_tokens is not None or run.open == 0
    return released


def test_a_chain_waits_for_the_end_and_the_gap() -> None:
    assert _play([_call(0), _call(1, (0,), gap_s=2.5), _call(2, (1,))], 10) == {0: 100, 1: 112.5, 2: 122.5}


def test_a_join_waits_for_the_last_and_a_spawn_for_a_start() -> None:
    calls = [_call(0), _call(1, on_start=0, gap_s=3), _call(2, (0,), gap_s=20), _call(3, (1, 2), gap_s=1)]
    assert _play(calls, 10) == {0: 100, 1: 103, 2: 130, 3: 141}


def test_gaps_are_capped_only_on_request() -> None:
    calls = [_call(0, gap_s=7), _call(1, (0,), gap_s=5000)]
    assert _play(calls, 1)[1] == 5108
    assert _play(calls, 1, gap_cap_s=5)[1] == 111


def test_calls_without_dependencies_start_with_the_session() -> None:
    assert _play([_call(0), _call(1, gap_s=4)], 1) == {0: 100, 1: 104}


def test_what_only_leads_to_calls_that_are_left_out_is_not_released() -> None:
    long = replace(_call(1, (0,), gap_s=50), input_tokens=1000)
    chain = [_call(0), long, replace(_call(2, (1,), gap_s=5000), input_tokens=1000)]
    assert set(_play(chain, 10, longest_tokens=100)) == {0}, "its gap of 50 s would only make the run longer"
    kept = [_call(0), long, _call(2, (1,), gap_s=3)]
    assert _play(kept, 10, longest_tokens=100) == {0: 100, 2: 163}, "a call that is sent waits for it; it takes no time"
    spawn = [_call(0), long, _call(2, on_start=1, gap_s=3)]
    assert _play(spawn, 10, longest_tokens=100)[2] == 163
