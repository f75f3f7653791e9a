"""The pump against LMCache's own threaded StorageManager: same hits, loads, evictions, in the same order and times."""

from __future__ import annotations

import pytest

from harness.cache.config import Eviction, SharedTierConfig, Transfer
from tests.cache.bed import AgentLoad, Bed, gib

pytestmark = [pytest.mark.usefixtures("lmcache"), pytest.mark.slow]


def outcome(make_stack, requests, **options):
    """Everything that can be seen of a run from outside."""
    bed = Bed(nodes=3, make_stack=make_stack, **options)
    deleted = []
    for node in bed.nodes:
        node.stack.watch.on_deleted.append(
            lambda keys, number=node.node: deleted.append((number, [(key.origin, key.index) for key in keys]))
        )
    load = AgentLoad(bed, requests)
    bed.run()
    assert load.ended == requests
    assert all(node.idle for node in bed.nodes)
    stats = [node.stats() for node in bed.nodes]
    in_flight = [node.stack.stores_in_flight for node in bed.nodes]
    bed.close()
    return load.log, [entry for entry in deleted if entry[1]], stats, in_flight


def compare(requests, **options):
    from tests.cache.threaded import ThreadedStack

    pumped = outcome(None, requests, **options)
    threaded = outcome(ThreadedStack, requests, **options)
    for one, other in zip(pumped, threaded, strict=True):
        assert one == other
    return pumped


def test_promotion_to_node_dram_with_held_transfers():
    """1,200 requests on three nodes and one tier; loads, stores and saves overlap and are held on the fabric."""
    log, deleted, stats, in_flight = compare(
        1200,
        l1_chunks=150,
        tiers=[SharedTierConfig(name="store", load=Transfer(cost="rdma-mori-cx7-read"))],
        l2_prefetch_policy="retain",
        l2_prefetch_max_in_flight=2,
    )
    assert in_flight == [0, 0, 0]
    found = [entry for entry in log if entry[0] == "found"]
    assert len(found) > 1_000
    assert sum(len(keys) for _, keys in deleted) > 1_000
    # the run has all of it: hits in both tiers, evictions, stores that found node DRAM full
    assert all(node[0].hit_tokens and node[1].hit_tokens for node in stats)
    assert any(node[0].skipped_bytes for node in stats)


def test_temporary_chunks_arc_and_a_shared_capacity():
    _, deleted, stats, _ = compare(
        500,
        l1_chunks=120,
        tiers=[SharedTierConfig(name="store", capacity_gb=gib(300), lookup_latency_us=300)],
        eviction=Eviction(eviction_policy="ARC", trigger_watermark=0.7, eviction_ratio=0.1),
        retention_s=20,
    )
    assert deleted
    assert stats[0][1].evicted_bytes > 0


def test_two_tiers_in_order():
    near = SharedTierConfig(name="near", capacity_gb=gib(150), lookup_latency_us=50)
    far = SharedTierConfig(name="far", load=Transfer(cost="rdma-mori-cx7-read"), lookup_latency_us=400)
    _, _, stats, _ = compare(400, l1_chunks=150, tiers=[near, far], l2_prefetch_policy="retain")
    assert stats[0][1].hit_tokens
    assert stats[0][2].hit_tokens


def test_node_dram_alone():
    log, _, stats, _ = compare(300, l1_chunks=200)
    assert stats[0][0].hit_tokens > 0
    assert log


def test_impatient_requests():
    """Requests that do not wait for loads: LMCache's L1-only lookups between running prefetches."""
    compare(
        300,
        l1_chunks=150,
        tiers=[SharedTierConfig(name="store", load=Transfer(cost="rdma-mori-cx7-read"))],
        l2_prefetch_policy="retain",
        wait="timeout",
        wait_timeout_s=0.002,
    )


def test_two_runs_are_equal():
    options = {"l1_chunks": 100, "tiers": [SharedTierConfig(name="store")], "l2_prefetch_policy": "retain"}
    assert outcome(None, 300, **options) == outcome(None, 300, **options)
