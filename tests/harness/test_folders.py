"""Folders for results, under the names that people give."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import polars as pl
import pytest

from harness.cli import main
from harness.errors import ComponentError, InputError
from harness.folders import fresh_folder, results_folder, whole, write_whole, writing
from harness.studies.outcome import PAGE, RESULTS, TABLE, deliver
from harness.sweep.pool import claim


def test_a_full_disk_is_a_failed_component_with_the_file_s_name(tmp_path: Path) -> None:
    with pytest.raises(ComponentError, match="could not be written") as caught, writing(tmp_path):
        Path("/dev/full").write_text("x")
    assert caught.value.exit_code == 3 and "No space left" in str(caught.value)
    with pytest.raises(ComponentError, match="gone/x could not be written"), writing(tmp_path):
        (tmp_path / "gone/x").write_text("x")


@contextmanager
def room_for(nbytes: int) -> Iterator[None]:
    """No file can grow beyond this meanwhile: what a full disk does to one that is being written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("content", ["new" * 9999, b"new" * 9999])
def test_a_file_that_does_not_fit_leaves_what_was_there(tmp_path: Path, content: str | bytes) -> None:
    file = tmp_path / "page.html"
    file.write_text("old")
    with pytest.raises(ComponentError, match="page.html could not be written"), writing(tmp_path), room_for(4096):
        write_whole(file, content)
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]
    write_whole(file, content)
    assert len(file.read_bytes()) == 3 * 9999 and list(tmp_path.iterdir()) == [file]


def test_a_table_that_does_not_fit_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ComponentError), writing(tmp_path), room_for(4096), whole(tmp_path / "t.parquet") as part:
        pl.DataFrame({"x": range(99_999)}).write_parquet(part)
    assert not list(tmp_path.iterdir())


def test_links_and_devices_stay_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "there")
    write_whole(tmp_path / "link", "x")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "there").read_text() == "x"
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "full", "x")
    write_whole(Path("/dev/null"), "x")


def test_a_study_s_page_is_never_half_written(tmp_path: Path) -> None:
    deliver(tmp_path, {}, "old table", "old page", as_json=True)
    with pytest.raises(ComponentError, match="study.html"), room_for(4096):
        deliver(tmp_path, {}, "table", "x" * 9999, as_json=True)
    assert (tmp_path / PAGE).read_text() == "old page" and (tmp_path / TABLE).read_text() == "table"
    assert {path.name for path in tmp_path.iterdir()} == {PAGE, TABLE, RESULTS}


def test_what_no_command_foresaw_of_a_disk_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("harness.cli.runner.hear_signals", lambda: None)
    monkeypatch.setattr("harness.cli.experiments.json_schema", full)
    with pytest.raises(SystemExit) as ended:
        main(["schema"])
    assert ended.value.code == 3
    assert capsys.readouterr().err == "error: a file: No space left on device; free space, or give another folder\n"


def test_the_working_folder_is_used_while_it_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    assert fresh_folder(Path(".")) == here
    assert fresh_folder(Path(".")) == tmp_path / "here-2", "it holds something now"
    (here / "in").mkdir()
    monkeypatch.chdir(here / "in")
    assert fresh_folder(Path("..")) == tmp_path / "here-3"


def test_a_command_that_fails_before_it_writes_leaves_no_folder(tmp_path: Path) -> None:
    def fail(wanted: Path, name: str | None = None) -> None:
        with pytest.raises(InputError), results_folder(wanted) as folder:
            if name:
                (folder / "logs" / name).write_text("")
            raise InputError("x", "is wrong", "correct it")

    mine = tmp_path / "mine"
    mine.mkdir()
    fail(mine)
    fail(tmp_path / "new")
    assert [path.name for path in tmp_path.rglob("*")] == ["mine"], "a folder that was there before stays"
    fail(mine, "router.log")
    assert (mine / "logs/router.log").exists()
    fail(mine)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_root_has_no_second() -> None:
    with pytest.raises(InputError, match="not empty"):
        fresh_folder(Path("/"))


def test_a_sweep_takes_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    claim(Path("."), ["work"], "sweep.json")
    claim(Path("."), ["work"], "sweep.json")
    with pytest.raises(InputError, match="holds another one"):
        claim(Path("."), ["other work"], "sweep.json")
    assert [path.name for path in here.iterdir()] == ["sweep.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["here"], "nothing is left beside it"
