"""The real llm-d router, unmodified, in lock-step with virtual time."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from fake_workers.api import metrics
from fake_workers.api.kv_events import EventsWire
from fake_workers.engine.events import KvEvent, Stored
from fake_workers.engine.gauges import Gauges
from harness.errors import ComponentError, InputError
from harness.router import adapt_v071, adapt_v0100, config, kubernetes_api, prompts
from harness.router.barriers import IndexUpdateBarrier, KvEventBarrier
from harness.router.base import Decision, Endpoint, RouteRequest
from harness.router.belief import PublishedBlocks, ScoreModel, pod_name, session_token
from harness.router.config import Adapted, Coupling, PromptForm
from harness.router.endpoints import NAMESPACE, POOL, write_endpoints_file
from harness.router.ext_proc import Answer, ExtProcClient, usage_chunk
from harness.router.granularity import Granularity
from harness.router.http_get import HttpGet, sample, samples
from harness.router.kv_events import KvEventPublisher
from harness.router.log_reader import LogReader
from harness.router.metrics_push import MetricsPush
from harness.router.process import RouterProcess, free_ports
from harness.router.tie_break import TieBreak
from harness.router.tokenizer import TokenizerService

_START_TIMEOUT_S = 30.0
_PORT_ATTEMPTS = 5
_POD_LABELS = {"harness/pool": POOL}
_FIRST_CHUNK = b'data: {"object":"text_completion","choices":[{"index":0,"text":"x"}]}\n\n'
_HIT_RATIO = b"inference_extension_prefix_indexer_hit_ratio_sum"
_SESSION_ID = "x-session-id"


class LlmdRouter:
    """Starts the router as a child process and offers `harness.router.base.Router`."""

    def __init__(
        self,
        binary: Path,
        release: str,
        config_path: Path,
        endpoints: Sequence[Endpoint],
        *,
        model: str,
        block_tokens: int,
        num_gpu_blocks: int,
        seed: int,
        workdir: Path,
        router_block_tokens: int | None = None,
        events_wire: EventsWire = "map",
        discovery: Literal["file", "kubernetes"] | None = None,
        unmodified: bool | None = None,
    ) -> None:
        if release not in config.RELEASES:
            raise InputError("router.release", f"{release!r} is not supported", f"choose from {', '.join(config.RELEASES)}")
        if release == "v0.7.1" and discovery == "file":
            raise InputError("router.discovery", "v0.7.1 has no file discovery", "leave it out or say `kubernetes`")
        ports = {e.port for e in endpoints}
        if len(ports) != 1:
            raise InputError("cluster", f"workers on {len(ports)} different ports", "give all workers the same port")
        self._binary, self._release, self._config_path = binary, release, config_path
        self._endpoints = list(endpoints)
        self._model, self._block_tokens, self._num_gpu_blocks = model, block_tokens, num_gpu_blocks
        self._unmodified = unmodified
        self._seed, self._workdir, self._events_wire = seed, workdir, events_wire
        self._router_block_tokens = router_block_tokens or block_tokens
        if self._router_block_tokens % block_tokens:
            raise InputError(
                "router.block_tokens",
                f"{router_block_tokens} is no multiple of the engine's block of {block_tokens} tokens",
                f"choose a multiple of {block_tokens}",
            )
        self._granularity = Granularity(self._router_block_tokens // block_tokens)
        self._discovery = discovery or ("kubernetes" if release == "v0.7.1" else "file")
        self._config_text, self._document = config.load(config_path)
        self._adapted: Adapted = config.adapt(self._document, str(config_path), self._coupling(0))
        self._names = [pod_name(e.name, self._discovery) for e in self._endpoints]
        self._by_address = {f"{e.address}:{e.port}": e.index for e in self._endpoints}
        self._gauges = [Gauges(0, 0, 0.0) for _ in self._endpoints]
        self._tie_break = TieBreak(len(self._endpoints), seed)
        self._rank_due = False
        self._model_of_scores = ScoreModel(
            self._adapted.scorers, self._names, self._adapted.prefix_scorer
        )
        self._published = PublishedBlocks(len(self._endpoints))
        self._open: dict[str, _Open] = {}
        self._cookies: dict[str, str] = {}
        self._number = 0
        self._index_update_due = False
        self._hit_ratio = 0.0
        self._seconds: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._stopped = False
        self._final: dict[str, Any] = {}
        self._cleanup = contextlib.ExitStack()
        self._log = LogReader()

    # What the simulation asks before it starts

    @property
    def reads_kv_events(self) -> bool:
        """Whether the configuration has a plugin that listens to KV events."""
        return self._adapted.reads_kv_events

    @property
    def reads_gauges(self) -> bool:
        """Whether the configuration has a plugin that reads the workers' gauges."""
        return self._adapted.reads_gauges

    @property
    def pid(self) -> int:
        """Process id of the router."""
        return self._process.pid

    # Life

    def start(self) -> None:
        """Brings the router up with all endpoints known and their first gauges read."""
        self._workdir.mkdir(parents=True, exist_ok=True)
        (self._workdir / "router.log").unlink(missing_ok=True)
        try:
            self._serve_workers()
            for attempt in range(_PORT_ATTEMPTS):
                if self._launch(last=attempt == _PORT_ATTEMPTS - 1):
                    break
            self._connect()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends the child process and frees the ports; safe to call twice."""
        if self._stopped:
            return
        self._stopped = True
        self._final = self._child_numbers()
        self._cleanup.close()

    # The coupling proper

    def push_gauges(self, updates: dict[int, Gauges]) -> None:
        """New scrape values; returns once the router has taken them over."""
        start_s = time.perf_counter()
        for index, gauges in updates.items():
            self._gauges[index] = gauges
        self._push(updates)
        self._seconds["push"] += time.perf_counter() - start_s
        self._counts["gauge_updates"] += len(updates)

    def publish_kv_events(self, events: dict[int, list[KvEvent]]) -> None:
        """KV events; returns once they are in the router's index."""
        if not self.reads_kv_events:
            return
        start_s = time.perf_counter()
        blocks = 0
        published = False
        for index, engine_batch in events.items():
            batch = self._granularity.events(engine_batch)
            if batch:
                published = True
                self._publisher.publish(index, batch)
                if self._release == "v0.7.1":
                    self._published.apply(index, batch)
                blocks += sum(e.count for e in batch if isinstance(e, Stored))
        if published:
            with self._watching():
                self._kv_barrier.pass_(blocks)
            self._counts["barriers"] += 1
        self._seconds["barrier"] += time.perf_counter() - start_s

    def decide(self, request: RouteRequest) -> Decision:
        """Where the request goes; it is in flight from now on unless the router refuses it."""
        start_s = time.perf_counter()
        if self._rank_due:
            self._push({})
        if self._index_update_due:
            self._index_update_due = False
            with self._watching():
                self._index_barrier.pass_()
            self._counts["index_barriers"] += 1
        ready_s = time.perf_counter()
        self._number += 1
        prompt = prompts.build(
            request, self._number, self._adapted, self._block_tokens, self._granularity, self._tokenizer
        )
        headers = {_SESSION_ID: request.session_id, **request.headers}
        header = self._adapted.session_header
        token = self._cookies.get(request.session_id) if header else None
        if header and token:
            headers[header] = token
        with self._watching():
            answer = self._ext_proc.decide(request.request_id, prompts.PATH, headers, prompt.body)
        if self._tokenizer is not None and prompt.key is not None:
            self._tokenizer.forget(prompt.key)
        decided_s = time.perf_counter()
        self._seconds["push"] += ready_s - start_s
        self._seconds["ext_proc"] += decided_s - ready_s
        self._counts["decisions"] += 1
        return self._decision(request, prompt, answer, token)

    def first_token(self, request_id: str) -> dict[str, str]:
        """Response headers and first streamed token passed through; returns the headers that the client sees."""
        start_s = time.perf_counter()
        opened = self._open[request_id]
        opened.streaming = True
        with self._watching():
            headers = self._ext_proc.first_token(request_id, _FIRST_CHUNK)
        self._keep_cookie(opened, headers)
        self._seconds["response"] += time.perf_counter() - start_s
        return headers

    def finish(
        self, request_id: str, prompt_tokens: int, cached_tokens: int, output_tokens: int
    ) -> dict[str, str]:
        """Last token with its usage passed through; returns headers that the client sees late, if any."""
        if not self._open[request_id].streaming:
            self.first_token(request_id)
        start_s = time.perf_counter()
        opened = self._open.pop(request_id)
        with self._watching():
            self._ext_proc.finish(request_id, usage_chunk(prompt_tokens, cached_tokens, output_tokens))
        late: dict[str, str] = {}
        if self._adapted.session_header and self._release == "v0.7.1":
            late[self._adapted.session_header] = session_token(self._names[opened.endpoint])
            self._keep_cookie(opened, late)
        self._seconds["response"] += time.perf_counter() - start_s
        return late

    def abort(self, request_id: str) -> None:
        """The client went away; returns once the router has let go of the request."""
        start_s = time.perf_counter()
        del self._open[request_id]
        with self._watching():
            self._ext_proc.abort(request_id)
        self._seconds["response"] += time.perf_counter() - start_s

    # Records

    def identity(self) -> dict[str, Any]:
        """What decided, and what the harness added to its configuration."""
        return {
            "kind": "llm-d",
            "release": self._release,
            "sha256": _sha256(self._binary),
            "unmodified": self._unmodified,
            "config": self._config_path.stem,
            "config_text": self._config_text,
            "discovery": self._discovery,
            "prompt_form": self._adapted.prompt_form.value,
            "added": [*self._adapted.added, *self._client_additions()],
            "not_simulated": list(self._adapted.not_simulated),
            "notes": [*self._adapted.notes, *self._belief_notes()],
        }

    def stats(self) -> dict[str, Any]:
        """Costs in wall seconds, counts, and what makes a run invalid (`fallbacks` not empty)."""
        numbers = self._final if self._stopped else self._child_numbers()
        return {
            "decisions": self._counts["decisions"],
            "barriers": self._counts["barriers"],
            "index_barriers": self._counts["index_barriers"],
            "gauge_updates": self._counts["gauge_updates"],
            "refusals": self._counts["refusals"],
            "push_s": self._seconds["push"],
            "barrier_s": self._seconds["barrier"],
            "ext_proc_s": self._seconds["ext_proc"],
            "response_s": self._seconds["response"],
            "fallbacks": dict(self._log.fallbacks),
            "beliefs_unknown": self._counts["beliefs_unknown"],
            **numbers,
        }

    # Start-up

    def _coupling(self, kv_events_port: int) -> Coupling:
        return Coupling(
            release=self._release,
            discovery=self._discovery,
            endpoints_file=self._workdir.resolve() / "endpoints.yaml",
            endpoints=len(self._endpoints),
            model=self._model,
            block_tokens=self._block_tokens,
            router_block_tokens=self._router_block_tokens,
            num_gpu_blocks=self._num_gpu_blocks,
            kv_events_url=f"tcp://127.0.0.1:{kv_events_port}",
            tokenizer_socket=self._workdir.resolve() / "tokenizer.sock",
        )

    def _serve_workers(self) -> None:
        pages = [self._page(e.index) for e in self._endpoints]
        self._metrics = MetricsPush(self._endpoints, pages, lambda: self._process.returncode is None)
        self._cleanup.callback(self._metrics.close)
        self._tokenizer: TokenizerService | None = None
        if self._adapted.needs_tokenizer:
            path = self._coupling(0).tokenizer_socket
            path.unlink(missing_ok=True)
            self._tokenizer = TokenizerService(path)
            self._cleanup.callback(self._tokenizer.close)
        if self._discovery == "kubernetes":
            self._kubernetes = kubernetes_api.KubernetesApi()
            self._cleanup.callback(self._kubernetes.close)
            pool = kubernetes_api.pool(self._endpoints[0].port, _POD_LABELS, 9002)
            self._kubernetes.put(kubernetes_api.POOLS, NAMESPACE, POOL, pool)
            for e in self._endpoints:
                self._kubernetes.put(kubernetes_api.PODS, NAMESPACE, e.name, kubernetes_api.pod(e, _POD_LABELS))

    def _launch(self, *, last: bool) -> bool:
        """One attempt on freshly chosen ports; False if somebody else was quicker on one of them."""
        grpc_port, health_port, metrics_port, events_port = free_ports(4)
        self._adapted = config.adapt(self._document, str(self._config_path), self._coupling(events_port))
        rendered = self._workdir / "router-config.yaml"
        rendered.write_text(self._adapted.text)
        write_endpoints_file(self._workdir.resolve() / "endpoints.yaml", self._endpoints)
        env = {k: v for k, v in os.environ.items() if not k.startswith(("KUBE", "OTEL_"))}
        env["OTEL_TRACES_SAMPLER_ARG"] = "0"  # v0.7.1 samples spans for a collector whatever --tracing says
        if self._discovery == "kubernetes":
            path = self._workdir / "kubeconfig.yaml"
            kubernetes_api.write_kubeconfig(path, self._kubernetes.port, NAMESPACE)
            env["KUBECONFIG"] = str(path)
        self._log = LogReader()
        process = RouterProcess(
            [
                str(self._binary),
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
                *self._adapted.flags,
            ],
            env,
            self._workdir / "router.log",
            self._log.line,
        )
        process.start()
        self._process = process
        self._ports = (grpc_port, metrics_port, events_port)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not _listening(grpc_port):
            if process.returncode is not None:
                if self._port_was_taken() and not last:
                    return False
                raise self._refusal()
            if time.monotonic() > deadline:
                process.stop()
                raise ComponentError("router", f"not up within {_START_TIMEOUT_S:g} s", process.tail())
            time.sleep(0.01)
        self._cleanup.callback(process.stop)
        return True

    def _connect(self) -> None:
        grpc_port, metrics_port, events_port = self._ports
        with self._watching():
            self._ext_proc = ExtProcClient(grpc_port)
            self._cleanup.callback(self._ext_proc.close)
            if not self._ext_proc.ready(_START_TIMEOUT_S):
                raise ComponentError("router", f"accepts no ext_proc streams within {_START_TIMEOUT_S:g} s")
            self._pages = HttpGet(metrics_port)
            self._cleanup.callback(self._pages.close)
            self._index_barrier = IndexUpdateBarrier(self._pages)
            if self.reads_kv_events:
                tokens = self._block_tokens if self._adapted.prompt_form is PromptForm.REAL_IDS else 1
                self._publisher = KvEventPublisher(
                    f"tcp://127.0.0.1:{events_port}", self._endpoints, self._model, tokens, self._events_wire
                )
                self._cleanup.callback(self._publisher.close)
                self._publisher.wait_subscribed(_START_TIMEOUT_S)
                self._kv_barrier = KvEventBarrier(self._publisher, self._pages, tokens)
            self._metrics.wait_all(_START_TIMEOUT_S)

    def _port_was_taken(self) -> bool:
        self._process.wait_drained(2.0)
        return "address already in use" in self._process.tail()

    def _refusal(self) -> Exception:
        self._process.wait_drained(2.0)
        code, words = self._process.returncode, self._log.refusal()
        if words is None or code is None or code < 0:
            return ComponentError("router", f"ended at start-up with status {code}", self._process.tail())
        return InputError(
            str(self._config_path),
            f"refused by the router {self._release}: {words}",
            f"correct the configuration (the router's log is {self._workdir / 'router.log'})",
        )

    # Gauges

    def _page(self, index: int) -> bytes:
        gauges, rank = self._gauges[index], self._tie_break.ranks[index]
        extra = {
            adapt_v0100.TIE_BREAK_METRIC: float(rank),
            adapt_v071.KV_TIE_BREAK_METRIC: gauges.kv_usage + rank * 1e-9,
        }
        return metrics.render(
            gauges,
            model=self._model,
            block_tokens=self._block_tokens,
            num_gpu_blocks=self._num_gpu_blocks,
            extra=extra,
        )

    def _push(self, updates: dict[int, Gauges]) -> None:
        self._rank_due = False
        changed = self._tie_break.deal(updates)
        with self._watching():
            self._metrics.push({index: self._page(index) for index in changed})

    # Decisions

    def _decision(self, request: RouteRequest, prompt: prompts.Prompt, answer: Answer, token: str | None) -> Decision:
        if answer.status != 200:
            self._counts["refusals"] += 1
            return Decision(None, None, answer.status, answer.message, answer.headers)
        index = self._by_address.get(answer.destinations[0]) if answer.destinations else None
        if index is None:
            raise ComponentError("router", f"chose {answer.destinations}, which is none of the workers")
        self._open[request.request_id] = _Open(index, request.session_id)
        share = None
        if self._adapted.prefix is not None:
            share = self._believed_share(request, prompt, answer, index, token)
            if share is None:
                self._counts["beliefs_unknown"] += 1
        self._tie_break.chosen(index)
        self._rank_due = True
        self._index_update_due = self._adapted.prefix == "approximate"
        return Decision(index, share, 200, "", answer.headers)

    def _believed_share(
        self, request: RouteRequest, prompt: prompts.Prompt, answer: Answer, index: int, token: str | None
    ) -> float | None:
        if prompt.blocks == 0:
            return 0.0
        if self._release == "v0.7.1":
            if self._adapted.prefix == "precise":
                return self._published.matched(index, prompt.runs) / prompt.blocks
            return self._hit_ratio_since()
        candidates = [self._by_address[address] for address in answer.scores]
        if not self._model_of_scores.usable or index not in candidates:
            return None
        total = answer.scores[answer.destinations[0]]
        return self._model_of_scores.prefix_share(
            total, index, candidates, self._gauges, self._tie_break.ranks[index], token, prompt.blocks
        )

    def _hit_ratio_since(self) -> float | None:
        """v0.7.1 adds each decision's matched share to a histogram: the growth of its sum is this decision's."""
        with self._watching():
            ratio = sample(self._pages.read("/metrics"), _HIT_RATIO)
        if ratio is None:
            return None
        share, self._hit_ratio = ratio - self._hit_ratio, ratio
        return min(1.0, max(0.0, share))

    def _keep_cookie(self, opened: _Open, headers: dict[str, str]) -> None:
        header = self._adapted.session_header
        if header and header in headers:
            self._cookies[opened.session_id] = headers[header]

    # Records

    def _client_additions(self) -> list[str]:
        added = [f"clients send {_SESSION_ID} with the session's id"]
        header = self._adapted.session_header
        if header:
            added.append(f"clients echo {header} as a browser echoes a cookie")
            if self._release == "v0.7.1":
                added.append(
                    f"{header} is made by the harness: this release sets it after the response headers have gone out, "
                    "so that no client ever receives it"
                )
        return added

    def _belief_notes(self) -> list[str]:
        if self._adapted.prefix is None:
            return []
        if self._release == "v0.7.1":
            if self._adapted.prefix == "precise":
                return ["believed prefix share: from the KV events that the router has acknowledged (it reports none)"]
            return ["believed prefix share: from the router's hit ratio histogram"]
        if self._model_of_scores.usable:
            return ["believed prefix share: the router's total score less the other scorers' known parts"]
        return [f"believed prefix share: unknown, scores of {', '.join(self._model_of_scores.unknown)} are not modelled"]

    def _child_numbers(self) -> dict[str, Any]:
        started = hasattr(self, "_process")
        numbers: dict[str, Any] = {
            "open_requests": len(self._open),
            "router_cpu_s": self._process.cpu_s() if started else 0.0,
            "router_rss_bytes": self._process.rss_bytes() if started else 0,
            "router_in_flight": None,
        }
        if started and self._process.returncode is None and hasattr(self, "_pages"):
            with contextlib.suppress(ComponentError):
                page = self._pages.read("/metrics")
                for name in (b"inference_objective_running_requests", b"llm_d_router_epp_running_requests"):
                    found = samples(page, name)
                    if found:
                        numbers["router_in_flight"] = int(sum(found.values()))
        return numbers

    @contextlib.contextmanager
    def _watching(self) -> Any:
        """Turns any failure while the router is dead into "the router died", with its last words."""
        try:
            yield
        except ComponentError as error:
            deadline = time.monotonic() + 0.5
            while self._process.returncode is None and time.monotonic() < deadline:
                time.sleep(0.01)
            if self._process.returncode is None:
                raise ComponentError(error.component, error.what, error.kept or self._process.tail()) from error
            self._process.wait_drained(1.0)
            raise ComponentError(
                "router", f"died with status {self._process.returncode}", self._process.tail()
            ) from error


class _Open:
    """A request in flight."""

    __slots__ = ("endpoint", "session_id", "streaming")

    def __init__(self, endpoint: int, session_id: str) -> None:
        self.endpoint, self.session_id, self.streaming = endpoint, session_id, False


def _listening(port: int) -> bool:
    with socket.socket() as s:
        s.settimeout(0.2)
        return s.connect_ex(("127.0.0.1", port)) == 0


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
