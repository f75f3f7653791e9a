"""Shared tiers behind several nodes: sharing, capacity, retention, several in order, placement, engine's calls."""

from __future__ import annotations

import pytest

from harness.cache.base import LoadResult
from harness.cache.config import SharedTierConfig, Transfer
from harness.clock import NS_PER_S
from tests.cache.bed import CHUNK, CHUNK_BYTES, TOKEN_BYTES, Bed, gib

pytestmark = pytest.mark.usefixtures("lmcache")

STORE = SharedTierConfig(name="store")


@pytest.fixture
def make():
    beds = []

    def build(**options):
        beds.append(Bed(**options))
        return beds[-1]

    yield build
    for bed in beds:
        bed.close()


# ---------------------------------------------------------------------- sharing


def test_what_one_node_wrote_another_reads(make):
    bed = make(nodes=2, tiers=[STORE])
    bed.store(0, 1, 20)
    result = bed.load(1, bed.request("r", (1, 0, 15), (2, 15, 30)), local=100)
    assert result is not None
    assert result.tokens == 15 * CHUNK - 100
    assert result.by_tier == {"store": 15 * CHUNK - 100}
    assert result.bytes == result.tokens * TOKEN_BYTES
    assert bed.nodes[0].stats()[1] == bed.nodes[1].stats()[1]
    assert bed.tiers[0].locked == 0
    # node DRAM was given back: the chunks were there only for this request
    assert bed.nodes[1].stats()[0].resident_bytes == 0


def test_a_chunk_is_stored_below_once(make):
    bed = make(nodes=2, tiers=[STORE])
    bed.store(0, 1, 20)
    request = bed.request("blind", (1, 0, 20))
    bed.nodes[1].save(request, 20 * CHUNK)
    bed.run()
    assert bed.tiers[0].counts.written == 20
    link = bed.topology.number("switch>store")
    assert bed.fabric.meter(link).nanobytes == 20 * CHUNK_BYTES * NS_PER_S


def test_bytes_on_the_wires_are_the_bytes_of_the_account(make):
    bed = make(nodes=2, tiers=[STORE], l2_prefetch_policy="retain")
    bed.store(0, 1, 20, rank=1)
    bed.load(1, bed.request("r", (1, 0, 20), rank=1))
    moved = {link.name: bed.fabric.meter(n).nanobytes / NS_PER_S for n, link in enumerate(bed.fabric.links())}
    size = 20 * CHUNK_BYTES
    assert {name: nbytes for name, nbytes in moved.items() if nbytes} == {
        "gpu[0,1]>host[0]": size,
        "host[0]>switch": size,
        "switch>store": size,
        "store>switch": size,
        "switch>host[1]": size,
        "host[1]>gpu[1,1]": size,
    }
    dram, store = bed.nodes[1].stats()
    assert (dram.read_bytes, dram.promoted_bytes, store.read_bytes, store.written_bytes) == (size,) * 4


def test_the_first_tier_that_holds_a_chunk_serves_it(make):
    near = SharedTierConfig(name="near", capacity_gb=gib(10), eviction=None)
    bed = make(nodes=2, tiers=[near, STORE])
    bed.store(0, 1, 20)
    assert len(bed.tiers[0].objects) == 10
    assert bed.nodes[0].stats()[1].skipped_bytes == 10 * CHUNK_BYTES
    result = bed.load(1, bed.request("r", (1, 0, 20)))
    assert result is not None
    assert result.by_tier == {"near": 10 * CHUNK, "store": 10 * CHUNK}


@pytest.mark.parametrize("placement", ["hash", "stripe"])
def test_placement_spreads_over_the_enclosures(make, placement):
    tier = SharedTierConfig(name="rack", at="enclosure", placement=placement)
    bed = make(nodes=1, tiers=[tier], topology="storage-rack", counts={"e": 4})
    bed.store(0, 1, 40)
    got = [
        bed.fabric.meter(bed.topology.number(f"controller[{e}]>enclosure[{e}]")).nanobytes / NS_PER_S for e in range(4)
    ]
    assert got == [10 * CHUNK_BYTES] * 4


def test_peer_dram_is_read_from_the_node_that_wrote_it(make):
    peers = SharedTierConfig(name="peers", placement="writer")
    bed = make(nodes=3, tiers=[peers])
    bed.store(1, 1, 20)
    bed.load(2, bed.request("r", (1, 0, 20)))
    assert bed.fabric.meter(bed.topology.number("host[1]>switch")).nanobytes == 20 * CHUNK_BYTES * NS_PER_S
    assert bed.fabric.meter(bed.topology.number("switch>host[2]")).nanobytes == 20 * CHUNK_BYTES * NS_PER_S


# ---------------------------------------------------------------------- capacity


def test_lmcache_evicts_from_a_full_shared_tier(make):
    tier = SharedTierConfig(name="store", capacity_gb=gib(100))
    bed = make(l1_chunks=200, nodes=2, tiers=[tier])
    for origin in range(1, 10):
        bed.store(origin % 2, origin, 10)
        bed.wait(1.5)
    stats = bed.nodes[0].stats()[1]
    # at 80 of 100 the check drops a fifth of the keys, the first prompts first
    assert stats.evicted_bytes == 16 * CHUNK_BYTES
    assert stats.resident_bytes == 74 * CHUNK_BYTES
    assert stats.peak_bytes <= 100 * CHUNK_BYTES
    assert {key.origin for key in bed.tiers[0].objects} == set(range(2, 10))
    assert stats.evicted_unread_bytes == 16 * CHUNK_BYTES


def test_loads_protect_from_eviction_below(make):
    """The shared LRU goes by loads: a prompt that was read outlives one that was written after it."""
    tier = SharedTierConfig(name="store", capacity_gb=gib(100))
    bed = make(l1_chunks=50, nodes=2, tiers=[tier])
    bed.store(0, 1, 10)
    bed.store(0, 2, 10)
    bed.load(1, bed.request("r", (1, 0, 10)))
    for origin in range(3, 9):
        bed.store(0, origin, 10)
        bed.wait(1.5)
    bed.wait(1.5)
    bed.nodes[0].stats()
    origins = [key.origin for key in bed.tiers[0].objects]
    # 16 of 80 keys go: all of the second prompt, then the end of the first, none of the third
    assert [origins.count(origin) for origin in (1, 2, 3)] == [4, 0, 10]


def test_a_tier_never_holds_more_than_its_capacity(make):
    tier = SharedTierConfig(name="store", capacity_gb=gib(30), eviction=None)
    bed = make(l1_chunks=200, nodes=2, tiers=[tier])
    requests = [(node, bed.request(f"r{node}", (node + 1, 0, 20))) for node in range(2)]
    for node, request in requests:
        bed.ask(node, request)
        bed.nodes[node].save(request, 20 * CHUNK)
    bed.run()
    # both stores were on the wire at once
    assert len(bed.tiers[0].objects) == 30
    assert bed.tiers[0].counts.skipped == 10
    assert bed.tiers[0].arriving == 0


# ---------------------------------------------------------------------- retention


def found(bed, node, origin, chunks):
    """Chunks that a request of the whole engine's course is served."""
    result = bed.load(node, bed.request("r", (origin, 0, chunks)))
    return 0 if result is None else result.tokens // CHUNK


def test_retention_drops_what_was_not_used_for_the_window(make):
    bed = make(nodes=2, tiers=[SharedTierConfig(name="store", retention_s=300)])
    bed.store(0, 1, 10)
    for _ in range(2):
        bed.wait(299.0)
        assert found(bed, 1, 1, 10) == 10
    bed.wait(300.001)
    assert found(bed, 1, 1, 10) == 0
    assert bed.nodes[0].stats()[1].expired_bytes == 10 * CHUNK_BYTES


def test_only_what_was_asked_for_is_kept(make):
    bed = make(nodes=2, tiers=[SharedTierConfig(name="store", retention_s=10)])
    bed.store(0, 1, 10)
    bed.wait(6.0)
    assert found(bed, 1, 1, 4) == 4
    bed.wait(6.0)
    assert found(bed, 1, 1, 10) == 4


def test_by_loads_a_lookup_is_no_use(make):
    """Found in node DRAM, the chunks below are looked up but not loaded."""
    for use, left in (("lookup", 10), ("load", 0)):
        bed = make(nodes=1, tiers=[SharedTierConfig(name="store", retention_s=10, retention_use=use)])
        bed.store(0, 1, 10)
        bed.wait(6.0)
        assert bed.ask(0, bed.request("r", (1, 0, 10))) == 10 * CHUNK
        bed.wait(6.0)
        bed.nodes[0].stats()
        assert len(bed.tiers[0].objects) == left


def test_retention_of_node_dram(make):
    bed = make(nodes=1, retention_s=60)
    bed.store(0, 1, 10)
    bed.store(0, 2, 10)
    bed.wait(50.0)
    bed.load(0, bed.request("use", (1, 0, 10)))
    bed.wait(20.0)
    assert bed.ask(0, bed.request("a", (1, 0, 10))) == 10 * CHUNK
    assert bed.ask(0, bed.request("b", (2, 0, 10))) == 0
    assert bed.nodes[0].account.expired == 10


def test_what_is_being_read_does_not_expire(make):
    bed = make(nodes=1, retention_s=10)
    bed.store(0, 1, 10)
    reader = bed.request("reader", (1, 0, 10))
    assert bed.ask(0, reader) == 10 * CHUNK
    bed.wait(100.0)
    bed.nodes[0].stats()
    assert bed.nodes[0].account.resident == 10
    bed.nodes[0].finish(reader, lambda: None)
    bed.wait(10.1)
    bed.nodes[0].stats()
    assert bed.nodes[0].account.resident == 0


# ---------------------------------------------------------------------- the engine's calls


def test_a_full_hit_leaves_one_token_to_compute(make):
    bed = make(nodes=1)
    bed.store(0, 1, 10)
    request = bed.request("full", (1, 0, 10))
    request.prompt_tokens = 10 * CHUNK
    assert bed.ask(0, request) == 10 * CHUNK - 1
    half = bed.request("half", (1, 0, 10))
    half.prompt_tokens = 10 * CHUNK
    assert bed.ask(0, half, local=5 * CHUNK) == 5 * CHUNK - 1


def test_locks_of_what_the_gpu_holds_go_back_at_once(make):
    bed = make(nodes=1)
    bed.store(0, 1, 10)
    request = bed.request("r", (1, 0, 10))
    more = bed.ask(0, request, local=5 * CHUNK + 10)
    assert more == 5 * CHUNK - 10
    done: list[LoadResult] = []
    bed.nodes[0].start_load(request, 5 * CHUNK + 10, more, done.append)
    l1 = bed.nodes[0].stack.l1
    keys = bed.cluster.keys.of(request.runs)
    assert [l1.is_key_evictable(key) for key in keys] == [True] * 5 + [False] * 5
    bed.run()
    assert all(l1.is_key_evictable(key) for key in keys)
    assert done[0].tokens == more
    assert done[0].bytes == more * TOKEN_BYTES


def test_a_cancelled_load_frees_what_it_held(make):
    bed = make(nodes=2, tiers=[STORE])
    bed.store(0, 1, 50)
    cache = bed.nodes[1]
    request = bed.request("r", (1, 0, 50))
    more = bed.ask(1, request)
    cache.start_load(request, 0, more, lambda result: pytest.fail("cancelled"))
    bed.run(bed.clock.now_ns + 1000)
    assert not cache.finish(request, lambda: None)
    bed.run()
    assert cache.idle
    assert cache.stats()[0].resident_bytes == 0
    assert all(bed.fabric.rate_bytes_per_s(n) == 0 for n in range(len(bed.fabric.links())))


def test_a_request_that_leaves_during_its_lookup_frees_what_it_held(make):
    bed = make(nodes=2, tiers=[STORE])
    bed.store(0, 1, 50)
    cache = bed.nodes[1]
    request = bed.request("r", (1, 0, 50), rank=0)
    request.wake = lambda: pytest.fail("nobody waits any more")
    assert cache.lookup(request, 0) is None
    cache.finish(request, lambda: None)
    bed.run()
    assert cache.idle
    assert cache.stats()[0].resident_bytes == 0
    assert bed.tiers[0].locked == 0


def test_lmcaches_own_way_with_such_locks_is_to_let_them_expire(make):
    bed = make(nodes=2, tiers=[STORE], abandoned_locks="expire")
    bed.store(0, 1, 50)
    cache = bed.nodes[1]
    request = bed.request("r", (1, 0, 50))
    assert cache.lookup(request, 0) is None
    cache.finish(request, lambda: None)
    bed.wait(299.0)
    assert cache.stats()[0].resident_bytes == 50 * CHUNK_BYTES
    bed.wait(2.0)
    assert cache.stats()[0].resident_bytes == 0


def test_blocks_wait_for_saves(make):
    bed = make(nodes=1)
    cache = bed.nodes[0]
    request = bed.request("r", (1, 0, 50))
    bed.ask(0, request)
    cache.save(request, 50 * CHUNK)
    freed: list[int] = []
    assert cache.finish(request, lambda: freed.append(bed.clock.now_ns))
    assert not freed
    bed.run()
    assert freed == [pytest.approx(50 * CHUNK_BYTES / 63e9 * 1e9 + 1000, abs=10)]


def test_only_whole_new_chunks_of_the_prompt_are_saved(make):
    bed = make(nodes=1)
    cache = bed.nodes[0]
    request = bed.request("r", (1, 0, 10))
    bed.ask(0, request)
    cache.save(request, CHUNK - 1)
    assert cache.account.saved == 0
    bed.run()
    for tokens, saved in ((CHUNK, 1), (3 * CHUNK + 5, 3), (10_000, 10), (20_000, 10)):
        cache.save(request, tokens)
        bed.run()
        assert cache.account.saved == saved


def test_preemption_starts_the_lookup_anew(make):
    bed = make(nodes=1)
    cache = bed.nodes[0]
    request = bed.request("r", (1, 0, 10))
    assert bed.ask(0, request) == 0
    cache.save(request, 8 * CHUNK)
    bed.run()
    cache.preempted(request)
    assert bed.ask(0, request) == 8 * CHUNK
    cache.finish(request, lambda: None)
    assert cache.idle


def test_a_failed_load_says_so(make):
    bed = make(nodes=1, load_failure_share=1.0)
    bed.store(0, 1, 10)
    result = bed.load(0, bed.request("r", (1, 0, 10)))
    assert result is not None
    assert result.failed


@pytest.mark.parametrize(("wait", "answered_s"), [("best_effort", 0.0), ("timeout", 0.003), ("hold", None)])
def test_how_long_a_request_waits(make, wait, answered_s):
    """Half of the prefix in node DRAM, half below behind a slow wire (10 ms): what is used and when."""
    bed = make(nodes=2, tiers=[STORE], wait=wait, wait_timeout_s=0.003, l2_prefetch_policy="retain", topology="tcp")
    bed.store(0, 1, 20)
    bed.store(1, 1, 5)
    request = bed.request("r", (1, 0, 20))
    start = bed.clock.now_ns
    got = bed.ask(1, request)
    took = (bed.clock.now_ns - start) / 1e9
    if answered_s is None:
        assert got == 20 * CHUNK
        assert took == pytest.approx(15 * CHUNK_BYTES / 12.5e9, rel=0.01)
    else:
        assert got == 5 * CHUNK
        assert took == answered_s
    bed.nodes[1].finish(request, lambda: None)
    bed.run()
    # the load went on and serves the next one
    assert bed.ask(1, bed.request("next", (1, 0, 20))) == 20 * CHUNK
    assert bed.tiers[0].locked == 0


def test_lookup_latencies_add_up(make):
    tier = SharedTierConfig(name="store", lookup_latency_us=500)
    bed = make(nodes=2, tiers=[tier], rpc_us=200)
    bed.store(0, 1, 1)
    start = bed.clock.now_ns
    bed.ask(1, bed.request("r", (9, 0, 1)))
    assert bed.clock.now_ns - start == 700_000


def test_a_cost_table_slows_loads(make):
    plain = SharedTierConfig(name="store")
    slow = SharedTierConfig(name="store", load=Transfer(cost="rdma-mori-cx7-read", descriptors_per_chunk=100))
    times = []
    for tier in (plain, slow):
        bed = make(nodes=2, tiers=[tier])
        bed.store(0, 1, 10)
        start = bed.clock.now_ns
        bed.ask(1, bed.request("r", (1, 0, 10)))
        times.append(bed.clock.now_ns - start)
    # 64 kB messages: 7.96 GB/s as published, 50 GB/s on the bare wire
    assert times[1] / times[0] == pytest.approx(50 / 7.96, rel=0.02)


def test_events_of_node_dram(make):
    bed = make(l1_chunks=64, nodes=1, kv_events=True)
    bed.store(0, 1, 60)
    stored = bed.nodes[0].take_events()
    assert [(e.medium, e.stored, e.origin, e.start, e.count) for e in stored] == [("CPU", True, 1, 0, 240)]
    bed.wait(1.0)
    bed.nodes[0].stats()
    gone = bed.nodes[0].take_events()
    assert all(not e.stored and e.origin == 1 for e in gone)
    assert sum(e.count for e in gone) == 48
    assert min(e.start for e in gone) == 192
    assert bed.nodes[0].take_events() == []


def test_bad_settings_are_named(make):
    from harness.errors import InputError

    with pytest.raises(InputError, match="two tiers"):
        make(tiers=[STORE, STORE])
    with pytest.raises(InputError, match="no shelf"):
        make(tiers=[SharedTierConfig(name="x", at="shelf")])
    with pytest.raises(InputError, match="at least two chunks"):
        make(l1_chunks=0)
