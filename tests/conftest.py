"""Fixtures that several test packages share: the real router's programs, where they are at hand."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# how long an example takes says how busy the machine is, nothing of the code
settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")


def _router(release: str, variable: str) -> Path:
    given = os.environ.get(variable)
    if given:
        path = Path(given)
        assert path.is_file(), f"{variable}={given} is no file"
        return path
    from harness.router.binaries import find

    found = find(release)
    if found is None:
        pytest.skip(f"no llm-d router {release} at hand (set {variable}, or run `harness router install {release}`)")
    return found.path


@pytest.fixture(scope="session")
def router_v071() -> Path:
    """The router v0.7.1."""
    return _router("v0.7.1", "HARNESS_ROUTER_V071")


@pytest.fixture(scope="session")
def router_v0100() -> Path:
    """The router v0.10.0."""
    return _router("v0.10.0", "HARNESS_ROUTER_V0100")


@pytest.fixture(params=["v0.7.1", "v0.10.0"])
def router_release(request: pytest.FixtureRequest) -> tuple[str, Path]:
    """Each release with its program; a test that uses this runs once per release."""
    fixture = {"v0.7.1": "router_v071", "v0.10.0": "router_v0100"}[request.param]
    return request.param, request.getfixturevalue(fixture)


@pytest.fixture(scope="session")
def lmcache() -> None:
    """LMCache is installed and set up."""
    from harness.cache import upstream

    if not upstream.available():
        pytest.skip("LMCache is not installed: python -m tests.cache.install, or pip install '.[lmcache]'")
    upstream.prepare()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with the real traces; the test is skipped where it is absent."""
    default = Path(__file__).resolve().parents[1].parent / "shared"
    folder = Path(os.environ.get("HARNESS_SHARED", default))
    if not (folder / "traces").is_dir():
        pytest.skip(f"no real traces at {folder} (HARNESS_SHARED says where they are)")
    return folder


@pytest.fixture
def heard_interrupts() -> Iterator[None]:
    """A shell's background job starts with SIGINT ignored, and so do Python and its children then."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def envoy_program() -> Path:
    """Envoy's program."""
    from harness.live import envoy

    found = envoy.find()
    if found is None:
        pytest.skip("no Envoy at hand (make test-setup installs it, or set HARNESS_ENVOY)")
    return found
