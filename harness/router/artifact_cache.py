"""The harness's cache folder: entries appear whole or not at all, and two processes never make the same one
twice.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Progress = Callable[[str], None]
"""Takes one line of plain text about what is going on; called now and then, never per byte."""


def silent(_line: str) -> None:
    """The progress of a caller that does not want to hear any."""


def cache_root() -> Path:
    """`HARNESS_CACHE`, else `harness` in the XDG cache folder (`XDG_CACHE_HOME`, by default ~/.cache)."""
    if own := os.environ.get("HARNESS_CACHE"):
        return Path(own).expanduser().absolute()
    # The XDG specification: a relative XDG_CACHE_HOME is invalid and to be ignored.
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache") / "harness"


_LOCK_POLL_S = 0.2
_TELL_AGAIN_S = 15.0


@contextmanager
def locked(path: Path, progress: Progress = silent) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`; the kernel drops it with the process, however that ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        began, told = time.monotonic(), 0.0
        while True:  # not a blocking lock: that would not hear Ctrl-C
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = time.monotonic() - began
                if not told or waited - told >= _TELL_AGAIN_S:
                    told = max(waited, 1e-9)
                    progress(f"another process is making this already; waiting for it ({waited:.0f} s)")
                time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(handle)


def make_entry(
    final: Path, fill: Callable[[Path], None], valid: Callable[[Path], bool], progress: Progress = silent
) -> Path:
    """Return the folder `final`, made by `fill` in a temporary sibling and renamed into place if it is not
    there yet.

    An entry that is there but not `valid` (damaged, half deleted) is made anew. Whatever interrupts `fill`,
    no half-filled `final` is ever seen; what a killed process left behind is removed by the next one.
    """
    with locked(final.with_name(f"{final.name}.lock"), progress):
        if final.exists():
            if valid(final):
                return final
            shutil.rmtree(final)
        prefix = f".{final.name}."
        for stale in final.parent.glob(f"{prefix}*"):
            # We hold the lock of this entry, so nobody is at work in there any more.
            shutil.rmtree(stale, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=final.parent))
        try:
            temporary.chmod(0o755)
            fill(temporary)
            temporary.rename(final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return final
