"""The real router, both releases, with KV events of tiers: who is preferred, what is believed, and an exact barrier."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Literal

import pytest

from fake_workers.engine.events import KvEvent, Removed, Stored, TierEvent
from harness.errors import InputError
from harness.router.log_reader import ORPHAN
from harness.router.tier_events import check_tier_grain

from .support import BLOCK, call, running

Release = tuple[str, Path]
Hashes = Literal["chunk", "block", "placeholder"]
pytestmark = pytest.mark.timeout(120)


def cpu(stored: bool, start: int, count: int, hashes: Hashes = "chunk", origin: int = 1, size: int = 1) -> TierEvent:
    return TierEvent(0, "CPU", stored, origin, start, count, hashes, size)


def decide(router, runs):  # type: ignore[no-untyped-def]
    request = call(runs)
    decision = router.decide(request)
    router.abort(request.request_id)
    return decision.endpoint, decision.believed_share


@pytest.mark.parametrize("hashes", ["chunk", "block", "placeholder"])
@pytest.mark.parametrize("wire", ["map", "array"])
def test_cpu_holder_is_better_than_nothing_and_worse_than_gpu(
    router_release: Release, tmp_path: Path, hashes: Hashes, wire: str
) -> None:
    prompt = [(1, 0, 40)]
    with running(router_release, "precise-tiers", tmp_path, tier_events=True, events_wire=wire) as router:
        # what the GPU held and the CPU tier took over
        router.publish_kv_events({2: [Stored(0, 1, 0, 40, None)]})
        router.publish_kv_events({2: [cpu(True, 0, 40, hashes), Removed(1, 1, 0, 40)]})
        assert decide(router, prompt) == (2, 1.0), "believed whole, in whatever tier"
        router.publish_kv_events({3: [Stored(2, 1, 0, 40, None)]})
        assert decide(router, prompt) == (3, 1.0), "GPU before CPU"
        router.publish_kv_events({3: [Removed(3, 1, 10, 30)]})
        assert decide(router, prompt) == (2, 1.0), "40 blocks at 0.4 are more than 10 at 1"
        router.publish_kv_events({3: [Stored(4, 1, 10, 8, (1, 9))]})
        assert decide(router, prompt) == (3, 18 / 40), "and less than 18"
        router.publish_kv_events({3: [Removed(5, 1, 0, 18)]})
        router.publish_kv_events({2: [cpu(False, 30, 10, hashes)]})
        assert decide(router, prompt) == (2, 0.75)
        router.publish_kv_events({2: [cpu(False, 0, 30, hashes)]})
        assert decide(router, prompt)[1] == 0.0
        assert router.stats()["beliefs_unknown"] == 0 and router.stats()["skipped_blocks"] == 0


def test_without_weights_cpu_counts_the_routers_own_four_fifths(router_release: Release, tmp_path: Path) -> None:
    with running(router_release, "precise", tmp_path, tier_events=True) as router:
        assert decide(router, [(1, 0, 40)])[1] == 0.0
        router.publish_kv_events({1: [cpu(True, 0, 40)], 2: [Stored(0, 1, 0, 31, None)]})
        assert decide(router, [(1, 0, 40)]) == (1, 1.0)
        router.publish_kv_events({2: [Stored(0, 1, 31, 2, (1, 30))]})
        assert decide(router, [(1, 0, 40)]) == (2, 33 / 40)
        assert router.stats()["beliefs_unknown"] == 0


def test_a_gpu_prefix_goes_on_in_the_cpu_tier(router_release: Release, tmp_path: Path) -> None:
    with running(router_release, "precise-tiers", tmp_path, tier_events=True) as router:
        router.publish_kv_events({1: [Stored(0, 1, 0, 10, None), cpu(True, 0, 30)]})
        assert decide(router, [(1, 0, 40)]) == (1, 30 / 40)
        router.publish_kv_events({1: [cpu(False, 5, 10)]})
        assert decide(router, [(1, 0, 40)]) == (1, 10 / 40)
        assert router.stats()["beliefs_unknown"] == 0


def test_a_child_whose_parent_is_gone_is_not_taken_in(router_release: Release, tmp_path: Path) -> None:
    """The router skips it, and so does the count that the barrier waits for."""
    with running(router_release, "precise-tiers", tmp_path, tier_events=True) as router:
        assert decide(router, [(1, 0, 40)])[1] == 0.0
        router.publish_kv_events({1: [cpu(True, 0, 10), cpu(False, 4, 1)]})
        router.publish_kv_events({1: [cpu(True, 5, 20)]})
        assert router.stats()["skipped_blocks"] == 20
        assert decide(router, [(1, 0, 40)]) == (1, 4 / 40)
        router.publish_kv_events({2: [cpu(True, 0, 5)]})
        router.publish_kv_events({1: [cpu(True, 5, 20)]})
        assert router.stats()["skipped_blocks"] == 20, "another endpoint made the parent known"
        assert router.stats()["fallbacks"] == {}, "the router says so in its log, but nothing is believed wrongly"


def test_chunks_of_several_router_blocks(router_release: Release, tmp_path: Path) -> None:
    """Four blocks per chunk; the second prompt leaves the first inside a chunk."""
    with running(router_release, "precise-tiers", tmp_path, tier_events=True) as router:
        decide(router, [(1, 0, 40)])
        decide(router, [(1, 0, 11), (2, 11, 40)])
        router.publish_kv_events({1: [cpu(True, 0, 40, size=4)], 2: [cpu(True, 0, 8, size=4)]})
        router.publish_kv_events({2: [cpu(True, 8, 32, origin=2, size=4)]})
        assert decide(router, [(1, 0, 40)]) == (1, 1.0)
        assert decide(router, [(1, 0, 11), (2, 11, 40)]) == (2, 1.0)
        router.publish_kv_events({1: [cpu(False, 8, 32, size=4)]})
        assert decide(router, [(1, 0, 40)]) == (2, 11 / 40), "a part of the other's chunk is the same"
        assert router.stats()["beliefs_unknown"] == 0


@pytest.mark.parametrize("size", [2, 4, 8])
def test_placeholders_name_the_last_block_only(router_release: Release, tmp_path: Path, size: int) -> None:
    """vLLM's default events with chunks of several blocks: the router believes no prefix of them."""
    with running(router_release, "precise-tiers", tmp_path, tier_events=True) as router:
        router.publish_kv_events({1: [Stored(0, 1, 0, 40, None), cpu(True, 0, 40, "placeholder", size=size)]})
        router.publish_kv_events({1: [Removed(1, 1, 0, 40)]})
        assert decide(router, [(1, 0, 40)])[1] == 0.0


@pytest.mark.parametrize("factor", [1, 4])
def test_the_barrier_is_exact_whatever_is_told(router_release: Release, tmp_path: Path, factor: int) -> None:
    """Random events of all kinds, parents that are not known, duplicates: it neither waits for ever nor too short."""
    rng = random.Random(factor)
    believed = 0.0
    with running(
        router_release, "precise-tiers", tmp_path, tier_events=True, router_block_tokens=factor * BLOCK
    ) as router:
        for _ in range(3):  # origins 2 and 3 continue origin 1 inside a chunk
            decide(router, [(1, 0, 64)])
            decide(router, [(1, 0, 22), (2, 22, 64)])
            decide(router, [(1, 0, 22), (2, 22, 41), (3, 41, 64)])
        for _ in range(80):
            events: dict[int, list[KvEvent]] = {}
            for i in rng.sample(range(4), 2):
                for _ in range(rng.randrange(1, 5)):
                    origin = rng.choice([1, 2, 3])
                    first = {1: 0, 2: 22, 3: 41}[origin]
                    start = rng.randrange(first, 60)
                    count = rng.randrange(1, 64 - start + 1)
                    hashes: Hashes = rng.choice(["chunk", "chunk", "block", "placeholder"])
                    size = 8 if hashes == "chunk" else rng.choice([1, 2])
                    kind = rng.randrange(4)
                    if kind == 0:
                        before = {1: 1, 2: 1, 3: 2}[origin] if start == first else origin
                        parent = (before, start - 1) if start else None
                        events.setdefault(i, []).append(Stored(0, origin, start, count, parent))
                    elif kind == 1:
                        events.setdefault(i, []).append(Removed(0, origin, start, count))
                    else:
                        first_chunk, chunks = -(-start // size), (start + count) // size
                        if hashes != "chunk":
                            hashes = "block" if i % 2 else "placeholder"
                        if chunks > first_chunk and (first_chunk + 1) * size > first:
                            at, length = first_chunk * size, (chunks - first_chunk) * size
                            events.setdefault(i, []).append(cpu(kind == 2, at, length, hashes, origin, size))
            router.publish_kv_events(events)
            for prompt in ([(1, 0, 64)], [(1, 0, 22), (2, 22, 64)], [(1, 0, 22), (2, 22, 41), (3, 41, 64)]):
                share = decide(router, prompt)[1]
                assert share is not None
                believed += share
        assert router.stats()["beliefs_unknown"] == 0 and router.stats()["skipped_blocks"] > 0
        assert router._index is not None
        said = router._deployment.log.fallbacks
        # the router's logger says the first hundred equal lines of a second and then every hundredth
        assert set(said) == {ORPHAN} and min(100, router._index.orphans) <= said[ORPHAN] <= router._index.orphans
    assert believed > 5


def test_grains_that_do_not_fit_are_refused() -> None:
    check_tier_grain(16, 4)
    check_tier_grain(4, 16)
    with pytest.raises(InputError, match=r"router\.block_tokens"):
        check_tier_grain(16, 6)
