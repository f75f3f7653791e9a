"""Prefill and decode workers with a CPU tier each: vLLM's MultiConnector of the two."""

from __future__ import annotations

import random
from typing import Any

import pytest

from harness.cache.build import GIB, CacheCluster
from harness.cache.config import CacheConfig, OffloadingConfig
from harness.cache.offload_build import EngineFacts, OffloadCluster
from harness.clock import VirtualClock
from harness.results.records import COMPLETED, digest
from harness.trace.model import Session
from tests.disagg.bed import BYTES_PER_TOKEN, Bed, call


def load() -> list[Session]:
    """Sessions whose prompts grow, on prefill workers whose GPUs hold one of them at a time."""
    rng = random.Random(5)
    made = []
    for s in range(6):
        calls = [call(0, 240, 8)]
        for i in range(1, 5):
            tokens = calls[-1].input_tokens + 4 * rng.randrange(4, 20)
            keep = calls[-1].input_tokens // 4
            more: dict[str, Any] = {"ref": i - 1, "keep_blocks": keep, "new_blocks": tokens // 4 - keep}
            calls.append(call(i, tokens, 8, deps=(i - 1,), gap_s=0.01, **more))
        made.append(Session(f"s{s}", 4, calls))
    return made


def tiers(kind: str, clock: VirtualClock) -> Any:
    if kind == "offloading":
        config = OffloadingConfig(cpu_bytes_to_use=1 << 30, blocks_per_chunk=2)
        engines = [EngineFacts(1, 1, BYTES_PER_TOKEN)] * 2
        return OffloadCluster(clock, config, engines, block_tokens=4, kv_bytes_per_token=BYTES_PER_TOKEN)
    return CacheCluster(
        clock,
        CacheConfig(l1_size_gb=(1 << 24) / GIB, chunk_size=8),
        nodes=2,
        ranks_per_node=1,
        block_tokens=4,
        kv_bytes_per_token=BYTES_PER_TOKEN,
        model_name="m",
    )


@pytest.mark.parametrize("kind", ["offloading", "lmcache"])
def test_the_tier_serves_prefill_and_the_wire_serves_decode(kind: str, request: pytest.FixtureRequest) -> None:
    if kind == "lmcache":
        request.getfixturevalue("lmcache")
    digests = []
    for _ in range(2):
        clock = VirtualClock()
        below = tiers(kind, clock)
        bed = Bed(load(), caches=below.nodes, clock=clock, blocks=160, decode_blocks=400)
        simulation = bed.run()
        below.close()
        records = simulation.records
        assert all(record.outcome == COMPLETED for record in records), {record.message for record in records}
        assert sum(record.dram_tokens for record in records) > 1000
        for record in records:
            parts = record.gpu_tokens + record.dram_tokens + record.shared_tokens + record.computed_tokens
            assert parts + record.peer_tokens == record.input_tokens
            assert record.transfer_end_ns is not None
        digests.append(digest(records))
    assert digests[0] == digests[1]
