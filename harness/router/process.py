"""The router, or another component, as a child process: own process group, dies with us, log drained into a file.

Both releases listen on all interfaces (neither has a flag for it), so ports are chosen free on all of them.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from harness.errors import ComponentError

# Runs between fork and the router's own code: asks the kernel to kill us when the parent dies, then becomes
# the router.
_LAUNCH = (
    "import ctypes,os,sys;ctypes.CDLL(None).prctl(1,9);"
    "os.getppid()==int(sys.argv[1]) or os._exit(1);os.execv(sys.argv[2],sys.argv[2:])"
)
GIVE_UP_S = 30.0
"""A router that has not answered for so long is given up, whatever it was asked (docs/router.md says why)."""
_STOP_GRACE_S = 1.0
_TAIL_LINES = 40
_PIPE_BYTES = 1 << 20
_F_SETPIPE_SZ = 1031

LineSink = Callable[[bytes], bool]


def free_ports(count: int) -> list[int]:
    """TCP ports that are free on all interfaces now (a later bind may still lose a race; callers retry)."""
    sockets = []
    try:
        for _ in range(count):
            s = socket.socket()
            sockets.append(s)
            s.bind(("", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


class RouterProcess:
    """Starts the binary and drains its output. `name` is for messages. `sink(line)` sees every line
    and says whether the file keeps it. A full disk ends the file, not the draining, or the child would stand still.

    The thread that drains the log also starts the child: the kernel ties "dies with the parent" to the
    starting thread, and this one lives as long as the child.
    """

    def __init__(
        self, argv: list[str], env: dict[str, str], log_path: Path, sink: LineSink, name: str = "router"
    ) -> None:
        self._argv, self._env, self._log_path, self._sink, self.name = argv, env, log_path, sink, name
        self._tail: deque[bytes] = deque(maxlen=_TAIL_LINES)
        self._child: subprocess.Popen[bytes] | None = None
        self._started = threading.Event()
        self._drained = threading.Event()
        self._failure: OSError | None = None
        self._thread = threading.Thread(target=self._run, name=f"{name}-log", daemon=True)

    def start(self) -> None:
        """Returns once the child exists."""
        if not os.access(self._argv[0], os.X_OK):
            raise ComponentError(self.name, f"{self._argv[0]} is no program that can be run")
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            raise ComponentError(self.name, f"could not be started: {self._failure}")
        atexit.register(self.stop)

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, None while it runs."""
        return self._child.poll() if self._child is not None else None

    def tail(self) -> str:
        """The last lines of its log."""
        return b"\n".join(list(self._tail)).decode(errors="replace")

    def wait_drained(self, timeout_s: float) -> None:
        """After the child's end: until its last lines have been read."""
        self._drained.wait(timeout_s)

    def cpu_s(self) -> float:
        """CPU seconds that the child has used so far."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_bytes(self) -> int:
        """Resident memory of the child."""
        try:
            return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            return 0

    def stop(self) -> None:
        """Ends the child's whole process group: SIGTERM, then SIGKILL. Safe to call twice."""
        child = self._child
        if child is None:
            return
        if child.poll() is None:
            _signal_group(child.pid, signal.SIGTERM)
            deadline = time.monotonic() + _STOP_GRACE_S
            while child.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
        if child.poll() is None:
            _signal_group(child.pid, signal.SIGKILL)
            child.wait()
        self._drained.wait(1.0)
        atexit.unregister(self.stop)

    def _run(self) -> None:
        try:
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), *self._argv],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as failure:
            self._failure = failure
            self._started.set()
            return
        self._child = child
        self._started.set()
        assert child.stdout is not None
        fd = child.stdout.fileno()
        with contextlib.suppress(OSError):
            _set_pipe_size(fd)
        with child.stdout, contextlib.suppress(OSError), self._log_path.open("ab", buffering=1 << 16) as log:
            self._drain(fd, log.write, log.flush)
        self._drained.set()

    def _drain(self, fd: int, write: Callable[[bytes], int], flush: Callable[[], None]) -> None:
        rest = b""
        writing = True

        def keep(text: bytes) -> None:
            nonlocal writing
            if writing:
                try:
                    write(text)
                    flush()
                except OSError:
                    writing = False

        while chunk := os.read(fd, _PIPE_BYTES):
            lines = (rest + chunk).split(b"\n")
            rest = lines.pop()
            kept = [line for line in lines if self._sink(line)]
            if kept:
                self._tail.extend(kept[-_TAIL_LINES:])
                keep(b"\n".join(kept) + b"\n")
        if rest and self._sink(rest):
            self._tail.append(rest)
            keep(rest + b"\n")


def _set_pipe_size(fd: int) -> None:
    import fcntl

    fcntl.fcntl(fd, _F_SETPIPE_SZ, _PIPE_BYTES)


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
