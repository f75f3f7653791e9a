"""Runs in the interpreter that has vLLM's sources: engines with vLLM's CPU tier on random workloads, step by step.

    python -m tests.differential.offloading_engine FIRST_SEED WORKLOADS [wrong]

vLLM's Scheduler or AsyncScheduler with its OffloadingConnectorScheduler, and ours; compared are all records of the
engine comparison (docs/engine.md) and every copy in its order: direction, request, chunks, chunks in the tier then.
With `wrong` our side stores generated tokens where vLLM's does not, or the other way round. One JSON line per workload
on stdout.
"""

from __future__ import annotations

import json
import sys
import traceback
from dataclasses import replace
from typing import Any

from fake_workers.vllm_engine import torch_stub

torch_stub.install()

from tests.differential.vllm_offloading import OffloadingVllmEngine  # noqa: E402  (after the placeholders)
from tests.engine.offloaded import random_offloading, run_offloaded  # noqa: E402
from tests.engine.workload import Record  # noqa: E402


def compare(seed: int, is_async: bool, wrong: bool) -> dict[str, Any]:
    """Counts of what was compared, and the first difference if there is one."""
    workload, tier = random_offloading(seed, is_async=is_async, size=40 if seed % 10 else 150)
    engine = OffloadingVllmEngine(workload, tier)
    theirs = engine.run()
    log: list[Record] = []
    ours, script = run_offloaded(workload, replace(tier, prompt_only=tier.prompt_only is not wrong), log)
    counts = {
        "seed": seed,
        "records": len(theirs),
        "copies": len(engine.jobs),
        "loads": sum(not job[0] for job in engine.jobs),
        "evicted": script.manager.counts.evicted,
        "preempted": sum(len(record[4]) for record in theirs if record[0] == "S"),
    }
    for what, a, b in (("copy", engine.jobs, script.log), ("record", theirs, ours)):
        if a != b:
            at = next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b)))
            return counts | {"failed": f"{what} {at} of {tier}: vLLM {a[at : at + 1]}, ours {b[at : at + 1]}"}
    return counts


def main() -> None:
    """Compare what the command line asks for, with and without asynchronous scheduling."""
    first, workloads, wrong = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] == ["wrong"]
    for seed in range(first, first + workloads):
        try:
            result = compare(seed, seed % 2 == 1, wrong)
        except Exception as error:  # a crash of ours is a difference like any other
            result = {
                "seed": seed,
                "failed": f"{type(error).__name__}: {error}",
                "trace": traceback.format_exc()[-1500:],
            }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
