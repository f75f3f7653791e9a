"""The real sidecar (router v0.10.0) between two recording workers: what it sends is what the harness would send."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.disagg.sidecar import PREFILLER, Exchange
from harness.router.process import free_ports
from tests.disagg.test_sidecar import CLIENT, PARAMS

VARIABLE = "HARNESS_PD_SIDECAR"


@pytest.fixture(scope="module")
def sidecar() -> Path:
    given = os.environ.get(VARIABLE)
    if not given:
        pytest.skip(f"no P/D sidecar at hand: set {VARIABLE} to a pd-sidecar built from the router's v0.10.0")
    path = Path(given)
    assert path.is_file(), f"{VARIABLE}={given} is no file"
    return path


class Worker:
    """Answers completions and keeps what it was sent."""

    def __init__(self, answer: dict[str, Any]) -> None:
        seen: list[tuple[dict[str, Any], dict[str, str]]] = []
        self.seen = seen

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                seen.append((json.loads(body), {k.lower(): v for k, v in self.headers.items()}))
                text = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def workers() -> Iterator[tuple[Worker, Worker]]:
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    prefill = Worker(
        {
            "choices": [{"index": 0, "text": "a", "finish_reason": "length"}],
            "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 2}},
            "kv_transfer_params": PARAMS,
        }
    )
    decode = Worker(
        {
            "choices": [{"index": 0, "text": "a", "finish_reason": "length"}],
            "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 1}},
        }
    )
    yield prefill, decode
    for worker in (prefill, decode):
        worker.server.shutdown()
        worker.server.server_close()


def _ask(program: Path, protocol: str, decode_port: int, prefiller: str | None) -> dict[str, Any]:
    (port,) = free_ports(1)
    command = [
        str(program),
        f"--port={port}",
        f"--model-server-port={decode_port}",
        "--secure-proxy=false",
        "--enable-ssrf-protection=false",
        f"--kv-connector={protocol}",
    ]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 20
        headers = {} if prefiller is None else {PREFILLER: prefiller}
        body = {**CLIENT, "stream": False}
        body.pop("stream_options")
        while True:
            try:
                answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, headers=headers, timeout=10)
                break
            except httpx.ConnectError:
                assert child.poll() is None, child.stderr and child.stderr.read()[-2000:]
                assert time.monotonic() < deadline, "the sidecar does not listen"
                time.sleep(0.05)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())
    finally:
        child.terminate()
        child.wait(10)


def _equal(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    made = dict(theirs)
    if "bootstrap_room" in made:  # made of the wall clock
        made["bootstrap_room"] = ours["bootstrap_room"]
    params = made.get("kv_transfer_params") or {}
    for side in ("remote_prefiller", "remote_decoder"):
        if side in params:  # a UUID
            params[side]["kv_request_id"] = "12345"
    assert ours == made


@pytest.mark.parametrize("protocol", ["nixlv2", "shared-storage", "sglang", "offloading"])
def test_the_harness_sends_what_the_real_sidecar_sends(
    sidecar: Path, workers: tuple[Worker, Worker], protocol: str
) -> None:
    prefill, decode = workers
    body = {**CLIENT, "stream": False}
    body.pop("stream_options")
    prefiller = f"127.0.0.1:{prefill.port}"
    answer = _ask(sidecar, protocol, decode.port, prefiller)
    ours = Exchange(protocol, body, prefiller, lambda: "12345")
    sends = ours.start()
    sends += ours.answered(200, {"kv_transfer_params": PARAMS})
    assert [send.leg for send in sends] == ["prefill", "decode"]
    deadline = time.monotonic() + 5
    while not prefill.seen and time.monotonic() < deadline:
        time.sleep(0.02)  # concurrent protocols answer the client without waiting for it
    _equal(sends[0].body, prefill.seen[0][0])
    _equal(sends[1].body, decode.seen[0][0])
    for worker in workers:
        assert PREFILLER not in worker.seen[0][1]
    if protocol == "nixlv2":
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
        assert prefill.seen[0][1]["x-request-id"] == decode.seen[0][1]["x-request-id"]


def test_without_the_header_the_real_sidecar_passes_the_body_on(sidecar: Path, workers: tuple[Worker, Worker]) -> None:
    prefill, decode = workers
    _ask(sidecar, "nixlv2", decode.port, None)
    body = {**CLIENT, "stream": False}
    body.pop("stream_options")
    assert decode.seen[0][0] == body and not prefill.seen
