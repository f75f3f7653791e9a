"""Export to agentic Mooncake traces, version 2: the calls of a session with typed edges between them.

A session becomes a play, its chains become the `session_id`s. Every edge of a call has the call's gap as its delay,
which is the same rule: the call starts that long after the latest of the events. Shared prefixes of sessions are lost,
since the format's block ids are local to a play. `stop` is a key that other readers of the format ignore.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from harness.errors import InputError
from harness.trace.exporters.ids import BlockNumbers
from harness.trace.importers.agentic_mooncake import SCHEMA, VERSION
from harness.trace.model import Call, Session
from harness.trace.write import write_rows

SOURCE_FORMAT = "llm-cluster-harness"
MS_DIGITS = 6


def export_agentic_mooncake(path: str | Path, sessions: Iterable[Session], digest: str = "") -> int:
    """Write sessions as plays, gzip where the name ends in .gz; returns the number of calls.

    `digest` identifies the source in the header. Sessions must have one block size, since the header has one.
    """
    calls = 0

    def rows() -> Iterator[bytes]:
        nonlocal calls
        block: int | None = None
        for session in sessions:
            if block is None:
                block = session.block_tokens
                yield msgspec.json.encode(_header(block, digest)) + b"\n"
            elif block != session.block_tokens:
                what = f"session {session.id} has blocks of {session.block_tokens} tokens, those before it of {block}"
                raise InputError(str(path), what, "write one file for each block size")
            calls += len(session.calls)
            for row in play_rows(session):
                yield msgspec.json.encode(row) + b"\n"

    write_rows(path, rows())
    return calls


def _header(block: int, digest: str) -> dict[str, Any]:
    source = {"format": SOURCE_FORMAT, "digest": digest}
    return {"schema": SCHEMA, "version": VERSION, "block_size": block, "hash_id_scope": "local", "source": source}


def play_rows(session: Session) -> Iterator[dict[str, Any]]:
    """The rows of one session."""
    begun: set[str] = set()
    for call, ids in zip(session.calls, BlockNumbers().prompts(session), strict=True):
        released = not call.deps and call.on_start is None
        row: dict[str, Any] = {
            "request_id": _request_id(session, call.index),
            "play_id": session.id,
            "session_id": f"{session.id}/{call.chain}",
            "model": call.model or "",
            "input_length": call.input_tokens,
            "output_length": call.output_tokens,
            "hash_ids": ids,
            "not_before_ms": _ms(call.gap_s if released else call.t_s),
        }
        if call.api_s is not None:
            row["recorded_api_time_ms"] = _ms(call.api_s)
        edges = [_edge(session, call, dep, "completion", begun) for dep in call.deps]
        if call.on_start is not None:
            edges.append(_edge(session, call, call.on_start, "dispatch", begun))
        if edges:
            row["dependencies"] = edges
        if call.stop is not None:
            row["stop"] = call.stop
        begun.add(call.chain)
        yield row


def _edge(session: Session, call: Call, earlier: int, trigger: str, begun: set[str]) -> dict[str, Any]:
    relation = "join" if call.chain in begun else "spawn"
    if session.calls[earlier].chain == call.chain:
        relation = "sequence"
    return {
        "request_id": _request_id(session, earlier),
        "trigger": trigger,
        "delay_ms": _ms(call.gap_s),
        "relation": relation,
    }


def _request_id(session: Session, index: int) -> str:
    return f"{session.id}/{index:06d}"


def _ms(seconds: float) -> float:
    value = round(seconds * 1000, MS_DIGITS)
    return int(value) if value == int(value) else value
