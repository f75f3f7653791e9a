"""Folders for results, under the names that people give."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.cli import main
from harness.errors import ComponentError, InputError
from harness.folders import fresh_folder, results_folder, writing
from harness.sweep.pool import claim


def test_a_full_disk_is_a_failed_component_with_the_file_s_name(tmp_path: Path) -> None:
    with pytest.raises(ComponentError, match="could not be written") as caught, writing(tmp_path):
        Path("/dev/full").write_text("x")
    assert caught.value.exit_code == 3 and "No space left" in str(caught.value)
    with pytest.raises(ComponentError, match="gone/x could not be written"), writing(tmp_path):
        (tmp_path / "gone/x").write_text("x")


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
