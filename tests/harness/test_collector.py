"""Python's collector during a run: restored afterwards, young garbage still goes, growth starts a full pass."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from harness import collector
from harness.collector import YOUNG, RareCollections


class _Cycle:
    """An object that only the collector can free."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def collector_as_it_was() -> Iterator[None]:
    before, on = gc.get_threshold(), gc.isenabled()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()
    if on:
        gc.enable()


def test_thresholds_hold_inside_and_are_restored_after_an_error() -> None:
    gc.enable()
    gc.set_threshold(701, 11, 12)
    with pytest.raises(KeyError), RareCollections():
        assert gc.get_threshold() == YOUNG
        assert gc.get_freeze_count() > 0
        raise KeyError
    assert gc.get_threshold() == (701, 11, 12)
    assert gc.get_freeze_count() == 0


def test_where_it_is_off_it_stays_off() -> None:
    gc.disable()
    before = gc.get_threshold()
    with RareCollections(growth_bytes=0, every=1) as rare:
        rare.look()
        assert gc.get_threshold() == before
    assert not gc.isenabled()
    assert rare.full_passes == 0


def test_young_cycles_are_freed_without_a_full_pass() -> None:
    gc.enable()
    with RareCollections() as rare:
        dead = weakref.ref(_Cycle())
        alive = [[] for _ in range(2 * YOUNG[0])]  # type: ignore[var-annotated]
        assert dead() is None
        assert rare.full_passes == 0 and alive


def test_growth_of_memory_starts_a_full_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.enable()
    resident = 1000
    monkeypatch.setattr(collector, "resident_bytes", lambda: resident)
    with RareCollections(growth_bytes=100, every=2) as rare:
        cycle = _Cycle()
        dead = weakref.ref(cycle)
        gc.collect()  # old by now
        del cycle
        resident = 1099
        rare.look()
        rare.look()
        assert rare.full_passes == 0 and dead() is not None
        resident = 1100
        rare.look()
        assert rare.full_passes == 0  # only every second look reads the memory
        rare.look()
        assert rare.full_passes == 1 and dead() is None
        rare.look()
        rare.look()
        assert rare.full_passes == 1  # the level is now that of the last pass


def test_resident_memory_is_that_of_this_process() -> None:
    assert 1 << 20 < collector.resident_bytes() < 1 << 40
