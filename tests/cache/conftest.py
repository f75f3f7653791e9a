"""Tests that drive LMCache are skipped, visibly, where it is not installed (docs/cache.md says how to install it)."""

from __future__ import annotations

import pytest

from harness.cache import upstream


@pytest.fixture(scope="session")
def lmcache() -> None:
    """LMCache is here and set up."""
    if not upstream.available():
        pytest.skip("LMCache is not installed: python -m tests.cache.install, or pip install '.[lmcache]'")
    upstream.prepare()
