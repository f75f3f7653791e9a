"""Router blocks that are larger than engine blocks (an approximation that the experiment may ask for).

The router's cost per decision grows with the blocks of a prompt (in v0.7.1 with their square), and agentic
prompts have thousands. With a factor g, router block j of a prompt stands for engine blocks g*j .. g*j+g-1
and counts as held where the last of them is. That is exact as long as an engine evicts a prefix from its
tail, as vLLM does; what is lost is the remainder of a match beyond a whole router block.

A block is (origin, pos) and identifies everything before it, so a router block is named by its last engine
block's origin. A run (origin, start, end) of engine blocks becomes (origin, start // g, end // g).
"""

from __future__ import annotations

from fake_workers.engine.events import Cleared, KvEvent, Removed, Stored, TierEvent
from harness.router.tokens import Runs


class Granularity:
    """Translates prompts and KV events from engine blocks into router blocks."""

    def __init__(self, factor: int, tiers: bool = False) -> None:
        """`tiers`: events of tiers will come, whose chunks have to be resolved to the origins of their blocks."""
        self.factor = factor
        self._tiers = tiers
        self._begins: dict[int, tuple[int, int]] = {}
        """Of each origin: where its own blocks begin, and the origin of the block before them (-1: none)."""

    def prompt(self, runs: Runs) -> Runs:
        """The prompt in router blocks."""
        g = self.factor
        if g > 1 or self._tiers:
            before = -1
            for origin, start, _ in runs:
                self._begins.setdefault(origin, (start, before))
                before = origin
        if g == 1:
            return runs
        return [(o, start // g, end // g) for o, start, end in runs if start // g < end // g]

    def events(self, batch: list[KvEvent]) -> list[KvEvent]:
        """The events in router blocks; those that complete or break none are left out, those of tiers
        are passed on (`tier_events`).
        """
        if self.factor == 1 and not self._tiers:
            return batch
        return [event for old in batch if (event := self._event(old)) is not None]

    def _event(self, event: KvEvent) -> KvEvent | None:
        if isinstance(event, Cleared | TierEvent):
            return event
        g = self.factor
        if isinstance(event, Stored):
            # A call that brings no block of its own is not in its prompt's runs, but its output fills blocks.
            self._begins.setdefault(event.origin, (event.start, event.parent[0] if event.parent else -1))
        start, end = event.start // g, (event.start + event.count) // g
        if start >= end:
            return None
        if isinstance(event, Removed):
            return Removed(event.t_ns, event.origin, start, end - start)
        parent = None if start == 0 else (self.owner(event.origin, start * g - 1), start - 1)
        return Stored(event.t_ns, event.origin, start, end - start, parent)

    def begin(self, origin: int) -> tuple[int, int]:
        """Where the origin's own content begins, in engine blocks, and the origin of the block before (-1: none)."""
        return self._begins[origin]

    def owner(self, origin: int, position: int) -> int:
        """The origin of the block at `position` in what precedes, or is, the origin's own content."""
        start, before = self._begins[origin]
        while position < start:
            origin = before
            start, before = self._begins[origin]
        return origin
