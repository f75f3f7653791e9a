"""The Makefile says what takes minutes before it begins."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def test_env_says_that_it_takes_minutes(tmp_path: Path) -> None:
    if shutil.which("make") is None:
        pytest.skip("no make on this machine")
    command = ["make", "--dry-run", "env", f"VENV={tmp_path}/venv"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    assert done.stdout.index("some minutes") < done.stdout.index("pip install") < done.stdout.index("env: done")
