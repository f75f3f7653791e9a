"""Fixtures of the live cluster: Envoy where it is at hand, a stack with each release of the router."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.live import envoy


@pytest.fixture(scope="session")
def envoy_program() -> Path:
    """Envoy's program."""
    found = envoy.find()
    if found is None:
        pytest.skip("no Envoy at hand (make test-setup installs it, or set HARNESS_ENVOY)")
    return found
