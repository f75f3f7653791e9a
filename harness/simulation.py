"""One experiment on the virtual clock: the way of a call from the trace to its record.

    load releases the call -> `_route`: what the router may know by now is brought to it (gauges as of each worker's
    last scrape, KV events of finished steps), then it decides -> the chosen engine takes the call (`Node.submit`)
    -> the node's steps -> `_advance`: first token and end go back to the router, the session and the record.

Time stands still while the router works. Nodes advance lazily: to their own next visible event, or as far as a decision
or a client needs to look.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fake_workers.engine.blocks import PromptRuns
from fake_workers.engine.events import KvEvent
from fake_workers.engine.gauges import Gauges
from fake_workers.engine.node import EngineStuckError, Node, Outcome, StepPrice
from fake_workers.engine.request import EngineRequest
from fake_workers.engine.scheduler import SchedulerConfig
from harness.cache.base import NODE_DRAM, ExternalCache
from harness.cache.connector import CacheConnector
from harness.cache.feed import TierFeed
from harness.clock import VirtualClock
from harness.errors import NoProgressError
from harness.front_end import FrontEnd, FrontEndTimes
from harness.load.prompts import Origins
from harness.load.session import SessionRun
from harness.results.records import COMPLETED, FAILED, REJECTED, TIMED_OUT, CallRecord
from harness.results.timeline import TimelineRecorder
from harness.router.base import Endpoint, Router, RouteRequest
from harness.trace.model import Session

_NODE, _CLIENT, _LOAD, _BEGIN = 0, 1, 2, 3
"""Order of events at one time: what engines did, clients giving up, new calls, idle engines that begin with them."""


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
    routed: bool = False
    first_seen_ns: int | None = None
    """When the client saw the first token; with a front end that is later than when the engine had it."""


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """What the simulation needs of the experiment, in its own units."""

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


@dataclass(slots=True)
class Counts:
    """How much happened, for the summary."""

    arrived: int = 0
    ended: int = 0
    left_out: int = 0
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
    ) -> None:
        """`caches[k]`: the cache tiers of node k, on the same `clock`; None: GPU caches only."""
        self.config = config
        self.clock = clock or VirtualClock()
        self._caches = caches
        self.router = router
        self.records: list[CallRecord] = []
        self.counts = Counts()
        self.endpoints = [endpoint for group in groups for endpoint in group]
        self.timeline = TimelineRecorder([endpoint.node for endpoint in self.endpoints])
        self._on_progress = on_progress
        self._front_end = FrontEnd(config.front_end, len(self.endpoints)) if config.front_end else None
        self._blocks_per_router_block = router.blocks_per_router_block
        self._origins = Origins()
        self._open: dict[str, _Open] = {}
        self._shown = [Gauges(0, 0, 0.0) for _ in self.endpoints]
        """What the router was last told of each endpoint."""
        self.groups = [self._make_group(price, group, g, len(groups)) for g, group in enumerate(groups)]
        self._place = {
            endpoint: (group, rank) for group in self.groups for rank, endpoint in enumerate(group.endpoints)
        }
        publishes = caches is not None and config.tier_events and router.reads_kv_events
        self._feed = TierFeed(caches, self.endpoints) if caches is not None and publishes else None
        self._stirred: dict[int, _Group] = {}
        """Groups about which the router may not know everything yet, by their first endpoint."""
        for session, start_ns in zip(sessions, starts_ns, strict=True):
            self.clock.call_at(start_ns, self._begin_session, session, rank=_LOAD)

    def _make_group(self, price: StepPrice, endpoints: list[Endpoint], number: int, groups: int) -> _Group:
        indexes = [endpoint.index for endpoint in endpoints]
        timeline = self.timeline

        def observe(rank: int, start: int, end: int, requests: int, prompt: int, outputs: int) -> None:
            timeline.level(indexes[rank], start, requests, 0, 0.0)
            timeline.busy(indexes[rank], start, end, prompt, outputs)
            timeline.level(indexes[rank], end, 0, 0, 0.0)

        interval = self.config.scrape_interval_ns
        connector = self._connector(endpoints, lambda: group)
        node = Node(
            price,
            self.config.engine,
            len(endpoints),
            leaping=self.config.leaping,
            keep_events=self.router.reads_kv_events,
            history_ns=2 * interval,
            observer=observe,
            connector=connector,
        )
        if connector is not None:
            connector.attach(node)
        # scrapes of different workers are spread over the interval, as independent tickers are
        group = _Group(node, indexes, number * interval // groups)
        return group

    def _connector(self, endpoints: list[Endpoint], group: Callable[[], _Group]) -> CacheConnector | None:
        """Puts the machine's cache tiers below a group's engines; what the tiers say reaches the group through it."""
        if self._caches is None:
            return None
        machine = endpoints[0].node
        first = min(endpoint.index for endpoint in self.endpoints if endpoint.node == machine)

        def bring() -> None:
            self._advance(group(), self.clock.now_ns)

        def stirred() -> None:
            self._stirred[group().endpoints[0]] = group()
            self._arm(group())

        cache = self._caches[machine]
        return CacheConnector(cache, self.clock, bring, stirred, first_rank=endpoints[0].index - first)

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
                if opened.request is not None:
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
            session, self.clock, self._release, self.config.gap_cap_s, self.config.engine.block_tokens, self._origins
        ).start()

    def _release(self, session: SessionRun, index: int) -> None:
        """The client sends the call."""
        call = session.session.calls[index]
        longest = self.config.max_call_tokens
        if longest is not None and call.sequence_tokens > longest:
            self.counts.left_out += 1
            session.call_started(index)
            session.call_ended(index)
            return
        record = CallRecord(
            call_id=f"{session.session.id}/{index}",
            session=session.session.id,
            index=index,
            chain=call.chain,
            arrival_ns=self.clock.now_ns,
            input_tokens=call.input_tokens,
            requested_output_tokens=call.generated_tokens,
        )
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
        if opened.request is not None and record.endpoint is not None:
            group, rank = self._place[record.endpoint]
            self._advance(group, now)
            if record.call_id not in self._open:
                return
            if not opened.request.finished:
                group.node.abort(rank, opened.request)
            self._arm(group)
            self._copy_progress(opened)
        if opened.routed:
            self.router.abort(record.call_id)
        self._end(opened, TIMED_OUT, now, "client time-out")

    # ------------------------------------------------------------------ routing

    def _route(self, opened: _Open) -> None:
        record = opened.record
        if record.call_id not in self._open:
            return
        now = self.clock.now_ns
        engine = self.config.engine
        if record.input_tokens < 1:
            return self._end(opened, REJECTED, now, "empty prompt")
        if record.input_tokens + record.requested_output_tokens > engine.max_model_len:
            # vLLM's own refusal (HTTP 400) of a request that cannot fit
            what = f"{record.input_tokens} + {record.requested_output_tokens} tokens exceed {engine.max_model_len}"
            return self._end(opened, REJECTED, now, what)
        runs = opened.session.prompts.runs(opened.index)
        self._inform_router(now)
        decision = self.router.decide(
            RouteRequest(
                request_id=record.call_id,
                session_id=record.session,
                model=self.config.model,
                runs=list(runs),
                prompt_tokens=record.input_tokens,
                output_tokens=record.requested_output_tokens,
            )
        )
        record.router_status = decision.status
        if decision.endpoint is None:
            return self._end(opened, FAILED, now, f"router: {decision.status} {decision.message}".strip())
        opened.routed = True
        record.routed_ns = now
        record.endpoint = decision.endpoint
        record.node = self.endpoints[decision.endpoint].node
        record.believed_share = decision.believed_share
        group, rank = self._place[decision.endpoint]
        self._advance(group, now)
        blocks = runs[-1][2] if runs else 0
        engine_rank = group.node.ranks[rank]
        held = engine_rank.truly_held(runs)
        if self._feed is not None:
            held = self._feed.held_blocks(record.endpoint, engine_rank.pool, runs)
        # in the router's own blocks, so that the gap shows what it did not know and not how coarsely it looks
        ratio = self._blocks_per_router_block
        record.held_share = (held // ratio) / (blocks // ratio) if blocks >= ratio else 0.0
        taken_ns = now
        if self._front_end is not None:
            taken_ns = self._front_end.reaches_engine_ns(now, decision.endpoint, record.input_tokens)
        if taken_ns > now:
            self.clock.call_at(taken_ns, self._submit, opened, runs, rank=_LOAD)
        else:
            self._submit(opened, runs)

    def _submit(self, opened: _Open, runs: PromptRuns) -> None:
        """The chosen engine takes the call in."""
        record = opened.record
        if record.call_id not in self._open:
            return
        assert record.endpoint is not None
        now = self.clock.now_ns
        group, rank = self._place[record.endpoint]
        self._advance(group, now)
        opened.request = EngineRequest(
            request_id=record.call_id,
            origin=opened.session.prompts.origin(opened.index),
            runs=runs,
            prompt_tokens=record.input_tokens,
            output_tokens=record.requested_output_tokens,
            arrival_ns=now,
        )
        group.node.submit(rank, opened.request)
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
            if opened is None or opened.request is not outcome.request:
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
            self.router.first_token(record.call_id)
        if outcome.done and request.failed:
            self._copy_progress(opened)
            self.router.abort(record.call_id)
            self._end(opened, FAILED, t_ns, "a KV load failed (vLLM answers 500)")
        elif outcome.done:
            self._copy_progress(opened)
            self.router.finish(record.call_id, record.input_tokens, record.gpu_tokens, record.output_tokens)
            self._end(opened, COMPLETED, t_ns)

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

    @staticmethod
    def _copy_progress(opened: _Open) -> None:
        record, request = opened.record, opened.request
        assert request is not None
        record.admitted_ns = request.admitted_ns
        record.first_token_ns = opened.first_seen_ns
        record.output_tokens = request.outputs
        record.preemptions = request.preemptions
        record.restore_ns = request.restore_ns
        if request.hit_tokens is not None and request.first_token_ns is not None:
            record.gpu_tokens = request.hit_tokens
            record.computed_tokens = request.prompt_tokens - request.hit_tokens
            for tier, tokens in (request.external_by_tier or {}).items():
                # the last prompt token is always computed, and loads after a preemption bring nothing twice
                taken = min(tokens, record.computed_tokens - 1)
                if tier == NODE_DRAM:
                    record.dram_tokens += taken
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
