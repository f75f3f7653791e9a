"""One deployment of the real router: the workers' metrics servers, what the release needs around it, the
child itself.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.errors import ComponentError, InputError
from harness.router import config, kubernetes_api
from harness.router.base import Endpoint
from harness.router.config import Adapted, Coupling
from harness.router.endpoints import NAMESPACE, POOL, write_endpoints_file
from harness.router.http_get import HttpGet, samples
from harness.router.log_reader import LogReader
from harness.router.metrics_push import MetricsPush
from harness.router.process import GIVE_UP_S, RouterProcess, free_ports
from harness.router.tokenizer import TokenizerService

START_TIMEOUT_S = 30.0
_PORT_ATTEMPTS = 5
_HURRY_S = 1.0
"""How long a router may take for its numbers once somebody has ended the run."""
_POD_LABELS = {"harness/pool": POOL}
_RUNNING = (b"inference_objective_running_requests", b"llm_d_router_epp_running_requests")


@dataclass(slots=True)
class Plan:
    """What is to be deployed. `coupling` takes the port on which the router shall listen for KV events."""

    binary: Path
    release: str
    discovery: str
    endpoints: Sequence[Endpoint]
    document: config.Json
    config_path: Path
    workdir: Path
    coupling: Callable[[int], Coupling]
    objectives: Mapping[str, int] = field(default_factory=dict)
    """Priority by name of InferenceObjective."""
    rewrites: Mapping[str, str] = field(default_factory=dict)
    """Served model by the model name that clients use."""


class Deployment:
    """Everything that runs; `close` ends it in the opposite order."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._cleanup = contextlib.ExitStack()
        self._process: RouterProcess | None = None
        self._last_numbers: dict[str, Any] | None = None
        self._silent = False
        """Whether the router runs and has been given up: it is not asked for its numbers, which takes as long again."""
        self._patience_s = GIVE_UP_S
        """How long it is waited for its numbers."""
        self.log = LogReader()
        self.adapted: Adapted = config.adapt(plan.document, str(plan.config_path), plan.coupling(0))
        self.tokenizer: TokenizerService | None = None
        self.metrics: MetricsPush
        self.pages: HttpGet
        self.grpc_port = 0
        self.kv_events_url = ""

    def start(self, pages: Sequence[bytes]) -> None:
        """Brings everything up; `pages` are the workers' first /metrics pages."""
        workdir = self._plan.workdir
        workdir.mkdir(parents=True, exist_ok=True)
        (workdir / "router.log").unlink(missing_ok=True)
        self.metrics = MetricsPush(self._plan.endpoints, pages, self.alive)
        self._cleanup.callback(self.metrics.close)
        if self.adapted.needs_tokenizer:
            path = self._plan.coupling(0).tokenizer_socket
            path.parent.mkdir(mode=0o700)
            self._cleanup.callback(shutil.rmtree, path.parent, ignore_errors=True)
            self.tokenizer = TokenizerService(path)
            self._cleanup.callback(self.tokenizer.close)
        env = self._environment()
        attempt = 1
        while not self._launch(env, last=attempt == _PORT_ATTEMPTS):
            attempt += 1

    def wait_objects(self) -> None:
        """Until the router's controllers have taken over all InferenceObjectives and InferenceModelRewrites."""
        wanted = {
            b'"inferenceobjective': len(self._plan.objectives),
            b'"inferencemodelrewrite': len(self._plan.rewrites),
        }
        deadline = time.monotonic() + START_TIMEOUT_S
        while any(wanted.values()):
            done = samples(self.pages.read("/metrics"), b"controller_runtime_reconcile_total")
            for controller in wanted:
                ok = sum(v for k, v in done.items() if controller in k and b'result="success"' in k)
                if ok >= wanted[controller]:
                    wanted[controller] = 0
            if time.monotonic() > deadline:
                raise ComponentError("router", f"has not read all Kubernetes objects within {START_TIMEOUT_S:g} s")

    def close(self) -> None:
        """Ends the child and frees all addresses; safe to call twice."""
        self._last_numbers = self.numbers()
        self._cleanup.close()

    def alive(self) -> bool:
        """Whether the child runs."""
        return self.process.returncode is None

    @property
    def process(self) -> RouterProcess:
        """The child; ComponentError where none was started."""
        if self._process is None:
            raise ComponentError("router", "has not been started")
        return self._process

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Turns any failure while the router is dead into "the router died", with its last words."""
        try:
            yield
        except KeyboardInterrupt:
            self._patience_s = _HURRY_S  # perhaps because the router does not answer
            raise
        except ComponentError as error:
            process = self.process
            deadline = time.monotonic() + 0.5
            while process.returncode is None and time.monotonic() < deadline:
                time.sleep(0.01)
            if process.returncode is None:
                self._silent = True
                raise ComponentError(error.component, error.what, error.kept or process.tail()) from error
            process.wait_drained(1.0)
            raise ComponentError("router", f"died with status {process.returncode}", process.tail()) from error

    def numbers(self) -> dict[str, Any]:
        """CPU seconds and memory of the child, and how many requests it counts as in flight (None: not
        exported).
        """
        if self._last_numbers is not None:
            return self._last_numbers
        numbers: dict[str, Any] = {"router_cpu_s": 0.0, "router_rss_bytes": 0, "router_in_flight": None}
        if self._process is None:
            return numbers
        numbers["router_cpu_s"] = self._process.cpu_s()
        numbers["router_rss_bytes"] = self._process.rss_bytes()
        if self._process.returncode is None and self.grpc_port and not self._silent:
            try:
                page = self.pages.read("/metrics", self._patience_s)
            except ComponentError:
                self._silent = True
            else:
                found = [value for name in _RUNNING for value in samples(page, name).values()]
                numbers["router_in_flight"] = int(sum(found)) if found else None
        return numbers

    def _environment(self) -> dict[str, str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("KUBE", "OTEL_"))}
        # Garbage collection took half of the router's CPU at Go's defaults; this only trades memory for it.
        env.setdefault("GOGC", "400")
        env.setdefault("GOMEMLIMIT", "3GiB")
        env["OTEL_TRACES_SAMPLER_ARG"] = "0"  # v0.7.1 samples spans for a collector whatever --tracing says
        if self._plan.discovery == "kubernetes":
            api = kubernetes_api.KubernetesApi()
            self._cleanup.callback(api.close)
            pool = kubernetes_api.pool(self._plan.endpoints[0].port, _POD_LABELS, 9002)
            api.put(kubernetes_api.POOLS, NAMESPACE, POOL, pool)
            for e in self._plan.endpoints:
                api.put(kubernetes_api.PODS, NAMESPACE, e.name, kubernetes_api.pod(e, _POD_LABELS))
            for name, priority in self._plan.objectives.items():
                for resource in (kubernetes_api.OBJECTIVES, kubernetes_api.LLMD_OBJECTIVES):
                    api.put(resource, NAMESPACE, name, kubernetes_api.objective(priority))
            for number, (model, target) in enumerate(self._plan.rewrites.items()):
                for resource in (kubernetes_api.REWRITES, kubernetes_api.LLMD_REWRITES):
                    api.put(resource, NAMESPACE, f"rewrite-{number}", kubernetes_api.rewrite(model, target))
            # not in the run's folder: KUBECONFIG is a list separated by colons, which the folder's name may hold
            folder = Path(tempfile.mkdtemp(prefix="harness-"))
            self._cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
            path = folder / "kubeconfig.yaml"
            kubernetes_api.write_kubeconfig(path, api.port, NAMESPACE)
            env["KUBECONFIG"] = str(path)
        return env

    def _launch(self, env: dict[str, str], *, last: bool) -> bool:
        """One attempt on freshly chosen ports; False if somebody else was quicker on one of them."""
        plan = self._plan
        grpc_port, health_port, metrics_port, events_port = free_ports(4)
        coupling = plan.coupling(events_port)
        self.adapted = config.adapt(plan.document, str(plan.config_path), coupling)
        rendered = plan.workdir / "router-config.yaml"
        rendered.write_text(self.adapted.text)
        write_endpoints_file(coupling.endpoints_file, plan.endpoints)
        self.log = LogReader()
        arguments = [
            f"--config-file={rendered}",
            f"--pool-name={POOL}",
            f"--pool-namespace={NAMESPACE}",
            f"--grpc-port={grpc_port}",
            f"--grpc-health-port={health_port}",
            f"--metrics-port={metrics_port}",
            "--secure-serving=false",
            "--metrics-endpoint-auth=false",
            "--tracing=false",
            "-v=0",
            *self.adapted.flags,
        ]
        process = RouterProcess([str(plan.binary), *arguments], env, plan.workdir / "router.log", self.log.line)
        process.start()
        self._process = process
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _listening(grpc_port):
            if process.returncode is not None:
                process.wait_drained(2.0)
                if "address already in use" in process.tail() and not last:
                    return False
                raise self._refusal(process)
            if time.monotonic() > deadline:
                process.stop()
                raise ComponentError("router", f"not up within {START_TIMEOUT_S:g} s", process.tail())
            time.sleep(0.01)
        self._cleanup.callback(process.stop)
        self.pages = HttpGet(metrics_port)
        self._cleanup.callback(self.pages.close)
        self.grpc_port, self.kv_events_url = grpc_port, coupling.kv_events_url
        return True

    def _refusal(self, process: RouterProcess) -> Exception:
        code, words = process.returncode, self.log.refusal()
        if words is None or code is None or code < 0:
            return ComponentError("router", f"ended at start-up with status {code}", process.tail())
        return InputError(
            str(self._plan.config_path),
            f"refused by the router {self._plan.release}: {words}",
            f"correct the configuration (the router's log is {self._plan.workdir / 'router.log'})",
        )


def _listening(port: int) -> bool:
    with socket.socket() as s:
        s.settimeout(0.2)
        return s.connect_ex(("127.0.0.1", port)) == 0


def check(
    release: str,
    discovery: str,
    endpoints: Sequence[Endpoint],
    block_tokens: int,
    router_block_tokens: int | None,
    needs_objects: bool,
) -> None:
    """InputError where release, discovery, endpoints and block sizes do not go together."""
    if release not in config.RELEASES:
        known = ", ".join(config.RELEASES)
        raise InputError("router.release", f"{release!r} is not supported", f"choose from {known}")
    if release == "v0.7.1" and discovery == "file":
        raise InputError("router.discovery", "v0.7.1 has no file discovery", "leave it out or say `kubernetes`")
    if needs_objects and discovery == "file":
        what = "objectives and model rewrites are objects of the Kubernetes API"
        raise InputError("router.discovery", what, "set it to `kubernetes`")
    ports = {e.port for e in endpoints}
    if len(ports) != 1:
        raise InputError("cluster", f"workers on {len(ports)} different ports", "give all workers the same port")
    if router_block_tokens is not None and (router_block_tokens < 1 or router_block_tokens % block_tokens):
        raise InputError(
            "router.block_tokens",
            f"{router_block_tokens} is no multiple of the engine's block of {block_tokens} tokens",
            f"choose a multiple of {block_tokens}",
        )
