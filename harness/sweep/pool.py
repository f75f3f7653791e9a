"""Runs points side by side, each in a process of its own, in folders that say what is done; a killed sweep goes on."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Protocol

from harness.errors import ComponentError, InputError
from harness.experiment import resolved_yaml
from harness.folders import writing
from harness.progress import Progress
from harness.results.store import SUMMARY
from harness.runner import Interrupted
from harness.sweep.points import Point
from harness.sweep.worker import POINT

_LOOK_EVERY_S: Final = 0.1
_MOST_TOLD: Final = 10
_END_WITHIN_S: Final = 60.0
"""A run that is told to end writes what it has and stops its router; longer than this it is killed."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a point's run ended: an exit code of the contract and, unless 0, the last line of what it said."""

    name: str
    code: int
    error: str = ""


class Executor(Protocol):
    """Where runs happen."""

    @property
    def slots(self) -> int:
        """Most runs at one time."""

    def start(self, point: Point, folder: Path) -> None:
        """Begin a run whose results shall lie in the folder."""

    def poll(self) -> list[Ended]:
        """Runs that have ended since the last call; their folders are complete."""

    def under_way(self) -> tuple[int, float]:
        """How far the runs under way are: calls simulated so far, and the sum of the shares that are done."""

    def stop(self) -> None:
        """End all runs under way; what they have is kept in their folders."""


class Source(Protocol):
    """Which points to run; it may learn from results."""

    def next(self) -> Point | None:
        """A point to run; None: nothing now (more may come when a run ends)."""

    def ended(self, point: Point, folder: Path, result: Ended) -> None:
        """A point's run ended, or had ended before this command began."""


class Processes:
    """Child processes on this machine."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._running: dict[str, _Child] = {}

    def start(self, point: Point, folder: Path) -> None:
        """See Executor."""
        self._running[point.name] = _Child(folder)

    def poll(self) -> list[Ended]:
        """See Executor."""
        found = []
        for name, child in list(self._running.items()):
            code = child.ended()
            if code is not None:
                del self._running[name]
                found.append(Ended(name, code, child.last_words() if code else ""))
        return found

    def under_way(self) -> tuple[int, float]:
        """See Executor."""
        children = self._running.values()
        return sum(child.done for child in children), sum(child.share for child in children)

    def stop(self) -> None:
        """See Executor."""
        for child in self._running.values():
            child.process.terminate()
        deadline = time.monotonic() + _END_WITHIN_S
        for child in self._running.values():
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
        self._running.clear()


class _Child:
    """One worker process and how far it is."""

    def __init__(self, folder: Path) -> None:
        self.done = 0
        self.share = 0.0
        self._error = ""
        self._log = folder / "logs" / "worker.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "harness.sweep.worker", str(folder), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            )
        assert self.process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            try:
                told = json.loads(line)
                self._error = str(told.get("error", self._error))
                self.done = int(told.get("done", self.done))
                self.share = float(told.get("share", self.share))
            except (ValueError, AttributeError, TypeError):
                continue

    def ended(self) -> int | None:
        """Its exit code, or None while it runs; one that a signal ended counts as failed."""
        code = self.process.poll()
        if code is None:
            return None
        self._reader.join()
        return code if code >= 0 else 3

    def last_words(self) -> str:
        """The error that it ended with."""
        return self._error or last_words(self._log)


def last_words(log: Path) -> str:
    """The last error in a worker's log."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        text = ""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    last = (errors or lines or [f"ended without a word (see {log})"])[-1]
    return last.removeprefix("error: ")


def summary_of(folder: Path) -> dict[str, Any] | None:
    """A run's summary; None where there is none that can be read."""
    try:
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    complete = isinstance(summary, dict) and summary.get("digest") and isinstance(summary.get("validity"), dict)
    return summary if complete else None


def finished(folder: Path) -> bool:
    """Whether the folder holds a run that went to its end."""
    summary = summary_of(folder)
    return summary is not None and not any("was interrupted" in reason for reason in summary["validity"]["reasons"])


def claim(folder: Path, specification: Any, record: str) -> None:
    """Make the folder this command's own: new or empty, or begun by the same command before.

    `specification` is kept in the file `record`; another one there means other work and is refused.
    """
    file = folder / record
    text = json.dumps(specification, indent=1, ensure_ascii=False, default=str) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        strange = any(path != file and not path.name.startswith(_begun(file)) for path in folder.iterdir())
        if strange and not file.exists():
            raise InputError(f"--out {folder}", f"is not empty and holds no {record}", "give another folder")
        _write_once(file, text)
        if file.read_text(encoding="utf-8") != text:
            raise InputError(
                f"--out {folder}", "holds another one, with other fields, values or files", "give another folder"
            )
    except OSError as error:
        raise InputError(f"--out {folder}", f"cannot be used ({error.strerror})", "give another folder") from None


def _write_once(file: Path, text: str) -> None:
    """The file with all of its text, unless it is there already; several commands may do this at once."""
    if file.exists():
        return
    beside = file.with_name(f"{_begun(file)}{socket.gethostname()}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        os.link(beside, file)
    except FileExistsError:
        pass
    finally:
        beside.unlink(missing_ok=True)


def _begun(file: Path) -> str:
    """How the names of records begin that are being written."""
    return f".{file.name}."


def drive(
    source: Source, folder: Path, executor: Executor, title: str, runs: int | None, *, show_progress: bool = True
) -> list[Ended]:
    """Run what the source wants until nothing is left; returns how each run ended, failures included.

    `runs`: how many there will be, where that is known; progress shows their share.

    A point whose folder holds a finished run is not run again. Ctrl-C ends all runs under way and raises Interrupted.
    """
    ended: list[Ended] = []
    running: dict[str, Point] = {}
    locks: dict[str, IO[bytes]] = {}
    calls = kept = 0
    progress: Progress | None = None

    def take(point: Point, result: Ended, ran: bool = True) -> None:
        nonlocal calls, kept
        ended.append(result)
        if ran:
            calls += _calls(folder / point.name)
        else:  # what was there before is no pace
            kept += 1
        source.ended(point, folder / point.name, result)

    try:
        while True:
            while len(running) < executor.slots and (point := source.next()) is not None:
                place = folder / point.name
                if finished(place):
                    take(point, Ended(point.name, 0), ran=False)
                    continue
                if show_progress and progress is None:
                    progress = Progress(title, 0)
                with writing(place):
                    locks[point.name] = _lock(place)
                    _prepare(place, point)
                    executor.start(point, place)
                running[point.name] = point
            if not running:
                break
            time.sleep(_LOOK_EVERY_S)
            for result in executor.poll():
                take(running.pop(result.name), result)
                locks.pop(result.name).close()
            if progress:
                progress.label = f"{title}: {len(ended)}{'' if runs is None else f'/{runs}'} runs"
                now_calls, now_share = executor.under_way()
                share = None if runs is None else (len(ended) - kept + now_share) / (runs - kept)
                progress.update(calls + now_calls, 0, share)
    except KeyboardInterrupt:
        executor.stop()
        if progress:
            progress.close("interrupted")
            progress = None
        raise Interrupted(
            f"interrupted with {len(ended)} runs done; the same command with --out {folder} goes on from there"
        ) from None
    finally:
        executor.stop()
        for lock in locks.values():
            lock.close()
        if progress:
            progress.close()
    return ended


def complain(ended: Sequence[Ended], folder: Path, command: str) -> None:
    """Points that failed, each with its reason: InputError where all of them failed for bad input."""
    bad = [result for result in ended if result.code]
    if not bad:
        return
    lines = [f"{result.name}: {result.error}" for result in bad[:_MOST_TOLD]]
    more = [f"and {len(bad) - _MOST_TOLD} more"] if len(bad) > _MOST_TOLD else []
    others = f"; the others are in {folder}" if len(bad) < len(ended) else ""
    text = "\n".join([f"{len(bad)} of {len(ended)} runs failed{others}:", *lines, *more])
    if all(result.code == InputError.exit_code for result in bad):
        raise InputError(command, text, "correct the experiment and run the same command again")
    raise ComponentError(command, text, "run the same command again: it repeats only what failed")


def _lock(folder: Path) -> IO[bytes]:
    """Holds a point for this command as long as the file is open; another command at the same point is refused."""
    file = (folder.parent / f".{folder.name}.lock").open("ab")
    try:
        _take(file, folder)
        if (folder / POINT).exists():  # a worker whose command was killed may not have ended yet
            with (folder / POINT).open("rb") as held:
                _take(held, folder)
    except BaseException:
        file.close()
        raise
    return file


def _take(file: IO[bytes], folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(str(folder), "is being run by another command", "wait for it, or give another --out") from None


def _prepare(folder: Path, point: Point) -> None:
    """A fresh folder with the point's experiment; what an unfinished run left there is superseded."""
    if (folder / POINT).exists():
        shutil.rmtree(folder)
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise InputError(str(folder), "is in the way of a run's folder", "move it away") from None
    (folder / POINT).write_text(resolved_yaml(point.experiment), encoding="utf-8")


def _calls(folder: Path) -> int:
    summary = summary_of(folder)
    return int(summary["outcome"]["arrived"]) if summary else 0


class Listed:
    """The points of a list, in its order."""

    def __init__(self, points: Iterable[Point]) -> None:
        self._left = iter(points)

    def next(self) -> Point | None:
        """See Source."""
        return next(self._left, None)

    def ended(self, point: Point, folder: Path, result: Ended) -> None:
        """See Source."""
