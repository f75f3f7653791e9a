"""The virtual clock: order, monotony, refusal of the past."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.clock import VirtualClock, to_ns


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), max_size=30))
def test_events_run_by_time_then_rank_then_order_of_scheduling(events: list[tuple[int, int]]) -> None:
    clock = VirtualClock()
    seen: list[tuple[int, int, int]] = []
    for serial, (t, rank) in enumerate(events):
        clock.call_at(t, lambda key=(t, rank, serial): seen.append(key), rank=rank)
    while clock.step():
        pass
    assert seen == sorted(seen)
    assert len(seen) == len(events) == clock.executed


def test_an_event_may_schedule_another_at_its_own_time() -> None:
    clock = VirtualClock()
    seen: list[int] = []
    clock.call_at(5, lambda: clock.call_later(0, seen.append, clock.now_ns))
    while clock.step():
        pass
    assert seen == [5]


def test_the_past_is_refused() -> None:
    clock = VirtualClock()
    clock.call_at(5, lambda: None)
    clock.step()
    with pytest.raises(ValueError, match="lies before now"):
        clock.call_at(4, lambda: None)


def test_seconds_become_whole_nanoseconds() -> None:
    assert to_ns(1.5) == 1_500_000_000
    assert to_ns(0.1) == 100_000_000
