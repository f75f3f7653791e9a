"""Import of Mooncake traces: the timestamp form and the multi-turn form.

Timestamp form: {timestamp (ms), input_length, output_length, hash_ids}, independent requests with global block
ids and no sessions. It becomes one session, since its requests share blocks and name no conversations; every
call is released at its timestamp.

Multi-turn form (aiperf, Dynamo): rows with `session_id`; later rows of a session carry `delay` (ms after the end
of the one before) or a timestamp, whose difference to the one before is taken as that delay. With `hash_ids` a
row holds the whole prompt; without, it adds to the conversation, as aiperf plays it. Sessions may be interleaved,
so the rows of the file are held at 8 bytes per block id.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from harness.trace.importers.common import (
    BlockId,
    Ids,
    file_id,
    follow,
    full_blocks,
    hashed_call,
    refused,
    reusing_call,
    typed_rows,
)
from harness.trace.importers.options import ImportOptions
from harness.trace.model import Call, Session
from harness.trace.prefixes import PrefixIndex
from harness.trace.rows import Count, Name, Seconds

BLOCK_TOKENS = 512
FIELDS = {"timestamp", "input_length", "output_length", "hash_ids"}
LENGTH_NAMES = {"input_length", "input_tokens"}


class MooncakeRow(Struct):
    """A request of the timestamp form; further keys are ignored."""

    timestamp: Seconds
    input_length: Count
    output_length: Count
    hash_ids: list[BlockId]


class TurnRow(Struct):
    """A turn of the multi-turn form, with the other names that Dynamo accepts for its fields."""

    session_id: Name | None = None
    input_length: Count | None = None
    input_tokens: Count | None = None
    output_length: Count | None = None
    output_tokens: Count | None = None
    hash_ids: list[BlockId] | None = None
    timestamp: Seconds | None = None
    created_time: Seconds | None = None
    delay: Seconds | None = None
    delay_ms: Seconds | None = None


@dataclass(slots=True)
class _Turn:
    input_tokens: int
    output_tokens: int
    ids: Ids | None
    timestamp_s: float | None
    delay_s: float | None


def is_mooncake(first_row: dict[str, Any]) -> bool:
    """Whether a file's first row is one of the timestamp form."""
    return first_row.keys() >= FIELDS and "session_id" not in first_row and "chat_id" not in first_row


def is_multi_turn(first_row: dict[str, Any]) -> bool:
    """Whether a file's first row is one of the multi-turn form."""
    return bool(LENGTH_NAMES & first_row.keys()) and not {"request_id", "chat_id"} & first_row.keys()


def read_mooncake(path: Path, check_blocks: bool, options: ImportOptions) -> Iterator[Session]:
    """The one session of a trace in timestamp form; `check_blocks`: refuse ids that do not fit the input tokens."""
    block = options.block(BLOCK_TOKENS)
    prefixes = PrefixIndex()
    calls: list[Call] = []
    for number, row in typed_rows(path, MooncakeRow):
        t_s = row.timestamp / 1000
        if calls and t_s < calls[-1].t_s:
            raise refused(path, number, "timestamp", f"{row.timestamp} ms is before the row above it")
        ids = full_blocks(path, number, row.hash_ids, row.input_length, block, check_blocks)
        call = hashed_call(prefixes, len(calls), ids, t_s, row.input_length, row.output_length)
        call.gap_s = call.t_s
        calls.append(call)
    yield Session(file_id(path), block, calls, "global", start_s=0.0)


def read_multi_turn(path: Path, check_blocks: bool, options: ImportOptions) -> Iterator[Session]:
    """Sessions of a trace in multi-turn form, in the order of their first rows."""
    block = options.block(BLOCK_TOKENS)
    sessions: dict[str, list[_Turn]] = {}
    for number, row in typed_rows(path, TurnRow):
        name = row.session_id if row.session_id is not None else f"{file_id(path)}-{number}"
        sessions.setdefault(name, []).append(_turn(path, number, row, block, check_blocks, options))
    for name, turns in sessions.items():
        yield _session(name, block, turns, options)
        turns.clear()


def _turn(path: Path, number: int, row: TurnRow, block: int, check_blocks: bool, options: ImportOptions) -> _Turn:
    tokens = row.input_length if row.input_length is not None else row.input_tokens
    if tokens is None:
        what = "is missing: rows with text, messages or a payload instead of a length are not read"
        raise refused(path, number, "input_length", what, "give the lengths, or use the dag_jsonl form for text")
    output = row.output_length if row.output_length is not None else row.output_tokens
    if output is None:
        output = options.output_tokens
    if output is None:
        raise refused(path, number, "output_length", "is missing", "give --output-tokens for such rows")
    ids = None
    if row.hash_ids is not None and options.turns != "delta":
        ids = full_blocks(path, number, row.hash_ids, tokens, block, check_blocks)
    stamp = row.timestamp if row.timestamp is not None else row.created_time
    delay = row.delay if row.delay is not None else row.delay_ms
    return _Turn(tokens, output, ids, _seconds(stamp), _seconds(delay))


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _session(name: str, block: int, turns: list[_Turn], options: ImportOptions) -> Session:
    prefixes = PrefixIndex()
    calls: list[Call] = []
    start_s = turns[0].timestamp_s
    context = 0
    for turn in turns:
        previous = calls[-1] if calls else None
        gap_s, t_s = _times(turn, previous, start_s)
        if turn.ids is not None:
            call = hashed_call(prefixes, len(calls), turn.ids, t_s, turn.input_tokens, turn.output_tokens)
        else:
            delta = options.turns != "full"
            tokens = turn.input_tokens + (context if delta else 0)
            reuse = 1.0 if delta else (options.reuse or 0.0)
            call = reusing_call(previous, len(calls), reuse, block, t_s, tokens, turn.output_tokens)
            prefixes.add(np.empty(0, dtype=np.int64))
        context = call.input_tokens + call.output_tokens
        follow(call, previous, gap_s)
        calls.append(call)
    return Session(name, block, calls, "global", start_s=start_s)


def _times(turn: _Turn, previous: Call | None, start_s: float | None) -> tuple[float, float]:
    """(wait after the previous turn, recorded start) of a turn in s; no duration is known, so turns take no time."""
    if previous is None:
        return (turn.delay_s or 0.0, turn.delay_s or 0.0)
    if turn.delay_s is not None:
        return turn.delay_s, previous.t_s + turn.delay_s
    if turn.timestamp_s is not None and start_s is not None:
        t_s = max(turn.timestamp_s - start_s, previous.t_s)
        return t_s - previous.t_s, t_s
    return 0.0, previous.t_s
