"""vLLM's own CPU tier (OffloadingConnector) below the engines of one node, on the virtual clock.

Each engine has a tier of its own. What is looked up, loaded, stored and evicted decides `OffloadScheduler`, by vLLM's
rules; here copies take their time. As in vLLM's worker an engine's copies of one direction run one after the other, and
a store begins when the step that computed its tokens has ended.

A model with window layers has chunks of several KV-cache groups; each holds the layers of one group, so bytes here are
a token's of one group.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fake_workers.engine.events import TierEvent
from fake_workers.engine.request import EngineRequest
from fake_workers.engine.scheduler import Batch
from harness.bins import LevelBins
from harness.cache.base import NODE_DRAM, CacheRequest, LoadResult, Run, TierStats
from harness.cache.chunks import ChunkKeys
from harness.cache.config import OffloadingConfig
from harness.cache.offload_manager import OffloadManager, group_of, make_key, origin_and_place
from harness.cache.offload_policies import Key
from harness.cache.offload_scheduler import Job, OffloadScheduler, OffloadState, Scheduled, WindowGroups
from harness.cache.transfers import NodePaths, Wires, transfer_cost
from harness.clock import VirtualClock

MEDIUM = "CPU"


@dataclass(slots=True)
class _Copy:
    job: Job
    nbytes: int
    done: Callable[[], None]


class _Rank:
    """One engine: its tier, and its copies in both directions."""

    def __init__(self, scheduler: OffloadScheduler) -> None:
        self.scheduler = scheduler
        self.finished: list[tuple[OffloadState, int]] = []
        """Requests that ended since the last schedule, with their computed tokens."""
        self.later: dict[int, list[Job]] = {}
        """Stores that begin when a batch has been executed, by its identity."""
        self.waiting: dict[CacheRequest, None] = {}
        """Requests whose lookup has no answer yet."""
        self.running: list[tuple[OffloadState, EngineRequest]] = []
        """Of the last schedule."""
        self.copies: dict[bool, deque[_Copy]] = {True: deque(), False: deque()}
        self.busy = {True: False, False: False}
        self.used = 0
        """Chunks, as last noted."""
        self.read_bytes = 0
        self.lookups = 0
        self.asked_tokens = 0
        self.hit_tokens = 0


class OffloadNode:
    """The tiers of one node; implements ExternalCache and follows the engines' steps."""

    follows_steps = True
    """Its connector tells it of every schedule and of every executed batch."""
    ends_loads = True
    """A load whose request is gone still ends, and its blocks are free then."""

    def __init__(
        self,
        clock: VirtualClock,
        config: OffloadingConfig,
        *,
        ranks: int,
        capacity: int,
        block_tokens: int,
        chunk_blocks: int,
        tier_bytes_per_token: int,
        gpu_bytes_per_token: int,
        store_gpus: int | None,
        wires: Wires,
        paths: NodePaths | None,
        identity: dict[str, Any],
        prefix_caching: bool = True,
        seed: str = "1/0",
        windows: WindowGroups | None = None,
    ) -> None:
        """capacity: chunks per engine, of all groups; tier_bytes_per_token: of a token of one group in the tier;
        gpu_bytes_per_token: the same summed over the GPUs that load it; store_gpus: how many GPUs of a replica write
        (None: all).
        """
        self.clock = clock
        self.config = config
        self.chunk_blocks = chunk_blocks
        self.chunk_tokens = block_tokens * chunk_blocks
        self.chunk_bytes = self.chunk_tokens * tier_bytes_per_token
        self.level = LevelBins()
        """Chunks of all engines' tiers over time."""
        self._block_tokens = block_tokens
        self._token_bytes, self._gpu_bytes = tier_bytes_per_token, gpu_bytes_per_token
        self._store_gpus = store_gpus
        self._wires, self._paths = wires, paths
        self._gpu_load, self._load_descriptors = transfer_cost(config.gpu_load)
        self._gpu_store, self._store_descriptors = transfer_cost(config.gpu_store)
        self._identity = identity
        self._random = random.Random(seed)
        self._keys: ChunkKeys[Key] = ChunkKeys(chunk_blocks, make_key)
        self._states: dict[CacheRequest, OffloadState] = {}
        self.keep_events = False
        self._events: list[TierEvent] = []
        self.ranks = [
            _Rank(
                OffloadScheduler(
                    OffloadManager(capacity, config.eviction_policy, config.store_threshold, config.max_tracker_size),
                    block_tokens,
                    chunk_blocks,
                    config.offload_prompt_only,
                    prefix_caching,
                    windows,
                )
            )
            for _ in range(ranks)
        ]

    # ------------------------------------------------------------------ the engine's side

    def lookup(self, request: CacheRequest, local_hit_tokens: int) -> int | None:
        """See ExternalCache."""
        rank, state = self.ranks[request.rank], self._state(request)
        if not state.asked:
            state.asked = True
            rank.lookups += 1
            rank.asked_tokens += len(state.keys) * self.chunk_tokens
        found = rank.scheduler.matched(state, local_hit_tokens)
        if found is None:
            rank.waiting[request] = None
            return None
        rank.waiting.pop(request, None)
        return found

    def start_load(
        self, request: CacheRequest, local_hit_tokens: int, external_tokens: int, done: Callable[[LoadResult], None]
    ) -> None:
        """See ExternalCache."""
        rank, state = self.ranks[request.rank], self._state(request)
        job = rank.scheduler.allocated(state, external_tokens)
        if job is None:
            return
        rank.hit_tokens += external_tokens
        nbytes = job.tokens * self._gpu_bytes
        asked = started = self.clock.now_ns

        def arrived() -> None:
            rank.read_bytes += job.tokens * self._token_bytes
            failed = self._random.random() < self.config.load_failure_share
            done(
                LoadResult(
                    first_token=local_hit_tokens,
                    tokens=external_tokens,
                    failed=failed,
                    bytes=nbytes,
                    started_ns=started,
                    ended_ns=self.clock.now_ns,
                    by_tier={NODE_DRAM: external_tokens},
                    asked_ns=asked,
                    answered_ns=asked,
                )
            )

        self._copy(request.rank, _Copy(job, nbytes, arrived))

    def save(self, request: CacheRequest, computed_tokens: int) -> None:
        """See ExternalCache: stores follow the schedule instead."""

    def preempted(self, request: CacheRequest) -> None:
        """See ExternalCache: stores under way end first, then the request is looked up anew."""
        if request in self._states:
            self._states[request].blocks = 0

    def finish(self, request: CacheRequest, freed: Callable[[], None]) -> bool:
        """See ExternalCache: blocks are free at once (vLLM waits where a copy still reads one that is taken again)."""
        state = self._states.pop(request, None)
        if state is None:
            return False
        rank, engine = self.ranks[request.rank], request.source
        assert engine is not None
        rank.waiting.pop(request, None)
        self._refresh(state, request)
        ended = engine.outputs >= engine.output_tokens
        computed = max(engine.prompt_tokens, engine.tokens - 1) if ended else engine.computed
        rank.finished.append((state, computed))
        # an engine that has nothing left to schedule takes an empty step
        self.clock.call_at(self.clock.now_ns, self._take_finished, request.rank)
        return False

    # ------------------------------------------------------------------ the engine's steps

    def scheduled(self, rank: int, batch: Batch, members: list[tuple[CacheRequest, EngineRequest]]) -> None:
        """A schedule() has ended; `members` are the batch's requests."""
        place = self.ranks[rank]
        items = []
        for (request, engine), item in zip(members, batch.items, strict=True):
            state = self._state(request)
            items.append(Scheduled(state, item.cached + item.tokens, engine.blocks))
        place.running = [(item.state, engine) for item, (_, engine) in zip(items, members, strict=True)]
        jobs = place.scheduler.build(items, self._ended(place))
        self._note(rank)
        if batch.items and jobs:
            place.later[id(batch)] = jobs
        else:
            self._start(rank, jobs)

    def executed(self, rank: int, batch: Batch) -> None:
        """The batch has been executed: what it computed can be copied."""
        self._start(rank, self.ranks[rank].later.pop(id(batch), []))

    def unsettled(self, rank: int) -> bool:
        """Whether the coming steps matter to the tier, decodes alone as they may be."""
        place = self.ranks[rank]
        if place.later or place.finished:
            return True
        if not self.config.offload_prompt_only:
            return bool(place.running)
        return any(place.scheduler.unstored(state, engine.computed) for state, engine in place.running)

    # ------------------------------------------------------------------ reports

    def take_events(self) -> list[TierEvent]:
        """See ExternalCache."""
        events, self._events = self._events, []
        return events

    def held_chunks(self, rank: int, runs: list[Run]) -> list[bool]:
        """See ExternalCache."""
        lookup = self.ranks[rank].scheduler.manager.lookup
        return [lookup(key) is True for key in self._keys.of(runs)]

    def stats(self) -> list[TierStats]:
        """See ExternalCache: the engines' tiers of the node as one."""
        size = self.chunk_tokens * self._token_bytes
        total = TierStats(NODE_DRAM, 0)
        for rank in self.ranks:
            manager = rank.scheduler.manager
            counts = manager.counts
            total.capacity_bytes = (total.capacity_bytes or 0) + manager.capacity * size
            total.resident_bytes += manager.used * size
            total.peak_bytes += counts.peak * size
            total.read_bytes += rank.read_bytes
            total.written_bytes += counts.stored * size
            total.evicted_bytes += counts.evicted * size
            total.evicted_unread_bytes += counts.evicted_unread * size
            total.skipped_bytes += (counts.refused + counts.below_threshold) * size
            total.lookups += rank.lookups
            total.asked_tokens += rank.asked_tokens
            total.hit_tokens += rank.hit_tokens
        return [total]

    def identity(self) -> dict[str, Any]:
        """See ExternalCache."""
        return dict(self._identity)

    def advance(self) -> None:
        """Nothing here is due by time."""

    def forget(self, origin: int) -> None:
        """See ExternalCache."""
        self._keys.forget(origin)

    def close(self) -> None:
        """Nothing is held."""

    # ------------------------------------------------------------------ inside

    def _state(self, request: CacheRequest) -> OffloadState:
        state = self._states.get(request)
        if state is None:
            state = self._states[request] = OffloadState(request.request_id, request.prompt_tokens)
        self._refresh(state, request)
        return state

    def _refresh(self, state: OffloadState, request: CacheRequest) -> None:
        """Names of the chunks of prompt and outputs so far."""
        engine = request.source
        assert engine is not None
        if engine.tokens == state.tokens:
            return
        state.tokens = engine.tokens
        if engine.tokens // self.chunk_tokens > len(state.keys):
            state.keys = self._keys.of(engine.known_runs(self._block_tokens))

    def _ended(self, place: _Rank) -> list[Scheduled]:
        ended = [Scheduled(state, tokens, state.blocks) for state, tokens in place.finished]
        place.finished = []
        return ended

    def _take_finished(self, rank: int) -> None:
        place = self.ranks[rank]
        if place.finished:
            self._start(rank, place.scheduler.build([], self._ended(place)))
            self._note(rank)

    def _start(self, rank: int, jobs: list[Job]) -> None:
        for job in jobs:
            self._copy(rank, _Copy(job, job.tokens * self._token_bytes, lambda: None))

    def _copy(self, rank: int, copy: _Copy) -> None:
        """Begins when the engine's earlier copies of this direction have ended."""
        self.ranks[rank].copies[copy.job.store].append(copy)
        self._next(rank, copy.job.store)

    def _next(self, rank: int, store: bool) -> None:
        place = self.ranks[rank]
        while place.copies[store] and not place.busy[store]:
            place.busy[store] = True
            self._send(rank, place.copies[store].popleft())

    def _send(self, rank: int, copy: _Copy) -> None:
        chunks, store = len(copy.job.keys), copy.job.store

        def ended() -> None:
            self.ranks[rank].busy[store] = False
            self._complete(rank, copy)
            self._next(rank, store)

        if self._paths is None:
            parts = []
        elif store:
            parts = self._paths.from_gpus(rank, copy.nbytes, chunks * self._store_descriptors, self._store_gpus)
        else:
            parts = self._paths.to_gpus(rank, copy.nbytes, chunks * self._load_descriptors)
        traffic = self._wires.traffic
        accounts = traffic.writes(NODE_DRAM) if store else traffic.reads(NODE_DRAM)
        self._wires.send(parts, self._gpu_store if store else self._gpu_load, ended, accounts)

    def _complete(self, rank: int, copy: _Copy) -> None:
        place = self.ranks[rank]
        place.scheduler.complete(copy.job)
        self._note(rank)
        copy.done()
        waiting, place.waiting = place.waiting, {}
        for request in waiting:
            request.wake()

    def _note(self, rank: int) -> None:
        """How full the tier is, and the manager's events as runs of engine blocks.

        Those of window groups are left out: routers pass them over (isPrefixIndexableSpecKind in llm-d's kvevents).
        """
        place = self.ranks[rank]
        manager = place.scheduler.manager
        self.level.change(self.clock.now_ns, manager.used - place.used)
        place.used = manager.used
        if not (self.config.kv_events and self.keep_events):
            manager.events.clear()
            return
        hashes: Any = "block" if self.config.self_describing_kv_events else "placeholder"
        size, now = self.chunk_blocks, self.clock.now_ns
        for stored, keys in manager.events:
            for origin, first, end in _runs([key for key in keys if not group_of(key)]):
                self._events.append(
                    TierEvent(now, MEDIUM, stored, origin, first * size, (end - first) * size, hashes, size, rank)
                )
        manager.events.clear()


def _runs(keys: list[Key]) -> list[Run]:
    """Neighbouring chunks as (origin, first, end), in the order of the prompt within each run."""
    out: list[Run] = []
    for key in keys:
        origin, place = origin_and_place(key)
        last = out[-1] if out else (-2, 0, 0)
        if last[0] == origin and last[2] == place:
            out[-1] = (origin, last[1], place + 1)
        elif last[0] == origin and last[1] == place + 1:
            out[-1] = (origin, place, last[2])
        else:
            out.append((origin, place, place + 1))
    return out
