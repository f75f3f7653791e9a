"""Folders for results, under the names that people give."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import InputError
from harness.folders import fresh_folder
from harness.sweep.pool import claim


def test_the_working_folder_is_used_while_it_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    assert fresh_folder(Path(".")) == here
    assert fresh_folder(Path(".")) == tmp_path / "here-2", "it holds something now"
    (here / "in").mkdir()
    monkeypatch.chdir(here / "in")
    assert fresh_folder(Path("..")) == tmp_path / "here-3"


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
