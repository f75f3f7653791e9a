"""Fixtures of the trace tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with the real traces; the test is skipped where it is absent."""
    default = Path(__file__).resolve().parents[2].parent / "shared"
    folder = Path(os.environ.get("HARNESS_SHARED", default))
    if not (folder / "traces").is_dir():
        pytest.skip(f"no real traces at {folder} (HARNESS_SHARED says where they are)")
    return folder
