"""Tiers whose KV events reach the real router in a whole run: once all is told, it believes what the tiers hold."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from fake_workers.engine.scheduler import SchedulerConfig
from harness.cache.build import GIB, CacheCluster
from harness.cache.config import CacheConfig, OffloadingConfig
from harness.cache.offload_build import EngineFacts, OffloadCluster
from harness.clock import VirtualClock
from harness.results.records import COMPLETED
from harness.router.base import Decision, RouteRequest
from harness.router.endpoints import loopback_endpoints
from harness.router.llmd import LlmdRouter
from harness.simulation import Simulation, SimulationConfig
from harness.trace.model import Call, Session
from tests.harness.simple_price import SimplePrice
from tests.router.support import CONFIGS, call

BLOCK, CHUNK, TOKEN_BYTES, NODES, RANKS = 4, 16, 1000, 2, 2
Release = tuple[str, Path]
ENGINE = SchedulerConfig(
    num_gpu_blocks=140, block_tokens=BLOCK, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=550
)


def sessions(seed: int, count: int = 30) -> list[Session]:
    """Growing prompts, whole engine blocks mostly, over a shared prefix."""
    rng = random.Random(seed)
    made = []
    for s in range(count):
        calls: list[Call] = []
        for i in range(rng.randrange(2, 6)):
            keep = rng.choice([calls[-1].blocks, rng.randrange(1, calls[-1].blocks + 1)]) if calls else 0
            new = rng.randrange(4, 24)
            tokens = (keep + new) * BLOCK + rng.randrange(BLOCK)
            deps = (i - 1,) if i else ()
            gap_s = rng.choice([0.01, 0.05, 0.1])
            ref = i - 1 if keep else -1
            calls.append(Call(i, 0.0, None, "main", tokens, rng.randrange(1, 20), ref, keep, new, deps, None, gap_s))
        made.append(Session(f"s{s}", BLOCK, calls))
    return made


class NotingRouter(LlmdRouter):
    """Keeps every prompt of at least one chunk that it was asked about."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.prompts: list[list[tuple[int, int, int]]] = []

    def decide(self, request: RouteRequest) -> Decision:
        if request.runs and request.runs[-1][2] >= CHUNK // BLOCK:
            self.prompts.append(list(request.runs))
        return super().decide(request)


def run_with_tiers(
    release: Release, tmp_path: Path, caches: Any, clock: VirtualClock, router_block: int, config: str = "precise-tiers"
) -> tuple[Simulation, NotingRouter]:
    """A run up to its end, everything told; the router is still up."""
    endpoints = loopback_endpoints(NODES * RANKS, ranks_per_node=RANKS)
    version, binary = release
    path = CONFIGS / version / f"{config}.yaml"
    router = NotingRouter(
        binary,
        version,
        path,
        endpoints,
        model="m",
        block_tokens=BLOCK,
        num_gpu_blocks=ENGINE.num_gpu_blocks,
        seed=1,
        workdir=tmp_path / "run",
        router_block_tokens=router_block,
        tier_events=True,
    )
    load = sessions(7)
    simulation = Simulation(
        SimulationConfig(ENGINE, "m", scrape_interval_ns=50_000_000, tier_events=True),
        SimplePrice(),
        [[endpoint] for endpoint in endpoints],
        router,
        load,
        [i * 3_000_000 for i in range(len(load))],
        clock=clock,
        caches=caches,
    )
    router.start()
    simulation.run()
    simulation.settle()
    return simulation, router


def check_belief(simulation: Simulation, router: NotingRouter, router_block: int, exact: bool) -> dict[str, int]:
    """Every prompt of the run against every endpoint: what the router's index holds is what the endpoint holds."""
    feed, model = simulation._feed, router._index
    assert feed is not None and model is not None
    ratio = router_block // BLOCK
    seen = {"gpu": 0, "tier": 0, "nothing": 0, "gap": 0}
    for prompt in list(router.prompts):
        coarse = router._granularity.prompt(prompt)
        decision = router.decide(request := call(prompt, block=BLOCK))
        router.abort(request.request_id)
        assert decision.believed_share is not None and decision.endpoint is not None
        for group in simulation.groups:
            for endpoint, rank in zip(group.endpoints, group.node.ranks, strict=True):
                held = feed.held_blocks(endpoint, rank.pool, prompt) // ratio
                believed = model.matched(endpoint, coarse)
                assert not exact or believed == held
                seen["gap"] += believed != held
                gpu = rank.pool.cached_prefix(prompt) // ratio
                seen["gpu" if held == gpu > 0 else "tier" if held else "nothing"] += 1
                if endpoint == decision.endpoint:
                    assert decision.believed_share * (prompt[-1][2] // ratio) == pytest.approx(believed)
    assert router.stats()["beliefs_unknown"] == 0 and router.stats()["fallbacks"] == {}
    return seen


@pytest.mark.parametrize("router_block", [CHUNK, 2 * CHUNK, BLOCK])
def test_lmcache_of_a_node_is_believed_of_each_of_its_engines(
    router_release: Release, tmp_path: Path, lmcache: None, router_block: int
) -> None:
    clock = VirtualClock()
    chunks = 100
    config = CacheConfig(l1_size_gb=(chunks + 0.5) * CHUNK * TOKEN_BYTES / GIB, chunk_size=CHUNK, kv_events=True)
    cluster = CacheCluster(
        clock,
        config.model_copy(update={"tick_s": 0.01}),
        nodes=NODES,
        ranks_per_node=RANKS,
        block_tokens=BLOCK,
        kv_bytes_per_token=TOKEN_BYTES,
        model_name="m",
    )
    simulation, router = run_with_tiers(router_release, tmp_path, cluster.nodes, clock, router_block)
    try:
        assert not [(r.outcome, r.message) for r in simulation.records if r.outcome != COMPLETED]
        assert sum(record.dram_tokens for record in simulation.records) > 0
        assert sum(node.account.evicted for node in cluster.nodes) > chunks, "the tier is too small for the load"
        for node in cluster.nodes:  # the log of events is LMCache's own state
            assert node.events._held == set(node.stack.l1._objects)
        seen = check_belief(simulation, router, router_block, exact=router_block >= CHUNK)
        assert seen["gpu"] and seen["tier"] and seen["nothing"], seen
    finally:
        router.stop()
        cluster.close()


@pytest.mark.parametrize(
    ("chunk_blocks", "router_block", "described", "policy"),
    [(1, BLOCK, False, "lru"), (4, CHUNK, True, "lru"), (2, BLOCK, True, "arc"), (1, CHUNK, False, "lru")],
)
def test_vllms_cpu_tier_of_an_engine_is_believed_of_it(
    router_release: Release, tmp_path: Path, chunk_blocks: int, router_block: int, described: bool, policy: str
) -> None:
    clock = VirtualClock()
    config = OffloadingConfig(
        cpu_bytes_to_use=220 * BLOCK * 1024,
        blocks_per_chunk=chunk_blocks,
        self_describing_kv_events=described,
        eviction_policy=policy,
    )
    cluster = OffloadCluster(
        clock,
        config,
        [EngineFacts(RANKS, 1, 1024)] * NODES,
        block_tokens=BLOCK,
        kv_bytes_per_token=1024,
    )
    simulation, router = run_with_tiers(router_release, tmp_path, cluster.nodes, clock, router_block)
    try:
        assert not [(r.outcome, r.message) for r in simulation.records if r.outcome != COMPLETED]
        for record in simulation.records:
            assert record.gpu_tokens + record.dram_tokens + record.computed_tokens == record.input_tokens
        assert sum(record.dram_tokens for record in simulation.records) > 0
        ranks = [rank for node in cluster.nodes for rank in node.ranks]
        assert sum(rank.scheduler.manager.counts.evicted for rank in ranks) * chunk_blocks > 100, (
            "too small for the load"
        )
        assert not any(rank.copies[True] or rank.copies[False] or rank.finished or rank.later for rank in ranks)
        # a router block of several chunks counts by its last one, and a running request loses its first ones first;
        # of a chunk of several router blocks the first ones may be those of another prompt's chunk
        seen = check_belief(simulation, router, router_block, exact=router_block == chunk_blocks * BLOCK)
        assert seen["gpu"] and seen["tier"] and seen["nothing"], seen
        assert seen["gap"] < 0.05 * sum(seen.values())
        if described or router_block == BLOCK:
            assert router.stats()["skipped_blocks"] == 0
    finally:
        router.stop()
