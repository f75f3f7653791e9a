"""Smoke test of LMCache's own server process with the harness's plugin adapter, and LMCache's own benchmark as client.

The server works by wall time in a process of its own, so nothing here is about virtual time: it shows that a released
`lmcache server` takes the adapter, stores to it and reports about it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytestmark = [pytest.mark.usefixtures("lmcache"), pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
ADAPTER = {
    "type": "plugin",
    "module_path": "harness.cache.adapter",
    "class_name": "HeldL2Adapter",
    "adapter_params": {"tier": "smoke"},
}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def get(url: str) -> dict:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


def test_lmcaches_server_works_with_the_plugin_adapter(tmp_path):
    program = Path(sys.executable).with_name("lmcache")
    if not program.exists():
        pytest.skip("LMCache's command line is not beside this Python")
    rpc, http = free_port(), free_port()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "INFO"}
    command = [
        *(str(program), "server", "--host", "127.0.0.1", "--port", str(rpc)),
        *("--http-host", "127.0.0.1", "--http-port", str(http), "--l1-size-gb", "0.1", "--no-l1-use-lazy"),
        *("--shm-name", f"lmcache_l1_pool_test_{rpc}", "--eviction-policy", "LRU", "--chunk-size", "256"),
        *("--supported-transfer-mode", "engine_driven", "--l2-adapter", json.dumps(ADAPTER)),
    ]
    log = tmp_path / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_until_healthy(f"http://127.0.0.1:{http}/healthcheck", server, log)
        result = tmp_path / "bench.json"
        subprocess.run(
            [
                *(str(program), "bench", "server", "--rpc-url", f"tcp://127.0.0.1:{rpc}", "--mode", "cpu"),
                *("--transfer-mode", "engine_driven", "--num-tokens", "1024", "--start", "0", "--end", "3"),
                *("--interval", "0", "--url", f"http://127.0.0.1:{http}", "--num-blocks", "256"),
                *("--kvcache-shape-spec", "(2,256,16,1,8):float16:2", "--format", "json", "--output", str(result)),
            ],
            env=environment,
            check=True,
            timeout=240,
            stdout=subprocess.DEVNULL,
        )
        outcome = json.loads(result.read_text())["metrics"]["results"]
        assert (outcome["total_requests"], outcome["checksum_ok"]) == (3, 3)
        # three requests of four chunks: all of them have reached the adapter's tier
        assert stored_objects(f"http://127.0.0.1:{http}/status") == 12
    finally:
        server.terminate()
        try:
            server.wait(timeout=30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def wait_until_healthy(url: str, server: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 180
    while True:
        assert server.poll() is None, f"the server ended:\n{log.read_text()[-3000:]}"
        try:
            get(url)
            return
        except (urllib.error.URLError, OSError, json.JSONDecodeError):
            assert time.monotonic() < deadline, f"the server does not come up:\n{log.read_text()[-3000:]}"
            time.sleep(0.5)


def stored_objects(url: str) -> int:
    """How many objects the adapter reports, once its stores have ended."""
    deadline = time.monotonic() + 30
    count = -1
    while count < 12 and time.monotonic() < deadline:
        count = max(_numbers(get(url), "objects"), default=-1)
        time.sleep(0.2)
    return count


def _numbers(value: object, name: str) -> list[int]:
    if isinstance(value, dict):
        here = [value[name]] if isinstance(value.get(name), int) else []
        return here + [number for part in value.values() for number in _numbers(part, name)]
    if isinstance(value, list):
        return [number for part in value for number in _numbers(part, name)]
    return []
