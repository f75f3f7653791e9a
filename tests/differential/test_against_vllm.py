"""Our engine against vLLM 0.32's own scheduler, step for step (docs/engine.md says what is compared and what is not).

Needs vLLM's sources: `harness engine install`, or HARNESS_VLLM_PYTHON naming an
interpreter that has them.
HARNESS_DIFFERENTIAL_STEPS sets the number of vLLM steps (default 120,000, and half as many with a KV connector),
HARNESS_DIFFERENTIAL_SEED the first seed.
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
from tests.engine.connected import random_connected_workload
from tests.engine.workload import random_workload

ROOT = Path(__file__).parents[2]
STEPS = int(os.environ.get("HARNESS_DIFFERENTIAL_STEPS", "120000"))
FIRST_SEED = int(os.environ.get("HARNESS_DIFFERENTIAL_SEED", "0"))


@pytest.fixture(scope="module")
def vllm_python() -> Path:
    python = interpreter()
    if python is None:
        pytest.skip("vLLM's sources are not installed: harness engine install")
    return python


def worker(python: Path, *arguments: str) -> list[dict[str, Any]]:
    """Results of tests.differential.worker, one per workload."""
    done = subprocess.run(
        [str(python), "-m", "tests.differential.worker", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_every_step_is_vllms(vllm_python: Path, mode: str) -> None:
    total = compared(worker(vllm_python, "random", mode, str(FIRST_SEED), str(STEPS // 2)), mode)
    assert total["steps"] >= STEPS // 2
    if STEPS >= 20_000:
        for what in ("preempted", "resumed", "hits", "events", "aborts", "full hits", "priority"):
            assert total[what] > STEPS // 4000, (what, total)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_every_step_with_a_connector_is_vllms(vllm_python: Path, mode: str) -> None:
    """External hits, late answers, loads that hold or fail, saves that delay frees; empty steps included."""
    total = compared(worker(vllm_python, "connected", mode, str(FIRST_SEED), str(STEPS // 4)), mode)
    assert total["steps"] >= STEPS // 4
    if STEPS >= 20_000:
        for what in ("loads", "errors", "aborts while loading", "overtaken", "preempted", "resumed", "priority"):
            assert total[what] > STEPS // 10_000, (what, total)


def compared(results: list[dict[str, Any]], mode: str) -> Counter[str]:
    """Sum of the counts; the first difference is an error."""
    total: Counter[str] = Counter()
    for result in results:
        if "at" in result:
            raise AssertionError(
                f"seed {result['seed']} ({mode}) differs at record {result['at']}\n"
                f"ours  {result['ours']}\nvLLM  {result['vllm'][-1:]}\nafter {result['vllm'][:-1]}\n"
                f"error {result['failure']}\nsmallest workload: {json.dumps(result['smallest'])}"
            )
        total.update({key: value for key, value in result.items() if key != "seed"})
    print(f"\n{mode}: {len(results)} workloads from seed {FIRST_SEED}, {dict(total)}")
    return total


def test_a_difference_would_be_found(vllm_python: Path, tmp_path: Path) -> None:
    """The comparison itself: an engine with another option than vLLM's gets caught."""
    workload = random_workload(2, is_async=False).to_json()
    file = tmp_path / "workload.json"
    file.write_text(
        json.dumps({"vllm": workload, "ours": workload | {"config": workload["config"] | {"max_num_seqs": 1}}})
    )
    (result,) = worker(vllm_python, "file", str(file))
    assert result["at"] >= 0 and result["ours"] != result["vllm"]
    file.write_text(json.dumps({"vllm": workload, "ours": workload}))
    (result,) = worker(vllm_python, "file", str(file))
    assert "at" not in result and result["steps"] > 50


def test_a_difference_with_a_connector_would_be_found(vllm_python: Path, tmp_path: Path) -> None:
    """The same for the connector's rules: each option matters to some workload."""
    both, producer = {"kv_role": "kv_both"}, {"kv_role": "kv_producer"}
    for vllm, ours in (
        ({"kv_load_failure_policy": "fail"}, {"kv_load_failure_policy": "recompute"}),
        (producer | {"requires_kv_delivery": True}, both),
        (producer, producer | {"requires_kv_delivery": False}),
    ):
        for seed in range(40):
            workload = random_connected_workload(seed, is_async=True)
            if workload.config.num_gpu_blocks > 24 or workload.config.max_num_seqs == 1:
                continue  # too much room for preemption
            data = workload.to_json()
            file = tmp_path / "workload.json"
            file.write_text(json.dumps({"vllm": data | {"connector": vllm}, "ours": data | {"connector": ours}}))
            (result,) = worker(vllm_python, "file", str(file))
            if "at" in result:
                break
        else:
            raise AssertionError(f"no workload tells {vllm} from {ours}")
