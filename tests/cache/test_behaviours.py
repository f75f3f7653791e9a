"""What LMCache does and a home-made LRU would not: each shown by the real package inside a run (docs/cache.md)."""

from __future__ import annotations

import pytest

from harness.cache.config import Eviction, SharedTierConfig
from tests.cache.bed import CHUNK, CHUNK_BYTES, Bed

pytestmark = pytest.mark.usefixtures("lmcache")

STORE = SharedTierConfig(name="store")


@pytest.fixture
def bed(request):
    made = Bed(**request.param)
    yield made
    made.close()


def with_bed(**options):
    return pytest.mark.parametrize("bed", [options], indirect=True, ids=[""])


@with_bed(l1_chunks=64)
def test_eviction_takes_a_prompt_from_its_end(bed):
    """Keys enter the LRU list in reverse, so what is left of an old prompt is a prefix, which still hits."""
    bed.store(0, 1, 60)
    bed.wait(1.0)
    assert bed.nodes[0].account.evicted == 0  # nothing until the node is used again
    assert bed.ask(0, bed.request("again", (1, 0, 60))) == 48 * CHUNK
    assert bed.nodes[0].account.evicted == 12


@with_bed(l1_chunks=64)
def test_a_store_that_does_not_fit_is_skipped_whole(bed):
    bed.store(0, 1, 60)
    bed.store(0, 2, 10)
    stats = bed.nodes[0].stats()[0]
    assert stats.skipped_bytes == 10 * CHUNK_BYTES
    assert stats.written_bytes == 60 * CHUNK_BYTES


@with_bed(l1_chunks=64)
def test_room_comes_only_with_the_next_check(bed):
    """Above the watermark of 0.8 nothing happens until the next whole second; then a fifth of the keys goes."""
    bed.store(0, 1, 60)
    bed.wait(0.5)
    bed.store(0, 2, 10)
    assert bed.nodes[0].account.skipped == 10
    bed.wait(1.0)
    bed.store(0, 3, 10)
    assert bed.nodes[0].account.skipped == 10
    assert bed.nodes[0].account.evicted == 12


@with_bed(l1_chunks=100, eviction=Eviction(trigger_watermark=0.8, eviction_ratio=0.2))
def test_below_the_watermark_nothing_is_evicted(bed):
    bed.store(0, 1, 79)
    bed.wait(10.0)
    bed.nodes[0].stats()
    assert bed.nodes[0].account.evicted == 0
    bed.store(0, 2, 1)
    bed.wait(10.0)
    bed.nodes[0].stats()
    assert bed.nodes[0].account.evicted == 16


@with_bed(l1_chunks=64, nodes=2, tiers=[STORE])
def test_a_hit_larger_than_node_dram_is_no_hit_at_all(bed):
    """All or nothing: 60 chunks in the shared tier, 40 free chunks in node DRAM, and the whole prefix is recomputed."""
    bed.store(0, 1, 60)
    bed.store(1, 2, 24)
    assert bed.ask(1, bed.request("big", (1, 0, 60))) == 0
    assert bed.ask(1, bed.request("small", (1, 0, 30))) == 30 * CHUNK


@with_bed(l1_chunks=64, nodes=2, tiers=[STORE])
def test_by_default_loaded_chunks_do_not_stay(bed):
    bed.store(0, 1, 20)
    result = bed.load(1, bed.request("one", (1, 0, 20)))
    assert result is not None
    assert result.by_tier == {"store": 20 * CHUNK}
    assert bed.nodes[1].account.resident == 0
    again = bed.load(1, bed.request("two", (1, 0, 20)))
    assert again is not None
    assert again.by_tier == {"store": 20 * CHUNK}


@with_bed(l1_chunks=64, nodes=2, tiers=[STORE], l2_prefetch_policy="retain")
def test_with_retain_they_stay(bed):
    bed.store(0, 1, 20)
    bed.load(1, bed.request("one", (1, 0, 20)))
    assert bed.nodes[1].account.resident == 20
    again = bed.load(1, bed.request("two", (1, 0, 20)))
    assert again is not None
    assert again.by_tier == {"dram": 20 * CHUNK}


@with_bed(l1_chunks=64, nodes=1, tiers=[STORE], l2_store_policy="skip_l1")
def test_a_write_buffer_keeps_nothing(bed):
    bed.store(0, 1, 20)
    assert bed.nodes[0].account.resident == 0
    assert len(bed.tiers[0].objects) == 20


@with_bed(l1_chunks=64, tiers=[STORE])
def test_chunks_cannot_be_evicted_while_they_are_written_below(bed):
    """A store holds read locks until its last byte has arrived: a watermark check in between passes them over."""
    node = bed.nodes[0]
    request = bed.request("r", (1, 0, 60))
    bed.ask(0, request)
    node.start_load(request, 0, 0, lambda result: None)
    node.save(request, 60 * CHUNK)
    while not node.account.resident:
        bed.clock.step()
    assert node.stack.stores_in_flight == 1
    assert node.stack.evictor.tick() == 0
    bed.run()
    assert node.stack.stores_in_flight == 0
    assert node.stack.evictor.tick() == 12


@with_bed(l1_chunks=64)
def test_chunks_cannot_be_evicted_while_a_request_holds_them(bed):
    bed.store(0, 1, 60)
    reader = bed.request("reader", (1, 0, 60))
    assert bed.ask(0, reader) == 60 * CHUNK
    bed.wait(5.0)
    bed.nodes[0].stats()
    assert bed.nodes[0].account.evicted == 0
    bed.nodes[0].finish(reader, lambda: None)
    bed.wait(5.0)
    bed.nodes[0].stats()
    assert bed.nodes[0].account.evicted == 12


@with_bed(l1_chunks=300, nodes=2, tiers=[STORE], l2_prefetch_max_in_flight=2)
def test_only_so_many_prefetches_are_under_way_at_once(bed):
    """Four prefixes of 50 chunks, two at a time: they share the wire in pairs, so they arrive in pairs."""
    for origin in range(1, 5):
        bed.store(0, origin, 50)
    start = bed.clock.now_ns
    times = {}
    for origin in range(1, 5):
        request = bed.request(f"r{origin}", (origin, 0, 50))
        request.wake = lambda origin=origin: times.setdefault(origin, bed.clock.now_ns - start)
        assert bed.nodes[1].lookup(request, 0) is None
    bed.run()
    alone_ns = 50 * CHUNK_BYTES / 50e9 * 1e9
    assert times[1] == times[2] == pytest.approx(2 * alone_ns, rel=0.001)
    assert times[3] == times[4] == pytest.approx(4 * alone_ns, rel=0.001)


@pytest.mark.parametrize("align", [4096, 64])
def test_small_objects_need_a_small_alignment(align):
    """LMCache's default alignment of 4 KiB would make the capacity in small objects far too small."""
    from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
    from lmcache.v1.distributed.l1_manager import L1Manager

    from harness.cache.keys import key_maker
    from harness.cache.stack import LAYOUT, OBJECT_BYTES

    memory = L1MemoryManagerConfig(size_in_bytes=64 * OBJECT_BYTES, use_lazy=False, align_bytes=align, shm_name="")
    l1 = L1Manager(L1ManagerConfig(memory_config=memory))
    keys = [key_maker("m")(1, index) for index in range(64)]
    fit = sum(1 for key in keys if l1.reserve_write([key], [False], LAYOUT)[key][1] is not None)
    l1.close()
    assert fit == (64 if align == 64 else 1)


def test_isolated_lru_on_node_dram_cannot_evict():
    """LMCache 0.5.6 accepts IsolatedLRU for L1 and then fails in its eviction thread; the harness does not offer it."""
    from lmcache.v1.distributed.config import EvictionConfig
    from lmcache.v1.distributed.eviction_policy import CreateEvictionPolicy
    from pydantic import ValidationError

    from harness.cache.keys import key_maker

    policy = CreateEvictionPolicy(EvictionConfig("IsolatedLRU"))
    policy.on_keys_created([key_maker("m")(1, 0)])
    with pytest.raises(ValueError, match="salt"):
        policy.get_eviction_actions(0.2)
    with pytest.raises(ValidationError):
        Eviction(eviction_policy="IsolatedLRU")
