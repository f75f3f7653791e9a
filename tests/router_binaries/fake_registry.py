"""A registry in plain Python that can be told to misbehave: what a real one hardly ever does on demand."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

from .images import Image

REPOSITORY = "team/router"
Fault = Callable[[BaseHTTPRequestHandler, bytes], bool]
"""Answers a request for an object itself (True), or lets the registry answer (False)."""


class FakeRegistry:
    """Serves images on a loopback port. `requests`: (path, Authorization) of each request, in order."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, tuple[str, bytes]] = {}
        self.faults: dict[str, Fault] = {}
        self.requests: list[tuple[str, str | None]] = []
        self.token: str | None = None
        self.challenge = ""
        self.token_status = 200
        self.redirect_blobs_to = ""
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                fake.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer((address, 0), Handler)
        self.host = f"{address}:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def add(self, image: Image) -> str:
        """Hold the image; returns the reference that names it."""
        self.blobs |= image.blobs
        self.manifests |= image.manifests
        return f"{self.host}/{REPOSITORY}@{image.digest}"

    def asked(self, digest: str) -> int:
        return Counter(path.rsplit("/", 1)[-1] for path, _ in self.requests)[digest]

    def require_token(self) -> None:
        self.token = "pull-me"
        self.challenge = f'Bearer realm="http://{self.host}/token",service="fake",scope="ignored"'

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        authorization = request.headers.get("Authorization")
        self.requests.append((request.path, authorization))
        if request.path.startswith("/token"):
            send(request, self.token_status, f'{{"token": "{self.token}"}}'.encode(), "application/json")
            return
        if self.challenge and authorization != f"Bearer {self.token}":
            request.send_response(401)
            request.send_header("WWW-Authenticate", self.challenge)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        kind, digest = request.path.split("/")[-2:]
        if kind == "manifests" and digest in self.manifests:
            media_type, body = self.manifests[digest]
        elif kind == "blobs" and digest in self.blobs:
            media_type, body = "application/octet-stream", self.blobs[digest]
            if self.redirect_blobs_to:
                request.send_response(307)
                request.send_header("Location", f"http://{self.redirect_blobs_to}{request.path}")
                request.send_header("Content-Length", "0")
                request.end_headers()
                return
        else:
            send(request, 404, b'{"errors": [{"code": "BLOB_UNKNOWN"}]}', "application/json")
            return
        fault = self.faults.get(digest)
        if fault is None or not fault(request, body):
            send(request, 200, body, media_type)


def send(request: BaseHTTPRequestHandler, status: int, body: bytes, media_type: str = "text/plain") -> None:
    request.send_response(status)
    request.send_header("Content-Type", media_type)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    request.wfile.write(body)


def cut(times: int) -> Fault:
    """Announce the whole length, send half of it and hang up; the first `times` times."""
    left = [times]

    def fault(request: BaseHTTPRequestHandler, body: bytes) -> bool:
        if left[0] == 0:
            return False
        left[0] -= 1
        request.send_response(200)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body[: len(body) // 2])
        request.close_connection = True
        return True

    return fault


def status(code: int, times: int) -> Fault:
    """Answer `code` the first `times` times."""
    left = [times]

    def fault(request: BaseHTTPRequestHandler, _: bytes) -> bool:
        if left[0] == 0:
            return False
        left[0] -= 1
        send(request, code, b"busy")
        return True

    return fault


def other(content: bytes) -> Fault:
    """Send something else."""

    def fault(request: BaseHTTPRequestHandler, _: bytes) -> bool:
        send(request, 200, content)
        return True

    return fault
