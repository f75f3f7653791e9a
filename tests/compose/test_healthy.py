"""The containers' health check."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from harness.live.deploy_files import ROOT


class _Server(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 503)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def place() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def code(*addresses: str) -> int:
    return subprocess.run([sys.executable, "-IS", ROOT / "healthy.py", *addresses], capture_output=True).returncode


def test_all_addresses_must_answer_200(place: str) -> None:
    assert code(f"{place}/health") == 0
    assert code(f"{place}/health", f"{place}/health") == 0
    assert code(f"{place}/health", f"{place}/other") == 1
    assert code("127.0.0.1:9/health") == 1
