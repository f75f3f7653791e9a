"""Files of YAML: what is wrong with one is said in one line with its name and where it can the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import yaml_text
from harness.errors import InputError


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"a: 1\nb: 2\na: 3\n", "line 3: key a stands twice"),
        (b"a: \xff\n", "byte 3 is not UTF-8"),
        (b"a: 2024-13-45\n", "YAML error"),
        (b"a: " + b"[" * 5000, "nested too deeply"),
        (b"a: \0\n", "special characters are not allowed"),
        (b"a: [1\n", "line 2"),
    ],
)
def test_a_file_that_is_no_yaml_is_one_line(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(content)
    with pytest.raises(InputError, match=complaint) as caught:
        yaml_text.read(path, "do something")
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_is_no_file_and_a_missing_one_is_the_caller_s(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"directory\); do something"):
        yaml_text.read(tmp_path, "do something")
    with pytest.raises(FileNotFoundError):
        yaml_text.read(tmp_path / "gone", "do something")
