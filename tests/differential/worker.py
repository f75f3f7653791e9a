"""Runs in the interpreter that has vLLM's sources: both engines on the same random workloads, record by record.

    python -m tests.differential.worker random sync|async FIRST_SEED STEPS    workloads until STEPS steps are compared
    python -m tests.differential.worker file FILE                             {"vllm": workload, "ours": workload}

One JSON line per workload on stdout; a difference is shrunk before it is reported.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.differential import torch_stub

torch_stub.install()

from tests.differential.vllm_engine import VllmEngine  # noqa: E402  (after the placeholders)
from tests.engine.workload import Record, RecordingRank, Workload, random_workload, run_node, simpler  # noqa: E402


def compare(workload: Workload, other: Workload | None = None) -> dict[str, Any]:
    """Counts of what was compared, and the first difference if there is one. `other`: what our engine gets instead."""
    theirs = VllmEngine(workload).run()
    log: list[Record] = []
    failure = None
    other = other or workload
    try:
        ours = run_node(other, RecordingRank(other.config, log), log)
    except Exception as error:  # a crash of our engine is a difference like any other
        ours, failure = log, f"{type(error).__name__}: {error}"
    steps = [r for r in theirs if r[0] == "S"]
    size = workload.config.block_tokens
    longest = {spec.request_id: (spec.prompt_tokens - 1) // size * size for spec in workload.requests}
    admitted = [(i, computed) for r in steps for i, _, computed in r[1] if computed and i in (*r[2], *r[3])]
    counts = {
        "steps": len(steps),
        "preempted": sum(len(r[4]) for r in steps),
        "resumed": sum(len(r[3]) for r in steps),
        "hits": len(admitted),
        "full hits": sum(computed >= longest[i] for i, computed in admitted),
        "events": sum(len(r[5]) for r in theirs if r[0] == "U"),
        "priority": int(workload.config.policy == "priority"),
        "aborts": sum(1 for spec in workload.requests if spec.abort_at is not None),
    }
    if ours == theirs:
        return counts
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return counts | {"at": at, "ours": ours[at : at + 1], "vllm": theirs[max(0, at - 3) : at + 1], "failure": failure}


def main() -> None:
    """Compare what the command line asks for."""
    kind, *arguments = sys.argv[1:]
    if kind == "file":
        data = json.loads(Path(arguments[0]).read_text())
        print(json.dumps(compare(Workload.from_json(data["vllm"]), Workload.from_json(data["ours"]))))
        return
    mode, seed, steps = arguments[0], int(arguments[1]), int(arguments[2])
    while steps > 0:
        # every tenth workload is a long one
        workload = random_workload(seed, is_async=mode == "async", size=40 if seed % 10 else 250)
        result = {"seed": seed, **compare(workload)}
        steps -= result["steps"]
        if "at" in result:
            small = simpler(workload, lambda w: "at" in compare(w))
            result |= {"smallest": small.to_json(), **compare(small)}
            steps = 0
        print(json.dumps(result), flush=True)
        seed += 1


if __name__ == "__main__":
    main()
