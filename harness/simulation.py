"""One experiment on the virtual clock: the way of a call from the trace to its record.

    load releases the call -> `_route`: what the router may know by now is brought to it (gauges as of each worker's
    last scrape, KV events of finished steps), then it decides -> the chosen engine takes the call (`Node.submit`)
    -> the node's steps -> `_advance`: first token and end go back to the router, the session and the record.

Time stands still while the router works. Nodes advance lazily: to their own next visible event, or as far as a decision
or a client needs to look.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from fake_workers.engine.blocks import PromptRuns
from fake_workers.engine.connector import ConnectorOptions
from fake_workers.engine.events import KvEvent
from fake_workers.engine.gauges import Gauges
from fake_workers.engine.node import EngineStuckError, Node, Outcome, StepPrice
from fake_workers.engine.request import EngineRequest
from fake_workers.engine.scheduler import RankScheduler, SchedulerConfig
from harness.below import Below
from harness.cache.base import NODE_DRAM, ExternalCache
from harness.cache.feed import TierFeed
from harness.cache.ledger import CacheLedger
from harness.clock import VirtualClock
from harness.disagg.handoff import Side
from harness.disagg.replay import Disaggregation, SplitCall
from harness.errors import ComponentError, NoProgressError
from harness.front_end import FrontEnd, FrontEndTimes
from harness.load.prompts import Origins
from harness.load.session import SessionRun
from harness.results.records import COMPLETED, FAILED, REJECTED, TIMED_OUT, CallRecord, arrived
from harness.results.timeline import TimelineRecorder
from harness.router.base import Decision, Endpoint, Router, RouteRequest
from harness.trace.model import Session

_NODE, _CLIENT, _LOAD, _BEGIN = 0, 1, 2, 3
"""Order of events at one time: what engines did, clients giving up, new calls, idle engines that begin with them."""

_PREFILL_STREAM = "#prefill"
"""Marks the router's request of a prefill phase that is placed on its own."""


@dataclass(slots=True)
class _Group:
    """One lock-step engine group and the endpoints of its ranks."""

    node: Node
    endpoints: list[int]
    phase_ns: int
    wake_ns: int | None = None
    wake_serial: int = 0


@dataclass(slots=True)
class _Open:
    """A call between its arrival and its end."""

    record: CallRecord
    session: SessionRun
    index: int
    request: EngineRequest | None = None
    """The request whose tokens the client sees."""
    split: SplitCall | None = None
    """The two requests of a call whose prompt is computed elsewhere."""
    streams: list[str] = field(default_factory=list)
    """Requests that the router counts as in flight for this call."""
    first_seen_ns: int | None = None
    """When the client saw the first token; with a front end that is later than when the engine had it."""


@dataclass(frozen=True, slots=True)
class GroupKind:
    """What a lock-step group runs, where not all run the same."""

    price: StepPrice
    engine: SchedulerConfig
    cached: bool = True
    """Whether the cache tiers lie below it."""


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """What the simulation needs of the experiment, in its own units. `engine`: of the groups that have no kind."""

    engine: SchedulerConfig
    model: str
    scrape_interval_ns: int
    router_latency_ns: int = 0
    front_end: FrontEndTimes | None = None
    client_timeout_ns: int | None = None
    gap_cap_s: float | None = None
    until_ns: int | None = None
    max_call_tokens: int | None = None
    leaping: bool = True
    tier_events: bool = False
    """Whether KV events of cache tiers go to the router."""
    connector: ConnectorOptions | None = None
    """Of engines with cache tiers; None: vLLM's defaults."""
    peer_tiers: frozenset[str] = frozenset()
    """Names of the cache tiers that are the memory of other nodes."""


@dataclass(slots=True)
class Counts:
    """How much happened, for the summary."""

    arrived: int = 0
    ended: int = 0
    steps: int = 0
    engine_events: int = 0
    clock_events: int = 0


Tick = Callable[[int, int], None]
"""Told of progress: (calls ended, virtual ns)."""


class Simulation:
    """Runs sessions through a router and engine groups; `records` holds one record per arrived call."""

    def __init__(
        self,
        config: SimulationConfig,
        price: StepPrice,
        groups: list[list[Endpoint]],
        router: Router,
        sessions: list[Session],
        starts_ns: list[int],
        on_progress: Tick | None = None,
        clock: VirtualClock | None = None,
        caches: Sequence[ExternalCache] | None = None,
        kinds: Sequence[GroupKind] | None = None,
        disaggregation: Disaggregation | None = None,
        sides: Sequence[list[Side]] | None = None,
        make_rank: Callable[[SchedulerConfig, bool], RankScheduler] = RankScheduler,
    ) -> None:
        """`caches[k]`: the cache tiers of node k, on the same `clock`; None: GPU caches only. `kinds[g]`: what group g
        runs (None: `price` and `config.engine`). With `disaggregation` groups exchange KV; `sides[g]`: GPUs of group
        g's ranks.
        """
        self.config = config
        self.disaggregation = disaggregation
        self.clock = clock or VirtualClock()
        self.ledger = CacheLedger(config.engine.block_tokens)
        """What cache tiers gave; empty without them."""
        self._make_rank = make_rank
        self.router = router
        self.records: list[CallRecord] = []
        self.counts = Counts()
        self.endpoints = [endpoint for group in groups for endpoint in group]
        self._below = Below(self.clock, self.endpoints, self.ledger, caches, disaggregation, sides)
        self.timeline = TimelineRecorder([endpoint.node for endpoint in self.endpoints])
        self._on_progress = on_progress
        self._front_end = FrontEnd(config.front_end, len(self.endpoints)) if config.front_end else None
        self._blocks_per_router_block = router.blocks_per_router_block
        self._origins = Origins()
        self._open: dict[str, _Open] = {}
        self._shown = [Gauges(0, 0, 0.0) for _ in self.endpoints]
        """What the router was last told of each endpoint."""
        default = GroupKind(price, config.engine)
        self.groups = [
            self._make_group(kinds[g] if kinds else default, group, g, len(groups)) for g, group in enumerate(groups)
        ]
        self._place = {
            endpoint: (group, rank) for group in self.groups for rank, endpoint in enumerate(group.endpoints)
        }
        self._longest = max(group.node.config.max_model_len for group in self.groups)
        publishes = caches is not None and config.tier_events and router.reads_kv_events
        self._feed = TierFeed(caches, groups) if caches is not None and publishes else None
        self._stirred: dict[int, _Group] = {}
        """Groups about which the router may not know everything yet, by their first endpoint."""
        for session, start_ns in zip(sessions, starts_ns, strict=True):
            self.clock.call_at(start_ns, self._begin_session, session, rank=_LOAD)

    def _make_group(self, kind: GroupKind, endpoints: list[Endpoint], number: int, groups: int) -> _Group:
        indexes = [endpoint.index for endpoint in endpoints]
        timeline = self.timeline

        def observe(rank: int, start: int, end: int, requests: int, prompt: int, outputs: int) -> None:
            timeline.level(indexes[rank], start, requests, 0, 0.0)
            timeline.busy(indexes[rank], start, end, prompt, outputs)
            timeline.level(indexes[rank], end, 0, 0, 0.0)

        interval = self.config.scrape_interval_ns

        def bring() -> None:
            self._advance(group, self.clock.now_ns)

        def stirred() -> None:
            self._stirred[indexes[0]] = group
            self._arm(group)

        connector, attach = self._below.connector(endpoints, number, kind.cached, bring, stirred)
        node = Node(
            kind.price,
            kind.engine,
            len(endpoints),
            leaping=self.config.leaping,
            keep_events=self.router.reads_kv_events,
            history_ns=2 * interval,
            observer=observe,
            connector=connector,
            connector_options=self._below.options(self.config.connector),
            make_rank=self._make_rank,
        )
        attach(node)
        # scrapes of different workers are spread over the interval, as independent tickers are
        group = _Group(node, indexes, number * interval // groups)
        return group

    # ------------------------------------------------------------------ running

    def run(self) -> None:
        """Until nothing is left to happen, or `until_ns`; NoProgressError if calls are open with nothing to come."""
        until = self.config.until_ns
        clock = self.clock
        try:
            while True:
                t_ns = clock.next_ns
                if t_ns is None or (until is not None and t_ns > until):
                    break
                clock.step()
            if until is not None:
                for group in self.groups:
                    self._advance(group, until, begin=True)
                clock.now_ns = max(clock.now_ns, until)
        except EngineStuckError as error:
            raise NoProgressError(str(error)) from None
        finally:
            self._close_counts()
            for opened in self._open.values():
                self._copy_progress(opened)
        if until is None and self._open:
            first = next(iter(self._open))
            raise NoProgressError(
                f"{len(self._open)} calls are open (first: {first}) but no event is left at {clock.now_ns / 1e9:.3f} s"
            )

    def _close_counts(self) -> None:
        self.counts.steps = sum(group.node.steps for group in self.groups)
        self.counts.engine_events = sum(group.node.boundaries_taken for group in self.groups)
        self.counts.clock_events = self.clock.executed

    def settle(self) -> None:
        """Bring all KV events to the router that it has not been told yet (for checks at the end of a run)."""
        events: dict[int, list[KvEvent]] = {}
        if self._feed is not None:
            self._feed.collect()
        for group in self.groups:
            for rank, endpoint in enumerate(group.endpoints):
                news = group.node.take_events(rank)
                if self._feed is not None:
                    news = self._feed.merge(endpoint, news, None)
                if news:
                    events[endpoint] = news
        if events and self.router.reads_kv_events:
            self.router.publish_kv_events(events)
        self.router.settle()

    def leftovers(self) -> list[str]:
        """What engines still hold although every call has ended (INV-7); empty if all is well."""
        found = []
        for group in self.groups:
            for rank, endpoint in zip(group.node.ranks, group.endpoints, strict=True):
                held = rank.pool.blocks - rank.pool.free
                if held or rank.unfinished:
                    found.append(f"INV-7: endpoint {endpoint} holds {held} blocks with no call open")
        return found

    # ------------------------------------------------------------------ load

    def _begin_session(self, session: Session) -> None:
        SessionRun(
            session,
            self.clock,
            self._release,
            self.config.gap_cap_s,
            self.config.engine.block_tokens,
            self._origins,
            self.config.max_call_tokens,
        ).start()

    def _release(self, session: SessionRun, index: int) -> None:
        """The client sends the call."""
        call = session.session.calls[index]
        record = arrived(session.session.id, call, self.clock.now_ns)
        self.records.append(record)
        self.counts.arrived += 1
        opened = self._open[record.call_id] = _Open(record, session, index)
        session.call_started(index)
        if self.config.client_timeout_ns is not None:
            self.clock.call_later(self.config.client_timeout_ns, self._give_up, opened, rank=_CLIENT)
        decided_ns = self.clock.now_ns
        if self._front_end is not None:
            decided_ns = self._front_end.reaches_router_ns(decided_ns, record.input_tokens)
        decided_ns += self.config.router_latency_ns
        if decided_ns > self.clock.now_ns:
            self.clock.call_at(decided_ns, self._route, opened, rank=_LOAD)
        else:
            self._route(opened)

    def _give_up(self, opened: _Open) -> None:
        """The client's time-out: the call leaves the engine and the router's counts and counts as failed."""
        record = opened.record
        if record.call_id not in self._open:
            return
        now = self.clock.now_ns
        for endpoint, request in self._requests(opened):
            group, rank = self._place[endpoint]
            self._advance(group, now)
            if record.call_id not in self._open:
                return
            if not request.finished:
                group.node.abort(rank, request)
                self._arm(group)
        if opened.split is not None:
            opened.split.abandon()
        self._copy_progress(opened)
        self._leave_router(opened)
        self._end(opened, TIMED_OUT, now, "client time-out")

    @staticmethod
    def _requests(opened: _Open) -> list[tuple[int, EngineRequest]]:
        """The call's requests in engines, with their endpoints."""
        if opened.split is not None:
            return list(opened.split.legs())
        if opened.request is None or opened.record.endpoint is None:
            return []
        return [(opened.record.endpoint, opened.request)]

    # ------------------------------------------------------------------ routing

    def _route(self, opened: _Open) -> None:
        record = opened.record
        if record.call_id not in self._open:
            return
        now = self.clock.now_ns
        if record.input_tokens < 1:
            return self._end(opened, REJECTED, now, "empty prompt")
        if self._too_long(opened, self._longest, record.requested_output_tokens):
            return
        runs = opened.session.prompts.runs(opened.index)
        make = partial(self._request, opened, runs)
        phase = self.router.phase_header
        if phase is not None:
            # the coordinator: one request through the gateway per phase, decode is placed when prefill has ended
            decision = self._decide(opened, runs, _PREFILL_STREAM, {phase: "prefill"})
            if decision is not None:
                record.routed_ns = now
                assert decision.endpoint is not None
                if self._too_long(opened, self._limit(decision.endpoint), 1):
                    return
                self._split(opened, make, decision.endpoint, partial(self._place_decode, opened, runs, phase))
            return
        decision = self._decide(opened, runs)
        if decision is None:
            return
        record.routed_ns = now
        chosen = self._placed(opened, runs, decision)
        prefill = decision.prefill_endpoint
        if prefill is not None and self._too_long(opened, self._limit(prefill), 1):
            return
        if self._too_long(opened, self._limit(chosen), record.requested_output_tokens):
            return
        if prefill is None:
            opened.request = make(record.requested_output_tokens)
            self._submit(chosen, opened.request)
        else:
            self._split(opened, make, prefill, lambda: chosen)

    def _limit(self, endpoint: int) -> int:
        """Longest prompt plus output of an endpoint's engine, tokens; pools may differ."""
        return self._place[endpoint][0].node.config.max_model_len

    def _too_long(self, opened: _Open, limit: int, output_tokens: int) -> bool:
        """vLLM refuses (HTTP 400) what cannot fit; a request for prefill alone asks for one token."""
        record = opened.record
        if record.input_tokens + output_tokens <= limit:
            return False
        self._leave_router(opened)
        what = f"{record.input_tokens} + {output_tokens} tokens exceed {limit}"
        self._end(opened, REJECTED, self.clock.now_ns, what)
        return True

    def _decide(
        self, opened: _Open, runs: PromptRuns, stream: str = "", headers: dict[str, str] | None = None
    ) -> Decision | None:
        """Ask the router, brought up to now; None: it refused, and the call has ended."""
        record = opened.record
        now = self.clock.now_ns
        self._inform_router(now)
        request = RouteRequest(
            request_id=record.call_id + stream,
            session_id=record.session,
            model=self.config.model,
            runs=list(runs),
            prompt_tokens=record.input_tokens,
            output_tokens=record.requested_output_tokens,
            headers=headers or {},
        )
        decision = self.router.decide(request)
        record.router_status = decision.status
        if decision.endpoint is None:
            self._end(opened, FAILED, now, f"router: {decision.status} {decision.message}".strip())
            return None
        opened.streams.append(request.request_id)
        return decision

    def _placed(self, opened: _Open, runs: PromptRuns, decision: Decision) -> int:
        """Notes where the answer will be generated, and how much of the prompt is cached there."""
        record = opened.record
        assert decision.endpoint is not None
        record.endpoint = decision.endpoint
        record.node = self.endpoints[decision.endpoint].node
        record.believed_share = decision.believed_share
        group, rank = self._place[decision.endpoint]
        self._advance(group, self.clock.now_ns)
        blocks = runs[-1][2] if runs else 0
        engine_rank = group.node.ranks[rank]
        held = engine_rank.truly_held(runs)
        if self._feed is not None:
            held = self._feed.held_blocks(record.endpoint, engine_rank.pool, runs)
        # in the router's own blocks, so that the gap shows what it did not know and not how coarsely it looks
        ratio = self._blocks_per_router_block
        record.held_share = (held // ratio) / (blocks // ratio) if blocks >= ratio else 0.0
        return decision.endpoint

    def _place_decode(self, opened: _Open, runs: PromptRuns, phase: str) -> int | None:
        """The coordinator's second phase."""
        decision = self._decide(opened, runs, "", {phase: "decode"})
        if decision is None:
            return None
        chosen = self._placed(opened, runs, decision)
        if self._too_long(opened, self._limit(chosen), opened.record.requested_output_tokens):
            return None
        return chosen

    def _split(
        self,
        opened: _Open,
        make: Callable[[int], EngineRequest],
        prefill_endpoint: int,
        decode_endpoint: Callable[[], int | None],
    ) -> None:
        """The call's prompt is computed at one endpoint, its answer generated at another."""
        if self.disaggregation is None:
            raise ComponentError("router", "chose a prefill worker in a cluster that has none")
        opened.split = SplitCall(
            self.disaggregation,
            opened.record,
            self.config.model,
            make,
            self._submit,
            prefill_endpoint,
            decode_endpoint,
        )
        opened.split.start()

    def _leave_router(self, opened: _Open) -> None:
        """The router is to count the call no longer."""
        for stream in opened.streams:
            self.router.abort(stream)
        opened.streams.clear()

    def _request(self, opened: _Open, runs: PromptRuns, output_tokens: int) -> EngineRequest:
        """An engine request of a call, arriving now."""
        return EngineRequest(
            request_id=opened.record.call_id,
            origin=opened.session.prompts.origin(opened.index),
            runs=runs,
            prompt_tokens=opened.record.input_tokens,
            output_tokens=output_tokens,
            arrival_ns=self.clock.now_ns,
        )

    def _submit(self, endpoint: int, request: EngineRequest) -> None:
        """A request reaches an endpoint's server now, and its engine when the server is done with it."""
        now = taken_ns = self.clock.now_ns
        if self._front_end is not None:
            taken_ns = self._front_end.reaches_engine_ns(now, endpoint, request.prompt_tokens)
        if taken_ns > now:
            self.clock.call_at(taken_ns, self._take_in, endpoint, request, rank=_LOAD)
        else:
            self._take_in(endpoint, request)

    def _take_in(self, endpoint: int, request: EngineRequest) -> None:
        """The engine takes a request in."""
        if request.request_id not in self._open:
            return  # its client gave up meanwhile
        request.arrival_ns = self.clock.now_ns
        group, rank = self._place[endpoint]
        self._advance(group, self.clock.now_ns)
        group.node.submit(rank, request)
        self._stirred[group.endpoints[0]] = group
        self._arm(group)

    def _inform_router(self, now: int) -> None:
        """Gauges as of each worker's last scrape tick and KV events of ended steps, where they may have changed."""
        router = self.router
        if not (router.reads_gauges or router.reads_kv_events):
            return
        gauges: dict[int, Gauges] = {}
        events: dict[int, list[KvEvent]] = {}
        interval = self.config.scrape_interval_ns
        feed = self._feed
        if feed is not None:
            for group in self._stirred.values():
                self._advance(group, now)
            feed.collect()
        for key, group in list(self._stirred.items()):
            node = group.node
            self._advance(group, now)
            tick = (now - group.phase_ns) // interval * interval + group.phase_ns
            settled = not node.busy
            for rank, endpoint in enumerate(group.endpoints):
                if router.reads_gauges:
                    seen = node.gauges(rank, tick)
                    if seen != self._shown[endpoint]:
                        self._shown[endpoint] = gauges[endpoint] = seen
                    if settled and node.gauges(rank, now) != seen:
                        settled = False
                if router.reads_kv_events:
                    news = node.take_events(rank)
                    if feed is not None:
                        news = feed.merge(endpoint, news, None if node.held else node.published_ns[rank])
                    if news:
                        events[endpoint] = news
            if settled:
                del self._stirred[key]
        if gauges:
            router.push_gauges(gauges)
        if events:
            router.publish_kv_events(events)

    # ------------------------------------------------------------------ engines

    def _advance(self, group: _Group, now: int, begin: bool = False) -> None:
        """Bring a group up to now and pass on what its clients saw."""
        for outcome in group.node.advance(now, begin):
            opened = self._open.get(outcome.request.request_id)
            if opened is None:
                continue
            if opened.split is not None:
                if outcome.request is opened.split.prefill:
                    self._prefill_ended(opened, outcome)
                    continue
                opened.request = opened.split.decode
            if opened.request is not outcome.request:
                continue
            if self._front_end is None:
                self._deliver(opened, outcome, outcome.t_ns)
            else:
                running = group.node.gauges(outcome.rank, outcome.t_ns).running
                seen_ns = self._front_end.reaches_client_ns(outcome.t_ns, running)
                self.clock.call_at(max(seen_ns, self.clock.now_ns), self._deliver, opened, outcome, seen_ns, rank=_NODE)

    def _deliver(self, opened: _Open, outcome: Outcome, t_ns: int) -> None:
        """The client sees a first token or the end of its call."""
        record, request = opened.record, outcome.request
        if record.call_id not in self._open:
            return  # it gave up meanwhile
        if outcome.first:
            opened.first_seen_ns = t_ns
            self.router.tell_first_token(record.call_id)
        if outcome.done and request.failed:
            self._copy_progress(opened)
            self._leave_router(opened)
            self._end(opened, FAILED, t_ns, "a KV load failed (vLLM answers 500)")
        elif outcome.done:
            self._copy_progress(opened)
            self.router.tell_end(record.call_id, record.input_tokens, record.gpu_tokens, record.output_tokens)
            self._end(opened, COMPLETED, t_ns)

    def _prefill_ended(self, opened: _Open, outcome: Outcome) -> None:
        """The prefill request of a split call has come to its end."""
        assert opened.split is not None
        if not outcome.done:
            return
        stream = opened.record.call_id + _PREFILL_STREAM
        if stream in opened.streams:
            opened.streams.remove(stream)
            request = outcome.request
            self.router.tell_end(stream, request.prompt_tokens, request.hit_tokens or 0, request.outputs)
        failure = opened.split.prefill_ended()
        if failure is not None:
            self._copy_progress(opened)
            self._leave_router(opened)
            self._end(opened, FAILED, outcome.t_ns, failure)

    def _arm(self, group: _Group) -> None:
        """Wake up at the group's next event that a client may see."""
        wake = group.node.wake_ns()
        if wake == group.wake_ns:
            return
        group.wake_ns = wake
        group.wake_serial += 1
        if wake is not None:
            now = self.clock.now_ns
            rank = _BEGIN if wake <= now else _NODE
            self.clock.call_at(max(wake, now), self._on_node, group, group.wake_serial, rank=rank)

    def _on_node(self, group: _Group, serial: int) -> None:
        if serial != group.wake_serial:
            return
        group.wake_ns = None
        self._advance(group, self.clock.now_ns, begin=True)
        self._arm(group)

    # ------------------------------------------------------------------ records

    def _copy_progress(self, opened: _Open) -> None:
        record, request = opened.record, opened.request
        if opened.split is not None:
            opened.split.copy_progress()
            request = opened.split.prefill
        elif request is not None:
            record.admitted_ns = request.admitted_ns
            record.output_tokens = request.outputs
            record.preemptions = request.preemptions
            record.restore_ns = request.restore_ns
        record.first_token_ns = opened.first_seen_ns
        if request is None or request.hit_tokens is None or request.first_token_ns is None:
            return
        record.gpu_tokens = request.hit_tokens
        record.computed_tokens = request.prompt_tokens - request.hit_tokens
        for tier, tokens in (request.external_by_tier or {}).items():
            # the last prompt token is always computed, and loads after a preemption bring nothing twice
            taken = min(tokens, record.computed_tokens - 1)
            if tier == NODE_DRAM:
                record.dram_tokens += taken
            elif tier in self.config.peer_tiers:
                record.peer_tokens += taken
            else:
                record.shared_tokens += taken
            record.computed_tokens -= taken

    def _end(self, opened: _Open, outcome: str, t_ns: int, message: str = "") -> None:
        record = opened.record
        del self._open[record.call_id]
        record.outcome = outcome
        record.finish_ns = t_ns
        record.message = message
        self.counts.ended += 1
        if self._on_progress is not None:
            self._on_progress(self.counts.ended, t_ns)
        opened.session.call_ended(opened.index)
