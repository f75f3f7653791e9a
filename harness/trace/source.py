"""Trace files as bytes: plain or gzip, line by line with bounded memory, every fault an InputError with file
and line.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from io import BufferedIOBase, BufferedReader, RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import InputError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

GZIP_MAGIC = b"\x1f\x8b"
ROW_LIMIT_BYTES = 4 << 20
"""Longest row of a row-per-call file; a real one has a few hundred bytes, so a longer line is another kind of
file.
"""
DOCUMENT_LIMIT_BYTES = 512 << 20
"""Largest document (unpacked) that one session may be in the formats that need a session in memory at once.
"""
PEEK_BYTES = 1 << 16
BUFFER_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Limits:
    """What a file may do to this process. `ratio`: bytes unpacked per packed byte, looked at once `ratio_from_bytes`
    are unpacked (real traces reach 53, gzip 1,030); `document_bytes`: the longest document.
    """

    ratio: float = 250.0
    ratio_from_bytes: int = 64 << 20
    document_bytes: int = DOCUMENT_LIMIT_BYTES


LIMITS: ContextVar[Limits] = ContextVar("LIMITS", default=Limits())  # noqa: B039 - Limits cannot change


class _Unpacked(RawIOBase):
    """The bytes of a gzip file; ends in an InputError where they are too many for its size."""

    def __init__(self, path: Path) -> None:
        self._path, self._stream, self._limits = path, gzip.open(path, "rb"), LIMITS.get()  # noqa: SIM115 - closed in close()
        self._packed, self._unpacked = os.path.getsize(path), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        data = self._stream.read1(len(view))
        view[: len(data)] = data
        self._unpacked += len(data)
        limits = self._limits
        if self._unpacked > max(limits.ratio_from_bytes, limits.ratio * self._packed):
            what = f"unpacks to more than {limits.ratio:g} times its size ({self._packed} bytes)"
            raise InputError(str(self._path), what, "this is not a trace; if it is one, raise --max-unpack-ratio")
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()


def open_trace(path: Path) -> BufferedIOBase:
    """Open a trace for reading, unpacking gzip whatever the file's name says."""
    try:
        with open(path, "rb") as raw:
            packed = raw.read(2) == GZIP_MAGIC
        return BufferedReader(_Unpacked(path), BUFFER_BYTES) if packed else open(path, "rb")
    except FileNotFoundError:
        raise InputError(str(path), "no such trace file", "give the path of an existing trace") from None
    except IsADirectoryError:
        raise InputError(str(path), "is a folder, not a trace file", "give a file of it") from None
    except OSError as error:
        raise InputError(str(path), f"cannot be read ({error.strerror})", "check the path and its rights") from None


def _broken(path: Path, line: int, error: Exception) -> InputError:
    where = f"{path}: line {line}" if line else str(path)
    if isinstance(error, EOFError):
        return InputError(where, "the gzip data ends in the middle", "the file is truncated: copy it again")
    if isinstance(error, (gzip.BadGzipFile, zlib.error)):
        return InputError(where, f"the gzip data is damaged ({error})", "copy the file again")
    return InputError(where, f"cannot be read ({error})", "check the file and the disk")


def peek(path: Path, size: int = PEEK_BYTES) -> bytes:
    """The first bytes (unpacked), to tell the format by."""
    head = b""
    with open_trace(path) as stream:
        try:
            while len(head) < size and (more := stream.read1(size - len(head))):
                head += more
        except (EOFError, OSError, zlib.error) as error:
            if not head:
                raise _broken(path, 0, error) from None
    return head


def read_document(path: Path, limit_bytes: int | None = None) -> bytes:
    """A whole file (unpacked), at most `limit_bytes` long (default: as LIMITS says)."""
    limit_bytes = LIMITS.get().document_bytes if limit_bytes is None else limit_bytes
    with open_trace(path) as stream:
        try:
            data = stream.read(limit_bytes + 1)
        except (EOFError, OSError, zlib.error) as error:
            raise _broken(path, 0, error) from None
    if len(data) > limit_bytes:
        raise _too_long(str(path), "the document", limit_bytes)
    return data


def read_lines(path: Path, limit_bytes: int = ROW_LIMIT_BYTES) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, line without its end) of every line that is not blank; memory is one line."""
    number = 0
    with open_trace(path) as stream:
        while True:
            try:
                line = stream.readline(limit_bytes + 1)
            except (EOFError, OSError, zlib.error) as error:
                raise _broken(path, number + 1, error) from None
            if not line:
                return
            number += 1
            if len(line) > limit_bytes:
                raise _too_long(f"{path}: line {number}", "the line", limit_bytes)
            line = line.strip()
            if line:
                yield number, line


def _too_long(where: str, what: str, limit_bytes: int) -> InputError:
    return InputError(
        where,
        f"{what} is longer than {limit_bytes >> 20} MiB",
        "this is not a trace; if it is one, split it by session (of documents: or raise --max-document-mib)",
    )
