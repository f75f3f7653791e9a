"""One run in a process of its own: `python -m harness.sweep.worker FOLDER [PARENT]`, told how by FOLDER/point.yaml.

Says how far it is on standard output, one JSON object a line: {"done": calls, "share": of the work}.
Ends with the exit codes of the contract; its error line goes to standard error, and as {"error": line} to standard
output. With the process id of its parent it ends when that one does.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from harness import runner
from harness.errors import HarnessError
from harness.experiment import load_experiment
from harness.progress import share_done

POINT: Final = "point.yaml"
_EVERY_S: Final = 0.5
_PR_SET_PDEATHSIG: Final = 1


class Reporter:
    """Takes a run's progress as harness.progress.Progress does and passes it on as lines."""

    def __init__(self, label: str, total: int, until_s: float | None) -> None:
        self._total, self._until_s = total, until_s
        self._done = 0
        self._virtual_ns = 0
        self._said_s = 0.0

    def update(self, done: int, virtual_ns: int) -> None:
        """See Progress."""
        self._done, self._virtual_ns = done, virtual_ns
        now = time.monotonic()
        if now - self._said_s >= _EVERY_S:
            self._said_s = now
            self._say()

    def close(self, note: str = "") -> None:
        """See Progress."""
        self._say()

    def cancel(self) -> None:
        """See Progress."""

    def _say(self) -> None:
        share = share_done(self._done, self._total, self._virtual_ns, self._until_s)
        _tell({"done": self._done, "share": share})


def _tell(what: dict[str, Any]) -> None:
    """To the parent, as long as there is one."""
    with suppress(OSError):
        print(json.dumps(what), flush=True)


def end_with_parent(pid: int) -> None:
    """Be told to end, with what is done so far, when the parent dies without a word."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != pid:
        raise KeyboardInterrupt


def work(folder: Path) -> int:
    """Run the point of a folder; returns the exit code."""
    lock = (folder / POINT).open("rb")  # held until this process ends: nobody clears the folder under it
    fcntl.flock(lock, fcntl.LOCK_SH)
    try:
        experiment = load_experiment(folder / POINT)
        runner.run_experiment(experiment, folder, label=folder.name, make_progress=Reporter)
    except HarnessError as error:
        _tell({"error": str(error)})  # the log may be on the disk that is full
        with suppress(OSError):
            print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    runner.hear_signals()
    # the terminal's Ctrl-C reaches the whole group; the parent decides and says so by SIGTERM
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if len(sys.argv) > 2:
        end_with_parent(int(sys.argv[2]))
    sys.exit(work(Path(sys.argv[1])))
