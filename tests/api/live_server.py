"""Workers with their HTTP API in a thread of the test, on free loopback addresses."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from fake_workers.api.serving import Below, Place, ServeSpec, serve
from fake_workers.pricing.registry import load_profile
from harness.router.endpoints import loopback_endpoints
from harness.router.process import free_ports

PROFILE = "qwen3-32b-bf16-tp2-h100"
MODEL = "sim/model"
JSON = {"content-type": "application/json"}


@dataclass
class Live:
    """What runs: one URL per worker."""

    spec: ServeSpec
    urls: list[str]

    def client(self, worker: int = 0, **more: Any) -> httpx.Client:
        """An HTTP client of one worker."""
        return httpx.Client(base_url=self.urls[worker], timeout=30, **more)


def spec(workers: int = 1, *, blocks: int = 4000, events: bool = False, **more: Any) -> ServeSpec:
    """A specification with engine arguments under `engine`."""
    profile = load_profile(PROFILE)
    block = profile.block_tokens
    engine = {
        "num_gpu_blocks": blocks,
        "block_tokens": block,
        "max_model_len": min((blocks - 1) * block, profile.max_model_len),
        **more.pop("engine", {}),
    }
    endpoints = loopback_endpoints(workers, port=18200)
    groups = [[Place(name=e.name, host=e.address, port=e.port)] for e in endpoints]
    if events:
        more["events_port"], more["replay_port"] = free_ports(2)
    return ServeSpec(profile=PROFILE, model=MODEL, engine=engine, groups=groups, **{"speed": 10.0, **more})


@contextmanager
def serving(wanted: ServeSpec, below: Below | None = None) -> Iterator[Live]:
    """Serve in a thread until the block ends."""
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    failure: list[BaseException] = []

    def run() -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(serve(wanted, stop, below))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="workers", daemon=True)
    thread.start()
    urls = [f"http://{place.host}:{place.port}" for group in wanted.groups for place in group]
    try:
        for url in urls:
            for _ in range(200):
                assert not failure, failure
                try:
                    if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                        break
                except httpx.HTTPError:
                    thread.join(0.05)
        yield Live(wanted, urls)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        assert not thread.is_alive()
        loop.close()


def samples(page: str) -> dict[str, float]:
    """Samples of a metrics page by `name{labels}`."""
    from prometheus_client.parser import text_string_to_metric_families

    found = {}
    for family in text_string_to_metric_families(page):
        for s in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(s.labels.items()) if k not in ("model_name", "engine"))
            found[f"{s.name}{{{labels}}}" if labels else s.name] = s.value
    return found
