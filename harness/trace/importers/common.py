"""What importers share: typed rows with their faults named, prompts out of block ids or out of a reuse share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from harness.errors import InputError
from harness.trace import source
from harness.trace.model import Call
from harness.trace.prefixes import PrefixIndex
from harness.trace.rows import BLOCKS_REMEDY, Problem, decode_object, to_row

Ids = NDArray[np.int64]
BlockId = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Row = TypeVar("Row", bound=Struct)
TEXT_ROW_LIMIT_BYTES = 64 << 20
"""Longest row of a format that carries prompts as text or token ids."""
REMEDY = "check that the file is an unmodified trace of this format (docs/trace-import.md)"
TIME_DIGITS = 9


def refused(path: Path, number: int, field: str, what: str, remedy: str = REMEDY) -> InputError:
    """The error for one field of one line."""
    where = f"{path}: line {number}" if number else str(path)
    return InputError(where + (f": field {field}" if field else ""), what, remedy)


def refused_problem(path: Path, number: int, problem: Problem) -> InputError:
    """The same for a fault that the row rules found."""
    return refused(path, number, problem.field, problem.what, REMEDY if problem.field else problem.remedy)


def typed_rows(path: Path, kind: type[Row], limit_bytes: int = source.ROW_LIMIT_BYTES) -> Iterator[tuple[int, Row]]:
    """(line number, row) of every line; keys that the type does not have are ignored."""
    for number, line in source.read_lines(path, limit_bytes):
        yield number, typed_row(path, number, line, kind)


def typed_row(path: Path, number: int, line: bytes, kind: type[Row]) -> Row:
    """One line as a row."""
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    value = decode_object(line)
    row = value if isinstance(value, Problem) else to_row(value, kind)
    if isinstance(row, Problem):
        raise refused_problem(path, number, row)
    if isinstance(row, list):
        raise refused_problem(path, number, row[0])
    return row


def file_id(path: Path) -> str:
    """A session id for a file that is one session and does not name it."""
    return path.name.split(".")[0] or path.name


def full_blocks(
    path: Path, number: int, ids: Sequence[int], input_tokens: int, block_tokens: int, check_blocks: bool
) -> Ids:
    """The ids of the full blocks of a prompt; an id for a last, partial block is dropped.

    `check_blocks`: refuse ids that do not fit the input tokens.
    """
    full, partial = divmod(input_tokens, block_tokens)
    if check_blocks and len(ids) not in (full, full + (partial > 0)):
        what = f"{input_tokens} tokens do not fit {len(ids)} block ids of {block_tokens} tokens"
        raise refused(path, number, "input_length", what, f"give --block-tokens, or: {BLOCKS_REMEDY}")
    return np.array(ids[:full], dtype=np.int64)


def hashed_call(prefixes: PrefixIndex, index: int, ids: Ids, t_s: float, input_tokens: int, output_tokens: int) -> Call:
    """The next call of a session, its prompt given by its block ids; chain and dependencies are left to set."""
    ref, keep = prefixes.add(ids)
    return Call(
        index=index,
        t_s=round(t_s, TIME_DIGITS),
        api_s=None,
        chain="main",
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        ref=ref,
        keep_blocks=keep,
        new_blocks=len(ids) - keep,
    )


def reusing_call(
    previous: Call | None,
    index: int,
    reuse: float,
    block_tokens: int,
    t_s: float,
    input_tokens: int,
    output_tokens: int,
) -> Call:
    """The next call of a session whose source has no block ids: it repeats the first `reuse` of the previous prompt."""
    blocks = input_tokens // block_tokens
    keep = min(int(previous.blocks * reuse), blocks) if previous is not None else 0
    return Call(
        index=index,
        t_s=round(t_s, TIME_DIGITS),
        api_s=None,
        chain="main",
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        ref=previous.index if previous is not None and keep else -1,
        keep_blocks=keep,
        new_blocks=blocks - keep,
    )


def follow(call: Call, previous: Call | None, gap_s: float) -> None:
    """Release the call `gap_s` after the end of the previous one, or after the session's start where there is none."""
    call.deps = () if previous is None else (previous.index,)
    call.gap_s = round(max(gap_s, 0.0), TIME_DIGITS)
