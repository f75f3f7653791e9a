"""Router blocks of several engine blocks, fed by a real engine: parents are known, and what is known is right."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fake_workers.engine.events import KvEvent, Removed, Stored
from fake_workers.engine.node import Node
from fake_workers.engine.request import EngineRequest
from fake_workers.engine.scheduler import SchedulerConfig
from harness.router.granularity import Granularity
from tests.harness.simple_price import SimplePrice


class Index:
    """Refuses a block whose parent it does not know, as the real router's index does."""

    def __init__(self, units: Granularity) -> None:
        self.units = units
        self.known: dict[tuple[int, int], int] = {}

    def take(self, news: list[KvEvent]) -> None:
        for event in self.units.events(news):
            if isinstance(event, Stored):
                assert event.parent is None or event.parent in self.known, f"{event}: unknown parent"
                for pos in range(event.start, event.start + event.count):
                    self.known[event.origin, pos] = self.known.get((event.origin, pos), 0) + 1
            elif isinstance(event, Removed):
                for pos in range(event.start, event.start + event.count):
                    self.known[event.origin, pos] -= 1
                    if not self.known[event.origin, pos]:
                        del self.known[event.origin, pos]


def test_output_of_a_call_without_blocks_of_its_own_follows_its_prefix() -> None:
    index = Index(Granularity(4))
    index.units.prompt([(1, 0, 10)])
    index.take([Stored(0, 1, 0, 10, None)])
    index.units.prompt([(1, 0, 10)])
    index.take([Stored(0, 2, 10, 2, (1, 9)), Stored(0, 2, 12, 4, (2, 11))])
    assert set(index.known) == {(1, 0), (1, 1), (2, 2), (2, 3)}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_router_holds_the_whole_groups_that_the_engine_holds(data: st.DataObject) -> None:
    """After every batch of events: router blocks known = groups whose engine blocks are all in the cache."""
    ratio = data.draw(st.sampled_from([2, 3, 4]))
    index = Index(Granularity(ratio))
    config = SchedulerConfig(data.draw(st.sampled_from([30, 60])), 4, 16, 4, 100)
    node = Node(SimplePrice(), config, keep_events=True)
    prompts: list[list[tuple[int, int, int]]] = []
    t = 0
    for origin in range(data.draw(st.integers(3, 14))):
        base = data.draw(st.sampled_from(prompts)) if prompts and data.draw(st.booleans()) else []
        keep = data.draw(st.integers(0, base[-1][2] if base else 0))
        runs = [(o, a, min(b, keep)) for o, a, b in base if a < keep]
        new = data.draw(st.integers(0 if keep else 1, 6))
        if new:
            runs.append((origin, keep, keep + new))
        prompts.append(runs)
        tokens = (keep + new) * 4 + data.draw(st.integers(0, 3))
        outputs = data.draw(st.integers(1, 30))
        if tokens + outputs > 100:
            continue
        index.units.prompt(runs)
        node.submit(0, EngineRequest(str(origin), origin, runs, tokens, outputs, t))
        t += data.draw(st.sampled_from([0, 3_000, 200_000]))
        node.advance(t)
        index.take(node.take_events(0))
    node.advance(t + 10**9)
    index.take(node.take_events(0))
    held = {(o, p) for o, a, b in node.ranks[0].pool.resident() for p in range(a, b)}
    last_blocks = {(o, p // ratio) for o, p in held if (p + 1) % ratio == 0}
    assert set(index.known) == last_blocks
