"""One node's LMCache (multi-process mode) on the virtual clock, and the cluster's shared tiers behind it.

LMCache decides; this module lets time pass. A task that LMCache hands to an L2 adapter, and a copy between GPU and node
DRAM, is put on the fabric, and LMCache hears of its end when the last byte has arrived. After everything that happens,
the stack is pumped until it has nothing more to do. Behaviour towards the engine is that of LMCacheMPConnector 0.5.6.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fake_workers.engine.events import TierEvent
from harness.cache.base import NODE_DRAM, CacheRequest, LoadResult, Run, TierStats
from harness.cache.chunks import ChunkKeys
from harness.cache.config import CacheConfig
from harness.cache.events import EventLog
from harness.cache.l1 import L1Account
from harness.cache.stack import Stack
from harness.cache.stretches import Stretch, chunks_by_tier, stretches, tokens_by_tier
from harness.cache.tasks import TierTasks
from harness.cache.ticks import Ticks
from harness.cache.tier import SharedTier
from harness.cache.transfers import NodePaths, TierPaths, TransferGroup, Wires, transfer_cost
from harness.clock import VirtualClock, to_ns


@dataclass(slots=True, eq=False)
class _Tracked:
    """A request as LMCacheMPConnector tracks it."""

    request: CacheRequest
    keys: list[Any]
    asked_ns: int
    ticket: int | None = None
    asked: bool = False
    answered: bool = False
    answered_ns: int = 0
    hit_chunks: int = 0
    locked: tuple[int, int] = (0, 0)
    """Chunks [first, end) whose read locks this request holds."""
    served: list[Stretch] = field(default_factory=list)
    """The tiers of the hit chunks."""
    stored_chunks: int = 0
    load: TransferGroup | None = None
    saves: int = 0
    freed: Callable[[], None] | None = None
    over: bool = False
    waking: bool = False


class MpNode:
    """The tiers of one node; implements ExternalCache."""

    ends_loads = False
    keep_events = True

    def __init__(
        self,
        clock: VirtualClock,
        config: CacheConfig,
        stack: Stack,
        *,
        keys: ChunkKeys[Any],
        tiers: list[SharedTier],
        wires: Wires,
        paths: NodePaths | None,
        node: int,
        capacity: int,
        block_tokens: int,
        kv_bytes_per_token: int,
        identity: dict[str, Any],
        seed: int = 1,
        phase_ns: int = 0,
    ) -> None:
        self.clock = clock
        self.config = config
        self.stack = stack
        self.node = node
        self.chunk_tokens = config.chunk_size
        self.chunk_blocks = config.chunk_size // block_tokens
        self.chunk_bytes = config.chunk_size * kv_bytes_per_token
        self._token_bytes = kv_bytes_per_token
        self._keys = keys
        self._tiers = tiers
        self._wires = wires
        self._paths = paths
        self._gpu_load, self._gpu_load_descriptors = transfer_cost(config.gpu_load)
        self._gpu_store, self._gpu_store_descriptors = transfer_cost(config.gpu_store)
        self._identity = identity
        self._random = random.Random(f"{seed}/{node}")
        self._tracked: dict[CacheRequest, _Tracked] = {}
        self._waiting: dict[_Tracked, None] = {}
        """Lookups without a result yet."""
        self._abandoned: dict[int, list[Any]] = {}
        """Tickets whose requests went away, with their keys."""
        tier_paths = [] if paths is None else [TierPaths(tier, paths, self.chunk_bytes) for tier in config.l2_adapters]
        self._tasks = TierTasks(clock, config, stack, wires, tier_paths, node, self.advance, self._collect)
        self.account = L1Account(stack.l1, stack.watch, clock, config, self.chunk_bytes, capacity)
        self.level = self.account.level
        self.events = EventLog(stack.watch, clock, self.chunk_blocks) if config.kv_events else None
        tick_ns = to_ns(config.tick_s)
        self._ticks = Ticks(tick_ns, phase_ns or tick_ns, lambda t_ns: self.account.tick(stack.evictor, t_ns))

    # ------------------------------------------------------------------ the engine's side

    def lookup(self, request: CacheRequest, local_hit_tokens: int) -> int | None:
        """See ExternalCache. The first call starts LMCache's lookup, which brings the prefix to node DRAM."""
        tracked = self._tracked.get(request)
        if tracked is None:
            tracked = self._track(request)
        if not tracked.asked:
            tracked.asked = True
            if self.config.rpc_us:
                self.clock.call_later(round(self.config.rpc_us * 1000), self._submit, tracked)
            else:
                self._submit(tracked)
        if not tracked.answered and not self._may_wait(tracked):
            self._take_what_l1_has(tracked)
        if not tracked.answered:
            tracked.waking = True
            return None
        tracked.waking = False
        hit = tracked.hit_chunks * self.chunk_tokens
        more = max(0, hit - local_hit_tokens)
        if more and hit == request.prompt_tokens:
            more -= 1  # the last token of a full hit is computed, so that there is something to sample from
        return more

    def start_load(
        self,
        request: CacheRequest,
        local_hit_tokens: int,
        external_tokens: int,
        done: Callable[[LoadResult], None],
    ) -> None:
        """See ExternalCache. Locks of chunks that the GPU already holds go back at once."""
        tracked = self._tracked[request]
        self.advance()
        hit = tracked.hit_chunks
        first = min(hit, local_hit_tokens // self.chunk_tokens) if external_tokens else hit
        self._release(tracked, first)
        if not external_tokens:
            self._tasks.run()
            return
        tokens = hit * self.chunk_tokens - local_hit_tokens
        nbytes = tokens * self._token_bytes
        descriptors = (hit - first) * self._gpu_load_descriptors
        started = self.clock.now_ns

        def arrived() -> None:
            tracked.load = None
            self.advance()
            failed = self._random.random() < self.config.load_failure_share
            self.account.loaded(tracked.keys[first:hit], nbytes)
            self._release(tracked, hit)
            self._tasks.run()
            done(
                LoadResult(
                    first_token=local_hit_tokens,
                    tokens=external_tokens,
                    failed=failed,
                    bytes=nbytes,
                    asked_ns=tracked.asked_ns,
                    answered_ns=tracked.answered_ns,
                    started_ns=started,
                    ended_ns=self.clock.now_ns,
                    by_tier=tokens_by_tier(tracked.served, self.chunk_tokens, local_hit_tokens),
                )
            )

        parts = self._paths.to_gpus(request.rank, nbytes, descriptors) if self._paths is not None else []
        group = self._wires.send(parts, self._gpu_load, arrived, self._wires.traffic.reads(NODE_DRAM))
        if group.open:
            tracked.load = group

    def save(self, request: CacheRequest, computed_tokens: int) -> None:
        """See ExternalCache. Whole new chunks of the prompt get a buffer in node DRAM, all of them or none."""
        tracked = self._tracked.get(request)
        if tracked is None:
            tracked = self._track(request)
        ready = min(computed_tokens, request.prompt_tokens) // self.chunk_tokens
        first = tracked.stored_chunks
        if ready <= first:
            return
        tracked.stored_chunks = ready
        self.advance()
        reserved = self.stack.reserve(tracked.keys[first:ready])
        self.account.skipped += reserved.no_room
        if not reserved.keys:
            return
        keys = reserved.keys
        nbytes = len(keys) * self.chunk_bytes
        tracked.saves += 1

        def arrived() -> None:
            tracked.saves -= 1
            self.advance()
            self.stack.written(keys)
            self._tasks.run()
            if not tracked.saves and tracked.freed is not None:
                freed, tracked.freed = tracked.freed, None
                freed()

        descriptors = len(keys) * self._gpu_store_descriptors
        parts = self._paths.from_gpus(request.rank, nbytes, descriptors) if self._paths is not None else []
        self._wires.send(parts, self._gpu_store, arrived, self._wires.traffic.writes(NODE_DRAM))

    def preempted(self, request: CacheRequest) -> None:
        """See ExternalCache. As the connector, which drops its tracker: the next lookup starts from nothing."""
        tracked = self._tracked.pop(request, None)
        if tracked is not None:
            self.advance()
            self._let_go(tracked)
            self._tasks.run()

    def finish(self, request: CacheRequest, freed: Callable[[], None]) -> bool:
        """See ExternalCache. LMCache marks all chunks of the session as used."""
        tracked = self._tracked.pop(request, None)
        if tracked is None:
            return False
        self.advance()
        self._let_go(tracked)
        self.stack.touch(tracked.keys)
        self._tasks.run()
        if tracked.saves:
            tracked.freed = freed
            return True
        return False

    def take_events(self) -> list[TierEvent]:
        """See ExternalCache."""
        if self.events is None:
            return []
        self.advance()
        return self.events.take()

    def held_chunks(self, rank: int, runs: list[Run]) -> list[bool]:
        """See ExternalCache."""
        keys = self._keys.of(runs)
        return [False] * len(keys) if self.events is None else self.events.holds(keys)

    def stats(self) -> list[TierStats]:
        """See ExternalCache."""
        self.advance()
        for tier in self._tiers:
            tier.sweep(self.clock.now_ns)
        return [self.account.stats(), *(tier.stats(self.chunk_tokens) for tier in self._tiers)]

    def identity(self) -> dict[str, Any]:
        """See ExternalCache."""
        return dict(self._identity)

    def forget(self, origin: int) -> None:
        """No prompt will name this origin again: its keys need not be kept ready."""
        self._keys.forget(origin)

    def close(self) -> None:
        """See ExternalCache."""
        self.stack.close()

    @property
    def idle(self) -> bool:
        """Whether no request is tracked and no lookup under way."""
        return not (self._tracked or self._waiting or self._abandoned)

    # ------------------------------------------------------------------ lookups

    def _track(self, request: CacheRequest) -> _Tracked:
        tracked = _Tracked(request, self._keys.of(request.runs), self.clock.now_ns)
        self._tracked[request] = tracked
        return tracked

    def _submit(self, tracked: _Tracked) -> None:
        if tracked.over or tracked.answered:
            return
        self.account.lookups += 1
        self.account.asked += len(tracked.keys)
        if not tracked.keys:
            tracked.answered = True
            tracked.answered_ns = self.clock.now_ns
            self._wake(tracked)
            return
        self.advance()
        self._waiting[tracked] = None
        tracked.ticket = self.stack.prefetch(tracked.keys)
        self._tasks.run()
        if not tracked.answered and self.config.wait != "hold":
            self.clock.call_at(max(self.clock.now_ns, self._deadline_ns(tracked)), self._wake, tracked)

    def _deadline_ns(self, tracked: _Tracked) -> int:
        patience_s = self.config.wait_timeout_s if self.config.wait == "timeout" else 0.0
        return tracked.asked_ns + to_ns(patience_s)

    def _may_wait(self, tracked: _Tracked) -> bool:
        if self.config.wait == "hold" or tracked.ticket is None:
            return True
        return self.clock.now_ns < self._deadline_ns(tracked)

    def _wake(self, tracked: _Tracked) -> None:
        if tracked.waking and not tracked.over:
            tracked.waking = False
            tracked.request.wake()

    def _take_what_l1_has(self, tracked: _Tracked) -> None:
        """Stop waiting: LMCache's L1-only lookup answers at once, the loads that are under way go on for others."""
        assert tracked.ticket is not None
        self.advance()
        self._abandoned[tracked.ticket] = tracked.keys
        self._waiting.pop(tracked, None)
        tracked.ticket = self.stack.prefetch(tracked.keys, l1_only=True)
        self._waiting[tracked] = None
        self._tasks.run()

    def _collect(self) -> None:
        """Pass on results that LMCache has published."""
        for tracked in list(self._waiting):
            assert tracked.ticket is not None
            found = self.stack.found(tracked.ticket)
            if found is None:
                continue
            del self._waiting[tracked]
            tracked.answered = True
            tracked.hit_chunks = tracked.stored_chunks = found.chunks
            tracked.locked = (0, found.chunks)
            tracked.served = stretches(found.chunks, found.from_l2, self.account.name, self._tier_of(tracked.keys))
            self._count_hits(tracked)
            tracked.answered_ns = self.clock.now_ns
            if tracked.waking:
                # the engine is told when all that happens now has happened
                self.clock.call_at(self.clock.now_ns, self._wake, tracked)
        for ticket, keys in list(self._abandoned.items()):
            found = self.stack.found(ticket)
            if found is None:
                continue
            del self._abandoned[ticket]
            if found.chunks:
                self._return_locks(keys[: found.chunks])
        if not self._waiting:
            self._tasks.source.clear()

    def _tier_of(self, keys: list[Any]) -> Callable[[int], str] | str:
        """Which shared tier brought each of the keys to node DRAM."""
        if len(self._tiers) < 2:
            return self._tiers[0].name if self._tiers else ""
        source, first = self._tasks.source, self._tiers[0].name
        return lambda index: source.get(keys[index], first)

    def _count_hits(self, tracked: _Tracked) -> None:
        counts = chunks_by_tier(tracked.served)
        self.account.hit += counts.get(self.account.name, 0)
        below = len(tracked.keys) - counts.get(self.account.name, 0)
        for tier in self._tiers:
            hit = counts.get(tier.name, 0)
            tier.counts.lookups += 1
            tier.counts.asked += below
            tier.counts.hit += hit
            below -= hit

    # ------------------------------------------------------------------ locks

    def _release(self, tracked: _Tracked, end: int) -> None:
        """Return the locks of the chunks before `end`."""
        first, last = tracked.locked
        if end > first and last > first:
            self.stack.release(tracked.keys[first : min(end, last)])
            tracked.locked = (min(end, last), last)

    def _let_go(self, tracked: _Tracked) -> None:
        """The request is over or starts anew: nothing of it is loaded, waited for or locked any more."""
        tracked.over = True
        if tracked.load is not None:
            self._wires.cancel(tracked.load)
            tracked.load = None
            self._release(tracked, tracked.locked[1])
        elif tracked.locked[1] > tracked.locked[0]:
            first, last = tracked.locked
            tracked.locked = (last, last)
            self._return_locks(tracked.keys[first:last])
        if tracked in self._waiting:
            del self._waiting[tracked]
            assert tracked.ticket is not None
            self._abandoned[tracked.ticket] = tracked.keys

    def _return_locks(self, keys: list[Any]) -> None:
        """Locks that nobody will use: given back at once, or when LMCache's read locks expire."""
        if self.config.abandoned_locks == "expire":
            self.clock.call_later(to_ns(float(self.config.l1_read_ttl_seconds)), self._expire_locks, keys)
        else:
            self.stack.release(keys)

    def _expire_locks(self, keys: list[Any]) -> None:
        self.advance()
        self.stack.release(keys)
        self._tasks.run()

    # ------------------------------------------------------------------ LMCache's side

    def advance(self) -> None:
        """Bring watermark checks and retention of node DRAM up to now."""
        now = self.clock.now_ns
        self._ticks.catch_up(now)
        self.account.expire(now)
