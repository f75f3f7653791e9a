"""Router blocks of several engine blocks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fake_workers.engine.events import Cleared, Removed, Stored
from harness.router.granularity import Granularity
from harness.router.tokens import total_blocks


def prompt(lengths: list[int]) -> list[tuple[int, int, int]]:
    runs, at = [], 0
    for origin, length in enumerate(lengths):
        runs.append((origin, at, at + length))
        at += length
    return runs


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 16))
def test_prompt_has_one_router_block_per_g_engine_blocks(lengths: list[int], g: int) -> None:
    runs = prompt(lengths)
    coarse = Granularity(g).prompt(runs)
    assert total_blocks(coarse) == total_blocks(runs) // g
    owner = {p: o for o, start, end in runs for p in range(start, end)}
    for origin, start, end in coarse:
        for j in range(start, end):
            assert owner[j * g + g - 1] == origin


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 16), st.data())
def test_events_complete_each_router_block_once_with_its_parent(
    lengths: list[int], g: int, data: st.DataObject
) -> None:
    """An engine that stores a prompt bit by bit tells of every whole router block once, each after its
    parent.
    """
    runs = prompt(lengths)
    units = Granularity(g)
    units.prompt(runs)
    told: list[tuple[int, int]] = []
    before: tuple[int, int] | None = None
    for origin, start, end in runs:
        at = start
        while at < end:
            count = data.draw(st.integers(1, end - at))
            for event in units.events([Stored(0, origin, at, count, before)]):
                assert isinstance(event, Stored)
                assert event.parent == (told[-1] if told else None)
                told += [(event.origin, p) for p in range(event.start, event.start + event.count)]
            at += count
            before = (origin, at - 1)
    assert told == [(o, p) for o, start, end in units.prompt(runs) for p in range(start, end)]


def test_parents_are_known_without_the_prompt() -> None:
    units = Granularity(4)
    units.events([Stored(0, 1, 0, 10, None)])
    (event,) = units.events([Stored(0, 2, 7, 9, (1, 6))])
    assert event == Stored(0, 2, 1, 3, (1, 0))


def test_removals_and_clears() -> None:
    units = Granularity(4)
    assert units.events([Removed(5, 1, 6, 1), Cleared(6)]) == [Cleared(6)]
    assert units.events([Removed(5, 1, 6, 4)]) == [Removed(5, 1, 1, 1)]


def test_factor_one_changes_nothing() -> None:
    events = [Stored(0, 1, 0, 3, None), Removed(0, 1, 2, 1)]
    assert Granularity(1).events(events) is events
