"""Health, models, metrics, adapters, and the dev-mode routes: caches, sleep, pause."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, HTTPException, Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from fake_workers.api.exposition import CONTENT_TYPE
from fake_workers.api.protocol import LoadLora, UnloadLora, random_id
from fake_workers.api.requests import json_only
from fake_workers.api.worker import VERSION, Worker

PauseMode = Literal["abort", "wait", "keep"]
_DRAIN_POLL_S = 0.02


def routes(worker: Worker) -> APIRouter:
    """Always there."""
    router = APIRouter()

    @router.get("/health")
    @router.get("/ping")
    @router.post("/ping")
    async def health() -> Response:
        return Response(status_code=503 if worker.engine.failure else 200)

    @router.get("/load")
    async def load() -> dict[str, int]:
        return {"server_load": worker.load}

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": VERSION}

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(metrics_page(worker), media_type=CONTENT_TYPE)

    if worker.tiers_account is not None:
        account = worker.tiers_account

        @router.get("/sim/tiers")
        async def tiers() -> Response:
            return JSONResponse(account())

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        name = worker.settings.model
        cards = [_card(worker, name, name, None, worker.max_model_len)]
        cards += [_card(worker, a.name, a.path, name, None) for a in worker.adapters.values()]
        return {"object": "list", "data": cards}

    @router.get("/kv_event_sources")
    async def kv_event_sources() -> dict[str, Any]:
        settings = worker.settings
        if not settings.events_endpoint:
            return {}
        return {
            str(settings.rank): {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": settings.events_endpoint,
                "replay_endpoint": settings.replay_endpoint or None,
                "topic": "",
            }
        }

    return router


def metrics_page(worker: Worker) -> bytes:
    """One scrape."""
    worker.engine.refresh_gauges(worker.settings.rank)
    running: set[str] = set()
    waiting: set[str] = set()
    for stream in worker.engine.streams(worker.settings.rank):
        if stream.lora:
            (running if stream.admitted else waiting).add(stream.lora)
    if worker.adapters or running or waiting:
        worker.metrics.set_lora(sorted(running), sorted(waiting), float(worker.started))
    return worker.metrics.registry.render() + worker.more_metrics()


def adapter_routes(worker: Worker) -> APIRouter:
    """With VLLM_ALLOW_RUNTIME_LORA_UPDATING."""
    router = APIRouter(dependencies=[Depends(json_only)])

    @router.post("/v1/load_lora_adapter")
    async def load(body: LoadLora) -> Response:
        return PlainTextResponse(worker.load_adapter(body.lora_name, body.lora_path, body.load_inplace))

    @router.post("/v1/unload_lora_adapter")
    async def unload(body: UnloadLora) -> Response:
        return PlainTextResponse(worker.unload_adapter(body.lora_name))

    return router


def dev_routes(worker: Worker) -> APIRouter:
    """With VLLM_SERVER_DEV_MODE. Pausing stops the engine's time for all ranks of the group."""
    router = APIRouter()
    engine = worker.engine

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache(reset_running_requests: bool = False, reset_external: bool = False) -> Response:
        return JSONResponse({"success": engine.reset_prefix_cache(worker.settings.rank)})

    @router.post("/reset_mm_cache")
    @router.post("/reset_encoder_cache")
    async def reset_nothing() -> Response:
        return Response(status_code=200)

    @router.post("/sleep")
    async def sleep(level: Annotated[int, Query(ge=0, le=2)] = 1, mode: PauseMode = "abort") -> Response:
        await _quiesce(worker, mode)
        if level:
            engine.reset_prefix_cache(worker.settings.rank)
        engine.freeze()
        worker.sleep_level = level
        worker.metrics.set_sleep(level)
        return JSONResponse({"status": "sleeping", "level": level})

    @router.post("/wake_up")
    async def wake_up(request: Request) -> Response:
        tags = request.query_params.getlist("tags") or None
        worker.sleep_level = None
        worker.metrics.set_sleep(None)
        engine.thaw()
        return JSONResponse({"status": "awake", "tags": tags})

    @router.get("/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        return {"is_sleeping": worker.sleep_level is not None}

    @router.post("/pause")
    async def pause(mode: PauseMode = "abort", clear_cache: bool = True) -> Response:
        await _quiesce(worker, mode)
        if mode != "keep" and clear_cache:
            engine.reset_prefix_cache(worker.settings.rank)
        engine.freeze()
        return JSONResponse({"status": "paused"})

    @router.post("/resume")
    async def resume() -> Response:
        engine.thaw()
        return JSONResponse({"status": "resumed"})

    @router.get("/is_paused")
    async def is_paused() -> dict[str, bool]:
        return {"is_paused": engine.paused}

    @router.post("/abort_requests")
    async def abort_requests(request: Request) -> Response:
        body = await _object(request, "Invalid JSON format")
        ids = body.get("request_ids")
        count = worker.abort([str(i) for i in ids]) if ids else engine.abort_all(worker.settings.rank)
        return JSONResponse({"status": "aborted", "aborted": count})

    @router.get("/server_info")
    async def server_info() -> dict[str, Any]:
        return {"vllm_config": {"model": worker.settings.model, "max_model_len": worker.max_model_len}}

    return router


def abort_routes(worker: Worker) -> APIRouter:
    """POST /inference/v1/abort_requests."""
    router = APIRouter()

    @router.post("/inference/v1/abort_requests")
    async def abort(request: Request) -> Response:
        ids = (await _object(request, "JSON decode error")).get("request_ids")
        if ids is None:
            raise HTTPException(400, "Missing 'request_ids' in request body")
        worker.abort([str(i) for i in ids])
        return Response(status_code=200)

    return router


async def _quiesce(worker: Worker, mode: PauseMode) -> None:
    engine = worker.engine
    if mode == "abort":
        engine.abort_all(worker.settings.rank)
    elif mode == "wait":
        while engine.unfinished(worker.settings.rank):
            await asyncio.sleep(_DRAIN_POLL_S)
    engine.pump()


async def _object(request: Request, complaint: str) -> dict[str, Any]:
    try:
        body = json.loads(await request.body())
    except ValueError as error:
        raise HTTPException(400, f"{complaint}: {error}") from None
    if not isinstance(body, dict):
        raise HTTPException(400, "Request body must be a JSON object")
    return body


def _card(worker: Worker, name: str, root: str, parent: str | None, max_len: int | None) -> dict[str, Any]:
    permission = {
        "id": f"modelperm-{random_id()}",
        "object": "model_permission",
        "created": worker.started,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": worker.started,
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": max_len,
        "permission": [permission],
    }
