"""vLLM's own KV-event bytes, replayed to the real router: what it missed it asks for, and takes in.

The frames are those of vLLM 0.32's publisher (tests/api/golden_kv_events.json), kept and served by a live worker's
replay socket; the router is one with `replaySocketPort` set.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from fake_workers.api.block_names import BlockNames
from fake_workers.api.event_socket import EventSocket
from harness.live.router import LiveRouter
from harness.router.base import Endpoint

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "api" / "golden_kv_events.json").read_text())
PAYLOADS = [bytes.fromhex(batch["frames"][2]) for batch in GOLDEN["batches"]]
CONFIG = Path(__file__).parents[2] / "deploy" / "router" / "configs" / "v0.10.0" / "precise.yaml"
HOST = "127.0.1.10"


def stored(batches: list[dict[str, Any]]) -> int:
    """Blocks that entered the cache."""
    return sum(len(e["block_hashes"]) for b in batches for e in b["events"] if e["type"] == "BlockStored")


def free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    for one in held:
        one.bind((HOST, 0))
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


@contextmanager
def serving(worker: EventSocket) -> Iterator[Callable[[Callable[[], None]], None]]:
    """The worker's replay socket answers in an event loop of its own; yields a way to do something in that loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    task = asyncio.run_coroutine_threadsafe(worker.serve_replay(), loop)

    def inside(what: Callable[[], None]) -> None:
        async def call() -> None:
            what()

        asyncio.run_coroutine_threadsafe(call(), loop).result(5)

    yield inside
    task.cancel()
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5)


def admitted(port: int) -> float:
    """Blocks that the router's index took in."""
    for line in httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text.splitlines():
        if line.startswith("kvcache_index_admissions_total"):
            return float(line.split()[-1])
    return 0.0


def until(value: Callable[[], float], wanted: float) -> float:
    deadline = time.monotonic() + 20
    while (seen := value()) < wanted and time.monotonic() < deadline:
        time.sleep(0.05)
    return seen


@pytest.mark.router
def test_the_router_asks_for_what_it_missed(router_v0100: Path, tmp_path: Path) -> None:
    events, replay, grpc, health, metrics = free_ports(5)
    topic = GOLDEN["topic"].encode()
    worker = EventSocket(
        f"tcp://{HOST}:{events}", f"tcp://{HOST}:{replay}", topic, GOLDEN["data_parallel_rank"], BlockNames(16, 1000)
    )
    endpoint = Endpoint(0, "w0", HOST, 8000, 0, {})
    router = LiveRouter(
        router_v0100,
        "v0.10.0",
        CONFIG,
        [endpoint],
        model="some/model",
        block_tokens=16,
        workdir=tmp_path,
        ports=(grpc, health, metrics),
        render_url="http://127.0.0.1:9",
        events_port=events,
        tokenizer=lambda: pytest.fail("no prompt is sent"),
    )
    found = [p for p in router.filled.document["plugins"] if "kvEventsConfig" in p.get("parameters", {})]
    found[0]["parameters"]["kvEventsConfig"]["podDiscoveryConfig"]["replaySocketPort"] = replay
    batches = GOLDEN["batches"]
    early = 2
    worker._kept.extend((number, payload) for number, payload in enumerate(PAYLOADS[:early]))
    with serving(worker) as inside:
        router.prepare()
        router.start()
        try:
            # published before the router was there: it asks on connecting
            assert until(lambda: admitted(metrics), stored(batches[:early])) == stored(batches[:early])
            # one is lost on the way: the next one on the wire shows the gap
            last = early + 1
            worker._kept.extend((number, PAYLOADS[number]) for number in range(early, last + 1))

            def lost_one() -> None:
                worker._socket.send_multipart([topic, last.to_bytes(8, "big"), PAYLOADS[last]])

            inside(lost_one)
            assert until(lambda: admitted(metrics), stored(batches[: last + 1])) == stored(batches[: last + 1])
        finally:
            router.close()
    worker.close()
    assert "Detected gap in event sequence" in (tmp_path / "router.log").read_text()
