"""Points that a capacity search asks for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from harness.errors import InputError
from harness.experiment import load_experiment
from harness.sweep.capacity import CapacitySource, check
from harness.sweep.page import method
from harness.sweep.search import RateLadder
from harness.sweep.slo import parse_slo
from harness.workload import load_sessions
from tests.harness.test_cli import EXPERIMENT
from tests.harness.test_runner import TRACE


@pytest.mark.parametrize(("history_s", "span_s"), [(0, 10), (4, 6)])
def test_a_point_ends_with_the_last_arrival(tmp_path: Path, history_s: int, span_s: float) -> None:
    source = _source(tmp_path, history_s)
    point = source.next()
    assert point is not None
    load = point.experiment.load
    assert (load.until_s, load.warmup_s) == (span_s, span_s / 4)


def test_a_history_longer_than_the_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"load\.history_s: 60: at 360 sessions per hour and node the trace's last"):
        _source(tmp_path, 60).next()


def test_the_experiments_own_stretch_is_kept(tmp_path: Path) -> None:
    point = _source(tmp_path, 0, "load.until_s=8", "load.warmup_s=3").next()
    assert point is not None
    assert (point.experiment.load.until_s, point.experiment.load.warmup_s) == (8, 3)


def test_a_stretch_longer_than_the_arrivals_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"load\.until_s: 11: at 360 .* last session arrives at 10 s"):
        _source(tmp_path, 0, "load.until_s=11").next()


def test_rates_that_the_trace_is_too_short_for_end_the_search(tmp_path: Path) -> None:
    """At 720 per hour the last session arrives after 5 s: that rate is not run, and 360's answer stands."""
    source = _source(tmp_path, 0, "load.until_s=8")
    search = source._searches["a", 1]
    search.answer(True)
    rates = []
    while (point := source.next()) is not None:
        rates.append(point.experiment.load.sessions_per_hour_per_node)
        source._asked.clear()
        search.answer(True)
        if search.rung is not None:
            source._idle.append(("a", 1))
    assert rates
    assert (
        max(rates) == source.capacities()[0].per_seed[1] == pytest.approx(437.6, abs=0.1)
    )  # 10 s / 8 s, a rung below 450
    assert search.blind


@pytest.mark.parametrize(
    ("history_s", "seeds", "order", "said"),
    [(4, [1, 2], "trace", True), (4, [1], "trace", False), (0, [1, 2], "trace", False), (4, [1, 2], "shuffled", False)],
)
def test_seeds_that_are_not_independent_are_named(
    tmp_path: Path, history_s: int, seeds: list[int], order: str, said: bool
) -> None:
    source = _source(tmp_path, history_s, f"load.order={order}", seeds=seeds)
    assert ("load.order=shuffled makes seeds independent" in source.capacities()[0].note) is said


def test_a_warm_up_needs_its_end(tmp_path: Path) -> None:
    (tmp_path / "e.yaml").write_text(EXPERIMENT)
    experiment = load_experiment(tmp_path / "e.yaml", ["load.arrivals=uniform", "load.warmup_s=3"])
    with pytest.raises(InputError, match=r"load\.warmup_s: without load\.until_s .*; give both"):
        check(experiment)


@pytest.mark.parametrize("warmup_s", [8, 9])
def test_a_warm_up_ends_before_the_run(tmp_path: Path, warmup_s: int) -> None:
    (tmp_path / "e.yaml").write_text(EXPERIMENT)
    changes = ["load.arrivals=uniform", f"load.warmup_s={warmup_s}", "load.until_s=8"]
    with pytest.raises(InputError, match=rf"load\.warmup_s: {warmup_s}: the run ends at load\.until_s, 8 s, before"):
        check(load_experiment(tmp_path / "e.yaml", changes))


@pytest.mark.parametrize(
    ("changes", "stretch"),
    [
        ([], "measured from 25% of the arrivals' span to the last arrival"),
        (["load.until_s=8", "load.warmup_s=3"], "measured from 3 s to 8 s at every rate"),
    ],
)
def test_the_page_says_which_stretch_is_measured(tmp_path: Path, changes: list[str], stretch: str) -> None:
    assert f"{stretch}; the run ends there" in method(_source(tmp_path, 0, *changes))


def test_the_page_says_what_the_points_share(tmp_path: Path) -> None:
    assert any("common random numbers" in line for line in method(_source(tmp_path, 0)))
    assert any("another part of the trace's sessions" in line for line in method(_source(tmp_path, 4)))


def _source(folder: Path, history_s: int, *more: str, seeds: Sequence[int] = (1,)) -> CapacitySource:
    """Two sessions, ten seconds apart at the ladder's first rate."""
    (folder / "trace.jsonl").write_text(TRACE + TRACE.replace('"session":"a"', '"session":"b"'))
    (folder / "e.yaml").write_text(EXPERIMENT)
    changes = ["load.arrivals=uniform", "cluster.nodes=1", f"load.history_s={history_s}", *more]
    experiment = load_experiment(folder / "e.yaml", changes)
    loaded = load_sessions(experiment)
    assert len(loaded.sessions) == 2
    return CapacitySource(
        {"a": experiment}, seeds, [parse_slo("e2e_p90_s=300")], RateLadder(360, 0.05, 1, 1000), 0.25, loaded
    )
