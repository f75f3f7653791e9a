"""Cache entries are whole or absent, whatever happens while they are made."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.router.artifact_cache import cache_root, locked, make_entry


def whole(entry: Path) -> bool:
    return (entry / "data").is_file() and (entry / "data").read_text() == "done"


def write(entry: Path) -> None:
    (entry / "data").write_text("done")


def test_an_entry_is_made_once(tmp_path: Path) -> None:
    final = tmp_path / "a" / "entry"
    calls: list[Path] = []

    def fill(folder: Path) -> None:
        calls.append(folder)
        assert not final.exists(), "not seen before it is whole"
        write(folder)

    assert make_entry(final, fill, whole) == final
    assert make_entry(final, fill, whole) == final
    assert len(calls) == 1 and whole(final)
    assert sorted(path.name for path in final.parent.iterdir()) == ["entry", "entry.lock"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, OSError])
def test_an_interrupted_entry_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    final = tmp_path / "entry"

    def fill(folder: Path) -> None:
        (folder / "data").write_text("do")
        raise error

    with pytest.raises(error):
        make_entry(final, fill, whole)
    assert [path.name for path in tmp_path.iterdir()] == ["entry.lock"]
    assert whole(make_entry(final, write, whole)), "and the lock is free again"


def test_a_damaged_entry_is_made_anew(tmp_path: Path) -> None:
    final = tmp_path / "entry"
    final.mkdir()
    (final / "data").write_text("do")
    (final / "more").write_text("left over")
    make_entry(final, write, whole)
    assert whole(final) and not (final / "more").exists()


CHILD = """
import sys, time
from pathlib import Path
from harness.router.artifact_cache import make_entry
final, seconds = Path(sys.argv[1]), float(sys.argv[2])
def fill(folder):
    (folder / "data").write_text("do")
    with (final.parent / "fills").open("a") as f: f.write("x")
    time.sleep(seconds)
    (folder / "data").write_text("done")
make_entry(final, fill, lambda e: (e / "data").read_text() == "done", lambda line: print(line, flush=True))
"""


def start(final: Path, seconds: float) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", CHILD, final, str(seconds)], stdout=subprocess.PIPE, text=True)


def wait_for(path: Path) -> None:
    deadline_s = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline_s, f"{path} does not appear"
        time.sleep(0.01)


def test_two_processes_make_it_once(tmp_path: Path) -> None:
    final = tmp_path / "entry"
    first = start(final, 1.0)
    wait_for(tmp_path / "fills")
    second = start(final, 1.0)
    outputs = [process.communicate(timeout=30)[0] for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0)
    assert (tmp_path / "fills").read_text() == "x" and whole(final)
    assert outputs[0] == "" and outputs[1].startswith("another process is making this already; waiting for it")


def test_what_a_killed_process_left_is_cleared(tmp_path: Path) -> None:
    final = tmp_path / "entry"
    killed = start(final, 60)
    wait_for(tmp_path / "fills")
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".entry.")], "it did leave something"
    assert not final.exists()
    make_entry(final, write, whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["entry", "entry.lock", "fills"]


def test_entries_do_not_clear_each_other(tmp_path: Path) -> None:
    """The rests of `entry` are told from the work in progress on `entry.2`."""
    other = tmp_path / ".entry-2.abc"
    other.mkdir()
    make_entry(tmp_path / "entry", write, whole)
    assert other.exists()


def test_a_lock_is_not_inherited(tmp_path: Path) -> None:
    with locked(tmp_path / "lock"):
        child = subprocess.Popen(["sleep", "30"], close_fds=False)
    said: list[str] = []
    with locked(tmp_path / "lock", said.append):
        pass
    child.kill()
    child.wait()
    assert said == []


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "own"
    monkeypatch.delenv("HARNESS_CACHE")
    assert cache_root() == tmp_path / "xdg" / "harness"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/invalid")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_root() == tmp_path / "home" / ".cache" / "harness"
