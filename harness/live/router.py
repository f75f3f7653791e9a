"""The real router on the wall clock: nothing is coupled to virtual time, so its configuration stays as it is.

Only what depends on this machine is filled in: where the endpoints are listed, where the tokenizer is, the workers'
block size, model and event port.
"""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fake_workers.api.tokenizer import Tokenizer
from harness.errors import ComponentError, InputError
from harness.live.tokenizer_service import LiveTokenizerService
from harness.router import config, kubernetes_api, plugins
from harness.router.base import Endpoint
from harness.router.config import Document, plugin_name
from harness.router.endpoints import NAMESPACE, POOL, write_endpoints_file
from harness.router.log_reader import LogReader
from harness.router.process import RouterProcess
from harness.router.tokenizer import tokenizer_socket_path

START_TIMEOUT_S = 30.0
_POD_LABELS = {"harness/pool": POOL}
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Facts:
    """What a configuration depends on."""

    release: str
    model: str
    block_tokens: int
    endpoints_file: str
    render_url: str
    tokenizer_socket: str
    events_port: int | None


@dataclass(slots=True)
class Filled:
    """A configuration as the router gets it."""

    document: Json
    changes: list[str] = field(default_factory=list)
    needs_tokenizer: bool = False

    @property
    def text(self) -> str:
        """As YAML."""
        return str(yaml.safe_dump(self.document, sort_keys=False, width=110))


def fill(document: Json, where: str, facts: Facts) -> Filled:
    """The user's configuration with this cluster's places in it; the input is not changed."""
    doc = Document(copy.deepcopy(document), where)
    filled = Filled(doc.document)
    precise = doc.by_type(plugins.PRECISE_PRODUCER, plugins.PRECISE_LEGACY)
    if precise and facts.events_port is None:
        raise InputError(
            where, "scores by KV events, and live.kv_events is off", "switch it on, or take another configuration"
        )
    for plugin in precise:
        _precise(doc, plugin, facts, filled)
    if facts.release == "v0.7.1":
        filled.changes.append("endpoints come from a stand-in for the Kubernetes API")
        return filled
    section = doc.section("dataLayer", "discovery")
    found = doc.named(str(section.get("pluginRef"))) if section else None
    if found is None:
        found = {"type": "file-discovery", "name": "live-endpoints"}
        doc.plugins.append(found)
        section["pluginRef"] = "live-endpoints"
    found["type"] = "file-discovery"
    found["parameters"] = {"path": facts.endpoints_file, "watchFile": True}
    filled.changes.append(f"{plugin_name(found)}: the workers are listed in {facts.endpoints_file}")
    for plugin in doc.by_type("token-producer", "tokenizer"):
        parameters = doc.parameters(plugin)
        if "estimate" in parameters:
            continue
        parameters.clear()
        parameters.update(modelName=facts.model, vllm={"url": facts.render_url})
        filled.changes.append(f"{plugin_name(plugin)}: the workers' render routes tokenise ({facts.render_url})")
    return filled


def _precise(doc: Document, plugin: Json, facts: Facts, filled: Filled) -> None:
    name, parameters = plugin_name(plugin), doc.parameters(plugin)
    tokens = doc.section("tokenProcessorConfig", of=parameters)
    key = "blockSize" if facts.release == "v0.7.1" else "blockSizeTokens"
    tokens.pop("blockSize" if key == "blockSizeTokens" else "blockSizeTokens", None)
    tokens[key] = facts.block_tokens
    events = doc.section("kvEventsConfig", of=parameters)
    events.pop("zmqEndpoint", None)
    events.update(discoverPods=True, podDiscoveryConfig={"socketPort": facts.events_port})
    filled.changes.append(
        f"{name}: blocks of {facts.block_tokens} tokens, KV events from port {facts.events_port} of every worker"
    )
    indexer = doc.section("indexerConfig", of=parameters)
    if facts.release == "v0.7.1":
        pool = doc.section("tokenizersPoolConfig", of=indexer)
        pool.update(modelName=facts.model, uds={"socketFile": facts.tokenizer_socket})
        pool.setdefault("workersCount", 4)
        filled.needs_tokenizer = True
        filled.changes.append(f"{name}: tokenizer at {facts.tokenizer_socket}")


class LiveRouter:
    """One router process and what its release needs around it; it can be stopped and started again."""

    def __init__(
        self,
        binary: Path,
        release: str,
        config_path: Path,
        endpoints: Sequence[Endpoint],
        *,
        model: str,
        block_tokens: int,
        workdir: Path,
        ports: tuple[int, int, int],
        render_url: str,
        events_port: int | None,
        tokenizer: Callable[[], Tokenizer],
    ) -> None:
        """`ports`: ext_proc, health, metrics. `workdir` takes the configuration and the log."""
        self._binary, self.release, self._endpoints, self._workdir = binary, release, list(endpoints), workdir
        self.grpc_port, self.health_port, self.metrics_port = ports
        self.config_path = config_path
        self._cleanup = contextlib.ExitStack()
        self._tokenizer = tokenizer
        self._endpoints_file = workdir / "endpoints.yaml"
        socket_path = tokenizer_socket_path()
        _, document = config.load(config_path)
        facts = Facts(
            release, model, block_tokens, str(self._endpoints_file), render_url, str(socket_path), events_port
        )
        self.filled = fill(document, str(config_path), facts)
        self._socket_path = socket_path
        self._env: dict[str, str] = {}
        self.process: RouterProcess | None = None
        self.log = LogReader()
        self.starts = 0

    def prepare(self) -> None:
        """Files and services that outlive a restart of the process."""
        self._workdir.mkdir(parents=True, exist_ok=True)
        (self._workdir / "router-config.yaml").write_text(self.filled.text)
        write_endpoints_file(self._endpoints_file, self._endpoints)
        self._env = {k: v for k, v in os.environ.items() if not k.startswith(("KUBE", "OTEL_"))}
        self._env["OTEL_TRACES_SAMPLER_ARG"] = "0"
        if self.filled.needs_tokenizer:
            self._socket_path.parent.mkdir(mode=0o700)
            self._cleanup.callback(shutil.rmtree, self._socket_path.parent, ignore_errors=True)
            service = LiveTokenizerService(self._socket_path, self._tokenizer())
            self._cleanup.callback(service.close)
        if self.release == "v0.7.1":
            self._kubernetes()

    def start(self) -> None:
        """Start the process and wait until it serves."""
        arguments = [
            f"--config-file={self._workdir / 'router-config.yaml'}",
            f"--pool-name={POOL}",
            f"--pool-namespace={NAMESPACE}",
            f"--grpc-port={self.grpc_port}",
            f"--grpc-health-port={self.health_port}",
            f"--metrics-port={self.metrics_port}",
            "--secure-serving=false",
            "--metrics-endpoint-auth=false",
            "--tracing=false",
            "-v=1",
        ]
        if self.release == "v0.7.1":
            arguments.append("--health-checking")
        else:
            arguments += ["--emit-endpoint-scores", "--allow-experimental-plugins"]
        self.log = LogReader()
        self.starts += 1
        log_path = self._workdir / "router.log"
        process = RouterProcess([str(self._binary), *arguments], self._env, log_path, self.log.line)
        process.start()
        self.process = process
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _listening(self.grpc_port):
            if process.returncode is not None:
                process.wait_drained(2.0)
                words = self.log.refusal()
                if words and process.returncode > 0 and "address already in use" not in process.tail():
                    raise InputError(
                        str(self.config_path), f"refused by the router {self.release}: {words}", "correct it"
                    )
                raise ComponentError("router", f"ended at start with status {process.returncode}", process.tail())
            if time.monotonic() > deadline:
                process.stop()
                raise ComponentError("router", f"not up within {START_TIMEOUT_S:g} s", process.tail())
            time.sleep(0.02)

    def stop(self) -> None:
        """End the process; `start` may follow."""
        if self.process is not None:
            self.process.stop()

    def close(self) -> None:
        """End everything."""
        self.stop()
        self._cleanup.close()

    def _kubernetes(self) -> None:
        api = kubernetes_api.KubernetesApi()
        self._cleanup.callback(api.close)
        pool = kubernetes_api.pool(self._endpoints[0].port, _POD_LABELS, 9002)
        api.put(kubernetes_api.POOLS, NAMESPACE, POOL, pool)
        for endpoint in self._endpoints:
            api.put(kubernetes_api.PODS, NAMESPACE, endpoint.name, kubernetes_api.pod(endpoint, _POD_LABELS))
        folder = Path(tempfile.mkdtemp(prefix="harness-"))
        self._cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        path = folder / "kubeconfig.yaml"
        kubernetes_api.write_kubeconfig(path, api.port, NAMESPACE)
        self._env["KUBECONFIG"] = str(path)


def _listening(port: int) -> bool:
    with socket.socket() as s:
        s.settimeout(0.2)
        return s.connect_ex(("127.0.0.1", port)) == 0
