"""Random workloads for engines with the CPU tier of vLLM's OffloadingConnector; copies take steps, not time.

`Copies` decides alike for any engine when a copy ends: by its request and by how many the request had before.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

from fake_workers.engine.connector import ConnectorOptions
from fake_workers.engine.node import EngineStuckError, Node
from fake_workers.engine.request import EngineRequest
from fake_workers.engine.scheduler import Batch
from harness.cache.offload_manager import OffloadManager, make_key
from harness.cache.offload_scheduler import Job, OffloadScheduler, OffloadState, Scheduled
from tests.engine.connected import STUCK, Outside, RecordingConnectedRank, comparable_connected
from tests.engine.workload import Record, UnitPrice, Workload, random_workload


@dataclass(frozen=True)
class Tier:
    """Options of the tier."""

    chunk_blocks: int
    capacity: int
    policy: str
    prompt_only: bool
    slowest: int
    """Steps that a copy takes at most."""


def random_offloading(seed: int, *, is_async: bool, size: int = 40) -> tuple[Workload, Tier]:
    """A random workload and a tier for it."""
    rng = random.Random(seed ^ 0x0FF10AD)
    workload = random_workload(seed, is_async=is_async, size=size)
    tier = Tier(
        chunk_blocks=rng.choice([1, 1, 2, 3]),
        capacity=rng.choice([5, 20, 60, 300]),
        policy=rng.choice(["lru", "arc"]),
        prompt_only=rng.random() < 0.6,
        slowest=rng.choice([1, 4, 20]),
    )
    options = ConnectorOptions(requires_kv_delivery=False)
    return Workload(workload.config, workload.requests, options), tier


class Copies(Outside):
    """Arrivals, aborts and ends of copies, by step."""

    def __init__(self, workload: Workload, tier: Tier) -> None:
        super().__init__(workload)
        self._slowest = tier.slowest
        self._count: Counter[str] = Counter()

    def begin(self, request_id: str, job: Any, step: int) -> None:
        """A copy begins; it is delivered as ("job", job) when it ends."""
        number = self._count[request_id]
        self._count[request_id] += 1
        delay = zlib.crc32(f"{request_id}/{number}".encode()) % self._slowest + 1
        self._push(step + delay, 2, "job", job)


class OffloadingScript:
    """Connector and FollowsSteps on an OffloadScheduler, with copies that take steps."""

    def __init__(self, workload: Workload, tier: Tier, copies: Copies) -> None:
        config = workload.config
        self.tier, self.copies, self.block = tier, copies, config.block_tokens
        self.manager = OffloadManager(tier.capacity, tier.policy)
        self.scheduler = OffloadScheduler(
            self.manager, self.block, tier.chunk_blocks, tier.prompt_only, config.enable_prefix_caching
        )
        self.node: Node | None = None
        self.states: dict[EngineRequest, OffloadState] = {}
        self.loads: dict[Job, EngineRequest] = {}
        self.finished: list[tuple[OffloadState, int]] = []
        self.log: list[tuple[Any, ...]] = []

    def _state(self, request: EngineRequest) -> OffloadState:
        state = self.states.get(request)
        if state is None:
            state = self.states[request] = OffloadState(request.request_id, request.prompt_tokens)
        size = self.tier.chunk_blocks
        state.tokens = request.tokens
        names = [(o, p) for o, a, b in request.known_runs(self.block) for p in range(a, b)]
        chunks = request.tokens // (self.block * size)
        state.keys = [make_key(names[(i + 1) * size - 1][0], i) for i in range(chunks)]
        return state

    def _begin(self, jobs: list[Job]) -> None:
        assert self.node is not None
        for job in jobs:
            places = sorted(key & 0xFFFFFFFF for key in job.keys)
            self.log.append((job.store, job.request.request_id, places, self.manager.used))
            self.copies.begin(job.request.request_id, job, self.node.steps)

    def lookup(self, rank: int, request: EngineRequest, local_hit_tokens: int) -> tuple[int, bool] | None:
        found = self.scheduler.matched(self._state(request), local_hit_tokens)
        return None if found is None else (found, True)

    def start_load(self, rank: int, request: EngineRequest, local_hit_tokens: int, external_tokens: int) -> None:
        job = self.scheduler.allocated(self.states[request], external_tokens)
        if job is not None:
            self.loads[job] = request
            self._begin([job])

    def save(self, rank: int, request: EngineRequest, computed_tokens: int) -> None:
        """Stores follow the schedule."""

    def preempted(self, rank: int, request: EngineRequest) -> None:
        self.states[request].blocks = 0

    def finish(self, rank: int, request: EngineRequest) -> bool:
        if request in self.states:
            state = self._state(request)
            ended = request.outputs >= request.output_tokens
            computed = max(request.prompt_tokens, request.tokens - 1) if ended else request.computed
            self.finished.append((state, computed))
        return False

    def scheduled(self, rank: int, batch: Batch) -> None:
        items = [Scheduled(self._state(i.request), i.cached + i.tokens, i.request.blocks) for i in batch.items]
        ended, self.finished = [Scheduled(s, n, s.blocks) for s, n in self.finished], []
        self._begin(self.scheduler.build(items, ended))

    def executed(self, rank: int, batch: Batch) -> None:
        """Copies begin when they are scheduled, here."""

    def unsettled(self, rank: int) -> bool:
        return True

    def ended(self, job: Job) -> None:
        """A copy has ended."""
        assert self.node is not None
        self.scheduler.complete(job)
        request = self.loads.pop(job, None)
        if request is None:
            self.node.lookup_ready()
        else:
            self.node.load_ended(0, request)


def run_offloaded(workload: Workload, tier: Tier, log: list[Record]) -> tuple[list[Record], OffloadingScript]:
    """Drive a one-rank node with the tier through the workload; its comparable record, and its copies."""
    assert workload.connector is not None
    copies = Copies(workload, tier)
    script = OffloadingScript(workload, tier, copies)
    rank = RecordingConnectedRank(workload.config, True, script, workload.connector)
    rank.log = log
    node = Node(UnitPrice(), workload.config, leaping=False, keep_events=True, connector=script)
    node.connect([rank])
    script.node = node
    requests: dict[str, EngineRequest] = {}

    def deliver() -> None:
        kind, what, _ = copies.next(node.steps)
        if kind == "job":
            script.ended(what)  # type: ignore[arg-type]
        elif kind == "add":
            requests[what.request_id] = what.request()
            node.submit(0, requests[what.request_id])
        else:
            node.abort(0, requests[what.request_id])

    try:
        while node.busy or copies.pending or script.finished:
            if not node.busy:
                if script.finished:
                    script.scheduled(0, Batch())
                    continue
                deliver()
                node.advance(node.now_ns)
                continue
            while copies.due(node.steps):
                deliver()
            node.advance(node.now_ns + 1)
    except EngineStuckError:
        return [*comparable_connected(log), STUCK], script
    if rank.unfinished:
        return [*comparable_connected(log), STUCK], script
    assert not node.held and rank.pool.free == rank.pool.blocks, "blocks leaked"
    return comparable_connected(log), script
