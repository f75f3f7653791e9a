"""The http_* families that vLLM's server gets from prometheus_fastapi_instrumentator, counted the same way."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fake_workers.api.exposition import Registry

EXCLUDED = ("/metrics", "/health", "/load", "/ping", "/version", "/server_info")
FINE = (0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60)
COARSE = (0.1, 0.5, 1)


class HttpMetrics:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, registry: Registry) -> None:
        self._app = app
        self._requests = registry.family(
            "http_requests", "Total number of requests by method, status and handler.", "counter"
        )
        self._in = registry.family(
            "http_request_size_bytes", "Content length of incoming requests by handler.", "summary"
        )
        self._out = registry.family(
            "http_response_size_bytes", "Content length of outgoing responses by handler.", "summary"
        )
        text = "Latency with many buckets but no API specific labels."
        self._fine = registry.family("http_request_duration_highr_seconds", text, "histogram").histogram({}, FINE)
        text = "Latency with only few buckets by handler."
        self._coarse = registry.family("http_request_duration_seconds", text, "histogram")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in EXCLUDED:
            await self._app(scope, receive, send)
            return
        status, size = 500, 0

        async def count(message: Message) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                size += len(message.get("body") or b"")
            await send(message)

        began = time.monotonic()
        try:
            await self._app(scope, receive, count)
        finally:
            self._record(scope, status, size, time.monotonic() - began)

    def _record(self, scope: Scope, status: int, size: int, seconds: float) -> None:
        # the route's template, so that ids in paths make no new label values
        handler = str(getattr(scope.get("route"), "path", "none"))
        method = scope["method"]
        self._requests.series({"handler": handler, "method": method, "status": f"{status // 100}xx"}).inc()
        length = next((int(v) for k, v in scope["headers"] if k == b"content-length" and v.isdigit()), 0)
        self._in.summary({"handler": handler}).observe(length)
        self._out.summary({"handler": handler}).observe(size)
        self._fine.observe(seconds)
        self._coarse.histogram({"handler": handler, "method": method}, COARSE).observe(seconds)
