"""Derived dependencies reproduce recorded starts and never lean on what had not happened."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from trace_builders import call, recorded_sessions

from harness.trace.chains import end_s, split_chains
from harness.trace.dependencies import derive_dependencies, replayed_starts_s
from harness.trace.model import Session
from harness.trace.read import read_trace


def check(session: Session) -> None:
    for c, start in zip(session.calls, replayed_starts_s(session), strict=True):
        assert start == pytest.approx(c.t_s, abs=1e-6)
        assert c.gap_s >= 0
        for dep in c.deps:
            earlier = session.calls[dep]
            assert dep < c.index and earlier.t_s < c.t_s and end_s(earlier) <= c.t_s
        assert c.on_start is None or c.on_start < c.index
    held = [c for c in session.calls if not c.deps and c.on_start is None]
    assert held[:1] == session.calls[:1]
    assert len(held) <= 1, "a call after the first hangs on nothing"


@settings(max_examples=300)
@given(recorded_sessions())
def test_a_replay_at_recorded_durations_starts_calls_when_recorded(session: Session) -> None:
    derive_dependencies(session)
    check(session)


@settings(max_examples=200)
@given(recorded_sessions())
def test_the_same_with_chains_found_from_prefixes(session: Session) -> None:
    split_chains(session.calls, [c.chain.split(".")[0] if "." in c.chain else "main" for c in session.calls])
    derive_dependencies(session)
    check(session)


@pytest.mark.parametrize("name", ["kvct_v8", "kvct_v6dedup", "neon"])
def test_real_traces_replay_exactly(shared: Path, name: str) -> None:
    for session in read_trace(shared / f"traces/weka_delta/{name}.dev.delta.jsonl.gz", blocks="repair"):
        check(session)


def test_raw_real_traces_replay_exactly(shared: Path) -> None:
    for session in read_trace(shared / "traces/weka"):
        check(session)


def derived(*calls: tuple[float, float | None, str]) -> list[tuple[tuple[int, ...], int | None, float]]:
    session = Session("s", 64, [call(i, t, 4, api_s=api, chain=chain) for i, (t, api, chain) in enumerate(calls)])
    derive_dependencies(session)
    return [(c.deps, c.on_start, c.gap_s) for c in session.calls]


def test_spawn_from_a_running_call_hangs_on_its_start() -> None:
    assert derived((1.0, 10.0, "main"), (4.0, 2.0, "s1.0"), (12.5, 1.0, "main"))[1:] == [
        ((), 0, 3.0),
        ((0, 1), None, 1.5),
    ]


def test_spawn_from_an_ended_call_hangs_on_its_end() -> None:
    assert derived((0.0, 2.0, "main"), (5.0, 2.0, "s1.0"))[1] == ((0,), None, 3.0)


def test_a_group_is_joined_once_and_only_when_it_is_over() -> None:
    found = derived(
        (0.0, 1.0, "main"),
        (2.0, 2.0, "s1.0"),
        (3.0, 1.0, "main"),
        (5.0, 2.0, "s1.0"),
        (8.0, 1.0, "main"),
        (10.0, 1.0, "main"),
    )
    assert found[2] == ((0,), None, 2.0)  # the group goes on: main does not wait for it
    assert found[4] == ((2, 3), None, 1.0)
    assert found[5] == ((4,), None, 1.0)


def test_a_lane_hangs_on_its_own_agent() -> None:
    found = derived(
        (0.0, 1.0, "main"), (2.0, 8.0, "s1.0"), (4.0, 1.0, "s1.1"), (11.0, 1.0, "s1.0"), (13.0, 1.0, "main")
    )
    assert found[2] == ((), 1, 2.0)
    assert found[3] == ((1, 2), None, 1.0)
    assert found[4] == ((0, 3), None, 1.0)


def test_a_chain_that_overlaps_itself_hangs_on_a_start() -> None:
    assert derived((0.0, 9.0, "main"), (2.0, 1.0, "main"), (5.0, 1.0, "main"))[1:] == [((), 0, 2.0), ((1,), None, 2.0)]


def test_calls_of_one_instant_stay_together() -> None:
    assert derived((0.0, None, "main"), (0.0, None, "main"))[1] == ((), 0, 0.0)
