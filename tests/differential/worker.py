"""Runs in the interpreter that has vLLM's sources: both engines on the same random workloads, record by record.

    python -m tests.differential.worker random sync|async FIRST_SEED STEPS     workloads until STEPS steps are compared
    python -m tests.differential.worker connected sync|async FIRST_SEED STEPS  the same with a KV connector
    python -m tests.differential.worker file FILE                              {"vllm": workload, "ours": workload}

One JSON line per workload on stdout; a difference is shrunk before it is reported.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from fake_workers.vllm_engine import torch_stub

torch_stub.install()

from tests.differential.vllm_connector import ConnectedVllmEngine  # noqa: E402  (after the placeholders)
from tests.differential.vllm_engine import VllmEngine  # noqa: E402
from tests.engine.connected import STUCK, random_connected_workload, run_connected  # noqa: E402
from tests.engine.workload import Record, RecordingRank, Workload, random_workload, run_node, simpler  # noqa: E402


def compare(workload: Workload, other: Workload | None = None) -> dict[str, Any]:
    """Counts of what was compared, and the first difference if there is one. `other`: what our engine gets instead."""
    connected = workload.connector is not None
    theirs = (ConnectedVllmEngine if connected else VllmEngine)(workload).run()
    log: list[Record] = []
    failure = None
    other = other or workload
    try:
        ours = run_connected(other, log) if connected else run_node(other, RecordingRank(other.config, log), log)
    except Exception as error:  # a crash of our engine is a difference like any other
        ours, failure = log, f"{type(error).__name__}: {error}"
    steps = [r for r in theirs if r[0] == "S" and (r[1] or not connected)]
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
    if connected:
        counts |= connected_counts(workload, theirs)
    if ours == theirs:
        return counts
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return counts | {"at": at, "ours": ours[at : at + 1], "vllm": theirs[max(0, at - 3) : at + 1], "failure": failure}


def connected_counts(workload: Workload, record: list[Record]) -> dict[str, int]:
    """What the connector brought about, as the record and the scripts show it."""
    held: set[str] = set()
    counts = {"loads": 0, "aborts while loading": 0, "errors": 0, "overtaken": 0, "stuck": int(record[-1] == STUCK)}
    aborted = {spec.request_id for spec in workload.requests if spec.abort_at is not None}
    done: set[str] = set()
    for entry in record:
        if entry[0] not in "SU":
            continue
        at = 5 if entry[0] == "S" else 3
        holding = entry[at][: entry[at].index("/")]
        counts["loads"] += len(set(holding) - held)
        if entry[0] == "S":
            counts["overtaken"] += bool(entry[2] and entry[5][-1] != "/")
        else:
            done.update(i for i, finished in entry[1] if finished)
            left = held - set(holding)
            counts["errors"] += len(left & done)
            counts["aborts while loading"] += len((left & aborted) - done)
        held = set(holding)
    return counts


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
        make = random_connected_workload if kind == "connected" else random_workload
        workload = make(seed, is_async=mode == "async", size=40 if seed % 10 else 250)
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
