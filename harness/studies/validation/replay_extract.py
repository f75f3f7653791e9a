"""Takes requests and times out of a checkout of LLMServingSim: what part `replay` of the study reads.

    python -m harness.studies.validation.replay_extract CHECKOUT

Writes one CSV per run of `runs.yaml`: arrival, lengths, the prompt's shared prefix (which earlier request, how many
blocks of 16), and TTFT and latency as logged. Arrival is the client's wall clock, the other stamps the engine's
monotonic one; the two are put together at the request that the engine saw soonest after it had come.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from harness.studies.validation.replay import COLUMNS, DATA, RUNS


def shared_prefixes(prompts: Sequence[Sequence[int]], block: int) -> list[tuple[int, int]]:
    """Per prompt: the earlier prompt with the longest common prefix in full blocks, and its blocks (-1, 0: none)."""
    seen: dict[tuple[int, tuple[int, ...]], int] = {}
    ids: dict[tuple[int, tuple[int, ...]], int] = {}
    out = []
    for number, prompt in enumerate(prompts):
        parent, like, blocks = -1, -1, 0
        for index in range(len(prompt) // block):
            key = (parent, tuple(prompt[index * block : (index + 1) * block]))
            if key in seen:
                like, blocks = seen[key], index + 1
            else:
                seen[key] = number
            parent = ids.setdefault(key, len(ids))
        out.append((like, blocks))
    return out


def extract(checkout: Path, run: dict[str, Any], block: int = 16) -> list[dict[str, int]]:
    """Rows of one run, in the order of arrival."""
    logged = _lines(checkout / run["log"])
    workload = _lines(checkout / run["workload"])
    offset = min(entry["queued_ts"] - entry["arrival_time"] for entry in logged)
    start = logged[0]["arrival_time"]
    prefixes = shared_prefixes([entry["input_tok_ids"] for entry in workload], block)
    rows = []
    for entry, (like, blocks) in zip(logged, prefixes, strict=True):
        arrival = entry["arrival_time"]
        rows.append(
            {
                "arrival_us": round((arrival - start) * 1e6),
                "prompt_tokens": entry["input_toks"],
                "output_tokens": entry["output_toks"],
                "like": like,
                "shared_blocks": blocks,
                "ttft_us": round((entry["first_token_ts"] - offset - arrival) * 1e6),
                "latency_us": round((entry["last_token_ts"] - offset - arrival) * 1e6),
            }
        )
    return rows


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def main(arguments: Sequence[str]) -> None:
    """Write the tables of all runs."""
    for name, run in yaml.safe_load((DATA / RUNS).read_text(encoding="utf-8"))["runs"].items():
        with (DATA / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(extract(Path(arguments[0]), run))


if __name__ == "__main__":
    main(sys.argv[1:])
