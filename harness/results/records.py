"""One record per call: what the whole run is remembered by. Written to calls.parquet, digested, read back.

Times are virtual, integer nanoseconds since the start of the run, None where the call never got that far.
Every column is defined in docs/metrics.md.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import polars as pl

from harness.errors import InputError
from harness.folders import whole
from harness.trace.model import Call

RECORD_SCHEMA: Final = 1
"""Version of the columns; part of the digest and of the Parquet file's metadata."""

COMPLETED: Final = "completed"
TIMED_OUT: Final = "timed_out"
FAILED: Final = "failed"
REJECTED: Final = "rejected"
IN_FLIGHT: Final = "in_flight"
OUTCOMES: Final = (COMPLETED, TIMED_OUT, FAILED, REJECTED, IN_FLIGHT)

_METADATA_KEY: Final = "harness.calls.schema"


class CallRecord(msgspec.Struct, gc=False, kw_only=True):
    """One call of the trace. Created at its arrival and filled in as it moves on; holds scalars only."""

    call_id: str
    session: str
    index: int
    chain: str
    arrival_ns: int
    input_tokens: int
    requested_output_tokens: int
    outcome: str = IN_FLIGHT
    endpoint: int | None = None
    node: int | None = None
    routed_ns: int | None = None
    admitted_ns: int | None = None
    restore_ns: int = 0
    first_token_ns: int | None = None
    finish_ns: int | None = None
    output_tokens: int = 0
    gpu_tokens: int = 0
    dram_tokens: int = 0
    shared_tokens: int = 0
    peer_tokens: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    believed_share: float | None = None
    held_share: float | None = None
    router_status: int = 0
    message: str = ""
    # Only where prefill and decode ran on different endpoints (then `endpoint` is the decode side's and `admitted_ns`
    # the prefill side's); None elsewhere.
    prefill_endpoint: int | None = None
    prefill_node: int | None = None
    prefill_done_ns: int | None = None
    transfer_start_ns: int | None = None
    transfer_end_ns: int | None = None
    decode_admitted_ns: int | None = None
    transfer_bytes: int | None = None
    transfer_tokens: int | None = None
    decode_hit_tokens: int | None = None


def arrived(session: str, call: Call, now_ns: int) -> CallRecord:
    """The record of a call that its client sends now."""
    return CallRecord(
        call_id=f"{session}/{call.index}",
        session=session,
        index=call.index,
        chain=call.chain,
        arrival_ns=now_ns,
        input_tokens=call.input_tokens,
        requested_output_tokens=call.generated_tokens,
    )


_STR: Final = ("call_id", "session", "chain", "outcome", "message")
_FLOAT: Final = ("believed_share", "held_share")
_SPLIT: Final = (
    "prefill_endpoint",
    "prefill_node",
    "prefill_done_ns",
    "transfer_start_ns",
    "transfer_end_ns",
    "decode_admitted_ns",
    "transfer_bytes",
    "transfer_tokens",
    "decode_hit_tokens",
)
"""Columns of calls whose prefill ran elsewhere. They enter the digest of such calls alone: other runs keep theirs."""
_INT: Final = tuple(f for f in CallRecord.__struct_fields__ if f not in (*_STR, *_FLOAT, *_SPLIT))

COLUMNS: Final[dict[str, Any]] = {
    name: pl.String if name in _STR else pl.Float64 if name in _FLOAT else pl.Int64
    for name in CallRecord.__struct_fields__
}
"""Columns of calls.parquet in order, with their types; all but the required ones are nullable."""


def digest(records: Iterable[CallRecord]) -> str:
    """SHA-256 (hex) over all records in call_id order: equal runs give equal digests on every platform.

    Per record: a bit mask of the present numbers, the integers as little-endian int64, the floats as
    little-endian IEEE 754 doubles (negative zero as zero), the strings as length and UTF-8. Absent numbers
    count as zero, told apart by the mask. Then, for calls with a prefill elsewhere, those columns (absent: -1).
    """
    numbers = struct.Struct(f"<I{len(_INT)}q{len(_FLOAT)}d")
    length = struct.Struct("<I")
    sha = hashlib.sha256(f"harness-calls/{RECORD_SCHEMA}\n".encode())
    for record in sorted(records, key=lambda r: r.call_id):
        mask = 0
        values: list[int | float] = []
        for bit, name in enumerate((*_INT, *_FLOAT)):
            value = getattr(record, name)
            if value is None:
                value = 0
            else:
                mask |= 1 << bit
                value += 0  # -0.0 + 0 is 0.0
            values.append(value)
        sha.update(numbers.pack(mask, *values))
        for name in _STR:
            text = getattr(record, name).encode("utf-8", "surrogatepass")
            sha.update(length.pack(len(text)) + text)
        split = [getattr(record, name) for name in _SPLIT]
        if any(value is not None for value in split):
            sha.update(b"split" + struct.pack(f"<{len(split)}q", *(-1 if v is None else v for v in split)))
    return sha.hexdigest()


def to_frame(records: Sequence[CallRecord]) -> pl.DataFrame:
    """The records as a table, one row each in the given order, columns as in COLUMNS."""
    return pl.DataFrame(
        {name: pl.Series(name, [getattr(r, name) for r in records], dtype=t) for name, t in COLUMNS.items()}
    )


def to_records(frame: pl.DataFrame) -> list[CallRecord]:
    """The inverse of `to_frame`."""
    return [CallRecord(**row) for row in frame.select(list(COLUMNS)).iter_rows(named=True)]


def write_calls(path: Path, frame: pl.DataFrame) -> None:
    """calls.parquet: the table in call_id order, so that equal runs give equal files whatever order they
    ended in.
    """
    with whole(path) as part:
        frame.sort("call_id").write_parquet(part, compression="zstd", metadata={_METADATA_KEY: str(RECORD_SCHEMA)})


def read_calls(path: Path) -> pl.DataFrame:
    """Read calls.parquet; a missing file, a foreign one or another schema version is an input error."""
    try:
        version = pl.read_parquet_metadata(path).get(_METADATA_KEY)
        frame = pl.read_parquet(path)
    except FileNotFoundError:
        raise InputError(str(path), "no such file", "give the folder that a run wrote") from None
    except (pl.exceptions.PolarsError, OSError) as error:
        raise InputError(str(path), f"not a readable Parquet file ({error})", "repeat the run") from None
    frame = frame.with_columns(pl.lit(None, pl.Int64).alias(name) for name in _SPLIT if name not in frame.columns)
    if version != str(RECORD_SCHEMA) or any(name not in frame.columns for name in COLUMNS):
        raise InputError(
            str(path),
            f"call records of schema {version or 'unknown'}, this harness reads {RECORD_SCHEMA}",
            "repeat the run, or use the version of the harness that wrote it",
        )
    return frame.select([pl.col(name).cast(t) for name, t in COLUMNS.items()])
