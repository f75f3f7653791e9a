"""What the tests with a real router share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.router.base import RouteRequest
from harness.router.endpoints import loopback_endpoints
from harness.router.llmd import LlmdRouter

CONFIGS = Path(__file__).parents[2] / "deploy" / "router" / "configs"
BLOCK = 16
_NUMBERS = itertools.count()


def make(release: tuple[str, Path], name: str | Path, tmp_path: Path, endpoints: int = 4, **more: Any) -> LlmdRouter:
    """A router with a shipped config (by name) or a file, not started."""
    version, binary = release
    path = name if isinstance(name, Path) else CONFIGS / version / f"{name}.yaml"
    values: dict[str, Any] = {"block_tokens": BLOCK, "num_gpu_blocks": 5000, "seed": 1}
    return LlmdRouter(
        binary,
        version,
        path,
        loopback_endpoints(endpoints),
        model="m",
        workdir=tmp_path / f"run{next(_NUMBERS)}",
        **(values | more),
    )


@contextmanager
def running(
    release: tuple[str, Path], name: str | Path, tmp_path: Path, endpoints: int = 4, **more: Any
) -> Iterator[LlmdRouter]:
    """The same, started, and stopped at the end."""
    router = make(release, name, tmp_path, endpoints, **more)
    router.start()
    try:
        yield router
    finally:
        router.stop()


def call(
    runs: list[tuple[int, int, int]],
    session: str = "s",
    tail_tokens: int = 0,
    block: int = BLOCK,
    **more: Any,
) -> RouteRequest:
    """A request with the given prompt in engine blocks."""
    tokens = sum(end - start for _, start, end in runs) * block + tail_tokens
    return RouteRequest(f"r{next(_NUMBERS)}", session, "m", runs, tokens, 10, **more)


def complete(router: LlmdRouter, request: RouteRequest) -> dict[str, str]:
    """First and last token; returns all headers that the client has seen."""
    headers = router.first_token(request.request_id)
    return headers | router.finish(request.request_id, request.prompt_tokens, 0, request.output_tokens)
