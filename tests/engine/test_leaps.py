"""Leaping and stepping are the same: times, outcomes, gauges at any tick, events at any cut, totals, pool state."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from fake_workers.engine.node import Node, StepPrice
from fake_workers.engine.scheduler import SchedulerConfig
from fake_workers.pricing.node_price import ProfilePrice
from fake_workers.pricing.registry import load_profile
from tests.engine.timed import (
    HISTORY_NS,
    Abort,
    Action,
    Look,
    RandomPrice,
    SlowLeap,
    Submit,
    play,
    random_actions,
    random_node_config,
)

WAITS = (0, 1, 30, 3000, 20_000, 50_000, 400_000)

submits = st.builds(
    Submit,
    wait_ns=st.sampled_from(WAITS),
    rank=st.integers(0, 2),
    parent=st.integers(-1, 12),
    keep=st.sampled_from([0.0, 0.5, 1.0]),
    new=st.integers(0, 8),
    tail=st.integers(0, 15),
    outputs=st.integers(1, 60),
    priority=st.integers(0, 2),
)
actions_ = st.lists(
    st.one_of(
        submits,
        submits,
        st.builds(Abort, wait_ns=st.sampled_from(WAITS), victim=st.integers(0, 12)),
        st.builds(Look, wait_ns=st.sampled_from(WAITS), back_ns=st.integers(0, HISTORY_NS), take=st.booleans()),
    ),
    min_size=1,
    max_size=25,
)
configs = st.builds(
    SchedulerConfig,
    num_gpu_blocks=st.sampled_from([20, 40, 200]),
    block_tokens=st.sampled_from([2, 4, 16]),
    max_num_batched_tokens=st.sampled_from([4, 16, 64]),
    max_num_seqs=st.sampled_from([2, 8]),
    max_model_len=st.sampled_from([30, 130]),
    async_scheduling=st.booleans(),
    enable_prefix_caching=st.booleans(),
    scheduler_reserve_full_isl=st.booleans(),
    watermark=st.sampled_from([0.0, 0.1]),
    long_prefill_token_threshold=st.sampled_from([0, 5]),
    policy=st.sampled_from(["fcfs", "priority"]),
)


def make(price: StepPrice, config: SchedulerConfig, ranks: int, leaping: bool, history: int = HISTORY_NS) -> Node:
    return Node(price, config, ranks, leaping=leaping, keep_events=True, history_ns=history)


def check(price: StepPrice, config: SchedulerConfig, ranks: int, actions: list[Action], scale: int = 1) -> Node:
    """Play `actions` three ways; returns the leaping node."""
    stepping = make(price, config, ranks, False, HISTORY_NS * scale)
    leaping = make(price, config, ranks, True, HISTORY_NS * scale)
    woken = make(price, config, ranks, True, HISTORY_NS * scale)
    expected = play(stepping, actions)
    assert play(leaping, actions) == expected
    assert play(woken, actions, by_wake=True) == expected
    return leaping


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1000), config=configs, ranks=st.integers(1, 3), actions=actions_)
def test_leaping_equals_stepping(seed: int, config: SchedulerConfig, ranks: int, actions: list[Action]) -> None:
    check(RandomPrice(seed), config, ranks, actions)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
def test_leaping_equals_stepping_on_long_random_workloads(ranks: int, is_async: bool, policy: str) -> None:
    steps = events = preemptions = 0
    for seed in range(60):
        rng = random.Random(seed)
        config = random_node_config(rng, is_async=is_async, policy=policy)
        try:
            node = check(RandomPrice(seed), config, ranks, random_actions(rng, 70, ranks, WAITS))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {config}") from error
        steps += node.steps
        events += node.boundaries_taken
        preemptions += sum(total.preemptions for total in node.totals)
    assert preemptions > 20, "the workloads no longer bring preemption"
    assert events < 0.8 * steps, "next to nothing was leapt over"


@pytest.mark.parametrize("name", ["llama-3.3-70b-fp8-tp8-h200", "glm-5.2-fp8-dp8ep8-b200", "qwen3-32b-bf16-tp2-h100"])
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_leaping_equals_stepping_with_real_prices(name: str, seed: int) -> None:
    price = ProfilePrice(load_profile(name))
    ranks = price.profile.layout.dp
    rng = random.Random(seed)
    is_async = rng.random() < 0.5
    config = random_node_config(rng, is_async=is_async, policy=rng.choice(["fcfs", "priority"]))
    config = replace(config, num_gpu_blocks=rng.choice([60, 4000]), max_model_len=rng.choice([130, 30_000]))
    scale = 1000  # steps take milliseconds here
    actions = [
        replace(action, back_ns=action.back_ns * scale) if isinstance(action, Look) else action
        for action in random_actions(rng, 40, ranks, [wait * scale for wait in WAITS])
    ]
    if config.max_model_len > 1000:
        actions = [replace(a, new=a.new * 100) if isinstance(a, Submit) else a for a in actions]
    note(f"{config}")
    check(price, config, ranks, actions, scale)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_leap_without_readers_leaves_the_same_pool(is_async: bool) -> None:
    """Where nobody reads events a leap takes a shorter way through the pool."""
    for seed in range(60):
        rng = random.Random(seed)
        config = random_node_config(rng, is_async=is_async, policy="fcfs")
        actions = random_actions(rng, 70, 1, WAITS)
        logs = []
        for leaping in (False, True):
            node = Node(RandomPrice(seed), config, leaping=leaping, keep_events=False, history_ns=HISTORY_NS)
            logs.append(play(node, actions))
        assert logs[0] == logs[1], f"seed {seed}, {config}"


def test_an_answer_cut_off_by_max_model_len_ends_in_time() -> None:
    config = SchedulerConfig(num_gpu_blocks=100, block_tokens=4, max_model_len=50)
    for is_async in (False, True):
        node = check(RandomPrice(1), replace(config, async_scheduling=is_async), 1, [Submit(0, 0, -1, 0.0, 2, 1, 500)])
        assert node.steps < 60


def test_a_freed_block_lets_a_request_of_high_priority_in_during_the_next_step() -> None:
    """Priority: the victim of a preemption is not the head of the line, so the line may move at the next boundary."""
    config = SchedulerConfig(
        num_gpu_blocks=13, block_tokens=4, max_model_len=200, policy="priority", async_scheduling=False
    )
    actions: list[Action] = [
        Submit(0, 0, -1, 0.0, 3, 1, 60, 1),
        Submit(0, 0, -1, 0.0, 6, 1, 60, 2),
        Submit(3000, 0, -1, 0.0, 2, 0, 4, 0),
    ]
    check(RandomPrice(3), config, 1, actions)


def test_a_real_step_is_worth_its_leap() -> None:
    """The closed form of the real prices against the sum of their steps."""
    from fake_workers.pricing.steps import RankBatch

    price = ProfilePrice(load_profile("glm-5.2-fp8-dp8ep8-b200"))
    batch = [RankBatch((), 3 + r, 40_000 * (r + 1)) for r in range(8)]
    slow, fast = SlowLeap(price, batch), price.leap(batch)
    assert [fast.cumulative_ns(k) for k in (1, 2, 77, 500)] == [slow.cumulative_ns(k) for k in (1, 2, 77, 500)]
