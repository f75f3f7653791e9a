"""Each invariant holds for sound records and is reported by its number when it is broken."""

from __future__ import annotations

from typing import Any

import pytest

from harness.results.invariants import violations
from harness.results.records import to_frame
from tests.results.synthetic import SHAPES, make_records

SHAPE = SHAPES[0]


def test_sound_records_break_nothing() -> None:
    for shape in SHAPES:
        records = make_records(shape, 500)
        assert violations(to_frame(records), arrived=500, drained=True) == []


def test_no_records_break_nothing() -> None:
    assert violations(to_frame([]), arrived=0, drained=True) == []


BREAKS: list[tuple[str, str, dict[str, Any]]] = [
    ("INV-1", "unknown outcome", {"outcome": "lost"}),
    ("INV-1", "still in flight", {"outcome": "in_flight", "finish_ns": None}),
    ("INV-2", "start of the run", {"arrival_ns": -1}),
    ("INV-2", "routed_ns before", {"routed_ns": 0}),
    ("INV-2", "admitted_ns before", {"admitted_ns": 1}),
    ("INV-2", "first_token_ns before", {"first_token_ns": 1}),
    ("INV-2", "finish_ns before", {"finish_ns": 1}),
    ("INV-3", "a station is missing", {"first_token_ns": None}),
    ("INV-3", "ended without a time", {"outcome": "failed", "finish_ns": None}),
    ("INV-3", "in flight but ended", {"outcome": "in_flight"}),
    ("INV-3", "rejected but admitted", {"outcome": "rejected"}),
    ("INV-3", "admitted nowhere", {"endpoint": None, "outcome": "failed"}),
    ("INV-4", "negative token count", {"output_tokens": -1}),
    ("INV-4", "not the sum over sources", {"dram_tokens": 1}),
    ("INV-4", "more tokens from sources", {"gpu_tokens": 10**9}),
    ("INV-4", "more output than requested", {"output_tokens": 10**9}),
    ("INV-5", "believed_share outside", {"believed_share": 1.01}),
    ("INV-5", "held_share outside", {"held_share": -0.01}),
]


@pytest.mark.parametrize(("number", "what", "changes"), BREAKS, ids=[b[1] for b in BREAKS])
def test_each_break_is_reported(number: str, what: str, changes: dict[str, Any]) -> None:
    records = make_records(SHAPE, 20)
    victim = records[7]
    for name, value in changes.items():
        setattr(victim, name, value)
    found = violations(to_frame(records), drained=True)
    assert any(line.startswith(number) and what in line and victim.call_id in line for line in found), found


def test_only_a_live_stream_that_broke_may_have_no_sources() -> None:
    """As `harness bench` records it when a worker is killed: a first token, but no usage."""
    records = make_records(SHAPE, 20)
    broken = records[7]
    broken.outcome, broken.gpu_tokens, broken.dram_tokens, broken.shared_tokens = "failed", 0, 0, 0
    broken.peer_tokens = broken.computed_tokens = 0
    assert violations(to_frame(records), live=True) == []
    wanted = f"INV-4: input tokens are not the sum over sources: {broken.call_id}"
    assert violations(to_frame(records)) == [wanted]
    broken.outcome = "completed"
    assert violations(to_frame(records), live=True) == [wanted]


def test_a_prompt_cannot_be_reused_whole() -> None:
    records = make_records(SHAPE, 20)
    records[3].gpu_tokens, records[3].computed_tokens = records[3].input_tokens, 0
    assert any(line.startswith("INV-5: the whole prompt") for line in violations(to_frame(records)))


def test_lost_and_doubled_calls_are_seen() -> None:
    records = make_records(SHAPE, 20)
    assert violations(to_frame(records), arrived=21) == ["INV-1: 21 calls arrived, 20 are recorded"]
    twice = violations(to_frame([*records, records[0]]))
    assert len(twice) == 1 and twice[0].startswith("INV-1: recorded more than once")


def test_in_flight_is_fine_when_the_run_was_cut() -> None:
    records = make_records(SHAPE, 20)
    records[0].outcome, records[0].finish_ns = "in_flight", None
    assert violations(to_frame(records), drained=False) == []


def test_long_lists_are_cut() -> None:
    records = make_records(SHAPE, 20)
    for record in records:
        record.outcome = "lost"
    (line,) = (v for v in violations(to_frame(records)) if "unknown outcome" in v)
    assert line.endswith("and 17 more")
