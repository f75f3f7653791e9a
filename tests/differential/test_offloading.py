"""Our CPU tier against vLLM 0.32's OffloadingConnector, decision for decision (docs/cache.md).

HARNESS_DIFFERENTIAL_OFFLOADS sets the number of workloads (default 80 of 150 schedules each).
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fake_workers.vllm_engine.install import interpreter

ROOT = Path(__file__).parents[2]
WORKLOADS = int(os.environ.get("HARNESS_DIFFERENTIAL_OFFLOADS", "80"))
FIRST_SEED = int(os.environ.get("HARNESS_DIFFERENTIAL_SEED", "0"))


def worker(module: str, *arguments: str) -> list[dict[str, Any]]:
    """Results of a worker module of this package, one per workload."""
    python = interpreter()
    if python is None:
        pytest.skip("vLLM's sources are not installed: harness engine install")
    done = subprocess.run(
        [str(python), "-m", f"tests.differential.{module}", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(600)
def test_every_decision_of_the_offloading_connector_is_vllms() -> None:
    """Lookups, loads, stores, evictions in order, KV events; LRU and ARC, thresholds, chunks of 1 to 4 blocks, window
    groups.
    """
    total = compared(worker("offloading", str(FIRST_SEED), str(WORKLOADS)))
    for what in ("hits", "late", "loads", "stores", "refused", "evicted", "described", "window_hits", "window_evicted"):
        assert total[what] > 2 * WORKLOADS, (what, total)


@pytest.mark.timeout(600)
def test_every_step_of_an_engine_with_it_is_vllms() -> None:
    """vLLM's scheduler with its OffloadingConnectorScheduler against ours: steps, and copies in their order."""
    total = compared(worker("offloading_engine", str(FIRST_SEED), str(WORKLOADS)))
    for what in ("copies", "loads", "evicted", "preempted"):
        assert total[what] > WORKLOADS, (what, total)


def compared(results: list[dict[str, Any]]) -> Counter[str]:
    """Sum of the counts; the first difference is an error."""
    total: Counter[str] = Counter()
    for result in results:
        assert "failed" not in result, f"seed {result['seed']}: {result['failed']}\n{result.get('trace', '')}"
        total.update({name: value for name, value in result.items() if name != "seed"})
    print(f"\n{len(results)} workloads from seed {FIRST_SEED}: {dict(total)}")
    return total


def test_a_difference_would_be_found() -> None:
    """The comparisons themselves: another eviction policy, or other tokens stored, than vLLM's get caught."""
    for module in ("offloading", "offloading_engine"):
        assert sum("failed" in result for result in worker(module, str(FIRST_SEED), "12", "wrong")) > 3, module
