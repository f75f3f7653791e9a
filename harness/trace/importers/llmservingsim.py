"""Import of LLMServingSim workloads: flat requests and agentic sessions, which may stand in one file.

Flat: {input_toks, output_toks, arrival_time_ns, input_tok_ids?}: independent requests; together they become one
session, each released at its arrival. Agentic: {session_id, arrival_time_ns, sub_requests: [{input_toks, output_toks,
tool_duration_ns, input_tok_ids?}]}: a chain, each call `tool_duration_ns` after the end of the one before. Token ids,
where given, are hashed in blocks of 16 tokens. Without them flat requests share nothing, and a call of a session
repeats the whole prompt before it (option `reuse`: a share of it).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct

from harness.trace import source
from harness.trace.hashes import block_ids
from harness.trace.importers.common import (
    TEXT_ROW_LIMIT_BYTES,
    Ids,
    file_id,
    follow,
    hashed_call,
    refused,
    reusing_call,
    typed_row,
)
from harness.trace.importers.options import ImportOptions
from harness.trace.model import Call, Session
from harness.trace.prefixes import PrefixIndex
from harness.trace.rows import Count, Name

BLOCK_TOKENS = 16
NS_PER_S = 1_000_000_000
TOKEN_ID_BYTES = 8
Nanoseconds = Annotated[float, Meta(ge=0, le=1e21)]
TokenId = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class CallRow(Struct):
    """A flat request, or a call of a session; further keys are ignored."""

    input_toks: Count
    output_toks: Count
    arrival_time_ns: Nanoseconds | None = None
    tool_duration_ns: Nanoseconds = 0.0
    input_tok_ids: list[TokenId] | None = None


class SessionRow(Struct):
    """An agentic session."""

    session_id: Name
    arrival_time_ns: Nanoseconds
    sub_requests: list[CallRow]


@dataclass(slots=True)
class _Flat:
    arrival_s: float
    input_tokens: int
    output_tokens: int
    ids: Ids


def is_llmservingsim(first_row: dict[str, Any]) -> bool:
    """Whether a file's first row is one of either form."""
    return "arrival_time_ns" in first_row and bool({"input_toks", "sub_requests"} & first_row.keys())


def read_llmservingsim(path: Path, check_blocks: bool, options: ImportOptions) -> Iterator[Session]:
    """Agentic sessions as they come, then the flat requests as one session. `check_blocks` changes nothing here."""
    block = options.block(BLOCK_TOKENS)
    flat: list[_Flat] = []
    seen: set[str] = set()
    for number, line in source.read_lines(path, TEXT_ROW_LIMIT_BYTES):
        if b'"sub_requests"' in line:
            row = typed_row(path, number, line, SessionRow)
            if row.session_id in seen:
                raise refused(path, number, "session_id", f"{row.session_id!r} stands twice in the file")
            seen.add(row.session_id)
            yield _session(path, number, row, block, 1.0 if options.reuse is None else options.reuse)
            continue
        call = typed_row(path, number, line, CallRow)
        if call.arrival_time_ns is None:
            raise refused(path, number, "arrival_time_ns", "is missing")
        ids = _ids(path, number, call, block)
        if ids is None:
            ids = np.empty(0, dtype=np.int64)
        flat.append(_Flat(call.arrival_time_ns / NS_PER_S, call.input_toks, call.output_toks, ids))
    if flat:
        yield _flat_session(file_id(path), flat, block)


def _ids(path: Path, number: int, call: CallRow, block: int) -> Ids | None:
    if call.input_tok_ids is None:
        return None
    if len(call.input_tok_ids) != call.input_toks:
        raise refused(path, number, "input_tok_ids", f"{len(call.input_tok_ids)} ids for {call.input_toks} tokens")
    return block_ids(np.array(call.input_tok_ids, dtype="<i8").tobytes(), block * TOKEN_ID_BYTES)


def _session(path: Path, number: int, row: SessionRow, block: int, reuse: float) -> Session:
    prefixes = PrefixIndex()
    calls: list[Call] = []
    gap_s = 0.0
    for sub in row.sub_requests:
        previous = calls[-1] if calls else None
        t_s = gap_s if previous is None else previous.t_s + gap_s
        ids = _ids(path, number, sub, block)
        if ids is None:
            prefixes.add(np.empty(0, dtype=np.int64))
            call = reusing_call(previous, len(calls), reuse, block, t_s, sub.input_toks, sub.output_toks)
        else:
            call = hashed_call(prefixes, len(calls), ids, t_s, sub.input_toks, sub.output_toks)
        follow(call, previous, gap_s)
        calls.append(call)
        gap_s = sub.tool_duration_ns / NS_PER_S
    return Session(row.session_id, block, calls, start_s=row.arrival_time_ns / NS_PER_S)


def _flat_session(name: str, flat: list[_Flat], block: int) -> Session:
    flat.sort(key=lambda request: request.arrival_s)
    prefixes = PrefixIndex()
    calls = []
    for index, request in enumerate(flat):
        call = hashed_call(prefixes, index, request.ids, request.arrival_s, request.input_tokens, request.output_tokens)
        call.new_blocks = call.input_tokens // block - call.keep_blocks
        call.gap_s = call.t_s
        calls.append(call)
    return Session(name, block, calls, start_s=0.0)
