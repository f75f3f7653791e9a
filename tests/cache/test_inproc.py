"""LMCache's in-process engine on the virtual clock, and how differently it evicts."""

from __future__ import annotations

import pytest

from harness.cache.base import LoadResult
from harness.cache.config import SharedTierConfig, Transfer
from harness.errors import InputError
from tests.cache.bed import CHUNK, CHUNK_BYTES, AgentLoad, Bed

pytest.importorskip("transformers", reason="LMCache's in-process engine needs transformers")
pytestmark = pytest.mark.usefixtures("lmcache")

STORE = SharedTierConfig(name="store")


@pytest.fixture
def make():
    beds = []

    def build(**options):
        beds.append(Bed(mode="inproc", **options))
        return beds[-1]

    yield build
    for bed in beds:
        bed.close()


def test_eviction_makes_room_for_each_chunk_from_the_front_of_a_prompt(make):
    """60 chunks, then 10 more into 64: 54 of the first are left, but the prefix is gone, and so is every hit."""
    bed = make(l1_chunks=64, ranks=1)
    bed.store(0, 1, 60)
    bed.store(0, 2, 10)
    stats = bed.nodes[0].stats()[0]
    assert stats.evicted_bytes == 6 * CHUNK_BYTES
    assert stats.skipped_bytes == 0
    assert bed.ask(0, bed.request("again", (1, 0, 60))) == 0


def test_a_hit_in_between_turns_the_order(make):
    """A lookup touches a prompt's chunks in reverse: afterwards the end goes first."""
    bed = make(l1_chunks=64, ranks=1)
    bed.store(0, 1, 60)
    assert bed.load(0, bed.request("hit", (1, 0, 60))) is not None
    bed.store(0, 2, 10)
    assert bed.ask(0, bed.request("again", (1, 0, 60))) == 54 * CHUNK


def test_pinned_chunks_leave_room_for_part_of_a_store(make):
    bed = make(l1_chunks=64, ranks=1)
    bed.store(0, 1, 60)
    holder = bed.request("holder", (1, 0, 60))
    assert bed.ask(0, holder) == 60 * CHUNK
    bed.store(0, 2, 20)
    assert bed.nodes[0].stats()[0].skipped_bytes == 16 * CHUNK_BYTES
    bed.nodes[0].finish(holder, lambda: None)
    assert bed.ask(0, bed.request("part", (2, 0, 20))) == 4 * CHUNK


def test_replicas_share_nothing_but_the_tier_below(make):
    bed = make(l1_chunks=100, ranks=2, tiers=[STORE])
    bed.store(0, 1, 20, rank=0)
    other = bed.load(0, bed.request("r", (1, 0, 20), rank=1), local=50)
    assert other is not None
    assert other.by_tier == {"store": 20 * CHUNK - 50}
    # what was loaded stays, without being told to
    again = bed.load(0, bed.request("again", (1, 0, 20), rank=1))
    assert again is not None
    assert again.by_tier == {"dram": 20 * CHUNK}
    assert bed.tiers[0].locked == 0


def test_times_and_bytes_of_a_load_from_below(make):
    bed = make(nodes=2, ranks=1, l1_chunks=100, tiers=[STORE])
    bed.store(0, 1, 50)
    start = bed.clock.now_ns
    result = bed.load(1, bed.request("r", (1, 0, 50)))
    assert result is not None
    size = 50 * CHUNK_BYTES
    assert bed.clock.now_ns - start == pytest.approx(size / 50e9 * 1e9 + size / 63e9 * 1e9 + 5_000, abs=10)
    assert bed.nodes[1].stats()[0].promoted_bytes == size


def test_a_load_that_pins_leave_no_room_for_fails(make):
    bed = make(nodes=2, ranks=1, l1_chunks=64, tiers=[STORE])
    bed.store(0, 1, 60)
    bed.store(1, 2, 60)
    holder = bed.request("holder", (2, 0, 60))
    bed.ask(1, holder)
    result = bed.load(1, bed.request("r", (1, 0, 60)))
    assert result is not None
    assert result.failed
    bed.nodes[1].finish(holder, lambda: None)
    result = bed.load(1, bed.request("again", (1, 0, 60)))
    assert result is not None
    assert not result.failed


def test_a_cancelled_load_returns_its_pins(make):
    bed = make(nodes=2, ranks=1, l1_chunks=64, tiers=[STORE])
    bed.store(0, 1, 50)
    request = bed.request("r", (1, 0, 50))
    more = bed.ask(1, request)
    results: list[LoadResult] = []
    bed.nodes[1].start_load(request, 0, more, results.append)
    bed.run(bed.clock.now_ns + 1_000)
    bed.nodes[1].finish(request, lambda: None)
    bed.run()
    assert not results
    assert bed.tiers[0].locked == 0
    assert bed.nodes[1].idle


def outcome(policy):
    tier = SharedTierConfig(name="store", load=Transfer(cost="rdma-mori-cx7-read"))
    bed = Bed(mode="inproc", nodes=1, l1_chunks=120, tiers=[tier], cache_policy=policy)
    load = AgentLoad(bed, 150)
    bed.run()
    assert load.ended == 150
    assert all(node.idle for node in bed.nodes)
    assert bed.tiers[0].locked == 0
    stats = bed.nodes[0].stats()
    bed.close()
    assert stats[0].evicted_bytes > 0
    return load.log, stats


@pytest.mark.slow
def test_equal_runs_are_equal_and_policies_differ():
    runs = [outcome(policy) for policy in ("LRU", "LRU", "LFU", "FIFO", "MRU")]
    assert runs[0] == runs[1]
    assert all(one != other for k, one in enumerate(runs[1:]) for other in runs[k + 2 :])


def test_what_the_mode_does_not_have_is_refused(make):
    for options in (
        {"tiers": [STORE, SharedTierConfig(name="other")]},
        {"retention_s": 5},
        {"l2_prefetch_policy": "retain"},
        {"l2_store_policy": "skip_l1"},
        {"wait": "best_effort"},
    ):
        with pytest.raises(InputError, match="mode inproc has no"):
            make(**options)
