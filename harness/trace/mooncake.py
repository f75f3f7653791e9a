"""Import of Mooncake traces in their timestamp form: independent requests with global block ids, no sessions.

Each row is {timestamp (ms), input_length, output_length, hash_ids}; ids are chained prefix hashes of
512-token blocks, the last of which may be partial. The trace becomes one session, since its requests share
blocks and name no conversations; every call is released at its timestamp.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct

from harness.errors import InputError
from harness.trace import source
from harness.trace.model import Call, Session
from harness.trace.prefixes import PrefixIndex
from harness.trace.rows import BLOCKS_REMEDY, Count, Problem, Seconds, decode_object, to_row

BLOCK_TOKENS = 512
FIELDS = {"timestamp", "input_length", "output_length", "hash_ids"}
REMEDY = "check that the file is an unmodified Mooncake trace"


class MooncakeRow(Struct):
    """A request; further keys are ignored."""

    timestamp: Seconds
    input_length: Count
    output_length: Count
    hash_ids: list[Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]]


def is_mooncake(first_row: dict[str, Any]) -> bool:
    """Whether a file's first row is one of this form."""
    return first_row.keys() >= FIELDS and "session_id" not in first_row


def read_mooncake(path: Path, check_blocks: bool) -> Iterator[Session]:
    """The one session of a Mooncake trace; `check_blocks`: refuse ids that do not fit the input tokens."""
    prefixes = PrefixIndex()
    calls: list[Call] = []
    for number, line in source.read_lines(path):
        value = decode_object(line)
        row = value if isinstance(value, Problem) else to_row(value, MooncakeRow)
        if isinstance(row, (Problem, list)):
            problem = row if isinstance(row, Problem) else row[0]
            raise _refused(path, number, problem.field, problem.what, problem.remedy)
        t_s = row.timestamp / 1000
        if calls and t_s < calls[-1].t_s:
            raise _refused(path, number, "timestamp", f"{row.timestamp} ms is before the row above it", REMEDY)
        full, partial = divmod(row.input_length, BLOCK_TOKENS)
        if check_blocks and len(row.hash_ids) not in (full, full + (partial > 0)):
            what = f"{row.input_length} tokens do not fit {len(row.hash_ids)} block ids of {BLOCK_TOKENS} tokens"
            raise _refused(path, number, "input_length", what, BLOCKS_REMEDY)
        ids = np.array(row.hash_ids[:full], dtype=np.int64)
        ref, keep = prefixes.add(ids)
        calls.append(
            Call(
                index=len(calls),
                t_s=t_s,
                api_s=None,
                chain="main",
                input_tokens=row.input_length,
                output_tokens=row.output_length,
                ref=ref,
                keep_blocks=keep,
                new_blocks=len(ids) - keep,
                gap_s=t_s,
            )
        )
    yield Session(path.name.split(".")[0], BLOCK_TOKENS, calls, "global", start_s=0.0)


def _refused(path: Path, number: int, field: str, what: str, remedy: str) -> InputError:
    return InputError(f"{path}: line {number}" + (f": field {field}" if field else ""), what, remedy)
