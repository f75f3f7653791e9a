"""`harness page`: the page alone, for a cluster whose parts somebody else starts."""

from __future__ import annotations

import asyncio
import shlex
import socket
from pathlib import Path
from typing import Any

import uvicorn

from harness import yaml_text
from harness.errors import InputError
from harness.live.access_log import AccessLogServer
from harness.live.watch import Watch
from harness.live.web import make_page
from harness.router.base import Endpoint


def read_endpoints(path: Path) -> list[Endpoint]:
    """The workers of an endpoints file as the router's file discovery reads it."""
    remedy = "give the endpoints file of the router's file discovery (docs/live.md)"
    try:
        entries = yaml_text.read(path, remedy)["endpoints"]
        workers = [
            Endpoint(i, str(e["name"]), str(e["address"]), int(e["port"]), i, dict(e.get("labels") or {}))
            for i, e in enumerate(entries)
        ]
        if not workers or any(not 0 < worker.port < 65536 for worker in workers):
            raise ValueError("it names no worker, or a port beyond 65535")
        return workers
    except FileNotFoundError:
        raise InputError(str(path), "no such file", remedy) from None
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(str(path), f"is no endpoints file ({type(error).__name__}: {error})", remedy) from None


def serve_page(
    endpoints: Path,
    gateway: str,
    router_metrics: str | None,
    model: str,
    host: str,
    port: int,
    access_log_port: int,
    results: Path | None,
) -> None:
    """Until a signal."""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}], "stream": true}}'
    facts: dict[str, Any] = {
        "model": model,
        "profile": "workers of an endpoints file",
        "speed": 1.0,
        "gateway": gateway,
        "router": "llm-d" if router_metrics else "",
        "curl": f"curl -N {gateway}/v1/chat/completions -H 'content-type: application/json' -d {shlex.quote(body)}",
    }
    watch = Watch(read_endpoints(endpoints), facts=facts, router_metrics=router_metrics, results=results)
    log = AccessLogServer(host, access_log_port, watch.access)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        raise InputError("--port", f"{port} of {host} cannot be used ({error.strerror})", "choose another") from None
    config = uvicorn.Config(make_page(watch, results), log_level="warning", access_log=False, lifespan="off")

    async def main() -> None:
        scraping = asyncio.create_task(watch.run())
        await uvicorn.Server(config).serve(sockets=[listener])
        scraping.cancel()

    try:
        asyncio.run(main())
    finally:
        log.close()
