"""The whole stack as child processes: workers, router, Envoy. Started in order, each with its health seen, ended whole.

Every child dies with this process. All of them listen on loopback, but for the router, which has no flag for it
(docs/live.md), and for the gateway and the page where the user says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from fake_workers.api.tokenizer import load_tokenizer
from harness.errors import ComponentError, InputError
from harness.experiment import Experiment
from harness.live import envoy, tiers
from harness.live.config import LiveConfig
from harness.live.router import LiveRouter
from harness.placement import PoolPlan, plan_pools, with_nodes
from harness.router.base import Endpoint
from harness.router.binaries import obtain
from harness.router.process import RouterProcess, free_ports
from harness.router.select import config_path

START_TIMEOUT_S = 60.0
_PROBE = "is-it-up"
"""Request id of what asks at the start whether all is up; the page does not count it."""
Tell = Callable[[str], None]


@dataclass(slots=True)
class WorkerProcess:
    """One process and the endpoints that it serves."""

    name: str
    spec_path: Path
    endpoints: list[Endpoint]
    log_path: Path
    module: str = "fake_workers.api.serving"
    process: RouterProcess | None = None
    starts: int = 0

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.process is not None and self.process.returncode is None

    def start(self) -> None:
        """Start it (again)."""
        argv = [sys.executable, "-m", self.module, str(self.spec_path)]
        env = dict(os.environ)
        root = str(Path(__file__).parents[2])
        env["PYTHONPATH"] = os.pathsep.join(p for p in (root, env.get("PYTHONPATH")) if p)
        self.process = RouterProcess(argv, env, self.log_path, lambda line: True, self.name)
        self.process.start()
        self.starts += 1

    def stop(self) -> None:
        """End it."""
        if self.process is not None:
            self.process.stop()


@dataclass(slots=True)
class Addresses:
    """Where everything listens."""

    workers: list[str]
    gateway: str = ""
    router_metrics: str = ""
    envoy_admin: str = ""
    render: str = ""
    events_port: int | None = None
    replay_port: int | None = None


@dataclass(slots=True)
class Stack:
    """The running cluster."""

    experiment: Experiment
    folder: Path
    model: str
    live: LiveConfig
    pools: list[PoolPlan]
    addresses: Addresses
    workers: list[WorkerProcess] = field(default_factory=list)
    router: LiveRouter | None = None
    envoy: RouterProcess | None = None
    on_access: Callable[[dict[str, Any]], None] = lambda entry: None
    """Told of every request that went through the gateway, by the thread that reads Envoy's log."""
    _cleanup: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def endpoints(self) -> list[Endpoint]:
        """All workers."""
        return [endpoint for pool in self.pools for endpoint in pool.endpoints]

    # ------------------------------------------------------------------ start and end

    def start(self, tell: Tell = lambda line: None) -> None:
        """Bring everything up; whatever fails takes all of it down again."""
        try:
            began = time.monotonic()
            for worker in self.workers:
                worker.start()
                self._cleanup.callback(worker.stop)
            self._wait_workers()
            processes = f"{len(self.workers)} process{'es' if len(self.workers) > 1 else ''}"
            tell(f"{len(self.endpoints)} workers in {processes} ({time.monotonic() - began:.1f} s)")
            if self.router is not None:
                self._cleanup.callback(self.router.close)
                self.router.prepare()
                self.router.start()
                tell(f"router {self.router.release} ({self.router.config_path.stem})")
                self.start_envoy()
                self._wait_serving()
                tell(f"Envoy; all up after {time.monotonic() - began:.1f} s")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End every child; safe to call twice."""
        self._cleanup.close()

    def start_envoy(self) -> None:
        """Start Envoy (again) and wait until it listens."""
        program = envoy.obtain(self.live.envoy, lambda line: print(line, file=sys.stderr, flush=True))
        config = self.folder / "envoy.yaml"
        argv = [
            str(program),
            "-c",
            str(config),
            "--concurrency",
            "1",
            "-l",
            "warning",
            "--disable-hot-restart",
            "--file-flush-interval-msec",
            "200",
        ]
        process = RouterProcess(argv, dict(os.environ), self.folder / "logs" / "envoy.log", self._envoy_line, "Envoy")
        process.start()
        self._cleanup.callback(process.stop)
        self.envoy = process
        self._wait_envoy(process)

    def problems(self) -> list[str]:
        """Children that have ended on their own."""
        found = [f"{w.name} has ended" for w in self.workers if not w.alive]
        if self.router is not None and (self.router.process is None or self.router.process.returncode is not None):
            found.append("the router has ended")
        if self.envoy is not None and self.envoy.returncode is not None:
            found.append("Envoy has ended")
        return found

    def worker_of(self, name: str) -> WorkerProcess:
        """The process that serves the worker of this name."""
        for process in self.workers:
            if any(endpoint.name == name for endpoint in process.endpoints):
                return process
        raise InputError(f"worker {name}", "is none of this cluster", "see the page for their names")

    def wait_worker(self, name: str, timeout_s: float = START_TIMEOUT_S) -> None:
        """Until the worker of this name is healthy."""
        process = self.worker_of(name)
        endpoint = next(e for e in process.endpoints if e.name == name)
        _wait(lambda: _healthy(endpoint), lambda: process.alive, process, timeout_s)

    # ------------------------------------------------------------------ waiting

    def _wait_workers(self) -> None:
        for process in self.workers:
            for endpoint in process.endpoints:
                _wait(lambda e=endpoint: _healthy(e), lambda p=process: p.alive, process, START_TIMEOUT_S)  # type: ignore[misc]

    def _wait_envoy(self, process: RouterProcess) -> None:
        host, port = self.live.host, int(self.addresses.gateway.rsplit(":", 1)[1])
        target = "127.0.0.1" if host == "0.0.0.0" else host
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with socket.socket() as s:
                s.settimeout(0.2)
                if process.returncode is None and s.connect_ex((target, port)) == 0:
                    return
            if process.returncode is not None:
                process.wait_drained(2.0)
                raise ComponentError("Envoy", f"ended at start with status {process.returncode}", process.tail())
            if time.monotonic() > deadline:
                raise ComponentError("Envoy", f"not up within {START_TIMEOUT_S:g} s", process.tail())
            time.sleep(0.02)

    def _wait_serving(self) -> None:
        """Until a request goes all the way: Envoy reaches the router, and the router knows a worker for it."""
        assert self.router is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        seen = "no answer"
        while True:
            try:
                answer = httpx.get(f"{self.addresses.gateway}/v1/models", headers={"x-request-id": _PROBE}, timeout=5)
                if answer.status_code == 200:
                    return
                seen = f"status {answer.status_code}: {answer.text[:200]}"
            except httpx.HTTPError as error:
                seen = f"{type(error).__name__}: {error}"
            if self.problems() or time.monotonic() > deadline:
                what = "; ".join(self.problems()) or f"serves no request within {START_TIMEOUT_S:g} s ({seen})"
                raise ComponentError("gateway", what, self.router.process.tail() if self.router.process else "")
            time.sleep(0.05)

    def _envoy_line(self, line: bytes) -> bool:
        if line.startswith(b"{"):
            try:
                entry = json.loads(line)
            except ValueError:
                return True
            if entry.get("id") != _PROBE:
                self.on_access(entry)
            return False
        return True


def _wait(ready: Callable[[], bool], alive: Callable[[], bool], process: WorkerProcess, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        if not alive():
            assert process.process is not None
            process.process.wait_drained(2.0)
            tail = process.process.tail()
            words = next((x for x in reversed(tail.splitlines()) if x.startswith("error: ")), "")
            what = words.removeprefix("error: ") or f"ended at start with status {process.process.returncode}"
            raise ComponentError(process.name, what, "" if words else tail)
        if time.monotonic() > deadline:
            raise ComponentError(process.name, f"not healthy within {timeout_s:g} s")
        time.sleep(0.05)


def _healthy(endpoint: Endpoint) -> bool:
    try:
        return httpx.get(f"http://{endpoint.address}:{endpoint.port}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


# ---------------------------------------------------------------------- planning


def plan_stack(experiment: Experiment, folder: Path, tell: Tell = lambda line: None) -> Stack:
    """Everything decided and written down, nothing started: ports, specifications, configurations."""
    live = experiment.live or LiveConfig()
    if experiment.cluster.engine.kind != "builtin":
        raise InputError("cluster.engine.kind", "vLLM's scheduler does not run in live workers", "leave it out")
    pools = plan_pools(experiment)
    experiment = with_nodes(experiment, pools)
    tiers.check(experiment, pools)
    model = experiment.model.name or pools[0].profile.model
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "logs").mkdir(exist_ok=True)
    endpoints = [e for pool in pools for e in pool.endpoints]
    addresses = Addresses([f"http://{e.address}:{e.port}" for e in endpoints])
    if live.kv_events:
        addresses.events_port, addresses.replay_port = free_ports(2)
    load_tokenizer(live.tokenizer)  # refuse a bad one before anything starts
    stack = Stack(experiment, folder, model, live, pools, addresses)
    stack.workers = _worker_processes(stack)
    if live.gateway == "none":
        return stack
    if experiment.router.kind != "llm-d":
        raise InputError(
            "router.kind",
            f"{experiment.router.kind} is no program that Envoy could ask",
            "set it to llm-d, or live.gateway to none",
        )
    _claim(live.host, live.gateway_port, "live.gateway_port")
    wanted = experiment.router
    grpc, health, metrics, render, admin, spare = free_ports(6)
    gateway_port = live.gateway_port or spare
    addresses.gateway = f"http://{_shown(live.host)}:{gateway_port}"
    addresses.router_metrics = f"http://127.0.0.1:{metrics}/metrics"
    addresses.envoy_admin = f"http://127.0.0.1:{admin}"
    addresses.render = f"http://127.0.0.1:{render}"
    program = obtain(wanted.release, tell, path=wanted.binary, image=wanted.image)
    stack.router = LiveRouter(
        program.path,
        wanted.release,
        config_path(wanted.config, wanted.release),
        endpoints,
        model=model,
        block_tokens=pools[0].engine.block_tokens,
        workdir=folder / "logs",
        ports=(grpc, health, metrics),
        render_url=addresses.render,
        events_port=addresses.events_port,
        tokenizer=lambda: load_tokenizer(live.tokenizer),
    )
    text = envoy.render(
        endpoints,
        host=live.host,
        port=gateway_port,
        admin_port=admin,
        render_port=render,
        router_port=grpc,
    )
    (folder / "envoy.yaml").write_text(text)
    return stack


def _worker_processes(stack: Stack) -> list[WorkerProcess]:
    """Engines spread over processes; a lock-step group stays together, and so do workers that share a cache tier."""
    live, folder = stack.live, stack.folder
    cached = stack.experiment.cache.kind != "none"
    numbers = {group[0].index: number for number, group in enumerate(g for pool in stack.pools for g in pool.groups)}
    wanted = live.processes or max(1, min(len(numbers), len(os.sched_getaffinity(0))))
    processes: list[WorkerProcess] = []
    for pool in stack.pools:
        bundles = _together(stack.experiment, pool)
        share = max(1, min(len(bundles), round(wanted * len(pool.groups) / len(numbers))))
        for number in range(share):
            part = [group for bundle in bundles[number::share] for group in bundle]
            name = f"workers-{pool.role or 'all'}-{number}"
            spec_path = folder / f"{name}.json"
            spec = _spec(stack, pool, part, name)
            served = [endpoint for group in part for endpoint in group]
            process = WorkerProcess(name, spec_path, served, folder / "logs" / f"{name}.log")
            if cached:
                process.module = "harness.live.tiered_worker"
                spec = {
                    "serve": spec,
                    "experiment": stack.experiment.model_dump(mode="json"),
                    "groups": [numbers[group[0].index] for group in part],
                    "results": str(folder / "tiers" / name),
                }
            spec_path.write_text(json.dumps(spec, indent=1))
            processes.append(process)
    return processes


def _together(experiment: Experiment, pool: PoolPlan) -> list[list[list[Endpoint]]]:
    """The pool's groups in bundles that need one process each."""
    if experiment.cache.kind == "none":
        return [[group] for group in pool.groups]
    if not tiers.nodes_apart(experiment):
        return [pool.groups]
    by_node: dict[int, list[list[Endpoint]]] = {}
    for group in pool.groups:
        by_node.setdefault(group[0].node, []).append(group)
    return list(by_node.values())


def _spec(stack: Stack, pool: PoolPlan, groups: list[list[Endpoint]], name: str) -> dict[str, Any]:
    live, experiment = stack.live, stack.experiment
    engine = {slot: getattr(pool.engine, slot) for slot in pool.engine.__slots__}
    calibration = experiment.model.calibration
    spec: dict[str, Any] = {
        "profile": _profile_of(experiment, pool),
        "model": stack.model,
        "engine": engine,
        "groups": [[{"name": e.name, "host": e.address, "port": e.port} for e in group] for group in groups],
        "speed": live.speed,
        "tokenizer": live.tokenizer,
        "mean_output_tokens": live.mean_output_tokens,
        "max_num_queued_reqs": live.max_num_queued_reqs,
        "max_num_queued_tokens": live.max_num_queued_tokens,
        "dev_mode": live.dev_mode,
        "events_port": stack.addresses.events_port,
        "replay_port": stack.addresses.replay_port,
        "events_wire": experiment.cluster.kv_events,
        "records": str(stack.folder / f"{name}.jsonl"),
    }
    if calibration is not None:
        spec["calibration"] = {
            "scale_prefill": calibration.scale_prefill,
            "scale_decode": calibration.scale_decode,
            "per_step_ns": round(calibration.per_step_ms * 1e6),
            "per_seq_ns": round(calibration.per_seq_ms * 1e6),
        }
    if pool.role:
        spec["kv_link"] = {"gbytes_per_s": live.kv_gbytes_per_s}
    return spec


def _profile_of(experiment: Experiment, pool: PoolPlan) -> str:
    for wanted in experiment.cluster.pools:
        if wanted.role == pool.role and wanted.profile:
            return wanted.profile
    return experiment.model.profile


def _shown(host: str) -> str:
    return "127.0.0.1" if host == "0.0.0.0" else host


def _claim(host: str, port: int, where: str) -> None:
    """InputError if the port is taken."""
    if not port:
        return
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError as error:
            what = f"port {port} of {host} cannot be used ({error.strerror})"
            raise InputError(where, what, "stop what listens there, or set it to 0 for any free port") from None
