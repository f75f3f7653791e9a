"""The connector between engines and tiers, on the virtual clock, with tiers that are a dictionary and a delay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from fake_workers.engine.connector import ConnectorOptions
from fake_workers.engine.events import TierEvent
from fake_workers.engine.node import Node, Outcome
from fake_workers.engine.request import EngineRequest
from fake_workers.engine.scheduler import SchedulerConfig
from harness.cache.base import CacheRequest, LoadResult, TierStats
from harness.cache.connector import CacheConnector
from harness.clock import VirtualClock
from tests.engine.timed import RandomPrice

CONFIG = SchedulerConfig(num_gpu_blocks=61, block_tokens=4, max_model_len=400, max_num_batched_tokens=64)
LOOKUP_NS, LOAD_NS_PER_TOKEN, SAVE_NS = 700, 50, 30_000


class DictCache:
    """Chunks of one engine block. Lookups take LOOKUP_NS, or none; loads and saves take their time."""

    chunk_tokens = 4
    chunk_blocks = 1
    ends_loads = False
    keep_events = False

    def __init__(self, clock: VirtualClock, lookup_ns: int = LOOKUP_NS, load_ns: int = LOAD_NS_PER_TOKEN) -> None:
        self.clock = clock
        self.lookup_ns = lookup_ns
        self.load_ns = load_ns
        self.chunks: set[tuple[int, int]] = set()
        self.failing: set[str] = set()
        self._answers: dict[CacheRequest, int | None] = {}
        self._loads: dict[CacheRequest, int] = {}
        self._saving: dict[CacheRequest, int] = {}
        self._freed: dict[CacheRequest, Callable[[], None]] = {}

    def _names(self, request: CacheRequest) -> Iterator[tuple[int, int]]:
        for origin, start, end in request.runs:
            for pos in range(start, end):
                yield origin, pos

    def lookup(self, request: CacheRequest, local_hit_tokens: int) -> int | None:
        if request not in self._answers:
            if self.lookup_ns:
                self._answers[request] = None
                self.clock.call_later(self.lookup_ns, self._answer, request)
            else:
                self._answers[request] = self._found(request)
        found = self._answers[request]
        if found is None:
            return None
        if found == request.prompt_tokens:
            found -= 1
        return max(0, found - local_hit_tokens)

    def _found(self, request: CacheRequest) -> int:
        found = 0
        for name in self._names(request):
            if name not in self.chunks:
                break
            found += self.chunk_tokens
        return found

    def _answer(self, request: CacheRequest) -> None:
        if request in self._answers:
            self._answers[request] = self._found(request)
            request.wake()

    def start_load(
        self, request: CacheRequest, local_hit_tokens: int, external_tokens: int, done: Callable[[LoadResult], None]
    ) -> None:
        if not external_tokens:
            return
        started = self.clock.now_ns
        number = self._loads[request] = self._loads.get(request, 0) + 1

        def arrived() -> None:
            if self._loads.get(request) == number:
                failed = request.request_id in self.failing
                self.failing.discard(request.request_id)
                tier = {"dict": external_tokens}
                done(LoadResult(local_hit_tokens, external_tokens, failed, 1, started, self.clock.now_ns, tier))

        if self.load_ns:
            self.clock.call_later(self.load_ns * external_tokens, arrived)
        else:
            arrived()

    def save(self, request: CacheRequest, computed_tokens: int) -> None:
        self._saving[request] = self._saving.get(request, 0) + 1
        names = list(self._names(request))[: computed_tokens // self.chunk_tokens]
        self.clock.call_later(SAVE_NS, self._saved, request, names)

    def _saved(self, request: CacheRequest, names: list[tuple[int, int]]) -> None:
        self.chunks.update(names)
        self._saving[request] -= 1
        if not self._saving[request] and request in self._freed:
            self._freed.pop(request)()

    def preempted(self, request: CacheRequest) -> None:
        self._answers.pop(request, None)
        self._loads.pop(request, None)

    def finish(self, request: CacheRequest, freed: Callable[[], None]) -> bool:
        self.preempted(request)
        if self._saving.get(request):
            self._freed[request] = freed
            return True
        return False

    def take_events(self) -> list[TierEvent]:
        return []

    def stats(self) -> list[TierStats]:
        return []

    def identity(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        """Nothing to give back."""


class Bed:
    """One node on a clock, woken as the harness wakes it."""

    def __init__(self, ranks: int = 1, *, config: SchedulerConfig = CONFIG, policy: str = "fail", **cache: int) -> None:
        self.clock = VirtualClock()
        self.cache = DictCache(self.clock, **cache)
        self.connector = CacheConnector(self.cache, self.clock, self.bring, self.arm)
        options = ConnectorOptions(kv_load_failure_policy=policy)
        self.node = Node(RandomPrice(2), config, ranks, connector=self.connector, connector_options=options)
        self.connector.attach(self.node)
        self.outcomes: list[Outcome] = []
        self._wake: int | None = None

    def bring(self) -> None:
        self.outcomes += self.node.advance(self.clock.now_ns, False)

    def arm(self) -> None:
        wake = self.node.wake_ns()
        if wake != self._wake:
            self._wake = wake
            if wake is not None:
                at = max(wake, self.clock.now_ns)
                self.clock.call_at(at, self._on_node, wake, rank=3 if at == self.clock.now_ns else 0)

    def _on_node(self, wake: int) -> None:
        if wake == self._wake:
            self._wake = None
            self.outcomes += self.node.advance(self.clock.now_ns)
            self.arm()

    def submit(self, request: EngineRequest, rank: int = 0, at: int = 0) -> EngineRequest:
        def arrive() -> None:
            self.bring()
            self.node.submit(rank, request)
            self.arm()

        self.clock.call_at(at, arrive, rank=2)
        return request

    def abort(self, request: EngineRequest, at: int, rank: int = 0) -> None:
        def leave() -> None:
            self.bring()
            self.node.abort(rank, request)
            self.arm()

        self.clock.call_at(at, leave, rank=2)

    def run(self) -> None:
        while self.clock.step():
            pass
        assert not self.node.held and not self.node.busy
        for engine in self.node.ranks:
            assert engine.pool.free == engine.pool.blocks and not engine.unfinished


def prompt(index: int, blocks: int, outputs: int = 5, tail: int = 1, of: int | None = None) -> EngineRequest:
    origin = index if of is None else of
    return EngineRequest(f"r{index}", index, [(origin, 0, blocks)], blocks * 4 + tail, outputs, 0)


@pytest.mark.parametrize("lookup_ns", [0, LOOKUP_NS])
def test_what_one_rank_saved_another_rank_loads(lookup_ns: int) -> None:
    bed = Bed(2, lookup_ns=lookup_ns)
    bed.submit(prompt(0, 20))
    second = bed.submit(prompt(1, 20, of=0), rank=1, at=5_000_000)
    bed.run()
    assert (second.hit_tokens, second.external_tokens, second.external_by_tier) == (0, 80, {"dict": 80})
    assert second.restore_ns == 80 * LOAD_NS_PER_TOKEN
    assert second.first_token_ns is not None
    assert second.first_token_ns >= 5_000_000 + lookup_ns + second.restore_ns
    assert bed.node.totals[1].scheduled_tokens == 1 + 4


def test_a_full_hit_leaves_one_token() -> None:
    bed = Bed(2)
    bed.submit(prompt(0, 20, tail=0))
    second = bed.submit(prompt(1, 20, tail=0, of=0), rank=1, at=5_000_000)
    bed.run()
    assert second.external_tokens == 79 and bed.node.totals[1].scheduled_tokens == 1 + 4


def test_a_cache_that_takes_no_time() -> None:
    """It answers from inside the engine's calls; the engine must not be entered twice."""
    bed = Bed(2, lookup_ns=0, load_ns=0)
    bed.submit(prompt(0, 20))
    second = bed.submit(prompt(1, 20, of=0), rank=1, at=5_000_000)
    bed.run()
    assert second.external_tokens == 80 and second.restore_ns == 0
    assert bed.node.totals[1].scheduled_tokens == 5


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_failed_load(policy: str) -> None:
    bed = Bed(2, policy=policy)
    bed.submit(prompt(0, 20))
    second = bed.submit(prompt(1, 20, of=0), rank=1, at=5_000_000)
    bed.cache.failing.add("r1")
    bed.run()
    assert bed.connector.failed_loads == 1
    assert second.failed == (policy == "fail")
    if policy == "recompute":
        assert second.outputs == 5 and second.external_tokens == 80, "it looked again and found it again"
    else:
        assert second.outputs == 0 and [o.done for o in bed.outcomes if o.request is second] == [True]


def test_a_client_that_leaves_during_its_load() -> None:
    bed = Bed(2)
    bed.submit(prompt(0, 20))
    gone = bed.submit(prompt(1, 20, of=0), rank=1, at=5_000_000)
    bed.abort(gone, 5_000_000 + LOOKUP_NS + 100, rank=1)
    bed.run()
    assert gone.finished and gone.outputs == 0 and gone.external_tokens == 0


def test_blocks_wait_for_their_save() -> None:
    bed = Bed()
    done = bed.submit(prompt(0, 20, outputs=1))
    while done.finish_ns is None and bed.clock.step():
        pass
    pool = bed.node.ranks[0].pool
    assert pool.free < pool.blocks and bed.node.held
    bed.run()
    assert bed.clock.now_ns >= (done.finish_ns or 0) + SAVE_NS


@pytest.mark.parametrize("is_async", [False, True])
def test_many_requests_on_a_small_pool_end_and_leave_nothing(is_async: bool) -> None:
    """Preemptions, loads, aborts and saves together: every block comes back and every request ends."""
    config = replace(CONFIG, num_gpu_blocks=41, async_scheduling=is_async, scheduler_reserve_full_isl=False)
    bed = Bed(2, config=config, policy="recompute")
    requests = []
    for index in range(60):
        of = index % 7 if index >= 7 else None
        request = prompt(index, 6 + index % 11, outputs=30, of=of)
        requests.append(bed.submit(request, rank=index % 2, at=index * 9_000))
        if index % 9 == 5:
            bed.abort(request, index * 9_000 + 40_000, rank=index % 2)
    bed.run()
    assert all(request.finished for request in requests)
    assert sum(request.external_tokens for request in requests) > 500
    assert sum(total.preemptions for total in bed.node.totals) > 0
