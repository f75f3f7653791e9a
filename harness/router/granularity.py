"""Router blocks that are larger than engine blocks (an approximation that the experiment may ask for).

The router's cost per decision grows with the blocks of a prompt (in v0.7.1 with their square), and agentic
prompts have thousands. With a factor g, router block j of a prompt stands for engine blocks g*j .. g*j+g-1
and counts as held where the last of them is. That is exact as long as an engine evicts a prefix from its
tail, as vLLM does; what is lost is the remainder of a match beyond a whole router block.

A block is (origin, pos) and identifies everything before it, so a router block is named by its last engine
block's origin. A run (origin, start, end) of engine blocks becomes (origin, start // g, end // g).
"""

from __future__ import annotations

from fake_workers.engine.events import Cleared, KvEvent, Removed, Stored
from harness.router.tokens import Runs


class Granularity:
    """Translates prompts and KV events from engine blocks into router blocks."""

    def __init__(self, factor: int) -> None:
        self.factor = factor
        self._chains: dict[int, Runs] = {}

    def prompt(self, runs: Runs) -> Runs:
        """The prompt in router blocks."""
        g = self.factor
        if g == 1:
            return runs
        if runs:
            self._chains[runs[-1][0]] = runs
        return [(o, start // g, end // g) for o, start, end in runs if start // g < end // g]

    def events(self, batch: list[KvEvent]) -> list[KvEvent]:
        """The events in router blocks; those that complete or break none are left out."""
        if self.factor == 1:
            return batch
        return [event for old in batch if (event := self._event(old)) is not None]

    def _event(self, event: KvEvent) -> KvEvent | None:
        if isinstance(event, Cleared):
            return event
        g = self.factor
        if isinstance(event, Stored):
            self._learn(event)
        start, end = event.start // g, (event.start + event.count) // g
        if start >= end:
            return None
        if isinstance(event, Removed):
            return Removed(event.t_ns, event.origin, start, end - start)
        parent = None if start == 0 else (self._owner(event.origin, start * g - 1), start - 1)
        return Stored(event.t_ns, event.origin, start, end - start, parent)

    def _learn(self, event: Stored) -> None:
        """Who owns which position before this origin's own blocks, if no request has told yet."""
        if event.origin in self._chains:
            return
        before: Runs = []
        if event.parent is not None:
            origin, position = event.parent
            for o, start, end in self._chains.get(origin, [(origin, 0, position + 1)]):
                if start <= position:
                    before.append((o, start, min(end, position + 1)))
            if before and before[-1][2] <= position:
                before.append((origin, before[-1][2], position + 1))
        self._chains[event.origin] = [*before, (event.origin, event.start, event.start + event.count)]

    def _owner(self, origin: int, position: int) -> int:
        for o, start, end in self._chains.get(origin, ()):
            if start <= position < end:
                return o
        return origin
