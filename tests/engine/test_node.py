"""What a node does at its edges: idle ranks, arrivals at once, gauges, wake-up times, requests that never fit."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from fake_workers.engine.node import EngineStuckError, Node, Outcome
from fake_workers.engine.request import EngineRequest
from fake_workers.engine.scheduler import SchedulerConfig
from tests.engine.timed import RandomPrice
from tests.engine.workload import UnitPrice

CONFIG = SchedulerConfig(num_gpu_blocks=101, block_tokens=4, max_model_len=300)


def request(index: int, prompt: int, outputs: int) -> EngineRequest:
    runs = [(index, 0, prompt // 4)] if prompt >= 4 else []
    return EngineRequest(f"r{index}", index, runs, prompt, outputs, 0)


def node(is_async: bool, ranks: int = 1) -> Node:
    return Node(UnitPrice(), replace(CONFIG, async_scheduling=is_async), ranks, leaping=False)


def first_tokens(outcomes: list[Outcome]) -> dict[str, int]:
    return {o.request.request_id: o.t_ns for o in outcomes if o.first}


@pytest.mark.parametrize("is_async", [False, True])
def test_a_request_for_an_idle_rank_joins_the_next_step(is_async: bool) -> None:
    """Also with async scheduling: an idle rank has nothing queued (vLLM: it runs dummy batches meanwhile)."""
    engines = node(is_async, ranks=2)
    engines.submit(0, request(0, 10, 50))
    engines.advance(4)
    engines.submit(1, request(1, 10, 5))
    assert first_tokens(engines.advance(20))["r1"] == 6


@pytest.mark.parametrize(("is_async", "expected"), [(False, 2), (True, 3)])
def test_a_request_for_a_busy_rank_waits_for_the_batches_under_way(is_async: bool, expected: int) -> None:
    engine = node(is_async)
    engine.submit(0, request(0, 10, 50))
    engine.advance(0)
    engine.submit(0, request(1, 10, 5))
    assert first_tokens(engine.advance(20)) == {"r0": 1, "r1": expected}


@pytest.mark.parametrize("is_async", [False, True])
def test_after_aborts_the_engine_is_as_async_as_before(is_async: bool) -> None:
    """All requests go away while a batch is queued; the next one must find two batches at a time again."""
    engine = node(is_async)
    early = request(0, 10, 50)
    engine.submit(0, early)
    engine.advance(0)
    engine.abort(0, early)
    engine.advance(1)
    engine.submit(0, request(1, 10, 50))
    seen = engine.advance(3)
    engine.submit(0, request(2, 10, 50))
    seen += engine.advance(100)
    start = 1 if is_async else 0  # the aborted request's second batch is under way already and runs to its end
    assert first_tokens(seen)["r1"] == start + 2
    assert first_tokens(seen)["r2"] == start + 5, "r2 came during step 4 and waits for the batches under way"


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("gate", [False, True])
def test_a_request_that_never_fits_is_an_error_and_not_an_endless_loop(is_async: bool, gate: bool) -> None:
    config = replace(CONFIG, num_gpu_blocks=6, async_scheduling=is_async, scheduler_reserve_full_isl=gate)
    engine = Node(UnitPrice(), config, leaping=False)
    engine.submit(0, request(0, 24, 1))
    with pytest.raises(EngineStuckError, match="r0"):
        engine.advance(1000)


@pytest.mark.parametrize("is_async", [False, True])
def test_an_answer_that_outgrows_the_pool_is_an_error_too(is_async: bool) -> None:
    config = replace(CONFIG, num_gpu_blocks=6, async_scheduling=is_async)
    engine = Node(RandomPrice(1), config)
    engine.submit(0, request(0, 10, 100))
    with pytest.raises(EngineStuckError, match="5 of 5 blocks free"):
        engine.advance(1 << 40)


def test_abort_and_arrival_while_idle() -> None:
    engine = node(True)
    gone = request(0, 5, 2)
    engine.abort(0, gone)
    assert not engine.busy and engine.wake_ns() is None
    engine.advance(10)
    engine.submit(0, request(1, 5, 1))
    assert first_tokens(engine.advance(20)) == {"r1": 11}
    assert not engine.busy


def test_an_abort_before_the_first_look_keeps_a_request_out() -> None:
    engine = node(False)
    engine.submit(0, request(0, 5, 3))
    late = request(1, 5, 3)
    engine.submit(0, late)
    engine.abort(0, late)
    outcomes = engine.advance(50)
    assert {o.request.request_id for o in outcomes} == {"r0"}
    assert late.finished and late.admitted_ns is None and late.outputs == 0


def test_gauges_are_those_of_the_last_finished_step() -> None:
    engine = node(False)
    engine.submit(0, request(0, 40, 10))
    engine.advance(0)
    engine.submit(0, request(1, 40, 10))
    assert engine.gauges(0, 0).running == 0, "the first step is still under way"
    engine.advance(3)
    first = engine.gauges(0, 1)
    assert (first.running, first.waiting, first.kv_usage) == (1, 0, 10 / 100)
    second = engine.gauges(0, 2)
    assert (second.running, second.waiting, second.kv_usage) == (2, 0, 21 / 100)


def test_busy_time_is_reported_without_gaps_or_overlaps() -> None:
    seen: list[tuple[int, ...]] = []
    engine = Node(RandomPrice(4), CONFIG, observer=lambda *spans: seen.append(spans))
    engine.submit(0, request(0, 20, 60))
    engine.advance(1 << 40)
    assert seen[0][1] == 0
    assert all(before[2] == after[1] for before, after in itertools.pairwise(seen))
    assert seen[-1][2] - seen[0][1] == engine.totals[0].busy_ns


@pytest.mark.parametrize("is_async", [False, True])
def test_an_idle_engine_begins_with_all_that_arrive_at_one_instant(is_async: bool) -> None:
    """vLLM drains its input queue when it wakes: a burst is one batch, not one request and then the rest."""
    engine = node(is_async)
    first, second = request(0, 10, 5), request(1, 10, 5)
    engine.submit(0, first)
    assert engine.wake_ns() == 0 and engine.busy
    assert engine.advance(0, begin=False) == []
    engine.submit(0, second)
    engine.advance(0)
    assert first.admitted_ns == second.admitted_ns == 0
    assert first_tokens(engine.advance(20)) == {"r0": 1, "r1": 1}


def test_a_request_that_is_aborted_before_its_idle_engine_begins_leaves_no_trace() -> None:
    engine = node(True)
    lost = request(0, 10, 5)
    engine.submit(0, lost)
    engine.abort(0, lost)
    assert engine.advance(20) == [] and not engine.busy and engine.steps == 0
