"""Import of text conversations (LMCache agent traces): every prompt in full, tokenised and hashed in blocks.

Rows {timestamp (microseconds), input, output, session_id}. No duration is recorded, so calls count as over when they
begin; dependencies are derived from the order of the calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from harness.trace.chains import MAIN, split_chains
from harness.trace.dependencies import derive_dependencies
from harness.trace.importers.common import TEXT_ROW_LIMIT_BYTES, Ids, hashed_call, typed_rows
from harness.trace.importers.options import ImportOptions
from harness.trace.importers.tokens import TokenStream
from harness.trace.model import Call, Session
from harness.trace.prefixes import PrefixIndex
from harness.trace.rows import Name

US_PER_S = 1_000_000


class TextRow(Struct):
    """A call; further keys are ignored."""

    timestamp: Annotated[float, Meta(ge=0, le=1e18)]
    input: str
    output: str
    session_id: Name


@dataclass(slots=True)
class _Text:
    at_us: float
    input_tokens: int
    output_tokens: int
    ids: Ids


def is_text(first_row: dict[str, Any]) -> bool:
    """Whether a file's first row is one of this format."""
    return isinstance(first_row.get("input"), str) and first_row.keys() >= {"timestamp", "output", "session_id"}


def read_text(path: Path, check_blocks: bool, options: ImportOptions) -> Iterator[Session]:
    """Sessions of a file, in the order of their first rows; texts are not kept. `check_blocks` changes nothing here.

    A session's start is counted from the file's first row; a file with one session has none.
    """
    stream = TokenStream(options)
    sessions: dict[str, list[_Text]] = {}
    first_us: float | None = None
    for _, row in typed_rows(path, TextRow, TEXT_ROW_LIMIT_BYTES):
        prompt = stream.encode(row.input)
        text = _Text(row.timestamp, stream.count(prompt), stream.count(stream.encode(row.output)), stream.ids(prompt))
        sessions.setdefault(row.session_id, []).append(text)
        first_us = row.timestamp if first_us is None else min(first_us, row.timestamp)
    for name, texts in sessions.items():
        texts.sort(key=lambda text: text.at_us)
        start_s = (texts[0].at_us - (first_us or 0.0)) / US_PER_S if len(sessions) > 1 else None
        yield _session(name, texts, options.block(), start_s)
        texts.clear()


def _session(name: str, texts: list[_Text], block: int, start_s: float | None) -> Session:
    prefixes = PrefixIndex()
    calls: list[Call] = []
    for text in texts:
        t_s = (text.at_us - texts[0].at_us) / US_PER_S
        calls.append(hashed_call(prefixes, len(calls), text.ids, t_s, text.input_tokens, text.output_tokens))
    session = Session(name, block, calls, start_s=start_s)
    split_chains(calls, [MAIN] * len(calls))
    derive_dependencies(session)
    return session
