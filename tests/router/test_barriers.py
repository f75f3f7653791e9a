"""When a barrier asks the router at all (test_llmd shows with the real one that what it waits for is enough)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from fake_workers.api import kv_events as wire
from harness.errors import ComponentError
from harness.router.barriers import _MOST_ON_THEIR_WAY, KvEventBarrier
from harness.router.http_get import HttpGet
from harness.router.kv_events import KvEventPublisher


class Router:
    """Publisher and metrics page of a router that takes one more block in at every look."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.admitted = self.looks = self.due = 0

    def send(self, index: int, events: Sequence[wire.WireEvent], ts: float = 0.0) -> None:
        self.sent.append((index, events))

    def read(self, path: str) -> bytes:
        self.looks += 1
        self.admitted += self.admitted < self.due
        return b"# HELP\nkvcache_index_admissions_total %d\n" % self.admitted


@pytest.fixture
def router() -> Router:
    return Router()


@pytest.fixture
def barrier(router: Router) -> KvEventBarrier:
    made = KvEventBarrier(cast(KvEventPublisher, router), cast(HttpGet, router), 1)
    router.looks = 0
    return made


def _publish(barrier: KvEventBarrier, router: Router, blocks: int, about: set[int] | None) -> None:
    barrier.begin(blocks, about)
    router.due += blocks + 1


def test_events_about_other_blocks_are_not_waited_for(barrier: KvEventBarrier, router: Router) -> None:
    _publish(barrier, router, 3, {7, 8})
    barrier.wait([1, 2])
    assert router.looks == 0
    barrier.wait([1, 8])
    assert router.looks == router.due == 4


def test_they_are_not_forgotten_either(barrier: KvEventBarrier, router: Router) -> None:
    """A later batch about other blocks leaves the first one to be waited for; what has been waited for is over."""
    _publish(barrier, router, 2, {7})
    barrier.wait([1])
    _publish(barrier, router, 1, {1})
    barrier.wait([2])
    assert router.looks == 0
    barrier.wait([7])
    assert router.looks == router.due == 5
    barrier.wait([7])
    _publish(barrier, router, 1, {3})
    barrier.wait([7])
    assert router.looks == 5


@pytest.mark.parametrize(("about", "asked"), [(None, [1]), ({7}, None)])
def test_any_blocks_and_all_events_are(
    barrier: KvEventBarrier, router: Router, about: set[int] | None, asked: list[int] | None
) -> None:
    _publish(barrier, router, 1, about)
    _publish(barrier, router, 1, {9})
    barrier.wait(asked)
    assert router.looks == router.due == 4


def test_the_router_never_lags_far_behind(barrier: KvEventBarrier, router: Router) -> None:
    for _ in range(_MOST_ON_THEIR_WAY):
        _publish(barrier, router, 0, {7})
        barrier.wait([1])
    assert router.looks == 0
    _publish(barrier, router, 0, {7})
    barrier.wait([1])
    assert router.looks == router.due == _MOST_ON_THEIR_WAY + 1


def test_more_blocks_than_were_published_are_an_error(barrier: KvEventBarrier, router: Router) -> None:
    _publish(barrier, router, 0, {7})
    router.admitted = router.due = 5
    with pytest.raises(ComponentError, match="took in 4 KV blocks that were not published"):
        barrier.wait([7])
