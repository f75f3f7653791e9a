"""The child process, with small programs in the router's place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.errors import ComponentError
from harness.router.process import RouterProcess, free_ports

ROOT = Path(__file__).parents[2]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def wait_gone(pid: int, timeout_s: float = 5.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def script(tmp_path: Path, body: str) -> str:
    path = tmp_path / "program.sh"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_log_is_kept_as_the_sink_says(tmp_path: Path) -> None:
    program = script(tmp_path, "echo one; echo two >&2; printf three; exit 7")
    process = RouterProcess([program], dict(os.environ), tmp_path / "log", lambda line: line != b"two")
    process.start()
    process.wait_drained(5)
    while process.returncode is None:
        time.sleep(0.01)
    assert process.returncode == 7
    assert (tmp_path / "log").read_text() == "one\nthree\n"
    assert process.tail() == "one\nthree"


@pytest.mark.parametrize("trap", ["", "trap '' TERM;"])
def test_stop_ends_the_whole_group_in_time(tmp_path: Path, trap: str) -> None:
    program = script(tmp_path, f"{trap} sleep 100 & echo $! > {tmp_path}/inner; {trap} while :; do sleep 0.1; done")
    process = RouterProcess([program], dict(os.environ), tmp_path / "log", lambda line: True)
    process.start()
    while not (tmp_path / "inner").exists() or not (tmp_path / "inner").read_text().strip():
        time.sleep(0.01)
    inner = int((tmp_path / "inner").read_text())
    start_s = time.monotonic()
    process.stop()
    process.stop()
    assert time.monotonic() - start_s < 2
    assert wait_gone(process.pid) and (trap or wait_gone(inner))
    if alive(inner):
        os.kill(inner, signal.SIGKILL)


def test_child_dies_with_a_killed_parent(tmp_path: Path) -> None:
    """SIGKILL gives the parent no chance to clean up; the kernel does it."""
    program = script(tmp_path, "echo up; exec sleep 100")
    code = f"""
import os, time
from pathlib import Path
from harness.router.process import RouterProcess
p = RouterProcess([{program!r}], dict(os.environ), Path({str(tmp_path / "log")!r}), lambda line: True)
p.start()
while not p.tail(): time.sleep(0.01)
print(p.pid, flush=True)
time.sleep(100)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert alive(child)
    parent.kill()
    parent.wait()
    assert wait_gone(child)


def test_program_that_cannot_be_run(tmp_path: Path) -> None:
    process = RouterProcess([str(tmp_path / "missing")], dict(os.environ), tmp_path / "log", lambda line: True)
    with pytest.raises(ComponentError, match="missing"):
        process.start()


def test_interpreter_that_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    with pytest.raises(ComponentError, match="could not be started"):
        RouterProcess(["/bin/true"], {}, tmp_path / "log", lambda line: True).start()


def test_free_ports_are_distinct_and_free() -> None:
    import socket

    ports = free_ports(4)
    assert len(set(ports)) == 4
    for port in ports:
        with socket.socket() as s:
            s.bind(("", port))
