"""The step loop of one node: its ranks run in lock-step on virtual time, one step or one leap of equal steps at a time.

A boundary is the end of a step. There vLLM processes the finished batch (update), takes in what arrived, and schedules;
with asynchronous scheduling the batch scheduled here runs after the one that was scheduled at the boundary before.
Between two boundaries nothing of an engine changes, so `advance(t)` processes the boundaries up to t and no more.

A leap processes k boundaries at once while every rank only decodes the same requests: no finish, no admission, no chunk
end, no lack of blocks, nothing new in the inbox. Times, block state, events and gauges come out as if each step had
been taken (tests/engine/test_leaps.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from fake_workers.engine.connected import ConnectedRank
from fake_workers.engine.connector import Connector, ConnectorOptions
from fake_workers.engine.events import KvEvent
from fake_workers.engine.gauges import Gauges
from fake_workers.engine.request import EngineRequest
from fake_workers.engine.scheduler import Batch, RankScheduler, SchedulerConfig
from fake_workers.engine.totals import LeapGaps, RankTotals
from fake_workers.pricing.steps import RankBatch


class Leap(Protocol):
    """Prices of a series of decode steps whose contexts grow by one token per request and step."""

    def cumulative_ns(self, steps: int) -> int:
        """Duration of the first `steps` steps."""

    def step_ns(self, i: int) -> int:
        """Duration of step i (1-based)."""

    def steps_until(self, duration_ns: int) -> int:
        """How many steps end within `duration_ns`."""


class StepPrice(Protocol):
    """What a node needs to know about time."""

    def step_ns(self, ranks: list[RankBatch]) -> int:
        """Duration of one lock-step step."""

    def leap(self, ranks: list[RankBatch]) -> Leap:
        """The series of decode steps that starts with `ranks`."""


@dataclass(slots=True)
class Outcome:
    """Something that a client sees: a first token, or the end of a request."""

    t_ns: int
    rank: int
    request: EngineRequest
    first: bool
    done: bool


@dataclass(slots=True)
class _Leapt:
    """The boundaries that one leap of a node covered, from `start_ns` to `last_ns`."""

    start_ns: int
    last_ns: int
    boundaries: int
    leap: Leap
    _asked: tuple[int, int] = (-1, 0)

    def after(self, t_ns: int) -> int:
        """How many boundaries beyond the first lie up to `t_ns`; the ranks of a node are looked at one by one."""
        if t_ns >= self.last_ns:
            return self.boundaries - 1
        if self._asked[0] != t_ns:
            self._asked = (t_ns, self.leap.steps_until(t_ns - self.start_ns))
        return self._asked[1]


@dataclass(slots=True)
class _Stats:
    """Published stats of one rank from `t_ns` on; within a leap the usage still moves with the steps."""

    t_ns: int
    running: int
    waiting: int
    used_blocks: int
    leapt: _Leapt | None = None
    growth: tuple[int, ...] = ()

    def at(self, t_ns: int, block_tokens: int) -> int:
        """Used blocks as published at the last boundary up to t_ns."""
        used = self.used_blocks
        if self.leapt is not None:
            after = self.leapt.after(t_ns)
            for tokens in self.growth:
                used += -(-(tokens + after) // block_tokens) + (-tokens // block_tokens)
        return used


@dataclass(frozen=True, slots=True)
class _Plan:
    """The coming boundaries that a leap may cover: their prices and how many they are."""

    leap: Leap
    most: int
    last_ns: int
    """From the first of them to the last."""
    duration_ns: int
    """From the first of them to the end of the step that begins at the last."""


_MOST_IDLE_BOUNDARIES = 16
"""Boundaries in a row without a token: an async engine drains in three, so this many mean that it is stuck."""

Observer = Callable[[int, int, int, int, int, int], None]
"""Told of busy time: (rank, start_ns, end_ns, requests in the batch, prompt tokens computed, output tokens)."""


class EngineStuckError(Exception):
    """Requests are waiting, none runs, and nothing that could be scheduled will ever end."""


class Node:
    """Engines that step together: one rank for tensor parallelism, several for data-parallel attention."""

    def __init__(
        self,
        price: StepPrice,
        config: SchedulerConfig,
        ranks: int = 1,
        *,
        leaping: bool = True,
        keep_events: bool = False,
        history_ns: int = 50_000_000,
        observer: Observer | None = None,
        connector: Connector | None = None,
        connector_options: ConnectorOptions | None = None,
        make_rank: Callable[[SchedulerConfig, bool], RankScheduler] = RankScheduler,
    ) -> None:
        """`make_rank`: whose scheduler a rank runs (given config and keep_events); with a connector it is ours."""
        self.price = price
        self.config = config
        self.connected: list[ConnectedRank] = []
        """The ranks, if there is a connector."""
        self.ranks: list[RankScheduler]
        if connector is None:
            self.ranks = [make_rank(config, keep_events) for _ in range(ranks)]
        else:
            options = connector_options or ConnectorOptions()
            self.connect([ConnectedRank(config, keep_events, connector, options, rank) for rank in range(ranks)])
        self.totals = [RankTotals() for _ in range(ranks)]
        self.leaping = leaping
        self.keep_events = keep_events
        self.history_ns = history_ns
        self.observer = observer
        self.now_ns = 0
        self.steps = 0
        """Steps priced, leapt ones included."""
        self.boundaries_taken = 0
        """Boundaries processed one by one plus leaps: the engine's own events."""
        self.published: list[list[KvEvent]] = [[] for _ in range(ranks)]
        """KV events that readers can see, oldest first, per rank; take them with `take_events`."""
        self.published_ns = [-1] * ranks
        """When each rank last published: what its connector had to say up to then has left it."""
        self._current: list[Batch] | None = None
        self._end_ns = 0
        self._depth = 2 if config.async_scheduling else 1
        """Batches that an engine has under way at once: vLLM's max_concurrent_batches."""
        self._queues: list[deque[Batch]] = [deque() for _ in range(ranks)]
        self._adds: list[tuple[int, EngineRequest]] = []
        self._aborts: list[tuple[int, EngineRequest]] = []
        self._stats = [deque([_Stats(0, 0, 0, 0)]) for _ in range(ranks)]
        self._plan: _Plan | None = None
        self._planned = False
        """Whether `_plan` is that of the step under way; None then says that no leap follows it."""
        self._outcomes: list[Outcome] = []
        self._idle_boundaries = 0
        self._nudged = False
        """The connector, or an abort while everything was held, calls for a boundary."""
        self._quiet = [False] * ranks
        """Ranks that have nothing to do and have published so: boundaries pass them by."""

    def connect(self, ranks: list[ConnectedRank]) -> None:
        """Engines with a connector take the place of plain ones."""
        self.ranks, self.connected = list(ranks), ranks

    # ------------------------------------------------------------------ from outside

    def submit(self, rank: int, request: EngineRequest) -> None:
        """A request arrives now (at `now_ns`).

        An idle node begins with all that arrive at this instant (as vLLM drains its input queue when it wakes), a busy
        one takes them in at its next boundary.
        """
        self._adds.append((rank, request))

    def abort(self, rank: int, request: EngineRequest) -> None:
        """A client disconnects now; the engine learns of it at the next boundary."""
        self._aborts.append((rank, request))
        if self._current is None:
            self._take_aborts()
            self._nudged = bool(self.connected)

    def load_ended(
        self,
        rank: int,
        request: EngineRequest,
        tokens: int | None = None,
        failed: bool = False,
        by_tier: dict[str, int] | None = None,
    ) -> None:
        """A load ends now; the engine learns of it at the next boundary, an idle one at once.

        Where it failed, `tokens` is how many of the external tokens arrived (None: even the local hit is lost).
        """
        engine = self.connected[rank]
        engine.now_ns = self.now_ns
        engine.load_ended(request, tokens, failed)
        if by_tier:
            seen = request.external_by_tier = request.external_by_tier or {}
            for tier, count in by_tier.items():
                seen[tier] = seen.get(tier, 0) + count
        self._quiet[rank] = False
        self._nudged = True

    def blocks_released(self, rank: int, request: EngineRequest) -> None:
        """Saves have read the blocks of a finished request; they are freed at the next boundary."""
        self.connected[rank].blocks_released(request)
        self._quiet[rank] = False
        self._nudged = True

    def lookup_ready(self) -> None:
        """A lookup that answered None, or any other, would answer something else now."""
        self._nudged = True

    def advance(self, t_ns: int, begin: bool = True) -> list[Outcome]:
        """Process every boundary up to and including `t_ns`; returns what clients saw, in order.

        `begin=False` only looks: an idle node does not yet begin with requests of this very instant, as more of them
        may follow.
        """
        if self._current is None and (self._adds or self._nudged) and (begin or t_ns > self.now_ns):
            self._start()
        while self._current is not None and self._end_ns <= t_ns:
            if not self._leap(t_ns):
                self._boundary()
        if t_ns > self.now_ns:
            self.now_ns = t_ns
        out = self._outcomes
        if out:
            self._outcomes = []
        return out

    def wake_ns(self) -> int | None:
        """The next time at which something may happen that a leap does not cover; None when idle."""
        if self._current is None:
            return self.now_ns if self._adds or self._nudged else None
        plan = self._leap_plan()
        if plan is None:
            return self._end_ns
        return self._end_ns + plan.duration_ns

    @property
    def boundary_ns(self) -> int | None:
        """When the current step ends, leap or not; None when idle. Who wants every token's time stops there."""
        return self.wake_ns() if self._current is None else self._end_ns

    @property
    def busy(self) -> bool:
        """Whether a step is being executed or about to begin."""
        return self._current is not None or bool(self._adds) or self._nudged

    @property
    def held(self) -> bool:
        """Whether requests or blocks wait for the connector; an idle node may be."""
        return any(engine.outstanding for engine in self.connected)

    def gauges(self, rank: int, t_ns: int) -> Gauges:
        """What a scrape of this rank at `t_ns` (not before now - history_ns) would have read."""
        stats = self._stats[rank]
        for entry in reversed(stats):
            if entry.t_ns <= t_ns:
                break
        used = entry.at(t_ns, self.config.block_tokens)
        return Gauges(entry.running, entry.waiting, used / self.ranks[rank].pool.blocks)

    def take_events(self, rank: int) -> list[KvEvent]:
        """KV events published up to now and not yet taken."""
        events = self.published[rank]
        if events:
            self.published[rank] = []
        return events

    # ------------------------------------------------------------------ one boundary at a time

    def _boundary(self) -> None:
        """The current step ends: update, take in what arrived, schedule, start the next step."""
        self.boundaries_taken += 1
        now = self.now_ns = self._end_ns
        current = self._current
        assert current is not None
        self._nudged = False
        for connected, batch in zip(self.connected, current, strict=False):
            connected.now_ns = now
            connected.saved(batch)
        self._take_aborts()
        for rank, (engine, batch) in enumerate(zip(self.ranks, current, strict=True)):
            if self._quiet[rank] and not batch.items:
                continue
            self._update(rank, engine, batch, now)
            self._quiet[rank] = not engine.unfinished
        self._take_adds()
        self._schedule_and_start(now)

    def _update(self, rank: int, engine: RankScheduler, batch: Batch, now: int) -> None:
        first, done = engine.update(batch)
        if first or done:
            self._note_outcomes(rank, now, first, done)
        self._publish(rank, engine, now)

    def _start(self) -> None:
        """An idle node begins with what has arrived, or with what the connector has said."""
        if self._nudged:
            self._nudged = False
            for rank, engine in enumerate(self.connected):
                engine.now_ns = self.now_ns
                self._update(rank, engine, Batch(), self.now_ns)
        self._take_adds()
        self._schedule_and_start(self.now_ns)

    def _schedule_and_start(self, now: int) -> None:
        """Schedule until every engine has as many batches under way as it may, then start the oldest ones.

        An async engine that had run dry thus schedules two batches before it waits for one (rule 16). An idle rank has
        nothing queued, so its next request joins the very next step of the node, as where vLLM runs dummy batches.
        """
        for rank, engine in enumerate(self.ranks):
            queue = self._queues[rank]
            while len(queue) < self._depth and engine.unfinished:
                queue.append(self._schedule(rank, engine, now))
                if self.connected and len(queue) > 1 and queue[-1].items and not queue[0].items:
                    self._update(rank, engine, queue.popleft(), now)  # an empty batch takes no time
        if not any(self._queues):
            self._current = None
            return
        if self.connected and self._falls_asleep(now):
            return
        current = self._current = [queue.popleft() if queue else Batch() for queue in self._queues]
        works = [_work(batch) for batch in current]
        self._plan, self._planned = None, any(work.prompt_tokens for work in works)  # no leap begins with a chunk
        if any(batch.items for batch in current):
            duration = self.price.step_ns([work.load for work in works])
            self.steps += 1
            self._idle_boundaries = 0
        else:
            duration = 0
            self._idle_boundaries += 1
            if self._idle_boundaries > _MOST_IDLE_BOUNDARIES:
                raise EngineStuckError(self._describe())
        self._account(works, now, duration)
        for connected, batch in zip(self.connected, current, strict=False):
            connected.step_begins(batch, duration)
        self._end_ns = now + duration

    def _falls_asleep(self, now: int) -> bool:
        """With a connector: whether all that is left waits for it. vLLM polls every millisecond then; we are woken."""
        if self._nudged or any(batch.items for queue in self._queues for batch in queue):
            return False
        if any(engine.changed for engine in self.connected if engine.unfinished) or not self.held:
            return False
        for rank, engine in enumerate(self.connected):
            self._queues[rank].clear()
            self._update(rank, engine, Batch(), now)
        self._current = None
        self._idle_boundaries = 0
        return True

    def _schedule(self, rank: int, engine: RankScheduler, now: int) -> Batch:
        if self.connected:
            self.connected[rank].now_ns = now
        batch = engine.schedule()
        for item in batch.items:
            if item.request.admitted_ns is None:
                item.request.admitted_ns = now
        if batch.preempted:
            self.totals[rank].preemptions += len(batch.preempted)
        return batch

    def _account(self, works: list[_Work], start: int, duration: int) -> None:
        for rank, work in enumerate(works):
            if work.requests:
                total = self.totals[rank]
                total.busy_ns += duration
                total.batch_ns += duration * work.requests
                total.scheduled_tokens += work.tokens
                total.step(duration, work.gaps, work.prompt_tokens > 0)
                if self.observer is not None and duration:
                    self.observer(rank, start, start + duration, work.requests, work.prompt_tokens, work.outputs)

    def _note_outcomes(self, rank: int, now: int, first: list[EngineRequest], done: list[EngineRequest]) -> None:
        for request in first:
            request.first_token_ns = now
        for request in done:
            request.finish_ns = now
        seen = set()
        for request in [*first, *done]:
            if id(request) not in seen:
                seen.add(id(request))
                self._outcomes.append(Outcome(now, rank, request, request.first_token_ns == now, request.finished))

    def _publish(self, rank: int, engine: RankScheduler, now: int) -> None:
        """End of update: pending KV events go out (one batch per step), the stats that a scrape reads are renewed."""
        if engine.events:
            for event in engine.events:
                event.t_ns = now
            self.published[rank].extend(engine.events)
            engine.events = []
        self.published_ns[rank] = now
        pool = engine.pool
        self._remember(rank, _Stats(now, len(engine.running), engine.waiting_count, pool.blocks - pool.free))

    def _remember(self, rank: int, entry: _Stats) -> None:
        stats = self._stats[rank]
        last = stats[-1]
        if last.t_ns == entry.t_ns and last.leapt is None:
            stats.pop()
        stats.append(entry)
        horizon = entry.t_ns - self.history_ns
        while len(stats) > 1 and stats[1].t_ns <= horizon:
            stats.popleft()

    def _take_aborts(self) -> None:
        if self._aborts:
            for rank, request in self._aborts:
                self.ranks[rank].abort(request)
                self._quiet[rank] = False
            self._aborts.clear()

    def _take_adds(self) -> None:
        if self._adds:
            for rank, request in self._adds:
                if not request.finished:
                    self.ranks[rank].add(request)
                    self._quiet[rank] = False
            self._adds.clear()

    # ------------------------------------------------------------------ leaps

    def _leap_plan(self) -> _Plan | None:
        """The leap that may follow; None if there is none.

        Boundary i (1..most) ends batch i of the series; batch 1 is the current one and already priced, so the leap's
        first step is batch 2.
        """
        if not self.leaping or self.config.num_speculative_tokens or self._adds or self._aborts or self._nudged:
            return None
        if not self._planned:
            self._planned = True
            self._plan = self._make_plan()
        return self._plan

    def _make_plan(self) -> _Plan | None:
        most = 1 << 62
        loads: list[RankBatch] = []
        ahead = 1 if self.config.async_scheduling else 0
        longest = self.config.max_model_len
        for rank, engine in enumerate(self.ranks):
            series = self._steady(rank, engine)
            if series is None:
                return None
            items = series.items
            context = 0
            if items:
                for item in items:
                    request = item.request
                    context += item.cached + 2
                    end = request.prompt_tokens + request.output_tokens
                    left = (end if end < longest else longest) - request.tokens
                    if left < most + 1 + ahead:
                        most = left - 1 - ahead
                if most < 1:
                    return None
                most = self._most_with_blocks(engine, items, most)
                if most < 1:
                    return None
            loads.append(RankBatch((), len(items), context))
        if most == 1 << 62:
            return None
        leap = self.price.leap(loads)
        duration = leap.cumulative_ns(most)
        return _Plan(leap, most, duration - leap.step_ns(most), duration)

    def _steady(self, rank: int, engine: RankScheduler) -> Batch | None:
        """The rank's current batch if every running request is one decode of it (and of the queued one), else None."""
        assert self._current is not None
        batch = self._current[rank]
        running = engine.running
        count = len(running)
        queue = self._queues[rank]
        if len(queue) != (self._depth - 1 if engine.unfinished else 0):
            return None
        if len(batch.items) != count or (
            engine.waiting_count and not self._blocked(engine, queue[-1] if queue else batch)
        ):
            return None
        if self.connected and not self.connected[rank].calm:
            return None
        for steady in (batch, *queue):
            if len(steady.items) != count:
                return None
            for item, request in zip(steady.items, running, strict=True):
                if item.request is not request or item.tokens != 1 or not item.samples:
                    return None
        for request in running:
            if request.outputs == 0:
                return None
        return batch

    def _blocked(self, engine: RankScheduler, last: Batch) -> bool:
        """Whether the head of the waiting line stays where it is as long as nothing is freed.

        The schedule() that made `last` has just left it there, and free blocks only get fewer in a leap; but a
        schedule() that preempts does not look at the line at all (rule 5), and a request that waits for output from
        before its preemption is only passed over for now (rule 16).
        """
        return not last.preempted and not any(request.stale for request in engine.waiting)

    def _most_with_blocks(self, engine: RankScheduler, items: list, most: int) -> int:  # type: ignore[type-arg]
        """Largest number of boundaries <= most whose allocations fit into the free blocks."""
        block = self.config.block_tokens
        free = engine.pool.free
        bases = [item.request.computed for item in items]
        if len(bases) * (most // block + 1) <= free:
            return most

        def allocated(k: int) -> int:
            return sum(-(-(c + k) // block) + (-c // block) for c in bases)

        low, high = 0, most
        while low < high:
            mid = (low + high + 1) // 2
            if allocated(mid) <= free:
                low = mid
            else:
                high = mid - 1
        return low

    def _leap(self, t_ns: int) -> bool:
        """Process at once as many coming boundaries up to t_ns as a leap covers; False if that is none."""
        plan = self._leap_plan()
        if plan is None:
            return False
        leap, start = plan.leap, self._end_ns
        if start + plan.last_ns <= t_ns:
            k, last, duration = plan.most, plan.last_ns, plan.duration_ns
        else:
            steps = leap.steps_until(t_ns - start)
            k, last = 1 + steps, leap.cumulative_ns(steps)
            duration = last + leap.step_ns(k)
        current = self._current
        assert current is not None
        self._planned = False
        self.boundaries_taken += 1
        self.steps += k
        leapt = _Leapt(start, start + last, k, leap)
        gaps = LeapGaps.of(k, duration, leap.cumulative_ns)
        for rank, engine in enumerate(self.ranks):
            self._leap_rank(rank, engine, current[rank], leapt)
            count = len(current[rank].items)
            if count:
                if self.connected:
                    self.connected[rank].leapt(k)
                total = self.totals[rank]
                total.busy_ns += duration
                total.batch_ns += duration * count
                total.scheduled_tokens += k * count
                total.leap(gaps, count)
                if self.observer is not None:
                    self.observer(rank, start, start + duration, count, 0, k * count)
        for rank, batch in enumerate(current):
            for steady in (batch, *self._queues[rank]):
                for item in steady.items:
                    item.cached += k
        self.now_ns = start + last
        self._end_ns = start + duration
        return True

    def _leap_rank(self, rank: int, engine: RankScheduler, batch: Batch, leapt: _Leapt) -> None:
        """The boundaries of one rank: k tokens per request, the blocks they need, the events and stats published."""
        items, k = batch.items, leapt.boundaries
        if self._quiet[rank] and not items:
            return
        self._publish(rank, engine, leapt.start_ns)
        self.published_ns[rank] = leapt.last_ns
        if not items:
            if k > 1:
                self._remember(rank, _Stats(leapt.last_ns, 0, engine.waiting_count, self._used(engine)))
            return
        requests = [item.request for item in items]
        if k > 1:
            stats = self._stats[rank][-1]
            stats.leapt = leapt
            stats.growth = tuple([request.computed for request in requests])
        if not self.keep_events and all(request.preemptions == 0 for request in requests):
            for request in requests:
                request.outputs += k
                request.computed += k
                engine.allocate(request, request.computed)
            return
        self._leap_blocks(rank, engine, requests, leapt)

    def _leap_blocks(self, rank: int, engine: RankScheduler, requests: list[EngineRequest], leapt: _Leapt) -> None:
        """The same where the order counts in which requests take blocks and fill them."""
        k, block = leapt.boundaries, self.config.block_tokens
        changes: list[tuple[int, int]] = []
        for order, request in enumerate(requests):
            # boundary i: tokens + i known after update; schedule() covers computed + i
            full = block - request.tokens % block
            need = request.blocks * block - request.computed + 1
            if full <= k or need <= k:
                changes.extend((i, order) for i in {*range(full, k + 1, block), *range(need, k + 1, block)})
        changes.sort()
        done = [0] * len(requests)
        for i, order in changes:
            request = requests[order]
            request.outputs += i - done[order]
            request.computed += i - done[order]
            done[order] = i
            mark = len(engine.events)
            engine.allocate(request, request.computed)
            if i < k and len(engine.events) > mark:
                when = leapt.start_ns + leapt.leap.cumulative_ns(i)
                news: list[KvEvent] = engine.events[mark:]
                del engine.events[mark:]
                for event in news:
                    event.t_ns = when
                self.published[rank].extend(news)
        for request, i in zip(requests, done, strict=True):
            request.outputs += k - i
            request.computed += k - i

    @staticmethod
    def _used(engine: RankScheduler) -> int:
        return engine.pool.blocks - engine.pool.free

    def _describe(self) -> str:
        lines = [f"at {self.now_ns} ns nothing can be scheduled any more:"]
        for rank, engine in enumerate(self.ranks):
            head = engine.waiting[0] if engine.waiting else None
            lines.append(
                f"rank {rank}: {len(engine.running)} running, {len(engine.waiting)} waiting, "
                f"{engine.pool.free} of {engine.pool.blocks} blocks free"
                + (f"; head of the line: {head.request_id} with {head.tokens} tokens" if head else "")
            )
        return "\n".join(lines)


class _Work(NamedTuple):
    """What one rank does in one step: `load` as the price sees it; tokens, samples and gaps as they are counted."""

    load: RankBatch
    requests: int
    tokens: int
    prompt_tokens: int
    outputs: int
    gaps: int
    """Requests that get a token after their first."""


_NO_WORK = _Work(RankBatch(), 0, 0, 0, 0, 0)


def _work(batch: Batch) -> _Work:
    """A single token on top of a context is a decode, as vLLM's kernels take it."""
    if not batch.items:
        return _NO_WORK
    prefills = []
    decodes = context = drafts = prompt = outputs = gaps = 0
    for item in batch.items:
        new, cached = item.tokens, item.cached
        if new - item.drafts == 1:
            decodes += 1
            context += cached + new
            drafts += item.drafts
        else:
            prompt += new
            prefills.append((new, cached))
        if item.samples:
            outputs += 1
            if cached + new > item.request.prompt_tokens:
                gaps += 1
    load = RankBatch(tuple(prefills), decodes, context, drafts)
    return _Work(load, len(batch.items), decodes + drafts + prompt, prompt, outputs, gaps)
