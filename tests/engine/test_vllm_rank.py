"""vLLM's own scheduler in the node's loop gives what the built-in one gives: times, outcomes, gauges, KV events.

Needs vLLM's Python files (`harness engine install`); the wider comparison, step by step, is tests/differential.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fake_workers.engine.node import EngineStuckError, Node
from fake_workers.engine.scheduler import RankScheduler, SchedulerConfig
from fake_workers.vllm_engine.install import interpreter
from fake_workers.vllm_engine.rank import VllmChildError, VllmProcess
from tests.engine.timed import HISTORY_NS, RandomPrice, play, random_actions, random_node_config

_WAITS = (0, 1, 30, 3000, 20_000, 50_000)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmProcess]:
    if interpreter() is None:
        pytest.skip("vLLM's scheduler is not installed: harness engine install")
    process = VllmProcess(tmp_path_factory.mktemp("vllm") / "log")
    yield process
    process.close()


def seen(node: Node, actions: list[Any], ranks: int) -> list[Any]:
    """What `play` sees, without the inside of the built-in pool."""
    log = play(node, actions)
    tail = 3 + 5 * ranks
    per_rank = log[-tail:-3]
    return [*log[:-tail], *per_rank[0::5], *per_rank[4::5], *log[-3:]]


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_node_cannot_tell_whose_scheduler_it_has(vllm: VllmProcess, is_async: bool) -> None:
    """Shared prefixes, chunks, pressure with preemption, priorities, aborts, several ranks."""
    totals = {"preempted": 0, "hits": 0, "steps": 0}
    for seed in range(80):
        rng = random.Random(seed)
        config = random_node_config(rng, is_async=is_async, policy=rng.choice(["fcfs", "fcfs", "priority"]))
        ranks = rng.choice([1, 1, 2])
        actions = random_actions(rng, 30, ranks, _WAITS)
        price = RandomPrice(seed)

        def node(make: Any, price: RandomPrice = price, config: SchedulerConfig = config, ranks: int = ranks) -> Node:
            return Node(price, config, ranks, leaping=False, keep_events=True, history_ns=HISTORY_NS, make_rank=make)

        try:
            expected = seen(node(RankScheduler), actions, ranks)
        except EngineStuckError:
            with pytest.raises(EngineStuckError):
                play(node(vllm.rank), actions)
            continue
        assert seen(node(vllm.rank), actions, ranks) == expected, f"seed {seed}"
        totals["preempted"] += sum(times[4] for times in expected[-3])
        totals["hits"] += sum(bool(times[0]) for times in expected[-3])
        totals["steps"] += expected[-1][1]
    assert totals["preempted"] > 10 and totals["hits"] > 50 and totals["steps"] > 1000, totals


def test_a_child_that_dies_is_reported_with_its_last_words(vllm: VllmProcess, tmp_path: Path) -> None:
    process = VllmProcess(tmp_path / "log")
    rank = process.rank(SchedulerConfig(num_gpu_blocks=20, block_tokens=16), False)
    with pytest.raises(VllmChildError, match="unknown command"):
        rank._ask("dance")
    process.close()
