"""Import of Bailian traces (Alibaba, qwen-bailian-usagetraces): chats linked by parent_chat_id, 16-token blocks.

Rows {chat_id, parent_chat_id (-1: none), timestamp (s), input_length, output_length, type, turn, hash_ids}. Chats that
hang together become a session; a chat depends on its parent and starts as long after it as recorded (no durations are
known, so this is the time from start to start). The second and later children of one chat begin chains of their own.
Sessions are interleaved, so the rows of the file are held at 8 bytes per block id.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import Struct

from harness.trace.chains import MAIN
from harness.trace.importers.common import BlockId, Ids, follow, full_blocks, hashed_call, refused, typed_rows
from harness.trace.importers.options import ImportOptions
from harness.trace.model import Call, Session
from harness.trace.prefixes import PrefixIndex
from harness.trace.rows import Count, Seconds

BLOCK_TOKENS = 16
NO_PARENT = -1


class ChatRow(Struct):
    """A request; further keys are ignored."""

    chat_id: int
    timestamp: Seconds
    input_length: Count
    output_length: Count
    parent_chat_id: int = NO_PARENT
    turn: int = 1
    type: str | None = None
    hash_ids: list[BlockId] = []


@dataclass(slots=True)
class _Chat:
    row: ChatRow
    ids: Ids
    root: int


def is_bailian(first_row: dict[str, Any]) -> bool:
    """Whether a file's first row is one of this format."""
    return first_row.keys() >= {"chat_id", "timestamp", "input_length"}


def read_bailian(path: Path, check_blocks: bool, options: ImportOptions) -> Iterator[Session]:
    """Sessions of a trace, in the order of their first chats; a chat whose parent is not in the file begins one."""
    block = options.block(BLOCK_TOKENS)
    chats: dict[int, _Chat] = {}
    groups: dict[int, list[_Chat]] = {}
    for number, row in typed_rows(path, ChatRow):
        if row.chat_id in chats:
            raise refused(path, number, "chat_id", f"{row.chat_id} stands twice in the file")
        ids = full_blocks(path, number, row.hash_ids, row.input_length, block, check_blocks)
        row.hash_ids = []
        parent = chats.get(row.parent_chat_id)
        if parent is not None and parent.row.timestamp > row.timestamp:
            raise refused(path, number, "timestamp", f"{row.timestamp} s is before that of the chat's parent")
        chat = _Chat(row, ids, row.chat_id if parent is None else parent.root)
        chats[row.chat_id] = chat
        groups.setdefault(chat.root, []).append(chat)
    chats.clear()
    for root, members in groups.items():
        yield _session(root, block, members)
        members.clear()


def _session(root: int, block: int, chats: list[_Chat]) -> Session:
    chats.sort(key=lambda chat: (chat.row.timestamp, chat.row.turn))
    start_s = chats[0].row.timestamp
    prefixes = PrefixIndex()
    calls: list[Call] = []
    by_chat: dict[int, Call] = {}
    continued: set[int] = set()
    chains = 0
    for chat in chats:
        row = chat.row
        t_s = row.timestamp - start_s
        call = hashed_call(prefixes, len(calls), chat.ids, t_s, row.input_length, row.output_length)
        parent = by_chat.get(row.parent_chat_id)
        if parent is not None and parent.index not in continued:
            continued.add(parent.index)
            call.chain = parent.chain
        elif parent is not None:
            chains += 1
            call.chain = f"f{chains}"
        else:
            call.chain = MAIN
        call.model = row.type
        follow(call, parent, call.t_s - (parent.t_s if parent is not None else 0.0))
        by_chat[row.chat_id] = call
        calls.append(call)
    return Session(str(root), block, calls, "global", start_s=start_s)
