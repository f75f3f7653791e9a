"""Export to weka documents: explicit block ids, one JSON document per line.

Times inside a sub-agent entry are relative to the entry (the convention of kv-cache-tester). Dependencies,
chain names inside an entry and shared prefixes have no place in the format: a reader derives the former from
times and prefixes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from harness.trace.model import Call, Session
from harness.trace.runs import SessionRuns
from harness.trace.write import write_rows

TIME_DIGITS = 6


def export_weka(path: str | Path, sessions: Iterable[Session]) -> int:
    """Write sessions as weka documents, gzip where the name ends in .gz; returns the number of calls."""
    calls = 0

    def rows() -> Iterator[bytes]:
        nonlocal calls
        for session in sessions:
            calls += len(session.calls)
            yield msgspec.json.encode(weka_document(session)) + b"\n"

    write_rows(path, rows())
    return calls


def weka_document(session: Session) -> dict[str, Any]:
    """One session; its block ids count from 1 in the order of first use."""
    runs = SessionRuns(session.calls)
    first_id: list[int] = []
    """Per call: what to add to a position of one of its new blocks to get the block's id."""
    used = 0
    requests: list[dict[str, Any]] = []
    groups: dict[str, dict[str, Any]] = {}
    for call in session.calls:
        first_id.append(1 + used - call.keep_blocks)
        used += call.new_blocks
        ids = [first_id[origin] + p for origin, start, end in runs.runs(call.index) for p in range(start, end)]
        group, dot, _ = call.chain.partition(".")
        if not dot:
            requests.append(_request(call, ids, 0.0))
            continue
        entry = groups.get(group)
        if entry is None:
            entry = {"t": call.t_s, "type": "subagent", "agent_id": group, "status": "completed", "requests": []}
            groups[group] = entry
            requests.append(entry)
        entry["requests"].append(_request(call, ids, entry["t"]))
        entry["duration_ms"] = round((call.t_s + (call.api_s or 0.0) - entry["t"]) * 1000)
    return {
        "id": session.id,
        "models": sorted({call.model for call in session.calls if call.model is not None}),
        "block_size": session.block_tokens,
        "hash_id_scope": "local",
        "tool_tokens": 0,
        "system_tokens": 0,
        "requests": requests,
    }


def _request(call: Call, ids: list[int], base_s: float) -> dict[str, Any]:
    row: dict[str, Any] = {"t": round(call.t_s - base_s, TIME_DIGITS), "type": "n"}
    if call.model is not None:
        row["model"] = call.model
    row |= {"in": call.input_tokens, "out": call.output_tokens, "hash_ids": ids, "stop": call.stop or ""}
    if call.api_s is not None:
        row["api_time"] = call.api_s
    return row
