"""What the tests of the router's origin share: a private cache, no inherited settings, a fake registry."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.router import oci

from .fake_registry import FakeRegistry


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow_router_build: builds the router with Go (HARNESS_TEST_GO_BUILD=1)")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; no router of the user's environment; no waiting between attempts."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("HARNESS_CACHE", str(folder))
    for name in ("HARNESS_ROUTER_V071", "HARNESS_ROUTER_V0100", "HARNESS_ROUTER_BINARY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(oci, "RETRY_DELAYS_S", (0.0, 0.0))
    return folder


@pytest.fixture
def registry() -> Iterator[FakeRegistry]:
    with FakeRegistry() as fake:
        yield fake
