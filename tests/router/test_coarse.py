"""Merged router blocks: the inner router sees exactly the whole groups, with parents that it has been told of."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_workers.engine.events import Cleared, Removed, Stored
from fake_workers.engine.gauges import Gauges
from fake_workers.engine.node import Node
from fake_workers.engine.request import EngineRequest
from fake_workers.engine.scheduler import SchedulerConfig
from harness.router.base import Decision, RouteRequest
from harness.router.coarse import CoarseRouter
from tests.harness.simple_price import SimplePrice


class Inner:
    """Keeps what it is told; refuses a block whose parent it does not know, as the real router's index does."""

    reads_kv_events = True
    reads_gauges = True

    def __init__(self) -> None:
        self.known: dict[tuple[int, int], int] = {}
        self.requests: list[RouteRequest] = []

    def publish_kv_events(self, events: dict[int, list[Any]]) -> None:
        for event in events.get(0, []):
            if isinstance(event, Stored):
                assert event.parent is None or event.parent in self.known, f"{event}: unknown parent"
                for pos in range(event.start, event.start + event.count):
                    self.known[event.origin, pos] = self.known.get((event.origin, pos), 0) + 1
            elif isinstance(event, Removed):
                for pos in range(event.start, event.start + event.count):
                    self.known[event.origin, pos] -= 1
                    if not self.known[event.origin, pos]:
                        del self.known[event.origin, pos]

    def decide(self, request: RouteRequest) -> Decision:
        self.requests.append(request)
        return Decision(0)

    def push_gauges(self, updates: dict[int, Gauges]) -> None: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...
    def first_token(self, request_id: str) -> dict[str, str]:
        return {}

    def finish(self, request_id: str, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, str]:
        return {}

    def abort(self, request_id: str) -> None: ...
    def identity(self) -> dict[str, Any]:
        return {"added": ["x"]}

    def stats(self) -> dict[str, Any]:
        return {}


def _request(runs: list[tuple[int, int, int]], origin: int) -> RouteRequest:
    return RouteRequest("r", "s", "m", runs, 0, 0, origin=origin)


def test_decode_blocks_of_a_call_without_blocks_of_its_own_follow_its_prefix() -> None:
    inner = Inner()
    router = CoarseRouter(inner, 4)
    router.decide(_request([(1, 0, 10)], 1))
    router.publish_kv_events({0: [Stored(0, 1, 0, 10, None)]})
    router.decide(_request([(1, 0, 10)], 2))
    router.publish_kv_events({0: [Stored(0, 2, 10, 2, (1, 9)), Stored(0, 2, 12, 4, (2, 11))]})
    assert set(inner.known) == {(1, 0), (1, 1), (2, 2), (2, 3)}


def test_runs_are_named_after_the_last_block_of_each_group() -> None:
    inner = Inner()
    CoarseRouter(inner, 4).decide(_request([(1, 0, 6), (2, 6, 9), (3, 9, 10)], 3))
    assert inner.requests[0].runs == [(1, 0, 1), (2, 1, 2)]


def test_clearing_passes_and_partial_groups_do_not() -> None:
    inner = Inner()
    router = CoarseRouter(inner, 4)
    router.decide(_request([(1, 0, 3)], 1))
    router.publish_kv_events({0: [Stored(0, 1, 0, 3, None), Cleared(0)]})
    assert inner.known == {}


def test_a_ratio_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="no merging"):
        CoarseRouter(Inner(), 1)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_router_holds_the_whole_groups_that_the_engine_holds(data: st.DataObject) -> None:
    """After every batch of events: router blocks known = groups whose engine blocks are all in the cache."""
    ratio = data.draw(st.sampled_from([2, 3, 4]))
    inner = Inner()
    router = CoarseRouter(inner, ratio)
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
        router.decide(_request(list(runs), origin))
        node.submit(0, EngineRequest(str(origin), origin, runs, tokens, outputs, t))
        t += data.draw(st.sampled_from([0, 3_000, 200_000]))
        node.advance(t)
        router.publish_kv_events({0: node.take_events(0)})
    node.advance(t + 10**9)
    router.publish_kv_events({0: node.take_events(0)})
    held = {(o, p) for o, a, b in node.ranks[0].pool.resident() for p in range(a, b)}
    last_blocks = {(o, p // ratio) for o, p in held if (p + 1) % ratio == 0}
    assert set(inner.known) == last_blocks
