"""LMCache's own server process below workers that talk to it as vLLM's connector does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from fake_workers.api.lmcache_connector import OBJECT_BYTES
from fake_workers.api.serving import LmcacheServer
from harness.router.process import free_ports
from tests.api.live_server import Live, samples, serving, spec

pytestmark = [pytest.mark.usefixtures("lmcache"), pytest.mark.slow]

CHUNKS = 40


@contextmanager
def server(folder: Path, rpc: int) -> Iterator[str]:
    """`lmcache server` with room for so many chunks; yields its HTTP address."""
    program = Path(sys.executable).with_name("lmcache")
    if not program.exists():
        pytest.skip("LMCache's command line is not beside this Python")
    (http,) = free_ports(1)
    environment = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "INFO"}
    command = [
        *(str(program), "server", "--host", "127.0.0.1", "--port", str(rpc), "--http-host", "127.0.0.1"),
        *("--http-port", str(http), "--l1-size-gb", str(CHUNKS * OBJECT_BYTES / 2**30), "--no-l1-use-lazy"),
        *("--shm-name", f"lmcache_l1_pool_test_{rpc}", "--eviction-policy", "LRU", "--chunk-size", "256"),
        *("--supported-transfer-mode", "engine_driven", "--disable-observability"),
    ]
    log = folder / "server.log"
    with log.open("w") as output:
        child = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{http}"
    try:
        deadline = time.monotonic() + 120
        while True:
            assert child.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            try:
                if httpx.get(f"{url}/healthcheck", timeout=5).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.3)
        yield url
    finally:
        child.terminate()
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def ask(live: Live, worker: int, ids: list[int], **more: Any) -> int:
    body = {"prompt": ids, "max_tokens": 1, "ignore_eos": True, **more}
    answer = httpx.post(f"{live.urls[worker]}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def prompt(seed: int, tokens: int = 2100) -> list[int]:
    return [20 + (7 * i + 131 * seed) % 9973 for i in range(tokens)]


def page(live: Live, worker: int) -> dict[str, float]:
    return samples(httpx.get(f"{live.urls[worker]}/metrics").text)


def test_prompts_come_back_from_the_server(tmp_path: Path) -> None:
    """From the GPU, from the server once evicted, on a neighbour, not for another salt, not once evicted there."""
    (rpc,) = free_ports(1)
    link = LmcacheServer(url=f"tcp://127.0.0.1:{rpc}", gbytes_per_s=5.0)
    wanted = spec(2, blocks=260, speed=1.0, lmcache=link, records=str(tmp_path / "records.jsonl"))
    with server(tmp_path, rpc), serving(wanted) as live:
        first = prompt(1)
        assert ask(live, 0, first) == 0
        assert ask(live, 0, first) == 2096
        assert [ask(live, 0, prompt(seed)) for seed in (2, 3)] == [0, 0]
        assert ask(live, 0, first) == 2048
        assert ask(live, 1, first) == 2048
        assert ask(live, 1, first, cache_salt="mine") == 0
        assert ask(live, 1, [*first[:1024], *prompt(5)]) == 1024
        near, far = page(live, 0), page(live, 1)
        assert near["vllm:external_prefix_cache_hits_total"] == 2048
        assert far["vllm:prompt_tokens_cached_by_source_total{source=external_unspecified}"] == 2048
        assert near["sim_tier_read_bytes_total{node=w0,tier=lmcache}"] == 2048 * 262144
        assert near["sim_tier_failures_total{node=w0,tier=lmcache}"] == 0
        # 40 chunks, watermark 0.8: what was not used for longest goes within a second or two
        for seed in range(10, 20):
            ask(live, 0, prompt(seed))
            time.sleep(0.3)
        time.sleep(3.0)
        assert ask(live, 1, prompt(2)) < 2048
        for seed in range(30, 40):  # a store that finds no room before the server's next check is skipped whole
            assert ask(live, 0, prompt(seed)) == 0
            time.sleep(1.0)
            if ask(live, 1, prompt(seed)):
                break
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").open()]
    loads = [r for r in records if r["external_tokens"] == 2048]
    copy_ns = 2048 * 262144 / 2 / 5e9 * 1e9  # each of the two GPUs gets its half
    assert len(loads) == 3 and all(r["external_by_tier"] == {"lmcache": 2048} for r in loads)
    waits = [r["admitted_ns"] - r["arrival_ns"] for r in loads]
    assert min(waits) >= copy_ns, "held for as long as the copy takes"
    assert min(waits) < copy_ns + 1e9, "and for the server's own time, which a busy machine stretches"


def test_a_server_that_comes_and_goes(tmp_path: Path) -> None:
    """Without it workers serve on, computing; when it is back they use it again; nothing hangs."""
    (rpc,) = free_ports(1)
    link = LmcacheServer(url=f"tcp://127.0.0.1:{rpc}", gbytes_per_s=63.0)
    with serving(spec(1, blocks=260, speed=1.0, lmcache=link)) as live:
        assert ask(live, 0, prompt(1)) == 0
        with server(tmp_path, rpc):
            end = time.monotonic() + 40
            used = 0.0
            while not used and time.monotonic() < end:
                for seed in (1, 2, 3):
                    ask(live, 0, prompt(seed))
                used = page(live, 0)["vllm:external_prefix_cache_hits_total"]
            assert used
        began = time.monotonic()
        assert ask(live, 0, prompt(7)) == 0
        assert time.monotonic() - began < 25
        assert ask(live, 0, prompt(8)) == 0
