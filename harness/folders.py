"""Folders for results: never one that holds something already. Their files: whole or not there;
and what a full or broken disk is called.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import polars as pl

from harness.errors import ComponentError, InputError


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Around the writing of results: a disk that is full, gone or read-only is a failed component, not a traceback."""
    try:
        yield
    except (OSError, pl.exceptions.PolarsError) as error:
        file = getattr(error, "filename", None) or place
        why = getattr(error, "strerror", None) or error
        raise ComponentError(
            "results", f"{file} could not be written ({why})", "free space there or give --out"
        ) from None


@contextmanager
def whole(file: Path) -> Iterator[Path]:
    """Where to write a file so that nobody ever finds a half of it: beside it, to take its place once it is complete.

    What ends the writing, a full disk or Ctrl-C, leaves what was there before. A device or a pipe is written to itself.
    """
    target = file.resolve()  # a link stays one
    if target.exists() and not target.is_file():
        yield file
        return
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    try:
        yield part
        part.replace(target)
    except OSError as error:
        if error.filename in (None, str(part)):
            error.filename = str(file)  # the one that the user knows of
        raise
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def write_whole(file: Path, content: str | bytes) -> None:
    """`Path.write_text` in UTF-8 (or `write_bytes`), by `whole`."""
    with whole(file) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def results_folder(wanted: Path) -> Iterator[Path]:
    """`fresh_folder` for a command; what ends it before it has written a file leaves no empty folders behind."""
    existed = wanted.exists()
    folder = fresh_folder(wanted)
    try:
        yield folder
    except BaseException:
        if not any(path.is_file() for path in folder.rglob("*")):
            for path in folder.iterdir():
                shutil.rmtree(path)
            if folder != wanted or not existed:
                folder.rmdir()
        raise


def fresh_folder(wanted: Path) -> Path:
    """The folder itself, or the first free numbered one, claimed for this command: results are never overwritten."""
    if wanted.name in ("", ".."):  # `.` and the like have no name to put a number to
        wanted = wanted.resolve()
    number = 1
    while True:
        if number > 1 and not wanted.name:
            raise InputError(f"--out {wanted}", "is not empty", "give another folder")
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not any(folder.iterdir()):
                (folder / "logs").mkdir()  # of two commands at once only one succeeds
                return folder
        except FileExistsError:
            if not folder.is_dir():
                raise InputError(f"--out {folder}", "is a file", "give a folder") from None
        except OSError as error:
            raise InputError(f"--out {folder}", f"cannot be used ({error.strerror})", "give another folder") from None
        number += 1
