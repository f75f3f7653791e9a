"""Write sessions in the project's trace format; equal sessions give equal bytes."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from harness.errors import InputError
from harness.folders import whole
from harness.trace.model import Call, Session

VERSION = 1
GZIP_LEVEL = 9


def write_trace(path: str | Path, sessions: Iterable[Session], src: dict[str, Any] | None = None) -> int:
    """Write sessions one at a time, gzip where the name ends in .gz; returns the number of calls.

    The gzip header carries neither time nor name. The file appears under its name only when it is complete.
    `src` says where the trace is from (format, digest, licence) and goes into every header.
    """
    calls = 0

    def rows() -> Iterator[bytes]:
        nonlocal calls
        for session in sessions:
            calls += len(session.calls)
            yield from session_rows(session, src)

    write_rows(path, rows())
    return calls


def write_rows(path: str | Path, rows: Iterable[bytes]) -> None:
    """Write lines, gzip where the name ends in .gz."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise InputError(str(path), "is not a regular file", "give the name of a file to write")
    try:
        with whole(path) as part, open(part, "wb") as raw, _packed(raw, path.name.endswith(".gz")) as out:
            for row in rows:
                out.write(row)
    except OSError as error:
        what = f"cannot be written ({error.strerror})"
        raise InputError(str(path), what, "check the folder, its rights and the space left") from None


def _packed(raw: BinaryIO, packed: bool) -> BinaryIO:
    if not packed:
        return raw
    return cast(BinaryIO, gzip.GzipFile("", "wb", compresslevel=GZIP_LEVEL, fileobj=raw, mtime=0))


def session_rows(session: Session, src: dict[str, Any] | None = None) -> Iterator[bytes]:
    """The lines of one session: header, then calls."""
    models = sorted({call.model for call in session.calls if call.model is not None})
    header: dict[str, Any] = {
        "v": VERSION,
        "session": session.id,
        "block": session.block_tokens,
        "scope": session.scope,
    }
    header["start"] = _number(session.start_s)
    header["prefix"] = [{"key": p.key, "blocks": p.blocks} for p in session.prefix]
    header["models"] = models
    if src is not None:
        header["src"] = src
    encode = msgspec.json.Encoder().encode
    yield encode(header) + b"\n"
    number = {name: index for index, name in enumerate(models)}
    for call in session.calls:
        yield encode(_call_row(call, number)) + b"\n"


def _call_row(call: Call, models: dict[str, int]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "i": call.index, "t": _number(call.t_s), "api": _number(call.api_s), "chain": call.chain,
        "in": call.input_tokens, "out": call.output_tokens,
        "ref": call.ref, "keep": call.keep_blocks, "new": call.new_blocks,
    }  # fmt: skip
    if call.prefix >= 0:
        row["pre"] = call.prefix
    row["deps"] = call.deps
    if call.on_start is not None:
        row["on"] = call.on_start
    row["gap"] = _number(call.gap_s)
    if call.model is not None:
        row["m"] = models[call.model]
    if call.stop is not None:
        row["stop"] = call.stop
    return row


def _number(value: float | None) -> float | int | None:
    """Whole numbers without the .0: shorter, and the same text from every writer."""
    return int(value) if value is not None and value == int(value) else value
