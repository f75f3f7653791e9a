"""With a connector, too, leaping and stepping are the same: loads, late answers, saves and failures at random times."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_workers.engine.connector import ConnectorOptions
from fake_workers.engine.node import EngineStuckError, Node
from fake_workers.engine.scheduler import SchedulerConfig
from tests.engine.test_leaps import WAITS, actions_, configs
from tests.engine.timed import (
    HISTORY_NS,
    Action,
    RandomPrice,
    TimedConnector,
    play,
    random_actions,
    random_node_config,
)


def check(
    seed: int, config: SchedulerConfig, options: ConnectorOptions, ranks: int, actions: list[Action]
) -> tuple[Node, list[Any]]:
    """Play `actions` both ways; returns the leaping node and what was seen."""
    logs: list[list[Any]] = []
    for leaping in (False, True):
        connector = TimedConnector(seed, 3000)
        node = Node(
            RandomPrice(seed),
            config,
            ranks,
            leaping=leaping,
            keep_events=True,
            history_ns=HISTORY_NS,
            connector=connector,
            connector_options=options,
        )
        try:
            logs.append(play(node, actions, by_wake=True, connector=connector))
        except EngineStuckError as error:
            logs.append([str(error)])
    assert logs[0] == logs[1]
    return node, logs[1]


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 1000),
    config=configs,
    options=st.builds(
        ConnectorOptions,
        kv_role=st.sampled_from(["kv_both", "kv_consumer", "kv_producer"]),
        kv_load_failure_policy=st.sampled_from(["fail", "recompute"]),
    ),
    ranks=st.integers(1, 3),
    actions=actions_,
)
def test_leaping_equals_stepping_with_a_connector(
    seed: int, config: SchedulerConfig, options: ConnectorOptions, ranks: int, actions: list[Action]
) -> None:
    check(seed, config, options, ranks, actions)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
def test_leaping_equals_stepping_on_long_workloads_with_a_connector(ranks: int, is_async: bool, policy: str) -> None:
    steps = events = preemptions = restored = failed = stuck = 0
    for seed in range(40):
        rng = random.Random(seed)
        config = random_node_config(rng, is_async=is_async, policy=policy)
        options = ConnectorOptions(kv_load_failure_policy=rng.choice(["fail", "recompute"]))
        try:
            node, seen = check(seed, config, options, ranks, random_actions(rng, 60, ranks, WAITS))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {config}, {options}") from error
        if len(seen) == 1:
            stuck += 1
            continue
        steps += node.steps
        events += node.boundaries_taken
        preemptions += sum(total.preemptions for total in node.totals)
        restored += sum(tokens > 0 and ns > 0 for tokens, _, ns, _ in seen[-3])
        failed += sum(was for _, _, _, was in seen[-3])
    assert preemptions > 3 and restored > 50 and failed > 10, (preemptions, restored, failed)
    assert stuck < 10, "most workloads must come to their end"
    assert events < 0.9 * steps, "next to nothing was leapt over"
