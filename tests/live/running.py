"""A running stack for a test."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from harness.experiment import Experiment
from harness.live.run import make_watch
from harness.live.stack import Stack, plan_stack
from harness.live.watch import Watch

PROFILE = "qwen3-32b-bf16-tp2-h100"


def experiment(workers: int = 2, release: str = "v0.10.0", config: str = "precise", **more: Any) -> Experiment:
    """A small cluster on free ports, ten times as fast as real."""
    live = {"gateway_port": 0, "page_port": 0, "speed": 10.0, "processes": workers, **more.pop("live", {})}
    router = {"release": release, "config": config, **more.pop("router", {})}
    cluster = {"nodes": 1, "gpus_per_node": 2 * workers, **more.pop("cluster", {})}
    return Experiment.model_validate(
        {
            "name": "live-test",
            "trace": {"path": "unused"},
            "model": {"profile": PROFILE, "name": "sim/model"},
            "cluster": cluster,
            "router": router,
            "live": live,
            **more,
        }
    )


@dataclass
class Running:
    """What a test needs."""

    stack: Stack
    watch: Watch
    access: list[dict[str, Any]] = field(default_factory=list)

    @property
    def url(self) -> str:
        """The gateway."""
        return self.stack.addresses.gateway

    def complete(self, prompt: str, tokens: int = 3, **more: Any) -> httpx.Response:
        """One completion through the gateway."""
        body = {"model": self.stack.model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **more}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=30)

    def picks(self, count: int) -> list[str]:
        """The workers that the last `count` requests went to, once the gateway has logged them."""
        until(lambda: len(self.access) >= count)
        return [str(entry["picked"]) for entry in self.access[-count:]]


@contextmanager
def running(wanted: Experiment, folder: Path) -> Iterator[Running]:
    """The stack, its watch scraping in the background."""
    stack = plan_stack(wanted, folder)
    found = Running(stack, make_watch(stack))

    def access(entry: dict[str, Any]) -> None:
        found.access.append(entry)
        found.watch.access(entry)

    stack.on_access = access
    stack.start()
    stop = threading.Event()

    def scrape() -> None:
        async def main() -> None:
            task = asyncio.create_task(found.watch.run())
            while not stop.is_set():
                await asyncio.sleep(0.05)
                found.watch.problems = stack.problems()
            task.cancel()

        asyncio.run(main())

    thread = threading.Thread(target=scrape, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join(10)
        stack.close()


def until(condition: Callable[[], Any], limit_s: float = 15.0) -> None:
    """Wait for a condition."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.05)
