"""Hit rate by retention window against a count over every single block."""

from __future__ import annotations

from hypothesis import given, settings
from trace_builders import call, explicit_blocks, recorded_sessions

from harness.trace.model import Session
from harness.trace.retention import session_hits

WINDOWS = (1.0, 5.0, 20.0, float("inf"))


def brute_force(session: Session) -> list[int]:
    hits = [0] * len(WINDOWS)
    used: dict[tuple[int, int], float] = {}
    for c, blocks in zip(session.calls, explicit_blocks(session.calls), strict=True):
        for number, window in enumerate(WINDOWS):
            hits[number] += sum(block in used and c.t_s - used[block] <= window for block in blocks)
        used.update(dict.fromkeys(blocks, c.t_s))
    return hits


@settings(max_examples=400)
@given(recorded_sessions())
def test_hits_are_those_of_a_count_over_blocks(session: Session) -> None:
    assert session_hits(session, WINDOWS) == brute_force(session)


def test_each_use_restarts_the_window() -> None:
    calls = [call(0, 0.0, 10), call(1, 4.0, 4, 0, 4), call(2, 8.0, 10, 0, 10)]
    # At 8 s the first four blocks were used 4 s ago, the others 8 s ago.
    assert session_hits(Session("s", 64, calls), (5.0, float("inf"))) == [4 + 4, 4 + 10]
