"""The engine on the wall clock: one lock-step group, advanced step by step as its steps end.

All of it runs in one event loop. A step's end is an event of the clock; each stream is then told how many tokens it has
by now, the metrics what happened in the step, and the event sockets which blocks came and went. Times are the engine's
own nanoseconds: the clock's, less the time that the engine was paused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fake_workers.api.block_names import BlockNames
from fake_workers.api.generation import Answer
from fake_workers.api.paced_clock import PacedClock
from fake_workers.api.server_metrics import Finished, ServerMetrics
from fake_workers.engine.connector import Connector, ConnectorOptions
from fake_workers.engine.events import Cleared, KvEvent
from fake_workers.engine.node import EngineStuckError, Node, Outcome, StepPrice
from fake_workers.engine.request import EngineRequest
from fake_workers.engine.scheduler import SchedulerConfig

EventSink = Callable[[int, list[KvEvent]], None]
"""Told of a rank's KV events, in order."""

_STEP, _BEGIN = 0, 3
"""Order of events at one time: steps end first, idle engines begin after all else."""
_LOOK_AGAIN_NS = 50_000_000


class EngineDeadError(Exception):
    """The engine cannot go on; every request fails."""


@dataclass(slots=True, eq=False)
class Stream:
    """One sequence on its way: `ready` tokens of its answer exist."""

    rank: int
    request: EngineRequest
    answer: Answer
    max_tokens: int | None
    lora: str | None = None
    prompt: Sequence[int] = ()
    salt: str = ""
    ready: int = 0
    done: bool = False
    reason: str = ""
    """Why it ended, once `done`: the answer's own reason, "abort" or "error"."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    admitted: bool = False
    last_token_ns: int = 0

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed, once known."""
        return (self.request.hit_tokens or 0) + self.external_tokens

    @property
    def external_tokens(self) -> int:
        """Prompt tokens that came through the connector."""
        return min(self.request.external_tokens, self.request.prompt_tokens - (self.request.hit_tokens or 0))


class LiveEngine:
    """A node and its streams on the wall's clock, which it may share with other engines."""

    def __init__(
        self,
        price: StepPrice,
        config: SchedulerConfig,
        metrics: list[ServerMetrics],
        clock: PacedClock,
        *,
        keep_events: bool = False,
        connector: Connector | None = None,
        connector_options: ConnectorOptions | None = None,
        names: BlockNames | None = None,
        hit_source: str = "p2p",
    ) -> None:
        """`names`: of blocks that other engines may hold too; None: each rank has its own. `hit_source`: where the
        connector's tokens come from, in vLLM's words.
        """
        ranks = len(metrics)
        self.config = config
        self.clock = clock
        self.node = Node(
            price, config, ranks, keep_events=keep_events, connector=connector, connector_options=connector_options
        )
        self._external_source = None if connector is None else hit_source
        self.metrics = metrics
        self.on_events: EventSink = lambda rank, events: None
        self.on_end: Callable[[Stream], None] = lambda stream: None
        self.below: Callable[[int, list[KvEvent]], list[KvEvent]] = lambda rank, events: events
        """Adds what the tiers below a rank have to say to the rank's own KV events."""
        self.names = [self._block_names(rank) if names is None else names for rank in range(ranks)]
        self.failure: str | None = None
        self._streams: list[dict[EngineRequest, Stream]] = [{} for _ in range(ranks)]
        self._frozen_ns: int | None = None
        self._paused_ns = 0
        """How long the engine's time has stood still."""
        self._wake_ns: int | None = None
        self._wake_serial = 0
        self._totals = [(0, 0) for _ in range(ranks)]

    def _block_names(self, rank: int) -> BlockNames:
        pool = self.node.ranks[rank].pool
        blocks = self.config.num_gpu_blocks
        return BlockNames(self.config.block_tokens, 2 * blocks + 65536, pool.holds)

    # ------------------------------------------------------------------ time

    @property
    def now_ns(self) -> int:
        """The engine's time; stands still while paused."""
        if self._frozen_ns is not None:
            return self._frozen_ns
        return self.clock.now_ns - self._paused_ns

    @property
    def paused(self) -> bool:
        """Whether time stands still."""
        return self._frozen_ns is not None

    @property
    def paused_ns(self) -> int:
        """By how much the engine's time lags behind the clock's."""
        return self._paused_ns

    def freeze(self) -> None:
        """Stop the engine's time; requests are taken in but nothing runs."""
        if self._frozen_ns is None:
            self.pump()
            self._frozen_ns = self.now_ns
            self.arm()

    def thaw(self) -> None:
        """Go on where `freeze` stopped."""
        if self._frozen_ns is not None:
            self.clock.pump()
            self._paused_ns = self.clock.now_ns - self._frozen_ns
            self._frozen_ns = None
            self.arm()
            self.pump()

    def call_at(self, t_ns: int, action: Callable[[], None]) -> None:
        """Run `action` at an engine time (the end of a transfer)."""

        def due() -> None:
            if self._frozen_ns is not None or self.now_ns < t_ns:
                self.call_at(t_ns, action)
            else:
                self.tell(action)

        at_ns = t_ns + self._paused_ns
        if self._frozen_ns is not None:
            at_ns = self.clock.now_ns + _LOOK_AGAIN_NS
        self.clock.call_at(max(at_ns, self.clock.now_ns), due)

    def tell(self, action: Callable[[], None]) -> None:
        """Bring the engine up to now, let `action` speak to its node, and let it go on."""
        self.pump()
        action()
        self.arm()
        self.pump()

    # ------------------------------------------------------------------ requests

    def submit(self, stream: Stream) -> None:
        """A sequence arrives now."""
        if self.failure is not None:
            raise EngineDeadError(self.failure)

        def arrive() -> None:
            stream.request.arrival_ns = self.node.now_ns
            self._streams[stream.rank][stream.request] = stream
            self.node.submit(stream.rank, stream.request)

        self.tell(arrive)

    def abort(self, stream: Stream, reason: str = "abort") -> None:
        """The client went away, or the request is dropped for another reason."""
        if stream.done:
            return
        self.pump()
        if stream.done:
            return
        self.node.abort(stream.rank, stream.request)
        self._end(stream, reason, self.now_ns)
        self.arm()
        self.pump()

    def abort_all(self, rank: int | None = None) -> int:
        """Abort every sequence (of one rank); returns how many there were."""
        found = [s for r, streams in enumerate(self._streams) if rank in (None, r) for s in streams.values()]
        for stream in found:
            self.abort(stream)
        return len(found)

    def unfinished(self, rank: int) -> int:
        """Sequences that wait or run."""
        return len(self._streams[rank])

    def queued_tokens(self, rank: int) -> int:
        """Prompt tokens of sequences that have no token yet (vLLM's get_num_queued_tokens)."""
        return sum(s.request.prompt_tokens for s in self._streams[rank].values() if s.ready == 0)

    def stream(self, rank: int, request: EngineRequest) -> Stream:
        """The sequence of a request that waits or runs."""
        return self._streams[rank][request]

    def streams(self, rank: int) -> list[Stream]:
        """Sequences that wait or run, oldest first."""
        return list(self._streams[rank].values())

    def reset_prefix_cache(self, rank: int) -> bool:
        """Forget all cached blocks; False while any is held."""
        self.pump()
        if not self.node.ranks[rank].pool.clear():
            return False
        self.on_events(rank, [*self.node.take_events(rank), Cleared(self.now_ns)])
        self.pump()
        return True

    # ------------------------------------------------------------------ the loop

    def pump(self) -> None:
        """Bring the clock, and with it this engine, up to the wall's now."""
        self.clock.pump()
        self.bring()

    def bring(self) -> None:
        """Bring the engine up to the clock's now, without beginning anything."""
        if self.failure is None and self._frozen_ns is None:
            self._advance(begin=False)

    def _advance(self, begin: bool) -> None:
        now = self.now_ns
        try:
            self._deliver(now, self.node.advance(now, begin))
        except EngineStuckError as error:
            self.die(str(error))
        self.arm()

    def arm(self) -> None:
        """Be woken at the end of the step, or at once if the node would begin with what it has been told."""
        boundary = None
        if self._frozen_ns is None and self.failure is None and self.node.boundary_ns is not None:
            boundary = self.node.boundary_ns + self._paused_ns
        if boundary == self._wake_ns:
            return
        self._wake_ns = boundary
        self._wake_serial += 1
        if boundary is not None:
            now = self.clock.now_ns
            rank = _BEGIN if boundary <= now else _STEP
            self.clock.call_at(max(boundary, now), self._due, self._wake_serial, rank=rank)

    def _due(self, serial: int) -> None:
        if serial != self._wake_serial:
            return
        self._wake_ns = None
        self._advance(begin=True)

    def _deliver(self, now: int, outcomes: list[Outcome]) -> None:
        for rank, streams in enumerate(self._streams):
            if streams:
                self._deliver_rank(rank, streams, now)
            events = self.below(rank, self.node.take_events(rank))
            if events:
                self.on_events(rank, events)

    def _deliver_rank(self, rank: int, streams: dict[EngineRequest, Stream], now: int) -> None:
        metrics = self.metrics[rank]
        generated = computed = 0
        ended: list[Stream] = []
        for request, stream in streams.items():
            if not stream.admitted and request.admitted_ns is not None:
                stream.admitted = True
                metrics.admitted(
                    request.prompt_tokens, request.hit_tokens or 0, stream.external_tokens, self._external_source
                )
            new = request.outputs - stream.ready
            if new > 0:
                generated += new
                if stream.ready == 0:
                    first = request.first_token_ns or now
                    metrics.first_token(
                        request.prompt_tokens,
                        request.hit_tokens or 0,
                        stream.external_tokens,
                        (first - request.arrival_ns) / 1e9,
                    )
                    computed += request.prompt_tokens - stream.cached_tokens
                else:
                    metrics.h_itl.observe((now - stream.last_token_ns) / 1e9)
                stream.last_token_ns = now
                stream.ready = request.outputs
                stream.changed.set()
            if request.finished:
                ended.append(stream)
        if generated:
            metrics.generation_tokens.inc(generated)
            metrics.h_iteration.observe(generated + computed)
        for stream in ended:
            self._end(stream, "error" if stream.request.failed else stream.answer.finish_reason, now)
        total = self.node.totals[rank].preemptions
        seen, _ = self._totals[rank]
        if total != seen:
            metrics.preemptions.inc(total - seen)
            self._totals[rank] = (total, 0)

    def _end(self, stream: Stream, reason: str, now: int) -> None:
        request = stream.request
        self._streams[stream.rank].pop(request, None)
        stream.done, stream.reason = True, reason
        if request.finish_ns is None:
            request.finish_ns = now
        admitted = request.admitted_ns if request.admitted_ns is not None else now
        first = request.first_token_ns if request.first_token_ns is not None else now
        last = stream.last_token_ns or first
        self.metrics[stream.rank].finished(
            Finished(
                reason=reason,
                e2e_s=(now - request.arrival_ns) / 1e9,
                queued_s=(admitted - request.arrival_ns) / 1e9,
                prefill_s=max(first - admitted, 0) / 1e9,
                decode_s=max(last - first, 0) / 1e9,
                inference_s=max(last - admitted, 0) / 1e9,
                prompt_tokens=request.prompt_tokens,
                cached_tokens=stream.cached_tokens,
                generated_tokens=stream.ready,
                preemptions=request.preemptions,
                max_tokens=stream.max_tokens,
            )
        )
        stream.changed.set()
        self.on_end(stream)

    def die(self, why: str) -> None:
        """The engine cannot go on: every request fails, now and later."""
        self.failure = why
        for streams in self._streams:
            for stream in list(streams.values()):
                self._end(stream, "error", self.now_ns)

    def refresh_gauges(self, rank: int) -> None:
        """Bring the gauges of a rank's metrics up to date (before a scrape)."""
        self.pump()
        gauges = self.node.gauges(rank, self.node.now_ns)
        metrics = self.metrics[rank]
        metrics.running.set(gauges.running)
        metrics.waiting.set(gauges.waiting)
        metrics.waiting_by["capacity"].set(gauges.waiting)
        metrics.kv_usage.set(gauges.kv_usage)
