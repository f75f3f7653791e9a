"""Router blocks that are several engine blocks long, so that a decision costs the router less.

A prompt of 219,000 tokens is 3,400 blocks of 64 tokens; the router's work per decision grows with their number (in
v0.7.1 with its square: it writes every matched block into a debug line, whether that is printed or not). Merging k
engine blocks into one router block loses at most k-1 engine blocks of a match: 192 tokens with 64-token engine blocks
and 256-token router blocks.

A router block is stored when its last engine block is, and removed when that is: an engine frees a prompt tail first
and never evicts a block before what follows it, so the last engine block of a group is the first to go.
"""

from __future__ import annotations

from typing import Any

from fake_workers.engine.events import KvEvent, Removed, Stored
from fake_workers.engine.gauges import Gauges
from harness.router.base import Decision, RouteRequest, Router


class CoarseRouter:
    """A router that sees `ratio` engine blocks as one. Everything else passes through."""

    def __init__(self, inner: Router, ratio: int) -> None:
        if ratio < 2:
            raise ValueError("a ratio below 2 needs no merging")
        self.inner = inner
        self.blocks_per_router_block = ratio
        self._start: dict[int, int] = {}
        self._before: dict[int, int] = {}

    @property
    def reads_kv_events(self) -> bool:
        """As the inner router."""
        return self.inner.reads_kv_events

    @property
    def reads_gauges(self) -> bool:
        """As the inner router."""
        return self.inner.reads_gauges

    def start(self) -> None:
        """As the inner router."""
        self.inner.start()

    def push_gauges(self, updates: dict[int, Gauges]) -> None:
        """As the inner router."""
        self.inner.push_gauges(updates)

    def publish_kv_events(self, events: dict[int, list[KvEvent]]) -> None:
        """Events of whole router blocks only."""
        coarse = {}
        for endpoint, news in events.items():
            merged = [event for fine in news if (event := self._merged(fine)) is not None]
            if merged:
                coarse[endpoint] = merged
        if coarse:
            self.inner.publish_kv_events(coarse)

    def decide(self, request: RouteRequest) -> Decision:
        """The prompt in whole router blocks."""
        before, end = -1, 0
        for origin, start, end in request.runs:
            self._note(origin, start, before)
            before = origin
        self._note(request.origin, end, before)
        request.runs = self._merged_runs(request.runs)
        return self.inner.decide(request)

    def first_token(self, request_id: str) -> dict[str, str]:
        """As the inner router."""
        return self.inner.first_token(request_id)

    def finish(self, request_id: str, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, str]:
        """As the inner router."""
        return self.inner.finish(request_id, prompt_tokens, cached_tokens, output_tokens)

    def abort(self, request_id: str) -> None:
        """As the inner router."""
        self.inner.abort(request_id)

    def identity(self) -> dict[str, Any]:
        """The inner router's, with the merging added to what the harness added."""
        identity = self.inner.identity()
        note = f"{self.blocks_per_router_block} engine blocks are one block to the router"
        return {**identity, "added": [*identity.get("added", []), note]}

    def stats(self) -> dict[str, Any]:
        """As the inner router."""
        return self.inner.stats()

    def stop(self) -> None:
        """As the inner router."""
        self.inner.stop()

    def _note(self, origin: int, start: int, before: int) -> None:
        """An origin's own blocks begin at `start`, after a block of `before`."""
        if origin not in self._start:
            self._start[origin], self._before[origin] = start, before

    def _merged_runs(self, runs: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """A router block is named after the origin of its last engine block."""
        ratio = self.blocks_per_router_block
        return [(o, a // ratio, b // ratio) for o, a, b in runs if b // ratio > a // ratio]

    def _merged(self, event: KvEvent) -> KvEvent | None:
        if not isinstance(event, Stored | Removed):
            return event
        ratio = self.blocks_per_router_block
        first, last = event.start // ratio, (event.start + event.count) // ratio
        if last == first:
            return None
        if isinstance(event, Removed):
            return Removed(event.t_ns, event.origin, first, last - first)
        return Stored(event.t_ns, event.origin, first, last - first, self._parent(event, first))

    def _parent(self, event: Stored, first: int) -> tuple[int, int] | None:
        """The router block before `first` on the event's chain of content."""
        if first == 0:
            return None
        last_block = first * self.blocks_per_router_block - 1
        origin = event.origin
        while last_block < self._start[origin]:
            origin = self._before[origin]
        return origin, first - 1
