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

from tests.differential.install import interpreter

ROOT = Path(__file__).parents[2]
WORKLOADS = int(os.environ.get("HARNESS_DIFFERENTIAL_OFFLOADS", "80"))
FIRST_SEED = int(os.environ.get("HARNESS_DIFFERENTIAL_SEED", "0"))


def worker(*arguments: str) -> list[dict[str, Any]]:
    """Results of tests.differential.offloading, one per workload."""
    python = interpreter()
    if python is None:
        pytest.skip("vLLM's sources are not installed: python -m tests.differential.install")
    done = subprocess.run(
        [str(python), "-m", "tests.differential.offloading", *arguments],
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
    """Lookups, loads, stores, evictions in order, KV events; LRU and ARC, thresholds, chunks of 1 to 4 blocks."""
    total: Counter[str] = Counter()
    for result in worker(str(FIRST_SEED), str(WORKLOADS)):
        assert "failed" not in result, f"seed {result['seed']}: {result['failed']}\n{result['trace']}"
        total.update({name: value for name, value in result.items() if name != "seed"})
    print(f"\n{WORKLOADS} workloads from seed {FIRST_SEED}: {dict(total)}")
    for what in ("hits", "late", "loads", "stores", "refused", "evicted", "described"):
        assert total[what] > 2 * WORKLOADS, (what, total)


def test_a_difference_would_be_found() -> None:
    """The comparison itself: another eviction policy than vLLM's gets caught."""
    assert sum("failed" in result for result in worker(str(FIRST_SEED), "12", "wrong")) > 3
