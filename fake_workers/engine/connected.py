"""vLLM 0.32's scheduler with a KV connector: external hits, loads that hold their blocks, failed loads, delayed frees.

`ConnectedRank` is the scheduler of an engine that has a connector; an engine without one is a plain `RankScheduler` and
pays nothing. Rules C1-C9 of docs/engine.md name the places in vLLM's source.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from fake_workers.engine.blocks import Run
from fake_workers.engine.connector import Connector, ConnectorOptions, FollowsSteps, StreamsLayers, Transfer
from fake_workers.engine.events import Removed
from fake_workers.engine.request import EngineRequest
from fake_workers.engine.scheduler import Batch, RankScheduler, Scheduled, SchedulerConfig, priority_key

Hits = list[tuple[Run, int, int]]


@dataclass(slots=True)
class _Ended:
    """A load that has ended. `valid` external tokens are usable; None: not even the local hit is to be trusted."""

    request: EngineRequest
    valid: int | None
    failed: bool


@dataclass(slots=True)
class _Notices:
    """What the connector said since the last update."""

    ended: list[_Ended] = field(default_factory=list)
    released: list[EngineRequest] = field(default_factory=list)


class ConnectedRank(RankScheduler):
    """One engine with a connector."""

    def __init__(
        self, config: SchedulerConfig, keep_events: bool, connector: Connector, options: ConnectorOptions, rank: int = 0
    ) -> None:
        super().__init__(config, keep_events)
        self.connector = connector
        self._follower = connector if isinstance(connector, FollowsSteps) else None
        self._streamer = connector if isinstance(connector, StreamsLayers) else None
        self.options = options
        self.rank = rank
        self.now_ns = 0
        """Virtual time of the call under way; the node keeps it."""
        self.holding: deque[EngineRequest] = deque()
        """kv_holding_waiting: waiting requests that have blocks; they always come before `waiting`."""
        self.changed = False
        """Whether anything but counters moved since the last schedule() began."""
        self._delayed: set[EngineRequest] = set()
        """Finished requests whose blocks a load or a save still uses."""
        self._prefilling: set[EngineRequest] = set()
        """_inflight_prefills: admitted or loading, and not all known tokens scheduled yet."""
        self._notices = _Notices()
        self._defers_frees = config.async_scheduling and options.consumer
        self._steps_scheduled = 0
        self._steps_processed = 0
        self._deferred_frees: deque[tuple[int, list[Run], int]] = deque()

    # ------------------------------------------------------------------ views

    @property
    def unfinished(self) -> bool:
        """Whether any request is running or waiting, loads included."""
        return bool(self.running or self.waiting or self.holding)

    @property
    def waiting_count(self) -> int:
        """vllm:num_requests_waiting, which counts deferred requests too."""
        return len(self.waiting) + len(self.holding)

    @property
    def deferred_count(self) -> int:
        """vllm:num_requests_waiting_by_reason{reason="deferred"}."""
        return sum(r.transfer.deferred for queue in (self.holding, self.waiting) for r in queue if r.transfer)

    @property
    def outstanding(self) -> bool:
        """Whether the connector still owes an answer, the end of a load, or the release of blocks."""
        if self._delayed:
            return True
        transfers = (r.transfer for queue in (self.holding, self.waiting) for r in queue if r.transfer)
        return any((t.loading and not t.arrived) or t.unanswered for t in transfers)

    @property
    def calm(self) -> bool:
        """Whether nothing but new tokens will happen at the next boundaries if nobody speaks up (for leaps)."""
        if self._follower is not None and self._follower.unsettled(self.rank):
            return False
        return not (self._deferred_frees or self._notices.ended or self._notices.released)

    # ------------------------------------------------------------------ from outside

    def add(self, request: EngineRequest) -> None:
        """A new request joins the line."""
        request.transfer = Transfer()
        super().add(request)

    def abort(self, request: EngineRequest) -> None:
        """C7: out of the queues; blocks that a load still fills stay until it has ended."""
        if request.finished:
            return
        self.changed = True
        if request in self.holding:
            self.holding.remove(request)
            request.finished = True
            self._free(request)
        elif request.transfer is None:
            request.finished = True  # the engine has not seen it yet
        else:
            super().abort(request)

    def load_ended(self, request: EngineRequest, tokens: int | None, failed: bool) -> None:
        """The connector's word on a load; it counts at the next update."""
        transfer = request.transfer
        assert transfer is not None and transfer.loading and not transfer.arrived, f"{request.request_id} loads nothing"
        request.restore_ns += self.now_ns - transfer.started_ns
        request.external_tokens += (tokens or 0) if failed else transfer.external_tokens
        self._notices.ended.append(_Ended(request, tokens, failed))

    def blocks_released(self, request: EngineRequest) -> None:
        """The connector has read what it saves of a finished request."""
        assert request.finished, f"{request.request_id} has not ended"
        self._notices.released.append(request)

    # ------------------------------------------------------------------ schedule

    def schedule(self) -> Batch:
        """As without a connector; then notes which step may write to whose blocks (C8)."""
        self.changed = False
        batch = super().schedule()
        if batch.items:
            if self._defers_frees:
                self._steps_scheduled += 1
            for item in batch.items:
                transfer = item.request.transfer
                assert transfer is not None
                transfer.last_step = self._steps_scheduled
                if item.samples:
                    self._prefilling.discard(item.request)
        if self._follower is not None:
            self._follower.scheduled(self.rank, batch)
        return batch

    def leapt(self, steps: int) -> None:
        """So many decode steps were scheduled and processed at once."""
        if self._defers_frees:
            self._steps_scheduled += steps
            self._steps_processed += steps
            for request in self.running:
                assert request.transfer is not None
                request.transfer.last_step = self._steps_scheduled

    def _long_prefill_threshold(self) -> int:
        threshold = self.config.long_prefill_token_threshold
        return threshold if len(self.running) + self.waiting_count > 1 else 0

    def _schedule_waiting(self, batch: Batch, budget: int, threshold: int) -> None:
        config = self.config
        block = config.block_tokens
        skipped: list[EngineRequest] = []
        skipped_holding: list[EngineRequest] = []
        while budget > 0 and len(self.running) < config.max_num_seqs:
            queue = self.holding or self.waiting  # C1
            if not queue:
                break
            request = queue[0]
            transfer = request.transfer
            assert transfer is not None
            fresh = load = False
            external = hit_blocks = idle = reserved = tokens = 0
            hits: Hits = []
            ready = not transfer.loading or transfer.arrived
            if ready and transfer.loading:
                self._promote(request, transfer)
            if ready and request.stale and not transfer.drop_stale:
                ready = False
            if ready and request.computed == 0:
                fresh = True
                hits, hit_blocks, idle = self._lookup(request)
                answer = self.connector.lookup(self.rank, request, hit_blocks * block)
                transfer.unanswered = answer is None
                if answer is None:
                    ready = False  # C2: others may overtake
                else:
                    external, load = answer
                    load = load and external > 0
            if not ready:
                transfer.deferred = True
                queue.popleft()
                (skipped_holding if transfer.loading or request.computed else skipped).append(request)
                continue
            computed = hit_blocks * block + external if fresh else request.computed
            if load:
                reserved = self._reserved()  # C4
            else:
                tokens = request.tokens - computed
                if 0 < threshold < tokens:
                    tokens = threshold
                tokens = min(tokens, budget)
            own = request.blocks + hit_blocks
            extra = idle + (self._watermark_blocks if self.running else 0)
            free = self.pool.free
            if config.scheduler_reserve_full_isl and max(0, self._blocks_for(request.tokens) - own) + extra > free:
                break
            if max(0, self._blocks_for(computed + tokens) - own) + extra > free - reserved:
                break
            queue.popleft()
            if fresh:
                if not request.blocks:  # a prompt of one token comes by again with the block that was loaded for it
                    request.held = self.pool.acquire(hits)
                    request.blocks = request.cached_blocks = hit_blocks
                if not request.preemptions:
                    request.hit_tokens = hit_blocks * block
            request.computed = computed
            if load:
                self._hold(request, transfer, hit_blocks * block, external)
                skipped_holding.append(request)
                continue
            allocated = self.allocate(request, computed + tokens)
            assert allocated, "the admission gate counted fewer blocks than the allocation needs"
            transfer.deferred = False
            request.running = True
            request.external_tokens += external
            self.running.append(request)
            batch.items.append(Scheduled(request, tokens, computed, False))
            budget -= tokens
            if computed + tokens < request.tokens:
                self._prefilling.add(request)
            if fresh:
                self.connector.start_load(self.rank, request, hit_blocks * block, external)
        self._requeue(self.holding, skipped_holding)
        self._requeue(self.waiting, skipped)

    def _hold(self, request: EngineRequest, transfer: Transfer, local: int, external: int) -> None:
        """C3: blocks at once, without identity (delay_cache_blocks), and out of the batch until the load has ended."""
        new = self._blocks_for(local + external) - request.blocks
        evicted = self.pool.take(new) if new > 0 else []
        request.blocks += max(0, new)
        if evicted and self.keep_events:
            self.events.extend(Removed(0, o, a, b - a) for o, a, b in evicted)
        transfer.loading = transfer.deferred = True
        transfer.local_tokens, transfer.external_tokens = local, external
        transfer.started_ns = self.now_ns
        self._prefilling.add(request)
        self.changed = True
        self.connector.start_load(self.rank, request, local, external)

    def _promote(self, request: EngineRequest, transfer: Transfer) -> None:
        """C5 (_update_waiting_for_remote_kv): loaded blocks get their identity; a full hit computes its last token."""
        if transfer.broken and not request.computed:
            self.pool.release(request.held, request.blocks - request.cached_blocks)
            request.held = []
            request.blocks = request.cached_blocks = 0
        else:
            self.cache_blocks(request, request.computed)
        if request.computed == request.tokens:
            request.computed -= 1
        transfer.loading = transfer.arrived = transfer.broken = False
        self.changed = True

    def _reserved(self) -> int:
        """_inflight_prefill_reserved_blocks: what prefills and loads under way still need."""
        return sum(max(0, self._blocks_for(r.tokens) - r.blocks) for r in self._prefilling)

    def _requeue(self, queue: deque[EngineRequest], skipped: list[EngineRequest]) -> None:
        """Back to the front, in the old order (priority: each to its place)."""
        if not skipped:
            return
        queue.extendleft(reversed(skipped))
        if self.config.policy == "priority":
            ordered = sorted(queue, key=priority_key)
            queue.clear()
            queue.extend(ordered)

    # ------------------------------------------------------------------ blocks that come back later

    def _can_free(self, victim: EngineRequest) -> bool:
        """C8 (_request_blocks_can_be_freed): no step that writes to its blocks is under way."""
        assert victim.transfer is not None
        return not self._defers_frees or victim.transfer.last_step <= self._steps_processed

    def _preempt(self, request: EngineRequest) -> None:
        transfer = request.transfer
        assert transfer is not None
        self._prefilling.discard(request)
        # an undrained dropped share stays dropped: its positions have been sampled again
        transfer.drop_stale = self.options.drops_stale or (transfer.drop_stale and request.stale > 0)
        super()._preempt(request)
        self.changed = True
        self.connector.preempted(self.rank, request)

    def _free(self, request: EngineRequest) -> None:
        if request.finished:
            transfer = request.transfer
            assert transfer is not None
            self._prefilling.discard(request)
            transfer.deferred = transfer.unanswered = False
            wanted = self.connector.finish(self.rank, request)
            if wanted or (transfer.loading and not transfer.arrived):
                self._delayed.add(request)
                return
        self._release(request)

    def _release(self, request: EngineRequest) -> None:
        blanks = request.blocks - request.cached_blocks
        if self._can_free(request):
            self.pool.release(request.held, blanks)
        elif request.blocks:
            self._deferred_frees.append((self._steps_scheduled, request.held, blanks))
        request.held = []
        request.blocks = request.cached_blocks = 0

    # ------------------------------------------------------------------ update

    def step_begins(self, batch: Batch, duration_ns: int) -> None:
        """The batch starts to execute; a connector that sends layer by layer hears how far each prompt will get."""
        if self._streamer is not None:
            for item in batch.items:
                if item.cached < item.request.prompt_tokens and not item.request.stale:
                    self._streamer.step_begins(self.rank, item.request, item.cached + item.tokens, duration_ns)

    def saved(self, batch: Batch) -> None:
        """C9: the batch has been executed; the connector hears how much of each prompt is in the GPU."""
        for item in batch.items:
            request = item.request
            if item.cached < request.prompt_tokens and not request.finished and not request.stale:
                self.connector.save(self.rank, request, item.cached + item.tokens)
        if self._follower is not None:
            self._follower.executed(self.rank, batch)

    def update(self, batch: Batch) -> tuple[list[EngineRequest], list[EngineRequest]]:
        """C6: deferred frees, failed loads, tokens, requests that end in an error, ended loads, released blocks."""
        if self._defers_frees and batch.items:
            self._steps_processed += 1
            while self._deferred_frees and self._deferred_frees[0][0] <= self._steps_processed:
                _, held, blanks = self._deferred_frees.popleft()
                self.pool.release(held, blanks)
                self.changed = True
        notices = self._notices
        news = bool(notices.ended or notices.released)
        if news:
            self._notices = _Notices()
            self.changed = True
        lost = self._lose(notices.ended) if news else ()
        for item in batch.items:
            transfer = item.request.transfer
            assert transfer is not None
            if item.request.stale and transfer.drop_stale:
                item.samples = False
        first, done = super().update(batch)
        for request in lost:
            self.holding.remove(request)
            request.finished = request.failed = True
            self._free(request)
            done.append(request)
        if news:
            for ended in notices.ended:
                assert ended.request.transfer is not None
                if ended.request.finished:
                    self._let_go((ended.request,))
                else:
                    ended.request.transfer.arrived = True
            self._let_go(notices.released)
        return first, done

    def _lose(self, ended: list[_Ended]) -> list[EngineRequest]:
        """Failed loads (_handle_invalid_blocks, _handle_failed_recving); returns the requests that end with them."""
        recompute = self.options.kv_load_failure_policy == "recompute"
        block = self.config.block_tokens
        lost = []
        for load in ended:
            request, transfer = load.request, load.request.transfer
            assert transfer is not None
            if not load.failed or request.finished:
                continue
            if not recompute:
                lost.append(request)
                continue
            transfer.broken = True
            request.computed = 0 if load.valid is None else (transfer.local_tokens + load.valid) // block * block
        return lost

    def _let_go(self, requests: Iterable[EngineRequest]) -> None:
        for request in requests:
            if request in self._delayed:
                self._delayed.remove(request)
                self._release(request)
