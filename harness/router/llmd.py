"""The real llm-d router, unmodified, in lock-step with virtual time."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fake_workers.api import metrics
from fake_workers.api.kv_events import EventsWire
from fake_workers.engine.events import Cleared, KvEvent, Removed, Stored, TierEvent
from fake_workers.engine.gauges import Gauges
from harness.disagg.sidecar import PREFILLER
from harness.errors import ComponentError, InputError
from harness.router import adapt_v0100, adapt_v071, config, prompts
from harness.router.barriers import IndexUpdateBarrier, InFlightBarrier, KvEventBarrier
from harness.router.base import Decision, Endpoint, RouteRequest
from harness.router.belief import PublishedBlocks, ScoreModel, pod_name, session_token
from harness.router.binaries import sha256_of
from harness.router.cold_start import cold_requests, probe_request
from harness.router.config import Adapted, Coupling, PromptForm
from harness.router.ext_proc import Answer, ExtProcClient, usage_chunk
from harness.router.granularity import Granularity
from harness.router.http_get import sample
from harness.router.index_model import IndexModel
from harness.router.kv_events import KvEventPublisher
from harness.router.launch import START_TIMEOUT_S, Deployment, Plan, check
from harness.router.log_reader import ORPHAN
from harness.router.record_notes import SESSION_ID, belief_notes, client_additions
from harness.router.tie_break import TieBreak
from harness.router.tier_events import RouterTierEvent, in_router_blocks
from harness.router.tokenizer import tokenizer_socket_path

_FIRST_CHUNK = b'data: {"object":"text_completion","choices":[{"index":0,"text":"x"}]}\n\n'
_MOST_STARTS = 64
"""At each the order of the router's producers is drawn anew: all wrong once in 2**64."""
_HIT_RATIO = b"inference_extension_prefix_indexer_hit_ratio_sum"


@dataclass(slots=True)
class _Open:
    """A request in flight."""

    endpoint: int
    session_id: str
    streaming: bool = False


class LlmdRouter:
    """Starts the router as a child process and offers `harness.router.base.Router`.

    router_block_tokens: block size in which precise prefix scoring counts, a multiple of `block_tokens`;
    larger ones are an approximation (`granularity`) that keeps the router's cost per decision down, which in
    v0.7.1 grows with the square of the matched blocks. objectives, rewrites: InferenceObjectives (name:
    priority) and InferenceModelRewrites (client's model: served model), over the Kubernetes API only.
    unmodified: what is known of the binary's origin, for the record. All calls must come from the thread that
    called `start`.
    """

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
        objectives: Mapping[str, int] | None = None,
        rewrites: Mapping[str, str] | None = None,
        unmodified: bool | None = None,
        provenance_note: str = "",
        tier_events: bool = False,
        gpu_blocks: Sequence[int] | None = None,
    ) -> None:
        discovery = discovery or ("kubernetes" if release == "v0.7.1" else "file")
        check(release, discovery, endpoints, block_tokens, router_block_tokens, bool(objectives or rewrites))
        self._binary, self._release, self._config_path = binary, release, config_path
        self._provenance_note = provenance_note
        self._unmodified, self._events_wire, self._model = unmodified, events_wire, model
        self._endpoints = list(endpoints)
        self._block_tokens = block_tokens
        self._gpu_blocks = list(gpu_blocks or [num_gpu_blocks] * len(endpoints))
        self._discovery = discovery
        self._granularity = Granularity((router_block_tokens or block_tokens) // block_tokens, tier_events)
        workdir = workdir.resolve()
        socket_path = tokenizer_socket_path()
        self._config_text, document = config.load(config_path)

        def coupling(kv_events_port: int) -> Coupling:
            return Coupling(
                release=release,
                discovery=self._discovery,
                endpoints_file=workdir / "endpoints.yaml",
                endpoints=len(self._endpoints),
                model=model,
                block_tokens=block_tokens,
                router_block_tokens=router_block_tokens or block_tokens,
                num_gpu_blocks=num_gpu_blocks,
                kv_events_url=f"tcp://127.0.0.1:{kv_events_port}",
                tokenizer_socket=socket_path,
                entries_per_endpoint=2 if tier_events else 1,
            )

        self._plan = Plan(
            binary,
            release,
            self._discovery,
            self._endpoints,
            document,
            config_path,
            workdir,
            coupling,
            objectives or {},
            rewrites or {},
        )
        try:
            self._deployment = Deployment(self._plan)
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise InputError(
                str(config_path), f"a field has a value of the wrong type ({error})", "compare with the shipped configs"
            ) from None
        self._names = [pod_name(e.name, self._discovery) for e in self._endpoints]
        self._by_address = {f"{e.address}:{e.port}": e.index for e in self._endpoints}
        self._gauges = [Gauges(0, 0, 0.0) for _ in self._endpoints]
        self._tie_break = TieBreak(len(self._endpoints), seed)
        self._rank_due = False
        adapted = self._adapted
        self._scores = ScoreModel(adapted.scorers, self._names, adapted.prefix_scorer)
        self._published = PublishedBlocks(len(self._endpoints))
        told_by_index = release != "v0.7.1" and adapted.prefix == "precise" and not self._scores.usable
        modelled = tier_events or told_by_index
        self._index = IndexModel(adapted.tier_weights, release != "v0.7.1") if modelled else None
        self._open: dict[str, _Open] = {}
        self._cookies: dict[str, str] = {}
        self._told: list[tuple[_Open, str | None]] = []
        """Answers told and not passed through yet: first tokens with their request id, ends with None."""
        self._number = 0
        self._index_update_due = False
        self._hit_ratio = 0.0
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._counts: Counter[str] = Counter()
        self._seed = seed
        self._cleanup = contextlib.ExitStack()

    @property
    def reads_kv_events(self) -> bool:
        """Whether the configuration has a plugin that listens to KV events."""
        return self._adapted.reads_kv_events

    @property
    def reads_gauges(self) -> bool:
        """Whether the configuration has a plugin that reads the workers' gauges."""
        return self._adapted.reads_gauges

    @property
    def blocks_per_router_block(self) -> int:
        """Engine blocks in one block of the router's precise prefix scoring."""
        return self._granularity.factor if self.reads_kv_events else 1

    @property
    def phase_header(self) -> str | None:
        """Header that names the phase, where every phase of a call has a decision of its own."""
        return self._adapted.phase_header

    @property
    def pid(self) -> int:
        """Process id of the router."""
        return self._deployment.process.pid

    def start(self) -> None:
        """Brings the router up with all endpoints known and their first gauges read."""
        for _ in range(_MOST_STARTS):
            self._cleanup.callback(self._deployment.close)
            try:
                self._deployment.start([self._page(e.index) for e in self._endpoints])
                with self._deployment.watching():
                    self._connect()
                    if not self._adapted.order_matters or self._prefix_first():
                        self._hit_ratio = self._hit_ratios() or 0.0
                        return
            except BaseException:
                self.stop()
                raise
            self.stop()
            self._deployment = Deployment(self._plan)
        raise ComponentError("router", f"drew the wrong order of its producers at {_MOST_STARTS} starts")

    def stop(self) -> None:
        """Ends the child process and frees the ports; safe to call twice."""
        self._cleanup.close()

    def push_gauges(self, updates: dict[int, Gauges]) -> None:
        """New scrape values, on their way to the router; the next decision waits until it has taken them over."""
        start_s = time.perf_counter()
        for index, gauges in updates.items():
            self._gauges[index] = gauges
        self._push(updates)
        self._seconds["push"] += time.perf_counter() - start_s
        self._counts["gauge_updates"] += len(updates)

    def publish_kv_events(self, events: dict[int, list[KvEvent]]) -> None:
        """KV events, on their way to the router; the next decision waits until they are in its index."""
        if not self.reads_kv_events:
            return
        start_s = time.perf_counter()
        blocks = 0
        published = False
        about: set[int] | None = set()
        for index, engine_batch in events.items():
            batch = self._granularity.events(engine_batch)
            if not batch:
                continue
            about = _about(batch, about)
            if self._index is not None:
                pieces, admitted = self._with_tiers(self._index, index, batch)
                published |= bool(pieces)
                if pieces:
                    self._publisher.publish(index, pieces)
                blocks += admitted
                continue
            published = True
            self._publisher.publish(index, batch)
            if self._release == "v0.7.1":
                self._published.apply(index, batch)
            blocks += sum(e.count for e in batch if isinstance(e, Stored))
        if published:
            with self._deployment.watching():
                self._kv_barrier.begin(blocks, about)
            self._counts["barriers"] += 1
        self._seconds["barrier"] += time.perf_counter() - start_s

    def _with_tiers(
        self, model: IndexModel, index: int, batch: list[KvEvent]
    ) -> tuple[list[KvEvent | RouterTierEvent], int]:
        """An endpoint's events as they go out, and how many blocks the router's index will admit for them."""
        out: list[KvEvent | RouterTierEvent] = []
        admitted = 0
        for event in batch:
            translated = in_router_blocks(event, self._granularity) if isinstance(event, TierEvent) else event
            if translated is None:
                continue
            for piece in model.pieces(translated):
                admitted += model.apply(index, piece)
                out.append(piece)
        return out, admitted

    def decide(self, request: RouteRequest) -> Decision:
        """Where the request goes; it is in flight from now on unless the router refuses it."""
        start_s = time.perf_counter()
        if self._rank_due:
            self._push({})
        self._catch_up()
        answered_s = time.perf_counter()
        with self._deployment.watching():
            self._deployment.metrics.wait()
        pushed_s = time.perf_counter()
        self._wait_for_events([origin for origin, _, _ in request.runs])
        if self._index_update_due:
            self._index_update_due = False
            with self._deployment.watching():
                self._index_barrier.pass_()
            self._counts["index_barriers"] += 1
        with self._deployment.watching():
            self._in_flight.wait()
        ready_s = time.perf_counter()
        self._number += 1
        tokenizer = self._deployment.tokenizer
        prompt = prompts.build(request, self._number, self._adapted, self._block_tokens, self._granularity, tokenizer)
        headers = {SESSION_ID: request.session_id, **request.headers}
        header = self._adapted.session_header
        token = self._cookies.get(request.session_id) if header else None
        if header and token:
            headers[header] = token
        with self._deployment.watching():
            answer = self._ext_proc.decide(request.request_id, prompts.PATH, headers, prompt.body)
            if answer.status == 200:
                self._in_flight.decided(request.request_id)
        if tokenizer is not None and prompt.key is not None:
            tokenizer.forget(prompt.key)
        self._seconds["response"] += answered_s - start_s
        self._seconds["push"] += pushed_s - answered_s
        self._seconds["barrier"] += ready_s - pushed_s
        self._seconds["ext_proc"] += time.perf_counter() - ready_s
        self._counts["decisions"] += 1
        return self._decision(request, prompt, answer, token)

    def first_token(self, request_id: str) -> dict[str, str]:
        """Response headers and first streamed token passed through; returns the headers that the client sees."""
        start_s = time.perf_counter()
        opened = self._open[request_id]
        opened.streaming = True
        with self._deployment.watching():
            headers = self._ext_proc.first_token(request_id, _FIRST_CHUNK)
        self._in_flight.first_token(request_id)
        self._keep_cookie(opened, headers)
        self._seconds["response"] += time.perf_counter() - start_s
        return headers

    def finish(self, request_id: str, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, str]:
        """Last token with its usage passed through; returns headers that the client sees late, if any."""
        if not self._open[request_id].streaming:
            self.first_token(request_id)
        start_s = time.perf_counter()
        opened = self._open.pop(request_id)
        with self._deployment.watching():
            self._ext_proc.finish(request_id, usage_chunk(prompt_tokens, cached_tokens, output_tokens))
        self._in_flight.ended(request_id)
        late = self._late_headers(opened)
        self._keep_cookie(opened, late)
        self._seconds["response"] += time.perf_counter() - start_s
        return late

    def tell_first_token(self, request_id: str) -> None:
        """See Router."""
        opened = self._open[request_id]
        opened.streaming = True
        self._ext_proc.tell_first_token(request_id, _FIRST_CHUNK)
        self._in_flight.first_token(request_id)
        self._told.append((opened, request_id))

    def tell_end(self, request_id: str, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """See Router."""
        if not self._open[request_id].streaming:
            self.tell_first_token(request_id)
        opened = self._open.pop(request_id)
        self._ext_proc.tell_end(request_id, usage_chunk(prompt_tokens, cached_tokens, output_tokens))
        self._in_flight.ended(request_id)
        self._told.append((opened, None))

    def settle(self) -> None:
        """See Router."""
        self._catch_up()
        with self._deployment.watching():
            self._deployment.metrics.wait()
        self._wait_for_events()

    def _wait_for_events(self, asked: list[int] | None = None) -> None:
        """What was published is in the router's index, or as much of it as is about these origins' blocks."""
        if self.reads_kv_events:
            with self._deployment.watching():
                self._kv_barrier.wait(asked)

    def _catch_up(self) -> None:
        """What was told is passed through, and cookies are kept in the order of the telling."""
        if not self._told:
            return
        told, self._told = self._told, []
        with self._deployment.watching():
            headers = self._ext_proc.catch_up()
        for opened, first in told:
            self._keep_cookie(opened, self._late_headers(opened) if first is None else headers[first])

    def _late_headers(self, opened: _Open) -> dict[str, str]:
        """What the client sees with the end of the answer."""
        if self._adapted.session_header and self._release == "v0.7.1":
            return {self._adapted.session_header: session_token(self._names[opened.endpoint])}
        return {}

    def abort(self, request_id: str) -> None:
        """The client went away; returns once the router has let go of the request."""
        start_s = time.perf_counter()
        self._catch_up()
        del self._open[request_id]
        with self._deployment.watching():
            self._ext_proc.abort(request_id)
        self._in_flight.ended(request_id)
        self._seconds["response"] += time.perf_counter() - start_s

    def identity(self) -> dict[str, Any]:
        """What decided, and what the harness added to its configuration."""
        adapted = self._adapted
        return {
            "kind": "llm-d",
            "release": self._release,
            "sha256": self._sha256,
            "unmodified": self._unmodified,
            "provenance_note": self._provenance_note,
            "config": self._config_path.stem,
            "config_text": self._config_text,
            "discovery": self._discovery,
            "prompt_form": adapted.prompt_form.value,
            "router_block_tokens": self._block_tokens * self._granularity.factor,
            "added": [*adapted.added, *client_additions(adapted, self._release)],
            "not_simulated": list(adapted.not_simulated),
            "notes": [*adapted.notes, *belief_notes(adapted, self._release, self._scores)],
        }

    def stats(self) -> dict[str, Any]:
        """Costs in wall seconds, counts, and what makes a run invalid (`fallbacks` not empty)."""
        counts = ("decisions", "barriers", "index_barriers", "gauge_updates", "refusals", "beliefs_unknown")
        seconds = ("push", "barrier", "ext_proc", "response")
        return {
            **{name: self._counts[name] for name in counts},
            **{f"{name}_s": self._seconds[name] for name in seconds},
            **({} if self._index is None else {"skipped_blocks": self._index.skipped}),
            "fallbacks": self._fallbacks(),
            "open_requests": len(self._open),
            **self._deployment.numbers(),
        }

    def _fallbacks(self) -> dict[str, int]:
        """What the router silently did without; not so what it skips of tiers' events, which beliefs account for."""
        found = Counter(self._deployment.log.fallbacks)
        if self._index is not None:
            found[ORPHAN] -= self._index.orphans
        return {what: count for what, count in found.items() if count > 0}

    @functools.cached_property
    def _sha256(self) -> str:
        return sha256_of(self._binary)

    @property
    def _adapted(self) -> Adapted:
        return self._deployment.adapted

    def _connect(self) -> None:
        deployment = self._deployment
        self._ext_proc = ExtProcClient(deployment.grpc_port)
        self._cleanup.callback(self._ext_proc.close)
        if not self._ext_proc.ready(START_TIMEOUT_S):
            raise ComponentError("router", f"accepts no ext_proc streams within {START_TIMEOUT_S:g} s")
        self._index_barrier = IndexUpdateBarrier(deployment.pages)
        self._in_flight = InFlightBarrier(deployment.pages, self._adapted.gives_tokens_back)
        if self.reads_kv_events:
            tokens = self._block_tokens if self._adapted.prompt_form is PromptForm.REAL_IDS else 1
            self._publisher = KvEventPublisher(
                deployment.kv_events_url, self._endpoints, self._model, tokens, self._events_wire
            )
            self._cleanup.callback(self._publisher.close)
            self._publisher.wait_subscribed(START_TIMEOUT_S)
            self._kv_barrier = KvEventBarrier(self._publisher, deployment.pages, tokens)
        deployment.metrics.wait_all(START_TIMEOUT_S)
        deployment.wait_objects()
        if self._adapted.cold_start:
            self._warm_all()

    def _warm_all(self) -> None:
        """One cold request to every endpoint, in a seeded order (see Adapted.cold_start)."""
        blocks = self._granularity.factor
        for endpoint, request in cold_requests(self._endpoints, self._seed, self._model, blocks, self._block_tokens):
            self._ask(endpoint, request)

    def _prefix_first(self) -> bool:
        """Whether the tokens in flight are counted with what is cached known (see Adapted.order_matters).

        A prompt is asked for twice, and held by the endpoint the second time: then it scores better, or not.
        """
        endpoint, request = probe_request(self._endpoints, self._model, self._granularity.factor, self._block_tokens)
        cold = self._ask(endpoint, request)
        [(origin, start, count)] = request.runs
        self.publish_kv_events({endpoint.index: [Stored(0, origin, start, count, None)]})
        self._wait_for_events()
        warm = self._ask(endpoint, request)
        self.publish_kv_events({endpoint.index: [Removed(0, origin, start, count)]})
        return sum(warm.scores.values()) > sum(cold.scores.values())

    def _ask(self, endpoint: Endpoint, request: RouteRequest) -> Answer:
        """A decision for which there is one endpoint only, taken back at once."""
        self._number += 1
        tokenizer = self._deployment.tokenizer
        prompt = prompts.build(request, self._number, self._adapted, self._block_tokens, self._granularity, tokenizer)
        address = f"{endpoint.address}:{endpoint.port}"
        answer = self._ext_proc.decide(request.request_id, prompts.PATH, {}, prompt.body, only=address)
        if tokenizer is not None and prompt.key is not None:
            tokenizer.forget(prompt.key)
        if answer.destinations != [address]:
            raise ComponentError("router", f"sent a request for {address} to {answer.destinations} {answer.message}")
        self._ext_proc.abort(request.request_id)
        if self._adapted.approximate:
            self._index_barrier.pass_()
        return answer

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
            num_gpu_blocks=self._gpu_blocks[index],
            extra=extra,
        )

    def _push(self, updates: dict[int, Gauges]) -> None:
        self._rank_due = False
        changed = self._tie_break.deal(updates)
        with self._deployment.watching():
            self._deployment.metrics.begin({index: self._page(index) for index in changed})

    def _decision(self, request: RouteRequest, prompt: prompts.Prompt, answer: Answer, token: str | None) -> Decision:
        if answer.status != 200:
            self._counts["refusals"] += 1
            return Decision(None, None, answer.status, answer.message, answer.headers)
        index = self._by_address.get(answer.destinations[0]) if answer.destinations else None
        if index is None:
            raise ComponentError("router", f"chose {answer.destinations}, which is none of the workers")
        self._open[request.request_id] = _Open(index, request.session_id)
        prefiller = answer.headers.get(PREFILLER)
        prefill = None if prefiller is None else self._by_address.get(prefiller.split(",")[0].strip())
        if prefiller is not None and prefill is None:
            raise ComponentError("router", f"chose the prefill worker {prefiller}, which is none of the workers")
        share = None
        if self._adapted.prefix is not None:
            share = self._believed_share(prompt, answer, index, token)
            if share is None:
                self._counts["beliefs_unknown"] += 1
        self._tie_break.chosen(index)
        self._rank_due = True
        self._index_update_due = self._adapted.approximate
        return Decision(index, share, 200, "", answer.headers, prefill)

    def _believed_share(self, prompt: prompts.Prompt, answer: Answer, index: int, token: str | None) -> float | None:
        if prompt.blocks == 0:
            return 0.0
        model = self._index if self._adapted.prefix == "precise" else None
        if self._release == "v0.7.1":
            if model is not None:
                return model.matched(index, prompt.runs) / prompt.blocks
            if self._adapted.prefix == "precise":
                return self._published.matched(index, prompt.runs) / prompt.blocks
            return self._hit_ratio_since()
        if not self._scores.usable:
            if model is not None:
                return model.matched(index, prompt.runs) / prompt.blocks
            return self._hit_ratio_since() if self._adapted.one_approximate else None
        candidates = [self._by_address[address] for address in answer.scores]
        if index not in candidates:
            return None
        total, rank = answer.scores[answer.destinations[0]], self._tie_break.ranks[index]
        share = self._scores.prefix_share(total, index, candidates, self._gauges, rank, token, prompt.blocks)
        if model is None or share is None:
            return share
        # the score is weighted by tier; it must be the model's, and then what is held in any tier is the model's too
        if round(share * prompt.blocks) != model.weighted(index, prompt.runs):
            return None
        return model.matched(index, prompt.runs) / prompt.blocks

    def _hit_ratio_since(self) -> float | None:
        """v0.7.1 adds each decision's matched share to a histogram: the growth of its sum is this decision's."""
        with self._deployment.watching():
            ratio = self._hit_ratios()
        if ratio is None:
            return None
        share, self._hit_ratio = ratio - self._hit_ratio, ratio
        return min(1.0, max(0.0, share))

    def _hit_ratios(self) -> float | None:
        return sample(self._deployment.pages.read("/metrics"), _HIT_RATIO)

    def _keep_cookie(self, opened: _Open, headers: dict[str, str]) -> None:
        header = self._adapted.session_header
        if header and header in headers:
            self._cookies[opened.session_id] = headers[header]


def _about(batch: Sequence[KvEvent], about: set[int] | None) -> set[int] | None:
    """The origins of blocks that events name, with those of `about`; None: they may name any."""
    if about is None or any(isinstance(event, Cleared | TierEvent) for event in batch):
        return None  # a tier's chunk holds blocks of what its origin continues, too
    return about.union(event.origin for event in batch if isinstance(event, Stored | Removed))
