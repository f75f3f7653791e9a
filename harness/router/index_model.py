"""What the router's index holds after the KV events that it was sent, with tiers: a model, event by event.

The index maps request keys (here: router blocks) to entries (endpoint, tier), and an engine's or a tier's hashes to the
request keys they were stored with. It skips a BlockStored whose parent hash it does not know, adds a tier to what it
knows for one without tokens, and forgets a hash when its last entry goes. v0.10.0 counts references per endpoint, tier
and hash, and v0.7.1 does not. The model says how many blocks an event admits (what the barrier waits for), how much of
a prompt the router takes an endpoint to hold, and how it weighs that. Places: llm-d-kv-cache v0.9.0
pkg/kvevents/pool.go `processEventBatch`, pkg/kvcache/kvblock/in_memory.go, pkg/kvcache/kvblock_scorer.go; v0.10.0
has the same in its own tree, with pkg/kvevents/event_dedup_filter.go. Not modelled: more entries per block than
podCacheSize.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fake_workers.engine.events import Cleared, KvEvent, Removed, Stored
from harness.router.tier_events import RouterTierEvent
from harness.router.tokens import Runs

DEFAULT_WEIGHTS = {"gpu": 1.0, "cpu": 0.8}
"""kvCacheBackendConfigs where a configuration has none; a tier that is not named weighs 1."""
_GPU = "gpu"
_BLOCK, _CHUNK = "block", "chunk"


class _Rows:
    """A growing row of numbers per origin; what was never written is 0."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._rows: dict[int, NDArray[Any]] = {}

    def part(self, origin: int, start: int, end: int) -> NDArray[Any]:
        """A view of positions start .. end-1."""
        row = self._rows.get(origin)
        if row is None or len(row) < end:
            grown = np.zeros(max(end, 2 * len(row) if row is not None else end), dtype=self._kind)
            if row is not None:
                grown[: len(row)] = row
            self._rows[origin] = row = grown
        return row[start:end]

    def items(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """Every row."""
        yield from self._rows.items()


class IndexModel:
    """The index of one router. Endpoints by number; tiers by their lower-cased medium."""

    def __init__(self, weights: Mapping[str, float] | None, counts_references: bool) -> None:
        self._weights = DEFAULT_WEIGHTS if weights is None else weights
        self._counts_references = counts_references
        self._entries: dict[int, dict[str, _Rows]] = defaultdict(lambda: defaultdict(lambda: _Rows(np.bool_)))
        self._references: dict[tuple[int, str, str], _Rows] = defaultdict(lambda: _Rows(np.int32))
        self._holders = _Rows(np.int32)
        """Entries of a block, over endpoints and tiers."""
        self._known = {_BLOCK: _Rows(np.bool_), _CHUNK: _Rows(np.bool_)}
        """Hashes that the index can resolve, the engines' and the tiers' own."""
        self._chunks: dict[tuple[int, int], Runs] = {}
        """Blocks of a chunk that has more than one."""
        self.skipped = 0
        """Blocks in events that the index did not take in: their parent, or they themselves, were not known."""
        self.orphans = 0
        """Events of which it says so in its log: the parent was not known."""

    # ------------------------------------------------------------------ events

    def pieces(self, event: KvEvent | RouterTierEvent) -> list[KvEvent | RouterTierEvent]:
        """The event as it may go on the wire: placeholders are kept apart where the index knows some of them."""
        if not isinstance(event, RouterTierEvent) or event.hashes != "placeholder" or not event.stored:
            return [event]
        out: list[KvEvent | RouterTierEvent] = []
        for origin, start, end in event.labels:
            known = self._known[_BLOCK].part(origin, start, end)
            cuts = [0, *(np.flatnonzero(known[1:] != known[:-1]) + 1).tolist(), end - start]
            for a, b in itertools.pairwise(cuts):
                run = [(origin, start + a, start + b)]
                out.append(replace(event, labels=run, blocks=run))
        return out

    def apply(self, index: int, event: KvEvent | RouterTierEvent) -> int:
        """One event of endpoint `index`; returns how many blocks the index admits."""
        if isinstance(event, Stored):
            run = (event.origin, event.start, event.start + event.count)
            return self._store(index, _GPU, _BLOCK, [run], [run], event.parent, 1)
        if isinstance(event, Removed):
            self._remove(index, _GPU, _BLOCK, [(event.origin, event.start, event.start + event.count)], 1)
            return 0
        if isinstance(event, Cleared):
            self._clear(index)
            return 0
        assert isinstance(event, RouterTierEvent)
        tier, space = event.medium.lower(), _CHUNK if event.hashes == "chunk" else _BLOCK
        if not event.stored:
            self._remove(index, tier, space, event.labels, event.label_blocks)
            return 0
        if event.hashes == "placeholder":
            return self._add_tier(index, tier, event.labels)
        return self._store(index, tier, space, event.labels, event.blocks, event.parent, event.label_blocks)

    def _store(
        self,
        index: int,
        tier: str,
        space: str,
        labels: Runs,
        blocks: Runs,
        parent: tuple[int, int] | None,
        label_blocks: int,
    ) -> int:
        known = self._known[space]
        count = sum(end - start for _, start, end in blocks)
        if parent is not None and not known.part(parent[0], parent[1], parent[1] + 1)[0]:
            self.skipped += count
            self.orphans += 1
            return 0
        for origin, start, end in labels:
            known.part(origin, start, end)[:] = True
            if self._counts_references:
                self._references[index, tier, space].part(origin, start, end)[:] += 1
        if label_blocks > 1:
            self._note_chunks(labels, blocks, label_blocks)
        for run in blocks:
            self._admit(index, tier, *run)
        return count

    def _note_chunks(self, labels: Runs, blocks: Runs, label_blocks: int) -> None:
        each = [(origin, at) for origin, start, end in blocks for at in range(start, end)]
        place = 0
        for origin, start, end in labels:
            for chunk in range(start, end):
                own = each[place : place + label_blocks]
                self._chunks[origin, chunk] = [(o, at, at + 1) for o, at in own]
                place += label_blocks

    def _add_tier(self, index: int, tier: str, labels: Runs) -> int:
        admitted = 0
        for origin, start, end in labels:
            known = self._known[_BLOCK].part(origin, start, end)
            if not known.all():
                assert not known.any(), "placeholders of known and unknown blocks in one event"
                self.skipped += end - start
                continue
            if self._counts_references:
                self._references[index, tier, _BLOCK].part(origin, start, end)[:] += 1
            self._admit(index, tier, origin, start, end)
            admitted += end - start
        return admitted

    def _admit(self, index: int, tier: str, origin: int, start: int, end: int) -> None:
        entries = self._entries[index][tier].part(origin, start, end)
        self._holders.part(origin, start, end)[:] += ~entries
        entries[:] = True

    def _remove(self, index: int, tier: str, space: str, labels: Runs, label_blocks: int) -> None:
        known = self._known[space]
        for origin, start, end in labels:
            gone = known.part(origin, start, end).copy()
            if self._counts_references:
                references = self._references[index, tier, space].part(origin, start, end)
                gone &= references <= 1
                references[:] = np.maximum(references - 1, 0)
            if label_blocks > 1:
                for chunk in np.flatnonzero(gone).tolist():
                    self._remove_chunk(index, tier, origin, start + chunk)
                continue
            entries = self._entries[index][tier].part(origin, start, end)
            holders = self._holders.part(origin, start, end)
            holders -= entries & gone
            entries &= ~gone
            known.part(origin, start, end)[gone & (holders == 0)] = False

    def _remove_chunk(self, index: int, tier: str, origin: int, chunk: int) -> None:
        blocks = self._chunks[origin, chunk]
        left = 0
        for run in blocks:
            entry, holders = self._entries[index][tier].part(*run), self._holders.part(*run)
            holders -= entry
            entry[:] = False
            left += int(holders[0])
        if not left:
            self._known[_CHUNK].part(origin, chunk, chunk + 1)[:] = False
            del self._chunks[origin, chunk]

    def _clear(self, index: int) -> None:
        """All tiers of the endpoint; hashes stay resolvable."""
        for rows in self._entries.pop(index, {}).values():
            for origin, row in rows.items():
                self._holders.part(origin, 0, len(row))[:] -= row
        for key in [key for key in self._references if key[0] == index]:
            del self._references[key]

    # ------------------------------------------------------------------ what the router makes of it

    def matched(self, index: int, runs: Runs) -> int:
        """Leading blocks of the prompt that the endpoint is believed to hold, in whatever tier."""
        return int((self._best(index, runs) > -1).sum())

    def weighted(self, index: int, runs: Runs) -> int:
        """The same with each block at the weight of its best tier, as a whole number: what v0.10.0 scores."""
        best = self._best(index, runs)
        return int(np.add.accumulate(best)[-1]) if len(best) else 0

    def _best(self, index: int, runs: Runs) -> NDArray[np.float64]:
        """Weight of each leading block, up to the first that is in no tier."""
        parts: list[NDArray[np.float64]] = []
        for origin, start, end in runs:
            best = np.full(end - start, -1.0)
            for tier, rows in self._entries.get(index, {}).items():
                held = rows.part(origin, start, end)
                best[held] = np.maximum(best[held], self._weights.get(tier, 1.0))
            missing = np.flatnonzero(best < 0)
            if len(missing):
                parts.append(best[: int(missing[0])])
                break
            parts.append(best)
        return np.concatenate(parts) if parts else np.zeros(0)
