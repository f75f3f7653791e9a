"""Prompts as runs against prompts as plain lists of blocks."""

from __future__ import annotations

from hypothesis import given
from trace_builders import call, explicit_blocks, sessions

from harness.trace.model import Session
from harness.trace.runs import SessionRuns, common_blocks, repair_blocks


@given(sessions())
def test_runs_are_the_blocks(session: Session) -> None:
    runs = SessionRuns(session.calls)
    for c, blocks in zip(session.calls, explicit_blocks(session.calls), strict=True):
        listed = [(origin, p) for origin, start, end in runs.runs(c.index) for p in range(start, end)]
        assert listed == blocks
        assert all(start < end for _, start, end in runs.runs(c.index))


@given(sessions())
def test_common_blocks_is_the_longest_common_prefix(session: Session) -> None:
    prompts = explicit_blocks(session.calls)
    for a in range(len(prompts)):
        for b in range(len(prompts)):
            common = 0
            while common < min(len(prompts[a]), len(prompts[b])) and prompts[a][common] == prompts[b][common]:
                common += 1
            assert common_blocks(session.calls, a, b) == common
            floored = common_blocks(session.calls, a, b, floor=3)
            assert floored == common if common > 3 else floored <= common


@given(sessions())
def test_repair_leaves_good_sessions_as_they_are(session: Session) -> None:
    before = [(c.keep_blocks, c.new_blocks) for c in session.calls]
    repair_blocks(session)
    assert [(c.keep_blocks, c.new_blocks) for c in session.calls] == before


def test_repair_cuts_what_calls_built_on() -> None:
    calls = [call(0, 0.0, 10, input_tokens=3 * 64 + 5), call(1, 1.0, 12, 0, 10, input_tokens=20 * 64)]
    repair_blocks(Session("s", 64, calls))
    assert [(c.ref, c.keep_blocks, c.new_blocks) for c in calls] == [(-1, 0, 3), (0, 3, 17)]
