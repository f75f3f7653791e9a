"""How every study ends: files, what is printed, and a disk that takes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.errors import ComponentError
from harness.studies.outcome import deliver


def test_files_and_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new"
    deliver(folder, {"study": "s"}, "# Title\n", "<p>page</p>", as_json=False)
    assert json.loads((folder / "study.json").read_text()) == {"study": "s"}
    assert (folder / "study.md").read_text() == "# Title\n" and (folder / "study.html").read_text() == "<p>page</p>"
    said = capsys.readouterr().out
    assert "Title" in said and said.endswith(f"page: {folder / 'study.html'}\n")
    deliver(folder, {"study": "s"}, "", None, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"study": "s"}


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ComponentError, match="could not be written"):
        deliver(tmp_path / "file" / "below", {}, "", None, as_json=False)
