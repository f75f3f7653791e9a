"""`harness live`: start the stack, show where it is, serve the page until it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import glob
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn

from harness.errors import InputError
from harness.experiment import Experiment
from harness.live.stack import Stack, plan_stack
from harness.live.watch import Watch
from harness.live.web import make_page

_LOOK_S = 0.5


def run_live(experiment: Experiment, folder: Path, *, stop: threading.Event | None = None) -> None:
    """Everything up, addresses printed, until a signal (or `stop`); then everything down."""
    page_socket = _claim_page(experiment)
    with page_socket:
        stack = plan_stack(experiment, folder, tell)
        watch = make_watch(stack)
        stack.on_access = watch.access
        stack.start(tell)
        try:
            host, port = page_socket.getsockname()[:2]
            page_url = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
            for line in banner(stack, page_url):
                print(line, flush=True)
            asyncio.run(_serve(stack, watch, page_socket, stop))
        finally:
            tell("ending")
            stack.close()
            sys.stdout.flush()


def tell(line: str) -> None:
    """Progress goes to standard error."""
    print(line, file=sys.stderr, flush=True)


def make_watch(stack: Stack) -> Watch:
    """What the page shows of a stack."""
    facts: dict[str, Any] = {
        "model": stack.model,
        "profile": stack.experiment.model.profile,
        "speed": stack.live.speed,
        "gateway": stack.addresses.gateway,
        "router": f"{stack.router.release}, {stack.router.config_path.stem}" if stack.router else "",
        "curl": curl(stack),
    }
    metrics = stack.addresses.router_metrics or None
    return Watch(
        stack.endpoints,
        facts=facts,
        router_metrics=metrics,
        results=stack.folder.parent,
        benches=f"{glob.escape(stack.experiment.name)}-bench*",
    )


def curl(stack: Stack) -> str:
    """One command to try."""
    base = stack.addresses.gateway or stack.addresses.workers[0]
    body = f'{{"model": "{stack.model}", "messages": [{{"role": "user", "content": "Hello"}}], "stream": true}}'
    return f"curl -N {base}/v1/chat/completions -H 'content-type: application/json' -d {shlex.quote(body)}"


def banner(stack: Stack, page_url: str) -> Iterator[str]:
    """What a user needs to know."""
    places = stack.addresses
    if places.gateway:
        yield f"gateway  {places.gateway}   (Envoy, then router {stack.router.release if stack.router else ''})"
    yield f"page     {page_url}"
    shown = ", ".join(places.workers[:4]) + (f" ... {len(places.workers)} in all" if len(places.workers) > 4 else "")
    yield f"workers  {shown}"
    if places.events_port:
        yield f"events   port {places.events_port} of every worker (ZMQ), replay on {places.replay_port}"
    yield f"model    {stack.model}"
    yield f"files    {stack.folder}"
    yield "try      " + curl(stack)
    if stack.live.host not in ("127.0.0.1", "localhost"):
        yield f"note     the gateway and the page are open to the network on {stack.live.host}"
    yield "end      Ctrl-C"


class _Server(uvicorn.Server):
    """Signals are ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(stack: Stack, watch: Watch, page_socket: socket.socket, stop: threading.Event | None) -> None:
    ended = asyncio.Event()
    if stop is None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, ended.set)
    app = make_page(watch, stack.folder.parent, make_switch(stack))
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1)
    server = _Server(config)
    tasks = [asyncio.create_task(watch.run()), asyncio.create_task(server.serve(sockets=[page_socket]))]
    told: list[str] = []
    while not ended.is_set() and not (stop is not None and stop.is_set()):
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), _LOOK_S)
        watch.problems = stack.problems()
        for problem in watch.problems:
            if problem not in told:
                tell(f"warning: {problem}")
        told = watch.problems
    server.should_exit = True
    tasks[0].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def make_switch(stack: Stack) -> Callable[[str, str], None]:
    """What the page's buttons do: kill or start the process of a worker, the router, Envoy."""

    def switch(component: str, action: str) -> None:
        if action not in ("kill", "start"):
            raise KeyError(action)
        if component == "router" and stack.router is not None:
            stack.router.stop()
            if action == "start":
                stack.router.start()
        elif component == "envoy" and stack.envoy is not None:
            stack.envoy.stop()
            if action == "start":
                stack.start_envoy()
        else:
            try:
                process = stack.worker_of(component)
            except InputError:
                raise KeyError(component) from None
            if action == "kill":
                process.stop()
            elif not process.alive:
                process.start()
                stack.wait_worker(component)

    return switch


def _claim_page(experiment: Experiment) -> socket.socket:
    live = experiment.live
    host = live.host if live else "127.0.0.1"
    port = live.page_port if live else 8090
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        found.listen(128)
    except OSError as error:
        found.close()
        what = f"port {port} of {host} cannot be used ({error.strerror})"
        raise InputError("live.page_port", what, "stop what listens there, or set it to 0 for any free port") from None
    return found
