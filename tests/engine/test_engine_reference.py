"""The engine (runs of blocks) and the readable block-by-block engine give the same record, call by call."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_workers.engine.scheduler import RankScheduler, SchedulerConfig
from tests.engine.reference import ReferenceRank
from tests.engine.workload import Record, RecordingRank, Spec, Workload, cut_runs, random_workload, run_node


def both(workload: Workload) -> tuple[list[Record], list[Record]]:
    """The records of our engine and of the reference."""
    logs: list[list[Record]] = []
    for kind in (RecordingRank, ReferenceRank):
        log: list[Record] = []
        rank = kind(workload.config, log)
        logs.append(run_node(workload, rank, log))  # type: ignore[arg-type]
        assert rank.pool.free == rank.pool.blocks
    return logs[0], logs[1]


def first_difference(ours: list[Record], reference: list[Record]) -> str:
    for at, (a, b) in enumerate(zip(ours, reference, strict=False)):
        if a != b:
            return f"record {at}:\n  engine    {a}\n  reference {b}\n  before    {reference[max(0, at - 2) : at]}"
    return f"{len(ours)} records against {len(reference)}"


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, True])
def test_engine_equals_reference_on_random_workloads(is_async: bool) -> None:
    """Every rule has to occur: preemption, resumption, hits, evictions, duplicates, aborts, tokens to the preempted."""
    seen: Counter[str] = Counter()
    for seed in range(300):
        workload = random_workload(seed, is_async=is_async)
        ours, reference = both(workload)
        assert ours == reference, f"seed {seed}, {workload.config}\n{first_difference(ours, reference)}"
        seen += occurrences(reference, workload)
    assert seen["steps"] > 20_000
    for what in ("preempted", "resumed", "hits", "evicted", "duplicates", "priority", "no caching", "aborted"):
        assert seen[what] > 20, (what, seen)
    assert not is_async or seen["token while waiting"] > 20, seen


def occurrences(record: list[Record], workload: Workload) -> Counter[str]:
    """How often the rules were needed."""
    seen: Counter[str] = Counter()
    resident: Counter[Record] = Counter()
    for entry in record:
        if entry[0] == "S":
            _, items, new, resumed, preempted, _, _ = entry
            seen["steps"] += 1
            seen["preempted"] += len(preempted)
            seen["resumed"] += len(resumed)
            seen["hits"] += sum(1 for name, _, cached in items if cached and name in (*new, *resumed))
        elif entry[0] == "U":
            _, outputs, _, waiting, _, events = entry
            seen["token while waiting"] += sum(1 for name, _ in outputs if name in waiting)
            for event in events:
                if event[0] == "-":
                    seen["evicted"] += 1
                    resident[event[1:3]] -= 1
                else:
                    seen["duplicates"] += resident[event[1:3]] > 0
                    resident[event[1:3]] += 1
    seen["priority"] += workload.config.policy == "priority"
    seen["no caching"] += not workload.config.enable_prefix_caching
    seen["aborted"] += sum(1 for spec in workload.requests if spec.abort_at is not None)
    return seen


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Small workloads whose every number hypothesis can shrink."""
    block = draw(st.sampled_from([2, 4]))
    pool = draw(st.integers(4, 20))
    config = SchedulerConfig(
        num_gpu_blocks=pool + 1,
        block_tokens=block,
        max_num_batched_tokens=draw(st.integers(1, 20)),
        max_num_seqs=draw(st.integers(1, 6)),
        max_model_len=draw(st.integers(2 * block, 30)),
        async_scheduling=draw(st.booleans()),
        enable_prefix_caching=draw(st.integers(0, 4)) > 0,
        scheduler_reserve_full_isl=draw(st.booleans()),
        watermark=draw(st.sampled_from([0.0, 0.1, 0.5])),
        long_prefill_token_threshold=draw(st.sampled_from([0, 1, 3])),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
    )
    most = min(config.max_model_len, pool * block)
    specs: list[Spec] = []
    at = 1
    for index in range(draw(st.integers(1, 8))):
        at += draw(st.integers(0, 6))
        runs: list[tuple[int, int, int]] = []
        if specs and draw(st.booleans()):
            other = draw(st.sampled_from(specs))
            reach = (other.prompt_tokens + other.output_tokens) // block
            full = other.prompt_tokens // block
            runs = cut_runs(
                [*other.runs, (other.origin, full, max(full, reach))], draw(st.integers(0, max(full, reach)))
            )
        keep = sum(end - start for _, start, end in runs)
        prompt = min(most - 1, keep * block + draw(st.integers(0 if keep else 1, 4 * block)))
        runs = cut_runs(runs, prompt // block)
        keep = sum(end - start for _, start, end in runs)
        if prompt // block > keep:
            runs.append((index, keep, prompt // block))
        outputs = draw(st.integers(1, 20))
        if most < config.max_model_len:
            outputs = min(outputs, most - prompt)
        specs.append(
            Spec(
                f"r{index}",
                index,
                tuple(runs),
                prompt,
                outputs,
                at,
                draw(st.one_of(st.none(), st.integers(at, at + 12))),
                draw(st.integers(0, 2)),
                at,
            )
        )
    return Workload(config, tuple(specs))


@settings(max_examples=300, deadline=None)
@given(workloads())
def test_engine_equals_reference(workload: Workload) -> None:
    ours, reference = both(workload)
    assert ours == reference, first_difference(ours, reference)


# ---------------------------------------------------------------------- single cases, sync and async


def run(specs: list[Spec], **options: object) -> list[Record]:
    config = SchedulerConfig(**{"num_gpu_blocks": 41, "block_tokens": 4, "max_model_len": 100} | options)  # type: ignore[arg-type]
    ours, reference = both(Workload(config, tuple(specs)))
    assert ours == reference, first_difference(ours, reference)
    return ours


def scheduled_tokens(record: list[Record]) -> list[tuple[tuple[str, int, int], ...]]:
    return [entry[1] for entry in record if entry[0] == "S" and entry[1]]


def spec(name: str, runs: list[tuple[int, int, int]], prompt: int, outputs: int, at: int = 1, **more: object) -> Spec:
    return Spec(name, int(name[1:]), tuple(runs), prompt, outputs, at, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_async", [False, True])
def test_prompt_of_one_token_and_one_output(is_async: bool) -> None:
    record = run([spec("r0", [], 1, 1)], async_scheduling=is_async)
    assert scheduled_tokens(record) == [(("r0", 1, 0),)]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_full_hit_computes_its_last_block_again(is_async: bool) -> None:
    first = spec("r0", [(0, 0, 4)], 16, 2)
    record = run([first, replace(first, request_id="r1", origin=1, at=9)], async_scheduling=is_async)
    assert (("r1", 4, 12),) in scheduled_tokens(record)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_request_of_the_same_step_hits_what_is_only_being_computed(is_async: bool) -> None:
    twins = [spec("r1", [(1, 0, 4)], 17, 2, at=1), spec("r2", [(1, 0, 4)], 18, 2, at=1)]
    record = run([spec("r0", [], 1, 9), *twins], async_scheduling=is_async)
    assert any(items[-2:] == (("r1", 17, 0), ("r2", 2, 16)) for items in scheduled_tokens(record))


def test_a_known_last_token_costs_no_extra_async_step() -> None:
    steps = {
        is_async: len(scheduled_tokens(run([spec("r0", [], 3, 7)], async_scheduling=is_async)))
        for is_async in (False, True)
    }
    assert steps == {False: 7, True: 7}


def test_after_aborts_an_async_engine_has_two_batches_under_way_again() -> None:
    record = run([spec("r0", [], 1, 30, at=1, abort_at=1), spec("r1", [(1, 0, 3)], 13, 3, at=2)], async_scheduling=True)
    kinds = [entry[0] for entry in record if entry[0] == "U" or entry[1]]
    assert kinds == ["S", "S", "U", "U", "S", "S", "U", "S", "U", "U"]


def test_a_preempted_request_gets_its_token_in_flight_and_may_end_while_it_waits() -> None:
    """Async: the victim's last token is under way when it loses its blocks."""
    found = 0
    for seed in range(300):
        workload = random_workload(seed, is_async=True)
        log: list[Record] = []
        rank = RecordingRank(workload.config, log)
        waiting: tuple[str, ...] = ()
        for entry in run_node(workload, rank, log):
            if entry[0] == "S":
                waiting = entry[5]
            elif entry[0] == "U":
                found += sum(1 for name, done in entry[1] if done and name in waiting)
        assert rank.pool.free == rank.pool.blocks
    assert found > 3


def test_abort_of_a_request_that_never_arrived_or_has_ended_changes_nothing() -> None:
    config = SchedulerConfig(num_gpu_blocks=10, block_tokens=4)
    rank = RankScheduler(config, True)
    request = spec("r0", [(0, 0, 2)], 9, 1).request()
    rank.add(request)
    rank.update(rank.schedule())
    assert request.finished and rank.pool.free == 9
    rank.abort(request)
    rank.abort(spec("r1", [], 3, 1).request())
    assert rank.pool.free == 9 and not rank.unfinished
