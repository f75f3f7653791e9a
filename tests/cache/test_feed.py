"""Events of tiers leave an engine with its next step."""

from __future__ import annotations

from typing import Any

from fake_workers.engine.blocks import BlockPool
from fake_workers.engine.events import KvEvent, Stored, TierEvent
from harness.cache.feed import TierFeed
from harness.router.base import Endpoint


class Tier:
    """Says what it is told to say."""

    chunk_blocks = 4
    keep_events = False

    def __init__(self) -> None:
        self.events: list[TierEvent] = []
        self.chunks: list[bool] = []

    def take_events(self) -> list[TierEvent]:
        events, self.events = self.events, []
        return events

    def held_chunks(self, rank: int, runs: list[tuple[int, int, int]]) -> list[bool]:
        return self.chunks


def feed(nodes: int = 2, ranks: int = 2) -> tuple[Any, list[Tier]]:
    tiers = [Tier() for _ in range(nodes)]
    groups = [[Endpoint(i, f"w{i}", "127.0.0.1", 1, i // ranks)] for i in range(nodes * ranks)]
    return TierFeed(tiers, groups), tiers  # type: ignore[arg-type]


def told(t_ns: int, rank: int | None = None) -> TierEvent:
    return TierEvent(t_ns, "CPU", True, 1, 0, 4, rank=rank)


def test_an_idle_engine_keeps_what_it_hears() -> None:
    events, tiers = feed()
    assert tiers[0].keep_events, "somebody takes them now"
    tiers[1].events = [told(10), told(20)]
    events.collect()
    assert events.merge(0, [], None) == [] == events.merge(1, [], None), "another node's"
    assert events.merge(2, [], 15) == [told(10)] and events.waits(2)
    assert events.merge(3, [], 5) == [] and events.waits(3)
    assert events.merge(2, [], 20) == [told(20)] and not events.waits(2)
    assert events.merge(3, [], None) == [told(10), told(20)]


def test_a_tier_of_one_engine_is_that_engines() -> None:
    events, tiers = feed()
    tiers[0].events = [told(10, rank=1)]
    events.collect()
    assert events.merge(0, [], None) == [] and events.merge(1, [], None) == [told(10, rank=1)]


def test_engines_of_a_replica_on_two_nodes_have_their_tiers_with_the_first() -> None:
    tiers = [Tier(), Tier()]
    replica = [Endpoint(i, f"w{i}", "127.0.0.1", 1, i // 2) for i in range(4)]
    events = TierFeed(tiers, [replica])  # type: ignore[arg-type]
    tiers[0].events = [told(10, rank=3)]
    events.collect()
    assert events.merge(1, [], None) == [] and events.merge(3, [], None) == [told(10, rank=3)]
    tiers[0].chunks = [True]
    assert events.held_blocks(3, BlockPool(8), [(1, 0, 5)]) == 4


def test_events_are_merged_by_time_the_engines_first() -> None:
    events, tiers = feed()
    tiers[0].events = [told(10), told(20)]
    events.collect()
    engine: list[KvEvent] = [Stored(10, 7, 0, 1, None), Stored(15, 7, 1, 1, (7, 0)), Stored(30, 7, 2, 1, (7, 1))]
    merged = events.merge(0, engine, 30)
    assert [(type(event).__name__, event.t_ns) for event in merged] == [
        ("Stored", 10),
        ("TierEvent", 10),
        ("Stored", 15),
        ("TierEvent", 20),
        ("Stored", 30),
    ]


def test_held_goes_from_gpu_to_tier_and_back() -> None:
    events, tiers = feed()
    pool = BlockPool(40)
    pool.take(7)
    pool.insert(1, 0, 3)
    pool.insert(1, 8, 12)
    tiers[0].chunks = [False, False, False, False]
    assert events.held_blocks(0, pool, [(1, 0, 16)]) == 3
    tiers[0].chunks = [True, True, False, False]
    assert events.held_blocks(0, pool, [(1, 0, 16)]) == 12
    tiers[0].chunks = [False, True, True, True]
    assert events.held_blocks(0, pool, [(1, 0, 16)]) == 3
    assert events.held_blocks(0, pool, [(1, 0, 2)]) == 2 and events.held_blocks(0, pool, []) == 0
