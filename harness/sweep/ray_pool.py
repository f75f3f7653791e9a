"""Runs points on a Ray cluster, whose machines need this package and a router at hand, and share no file system.

A task gets the experiment and the trace as bytes, runs `harness.sweep.worker` in a folder of its own and gives the
folder's files back.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import yaml

from harness.errors import ComponentError, InputError
from harness.sweep.points import Point
from harness.sweep.pool import Ended, last_words
from harness.sweep.worker import POINT

LOCAL: Final = "local"
"""Address for a Ray of this machine's own, started and ended by the sweep."""

Files = dict[str, bytes]


class RayCluster:
    """An Executor (harness.sweep.pool) over a Ray cluster; `jobs` bounds the runs at one time (default: its CPUs)."""

    def __init__(self, address: str, jobs: int | None) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            ray: Any = importlib.import_module("ray")
        except ImportError:
            raise InputError("--ray", "Ray is not installed", "pip install '.[ray]'") from None
        self._ray = ray
        try:
            if address == LOCAL:
                ray.init(num_cpus=jobs, include_dashboard=False, log_to_driver=False, configure_logging=False)
            else:
                ray.init(address=address, log_to_driver=False, configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise InputError(
                f"--ray {address}", f"cannot be reached ({error})", "give a running cluster, or local"
            ) from None
        self.slots = jobs or max(1, int(ray.cluster_resources().get("CPU", 1)))
        # a run keeps one core busy and its router part of another
        self._task: Any = ray.remote(num_cpus=1, max_retries=0)(run_remote)
        self._traces: dict[str, Any] = {}
        self._running: dict[Any, tuple[str, Path]] = {}

    def start(self, point: Point, folder: Path) -> None:
        """See Executor."""
        path = point.experiment.trace.path
        if path not in self._traces:
            self._traces[path] = self._ray.put(read_files(Path(path)))
        text = (folder / POINT).read_text(encoding="utf-8")
        self._running[self._task.remote(text, self._traces[path])] = (point.name, folder)

    def poll(self) -> list[Ended]:
        """See Executor."""
        if not self._running:
            return []
        ready, _ = self._ray.wait(list(self._running), num_returns=len(self._running), timeout=0)
        found = []
        for task in ready:
            name, folder = self._running.pop(task)
            try:
                code, error, files = self._ray.get(task)
            except self._ray.exceptions.RayError as failure:
                found.append(Ended(name, 3, f"the Ray task was lost ({type(failure).__name__})"))
                continue
            write_files(folder, files)
            found.append(Ended(name, code, error))
        return found

    def under_way(self) -> tuple[int, float]:
        """Not known before a task ends."""
        return 0, 0.0

    def stop(self) -> None:
        """See Executor; tasks under way are cancelled."""
        for task in self._running:
            self._ray.cancel(task, force=True)
        self._running.clear()
        self._ray.shutdown()


def run_remote(experiment_yaml: str, trace: Files) -> tuple[int, str, Files]:
    """One run on a machine of the cluster: exit code, last words, files of the folder by relative name."""
    with tempfile.TemporaryDirectory(prefix="harness-") as scratch:
        base = Path(scratch)
        folder = base / "run"
        (folder / "logs").mkdir(parents=True)
        document = yaml.safe_load(experiment_yaml)
        place = base / Path(document["trace"]["path"]).name
        write_files(place if "" not in trace else base, {place.name: trace[""]} if "" in trace else trace)
        document["trace"]["path"] = str(place)
        (folder / POINT).write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
        log = folder / "logs" / "worker.log"
        with log.open("wb") as stderr:
            done = subprocess.run(
                [sys.executable, "-m", "harness.sweep.worker", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                check=False,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            )
        return done.returncode, last_words(log) if done.returncode else "", read_files(folder)


def read_files(path: Path) -> Files:
    """A folder's files by relative name; a single file under the empty name."""
    try:
        if path.is_file():
            return {"": path.read_bytes()}
        return {p.relative_to(path).as_posix(): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}
    except OSError as error:
        raise InputError(str(path), f"cannot be read ({error.strerror})", "give a readable file") from None


def write_files(folder: Path, files: Files) -> None:
    """The inverse of `read_files` for a folder; names stay inside it."""
    for name, content in files.items():
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise ComponentError("ray", f"a task gave back the file {name}", "its results are not used")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
