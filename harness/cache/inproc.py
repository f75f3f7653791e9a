"""One node's replicas with LMCache's in-process engine (LMCacheConnectorV1) in each, on the virtual clock.

Other than in multi-process mode, each replica has a DRAM cache of its own, a chunk is evicted when room is needed (one
by one, no watermark), what is loaded from a shared tier always enters the cache, and only lookups count as use. State
changes at once; a load's time passes before it, a save's before it, a store to the shared tier after it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fake_workers.engine.events import TierEvent
from harness.cache.base import NODE_DRAM, CacheRequest, LoadResult, Run, TierStats
from harness.cache.chunks import ChunkKeys
from harness.cache.config import CacheConfig
from harness.cache.engine import DramSize, DramWatch, make_engine
from harness.cache.l1 import L1Account
from harness.cache.storage_plugin import LINKS, PluginLink
from harness.cache.tier import SharedTier
from harness.cache.transfers import NodePaths, TierPaths, TransferGroup, Wires, transfer_cost
from harness.clock import VirtualClock
from harness.fabric.meter import RateMeter

_LOCAL = "LocalCPUBackend"


@dataclass(slots=True, eq=False)
class _Tracked:
    request: CacheRequest
    keys: list[Any]
    asked_ns: int
    answered: bool = False
    answered_ns: int = 0
    asked: bool = False
    waking: bool = False
    over: bool = False
    hit_chunks: int = 0
    from_tier: list[str] = field(default_factory=list)
    pinned: list[Any] = field(default_factory=list)
    stored_chunks: int = 0
    load: TransferGroup | None = None
    saves: int = 0
    freed: Callable[[], None] | None = None


class _Replica:
    """One engine and its account."""

    def __init__(self, engine: Any, clock: VirtualClock, config: CacheConfig, chunk_bytes: int, capacity: int) -> None:
        self.engine = engine
        self.backend = engine.storage_manager.local_cpu_backend
        self.watch = DramWatch()
        self.backend.batched_msg_sender = self.watch
        self.account = L1Account(DramSize(self.backend), self.watch, clock, config, chunk_bytes, capacity)
        self.account.count_all_drops_as_evictions = True
        self.pins: Counter[Any] = Counter()
        """Chunks of the DRAM cache that lookups have pinned."""


class InprocNode:
    """The tiers of one node; implements ExternalCache."""

    ends_loads = False
    keep_events = True

    def __init__(
        self,
        clock: VirtualClock,
        config: CacheConfig,
        *,
        keys: ChunkKeys[Any],
        tiers: list[SharedTier],
        wires: Wires,
        paths: NodePaths | None,
        node: int,
        ranks: int,
        capacity: int,
        block_tokens: int,
        kv_bytes_per_token: int,
        model_name: str,
        identity: dict[str, Any],
        link_name: str,
        seed: int = 1,
    ) -> None:
        self.clock = clock
        self.config = config
        self.node = node
        self.chunk_tokens = config.chunk_size
        self.chunk_blocks = config.chunk_size // block_tokens
        self.chunk_bytes = config.chunk_size * kv_bytes_per_token
        self._token_bytes = kv_bytes_per_token
        self._keys = keys
        self._tiers = tiers
        self._wires = wires
        self._paths = paths
        self._tier_paths = (
            [TierPaths(tier, paths, self.chunk_bytes) for tier in config.l2_adapters] if paths is not None else []
        )
        self._gpu_load, self._gpu_load_descriptors = transfer_cost(config.gpu_load)
        self._gpu_store, self._gpu_store_descriptors = transfer_cost(config.gpu_store)
        self._identity = identity
        self._random = random.Random(f"{seed}/{node}")
        self._tracked: dict[CacheRequest, _Tracked] = {}
        self._link_name = link_name if tiers else None
        if tiers:
            LINKS[link_name] = PluginLink(tiers[0], lambda: clock.now_ns, self._store_below)
        self.replicas = [
            _Replica(
                make_engine(f"node{node}.{rank}", capacity, config.cache_policy, model_name, self._link_name),
                clock,
                config,
                self.chunk_bytes,
                capacity,
            )
            for rank in range(ranks)
        ]
        self.level = self.replicas[0].account.level
        for replica in self.replicas[1:]:
            replica.account.level = self.level  # the node's residency is one
        self._closed = False

    # ------------------------------------------------------------------ the engine's side

    def lookup(self, request: CacheRequest, local_hit_tokens: int) -> int | None:
        """See ExternalCache."""
        tracked = self._tracked.get(request)
        if tracked is None:
            tracked = self._track(request)
        if not tracked.asked:
            tracked.asked = True
            delay_us = self.config.rpc_us + sum(tier.lookup_latency_us for tier in self.config.l2_adapters)
            if delay_us:
                self.clock.call_later(round(delay_us * 1000), self._look_up, tracked)
            else:
                self._look_up(tracked)
        if not tracked.answered:
            tracked.waking = True
            return None
        tracked.waking = False
        hit = tracked.hit_chunks * self.chunk_tokens
        more = max(0, hit - local_hit_tokens)
        if more and hit == request.prompt_tokens:
            more -= 1
        return more

    def start_load(
        self,
        request: CacheRequest,
        local_hit_tokens: int,
        external_tokens: int,
        done: Callable[[LoadResult], None],
    ) -> None:
        """See ExternalCache. First the shared tier's part reaches DRAM, then all of it the GPU."""
        tracked = self._tracked[request]
        if not external_tokens:
            self._unpin(tracked)
            return
        hit = tracked.hit_chunks
        first = min(hit, local_hit_tokens // self.chunk_tokens)
        nbytes = (hit * self.chunk_tokens - local_hit_tokens) * self._token_bytes
        started = self.clock.now_ns
        below = [chunk for chunk in range(first, hit) if tracked.from_tier[chunk] != self.replicas[0].account.name]

        def arrived() -> None:
            tracked.load = None
            brought = self._retrieve(tracked, first, len(below))
            by_tier: dict[str, int] = {}
            for chunk in range(first, hit):
                new = (chunk + 1) * self.chunk_tokens - max(local_hit_tokens, chunk * self.chunk_tokens)
                by_tier[tracked.from_tier[chunk]] = by_tier.get(tracked.from_tier[chunk], 0) + new
            failed = not brought or self._random.random() < self.config.load_failure_share
            self._replica(request).account.loaded(tracked.keys[first:hit], nbytes)
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
                    by_tier=by_tier,
                )
            )

        def in_dram() -> None:
            descriptors = (hit - first) * self._gpu_load_descriptors
            parts = self._paths.to_gpus(request.rank, nbytes, descriptors) if self._paths is not None else []
            self._hold(tracked, parts, self._gpu_load, arrived, self._wires.traffic.reads(NODE_DRAM))

        if below and self._tier_paths:
            keys = [tracked.keys[chunk] for chunk in below]
            written_by = [self._tiers[0].objects.get(key, self.node) for key in keys]
            parts = self._tier_paths[0].load(keys, written_by)
            reads = self._wires.traffic.reads(self._tiers[0].name)
            self._hold(tracked, parts, self._tier_paths[0].load_cost, in_dram, reads)
        else:
            in_dram()

    def save(self, request: CacheRequest, computed_tokens: int) -> None:
        """See ExternalCache. Chunks enter DRAM when their copy ends; LMCache evicts one by one to make room."""
        tracked = self._tracked.get(request)
        if tracked is None:
            tracked = self._track(request)
        ready = min(computed_tokens, request.prompt_tokens) // self.chunk_tokens
        first = tracked.stored_chunks
        if ready <= first:
            return
        tracked.stored_chunks = ready
        nbytes = (ready - first) * self.chunk_bytes
        tracked.saves += 1

        def arrived() -> None:
            tracked.saves -= 1
            self._store(tracked, first, ready)
            if not tracked.saves and tracked.freed is not None:
                freed, tracked.freed = tracked.freed, None
                freed()

        descriptors = (ready - first) * self._gpu_store_descriptors
        parts = self._paths.from_gpus(request.rank, nbytes, descriptors) if self._paths is not None else []
        self._wires.send(parts, self._gpu_store, arrived, self._wires.traffic.writes(NODE_DRAM))

    def preempted(self, request: CacheRequest) -> None:
        """See ExternalCache."""
        tracked = self._tracked.pop(request, None)
        if tracked is not None:
            self._let_go(tracked)

    def finish(self, request: CacheRequest, freed: Callable[[], None]) -> bool:
        """See ExternalCache. The in-process engine marks nothing as used here."""
        tracked = self._tracked.pop(request, None)
        if tracked is None:
            return False
        self._let_go(tracked)
        if tracked.saves:
            tracked.freed = freed
            return True
        return False

    def take_events(self) -> list[TierEvent]:
        """See ExternalCache: none, as what this mode reports is of no use to a router (docs/cache.md)."""
        return []

    def held_chunks(self, rank: int, runs: list[Run]) -> list[bool]:
        """See ExternalCache."""
        return [False] * len(self._keys.of(runs))

    def stats(self) -> list[TierStats]:
        """See ExternalCache; the replicas' caches count as one tier."""
        for tier in self._tiers:
            tier.sweep(self.clock.now_ns)
        parts = [replica.account.stats() for replica in self.replicas]
        total = parts[0]
        for part in parts[1:]:
            for name in TierStats.__dataclass_fields__:
                if name != "name":
                    setattr(total, name, getattr(total, name) + getattr(part, name))
        return [total, *(tier.stats(self.chunk_tokens) for tier in self._tiers)]

    def identity(self) -> dict[str, Any]:
        """See ExternalCache."""
        return dict(self._identity)

    def forget(self, origin: int) -> None:
        """No prompt will name this origin again."""
        self._keys.forget(origin)

    def advance(self) -> None:
        """Nothing here is due by time."""

    def close(self) -> None:
        """See ExternalCache."""
        if self._closed:
            return
        self._closed = True
        for replica in self.replicas:
            replica.engine.close()
        if self._link_name is not None:
            LINKS.pop(self._link_name, None)

    @property
    def idle(self) -> bool:
        """Whether no request is tracked."""
        return not self._tracked

    # ------------------------------------------------------------------ LMCache's side

    def _replica(self, request: CacheRequest) -> _Replica:
        return self.replicas[request.rank]

    def _track(self, request: CacheRequest) -> _Tracked:
        tracked = self._tracked[request] = _Tracked(request, self._keys.of(request.runs), self.clock.now_ns)
        return tracked

    def _look_up(self, tracked: _Tracked) -> None:
        if tracked.over:
            return
        replica = self._replica(tracked.request)
        engine, name = replica.engine, tracked.request.request_id
        hit = engine.lookup(tokens=tracked.keys, lookup_id=name, pin=True) if tracked.keys else 0
        tracked.answered = True
        tracked.answered_ns = self.clock.now_ns
        tracked.hit_chunks = tracked.stored_chunks = hit
        for location, keys in engine.lookup_pins.get(name, {}).items():
            if location == _LOCAL:
                tracked.pinned = [key.chunk_hash for key in keys]
                replica.pins.update(tracked.pinned)
                tracked.from_tier += [replica.account.name] * len(keys)
            else:
                tracked.from_tier += [self._tiers[0].name] * len(keys)
        account = replica.account
        local = tracked.from_tier.count(account.name)
        account.lookups += 1
        account.asked += len(tracked.keys)
        account.hit += local
        for tier in self._tiers:
            tier.counts.lookups += 1
            tier.counts.asked += len(tracked.keys) - local
            tier.counts.hit += hit - local
        if tracked.waking:
            tracked.waking = False
            tracked.request.wake()

    def _retrieve(self, tracked: _Tracked, first: int, from_below: int) -> bool:
        """LMCache's blocking retrieve, all of whose bytes have arrived; whether it brought everything.

        It would wait for ever for room that only another thread could make by returning pins. Where pins leave too
        little room, the load is reported as failed instead.
        """
        replica = self._replica(tracked.request)
        hit = tracked.hit_chunks
        if from_below > replica.account.capacity - len(replica.pins):
            self._unpin(tracked)
            return False
        mask = torch.ones(hit, dtype=torch.bool)
        mask[:first] = False
        replica.watch.promoting = True
        try:
            got = replica.engine.retrieve(tracked.keys[:hit], mask=mask, req_id=tracked.request.request_id)
        finally:
            replica.watch.promoting = False
        self._unpin(tracked)
        return int(got.sum()) == hit - first

    def _store(self, tracked: _Tracked, first: int, ready: int) -> None:
        replica = self._replica(tracked.request)
        mask = torch.ones(ready, dtype=torch.bool)
        mask[:first] = False
        replica.engine.store(tokens=tracked.keys[:ready], mask=mask, req_id=tracked.request.request_id)
        database, cache = replica.engine.token_database, replica.backend.hot_cache
        replica.account.skipped += sum(
            1 for chunk in tracked.keys[first:ready] if database.engine_key(chunk) not in cache
        )

    def _store_below(self, keys: list[Any]) -> None:
        tier = self._tiers[0]
        accepted = tier.accept(keys, self.clock.now_ns)
        if not accepted:
            return

        def arrived() -> None:
            tier.arrive(accepted, self.node, self.clock.now_ns)

        if self._tier_paths:
            parts = self._tier_paths[0].store(accepted, self.node)
            self._wires.send(parts, self._tier_paths[0].store_cost, arrived, self._wires.traffic.writes(tier.name))
        else:
            self._wires.send([], self._gpu_store, arrived)

    def _hold(
        self, tracked: _Tracked, parts: Any, cost: Any, then: Callable[[], None], accounts: tuple[RateMeter, ...]
    ) -> None:
        group = self._wires.send(parts, cost, then, accounts)
        if group.open:
            tracked.load = group

    def _unpin(self, tracked: _Tracked) -> None:
        replica = self._replica(tracked.request)
        replica.engine.lookup_unpin(tracked.request.request_id)
        if tracked.pinned:
            replica.pins.subtract(tracked.pinned)
            for chunk in tracked.pinned:
                if not replica.pins[chunk]:
                    del replica.pins[chunk]
            tracked.pinned = []

    def _let_go(self, tracked: _Tracked) -> None:
        tracked.over = True
        if tracked.load is not None:
            self._wires.cancel(tracked.load)
            tracked.load = None
        if tracked.answered:
            self._unpin(tracked)
