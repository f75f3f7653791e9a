"""The HTTP application of one worker."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import Response

from fake_workers.api import (
    errors,
    routes_completions,
    routes_messages,
    routes_operations,
    routes_responses,
    routes_tokens,
)
from fake_workers.api.http_metrics import HttpMetrics
from fake_workers.api.streaming import ClientGoneError
from fake_workers.api.worker import VERSION, Worker

_CLIENT_CLOSED_REQUEST = 499


def make_app(worker: Worker) -> FastAPI:
    """All routes. Nothing of it knows which server or socket it runs on."""
    app = FastAPI(title="simulated vLLM worker", version=VERSION, docs_url=None, redoc_url=None)
    errors.install(app)
    app.exception_handler(ClientGoneError)(_gone)
    app.include_router(routes_operations.routes(worker))
    app.include_router(routes_completions.routes(worker))
    app.include_router(routes_responses.routes(worker))
    app.include_router(routes_messages.routes(worker))
    app.include_router(routes_tokens.routes(worker))
    app.include_router(routes_operations.abort_routes(worker))
    if worker.settings.dev_mode:
        app.include_router(routes_operations.dev_routes(worker))
        app.include_router(routes_operations.adapter_routes(worker))
    app.add_middleware(HttpMetrics, registry=worker.metrics.registry)
    return app


async def _gone(request: Request, error: ClientGoneError) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)
