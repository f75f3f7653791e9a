"""KV events of tiers on their way to the router: each endpoint that can load from a tier says what it holds.

vLLM takes its connector's events with the update of a step, so they leave an engine with its next step: an idle one
keeps what it hears of its node's tier until it works again. While requests of an engine wait for loads it polls, and
events leave at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from fake_workers.engine.blocks import BlockPool, PromptRuns
from fake_workers.engine.events import KvEvent, TierEvent
from harness.cache.base import ExternalCache
from harness.router.base import Endpoint


class TierFeed:
    """Events of all nodes' tiers, by endpoint, until its engine publishes them."""

    def __init__(self, caches: Sequence[ExternalCache], groups: Sequence[Sequence[Endpoint]]) -> None:
        """`caches[k]`: the tiers of node k; its ranks are the endpoints of the groups that begin on it, in order."""
        self._caches = caches
        for cache in caches:
            cache.keep_events = True
        self._members: list[list[int]] = [[] for _ in caches]
        self._place: dict[int, tuple[int, int]] = {}
        for group in groups:
            home = group[0].node
            members = self._members[home]
            for endpoint in group:
                self._place[endpoint.index] = (home, len(members))
                members.append(endpoint.index)
        self._pending: dict[int, list[TierEvent]] = {endpoint: [] for endpoint in self._place}

    def collect(self) -> None:
        """Take over what happened in the tiers up to now."""
        for cache, members in zip(self._caches, self._members, strict=True):
            for event in cache.take_events():
                for endpoint in members if event.rank is None else (members[event.rank],):
                    self._pending[endpoint].append(event)

    def merge(self, endpoint: int, engine: list[KvEvent], until_ns: int | None) -> list[KvEvent]:
        """The engine's events and those of its tiers up to `until_ns` (None: all), in order of time.

        At one time the engine's come first, as in vLLM's update.
        """
        pending = self._pending[endpoint]
        count = len(pending) if until_ns is None else sum(event.t_ns <= until_ns for event in pending)
        if not count:
            return engine
        due: list[KvEvent] = [*engine, *pending[:count]]
        del pending[:count]
        due.sort(key=lambda event: event.t_ns)
        return due

    def waits(self, endpoint: int) -> bool:
        """Whether the endpoint still has to say something."""
        return bool(self._pending[endpoint])

    def held_blocks(self, endpoint: int, pool: BlockPool, prompt: PromptRuns) -> int:
        """Leading engine blocks of the prompt that are in the endpoint's GPU cache or in whole chunks of its tier."""
        node, rank = self._place[endpoint]
        cache = self._caches[node]
        chunks = cache.held_chunks(rank, prompt)
        total = prompt[-1][2] if prompt else 0
        size = cache.chunk_blocks
        at = 0
        while at < total:
            found = at + pool.cached_prefix(_from(prompt, at))
            while found // size < len(chunks) and chunks[found // size]:
                found = (found // size + 1) * size
            if found == at:
                break
            at = found
        return at


def _from(prompt: PromptRuns, start: int) -> PromptRuns:
    """The prompt from block `start` on."""
    return [(origin, max(a, start), b) for origin, a, b in prompt if b > start]
