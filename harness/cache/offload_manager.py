"""What a CPU tier of one engine holds: vLLM 0.32's CPUOffloadingManager, decision for decision.

vllm/v1/kv_offload/cpu/manager.py; tests/differential holds the two equal call by call. Chunks of all KV-cache groups
share the capacity and one order of eviction. Stores and loads never fail half-way (vLLM asserts the same).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from harness.cache.offload_policies import POLICIES, Chunk, Key, Policy


@dataclass(slots=True)
class Access:
    """Keys that one request has seen, for the policy at its end."""

    keys: list[Key] = field(default_factory=list)
    seen: set[Key] = field(default_factory=set)
    inserted: set[Key] = field(default_factory=set)
    reused: set[Key] = field(default_factory=set)
    missed: set[Key] = field(default_factory=set)
    over: bool = False


@dataclass(frozen=True, slots=True)
class PreparedStore:
    """Keys that will be written, and those that had to go for them."""

    keys: list[Key]
    evicted: list[Key]


@dataclass(slots=True)
class ManagerCounts:
    """Chunks, over the run."""

    stored: int = 0
    evicted: int = 0
    evicted_unread: int = 0
    refused: int = 0
    """Offered while too little could be evicted; offered again with the request's next step."""
    below_threshold: int = 0
    peak: int = 0


class OffloadManager:
    """One engine's tier of `capacity` chunks."""

    def __init__(self, capacity: int, policy: str, store_threshold: int = 0, max_tracker_size: int = 64_000) -> None:
        self.capacity = capacity
        self.policy: Policy = POLICIES[policy](capacity)
        self.used = 0
        self.events: list[tuple[bool, list[Key]]] = []
        """(stored, keys), oldest first; take and clear."""
        self.counts = ManagerCounts()
        self._evictable = 0
        self._threshold = store_threshold
        self._tracker_size = max_tracker_size
        self._offers: OrderedDict[Key, int] | None = OrderedDict() if store_threshold >= 2 else None
        self._unread: set[Key] = set()

    def lookup(self, key: Key) -> bool | None:
        """Whether the chunk can be read; None: it is being written."""
        chunk = self.policy.get(key)
        return False if chunk is None else True if chunk.users >= 0 else None

    def prepare_load(self, keys: Sequence[Key], access: Access) -> None:
        """The chunks, all readable, stay until `complete_load`."""
        for key in keys:
            chunk = self.policy.get(key)
            assert chunk is not None and chunk.ready, f"chunk {key} cannot be read"
            if chunk.users == 0:
                self.policy.mark(key, False)
                self._evictable -= 1
            chunk.users += 1
        self._unread.difference_update(keys)
        self._record(access, keys, reused=keys)

    def complete_load(self, keys: Iterable[Key]) -> None:
        """A load has read them."""
        for key in keys:
            chunk = self.policy.get(key)
            assert chunk is not None and chunk.users > 0, f"chunk {key} is not being read"
            chunk.users -= 1
            if chunk.users == 0:
                self._evictable += 1
                self.policy.mark(key, True)

    def prepare_store(self, keys: Sequence[Key], access: Access) -> PreparedStore | None:
        """Room for those that are not held; None where too little can be evicted."""
        if self._offers is not None:
            self._count_offers(keys)
        wanted: list[Key] = []
        ready: list[Key] = []
        for key in keys:
            chunk = self.policy.get(key)
            if chunk is None:
                wanted.append(key)
            elif chunk.ready:
                ready.append(key)
        if self._offers is not None:
            often = [key for key in wanted if self._offers.get(key, 0) >= self._threshold]
            self.counts.below_threshold += len(wanted) - len(often)
            wanted = often
        missed = [key for key in wanted if key not in access.missed]
        if missed:
            self.policy.missed(missed)
            access.missed.update(missed)
        recorded = {*wanted, *ready}
        self._record(access, [key for key in keys if key in recorded], reused=ready)
        if not wanted:
            return PreparedStore([], [])
        evicted: list[Key] = []
        lacking = len(wanted) - (self.capacity - self.used)
        if lacking > 0:
            found = self.policy.evict(lacking, set(keys)) if lacking <= self._evictable else None
            if found is None:
                self.counts.refused += len(wanted)
                return None
            evicted = found
            self._evictable -= len(evicted)
            self.used -= len(evicted)
            self.counts.evicted += len(evicted)
            self.counts.evicted_unread += sum(key in self._unread for key in evicted)
            self._unread.difference_update(evicted)
            self.events.append((False, evicted))
        for key in wanted:
            self.policy.insert(key, Chunk())
        self.used += len(wanted)
        self.counts.peak = max(self.counts.peak, self.used)
        access.inserted.update(wanted)
        return PreparedStore(wanted, evicted)

    def complete_store(self, keys: Sequence[Key]) -> None:
        """The chunks have been written: they can be read, and evicted."""
        stored: list[Key] = []
        for key in keys:
            chunk = self.policy.get(key)
            if chunk is not None and not chunk.ready:
                chunk.users = 0
                self._evictable += 1
                self.policy.mark(key, True)
                stored.append(key)
        if stored:
            self.counts.stored += len(stored)
            self._unread.update(stored)
            self.events.append((True, stored))

    def request_over(self, access: Access) -> None:
        """No more loads or stores of the request will be prepared."""
        if not access.over:
            access.over = True
            keys = sorted(access.keys, key=_place)
            self.policy.request_over(keys, access.inserted - access.reused, access.reused)

    def _record(self, access: Access, keys: Sequence[Key], reused: Sequence[Key]) -> None:
        for key in keys:
            if key not in access.seen:
                assert not access.over, "a chunk was seen after the request's end"
                access.seen.add(key)
                access.keys.append(key)
        access.reused.update(key for key in reused if key not in access.inserted)

    def _count_offers(self, keys: Sequence[Key]) -> None:
        """How often each key was offered; what is offered now is not forgotten for it."""
        offers = self._offers
        assert offers is not None
        known = {key for key in keys if key in offers}
        for key in keys:
            if key in known:
                offers.move_to_end(key)
                offers[key] += 1
        others = len(offers) - len(known)
        for key in keys:
            if key in offers:
                continue
            if len(offers) >= self._tracker_size:
                if not others:
                    continue
                offers.popitem(last=False)
                others -= 1
            offers[key] = 1


_GROUP_AT, _GROUPS = 28, 16
_PLACE = (1 << _GROUP_AT) - 1


def make_key(origin: int, index: int) -> Key:
    """The chunk of one prompt at place `index`, named by the origin of its last block, of the first group."""
    return (origin + 1) << 32 | index


def in_group(key: Key, group: int) -> Key:
    """The chunk of another KV-cache group (at most 16) at the place of a chunk of the first one."""
    return key | group << _GROUP_AT


def group_of(key: Key) -> int:
    """The KV-cache group that a chunk belongs to."""
    return key >> _GROUP_AT & _GROUPS - 1


def origin_and_place(key: Key) -> tuple[int, int]:
    """The inverse of `make_key`, whatever the group."""
    return (key >> 32) - 1, key & _PLACE


def _place(key: Key) -> int:
    """A chunk's place in the prompt, groups in their order within a place (order_request_keys)."""
    return (key & _PLACE) * _GROUPS + group_of(key)
