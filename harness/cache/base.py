"""What the engine sees of the tiers below it, in the order in which vLLM calls its KV connector.

    lookup      at each admission attempt (get_num_new_matched_tokens); None: ask again, `wake` tells when
    start_load  after the blocks are allocated (update_state_after_alloc)
    save        at the end of each step that computed prompt tokens (wait_for_save)
    preempted   the request lost its blocks and will be admitted anew
    finish      the request ended, or its client went away (request_finished)

All calls are made at the clock's now, in the order in which an engine would make them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from fake_workers.engine.events import TierEvent
from fake_workers.engine.request import EngineRequest
from fake_workers.engine.scheduler import Batch
from harness.bins import LevelBins

NODE_DRAM = "dram"
"""Name of the node's own tier in stats and in tokens by tier; shared tiers have the names that the experiment gives."""

Run = tuple[int, int, int]
"""(origin, start, end) in engine blocks, end exclusive."""


@dataclass(slots=True, eq=False)
class CacheRequest:
    """A request as the tiers see it. `runs` name the prompt's full engine blocks."""

    request_id: str
    rank: int
    """Which engine of the node."""
    runs: list[Run]
    prompt_tokens: int
    source: EngineRequest | None = None
    """The engine's own request, for a connector that looks at more than the prompt."""
    wake: Callable[[], None] = lambda: None
    """Called, at the clock's now, when a lookup that answered None has an answer, once for each such lookup."""


@dataclass(slots=True)
class LoadResult:
    """The end of a load: `tokens` from `first_token` on are in the GPU's blocks; with `failed`, none of them is."""

    first_token: int
    tokens: int
    failed: bool
    bytes: int
    started_ns: int
    """The blocks were there and the load began."""
    ended_ns: int
    by_tier: dict[str, int] = field(default_factory=dict)
    """Tokens by the tier they were found in when the request looked them up."""
    asked_ns: int = 0
    """First lookup."""
    answered_ns: int = 0
    """The prefix was in node DRAM (mp), or known to be somewhere (inproc)."""


@dataclass(slots=True)
class TierStats:
    """Account of one tier. Bytes are modelled bytes (tokens times KV bytes per token)."""

    name: str
    capacity_bytes: int | None
    resident_bytes: int = 0
    peak_bytes: int = 0
    read_bytes: int = 0
    """Left the tier towards the GPU (node DRAM) or towards a node (shared tiers)."""
    written_bytes: int = 0
    """Entered from above: computed and saved."""
    promoted_bytes: int = 0
    """Entered node DRAM from a lower tier."""
    evicted_bytes: int = 0
    evicted_unread_bytes: int = 0
    """Of those evicted or expired: never read since they were written."""
    expired_bytes: int = 0
    """Dropped by the retention window."""
    skipped_bytes: int = 0
    """Not stored because the tier was full."""
    lookups: int = 0
    asked_tokens: int = 0
    hit_tokens: int = 0
    """Served from this tier: the part of a lookup's prefix that it held first."""


class ExternalCache(Protocol):
    """The tiers of one node, shared by its ranks."""

    chunk_tokens: int
    chunk_blocks: int
    """Engine blocks per chunk."""
    chunk_bytes: int
    """Modelled bytes of a chunk in the node's own tier."""
    ends_loads: bool
    """Whether a load whose request is gone goes on to its end; else it is dropped at once."""

    level: LevelBins
    """Chunks that the node's own tier holds, over time."""

    def lookup(self, request: CacheRequest, local_hit_tokens: int) -> int | None:
        """Tokens beyond the local hit that a load would bring; None: not known yet, `wake` will be called."""

    def start_load(
        self,
        request: CacheRequest,
        local_hit_tokens: int,
        external_tokens: int,
        done: Callable[[LoadResult], None],
    ) -> None:
        """The request has its blocks. `done` follows when the tokens are there; with 0 tokens it is not called."""

    def save(self, request: CacheRequest, computed_tokens: int) -> None:
        """KV of the first `computed_tokens` tokens is in the GPU now: store what is a whole new chunk of the prompt."""

    def preempted(self, request: CacheRequest) -> None:
        """Blocks are gone; a running load ends without `done`, and the next lookup is a new one.

        Saves under way go on: vLLM's worker finishes them before the blocks are written again.
        """

    def finish(self, request: CacheRequest, freed: Callable[[], None]) -> bool:
        """The request is over. True: saves still read its blocks, which may go when `freed` is called; False: now."""

    def advance(self) -> None:
        """Bring checks that go by time up to now, so that events and levels are those of now."""

    def forget(self, origin: int) -> None:
        """No prompt will name this origin again (its session is over): its keys need not be kept ready."""

    keep_events: bool
    """Whether somebody takes the events; else they need not be kept."""

    def take_events(self) -> list[TierEvent]:
        """What entered and left node tiers since the last call, oldest first; empty where events are off."""

    def held_chunks(self, rank: int, runs: list[Run]) -> list[bool]:
        """For each whole chunk of a prompt: whether the tier that publishes events would serve it to that engine."""

    def stats(self) -> list[TierStats]:
        """The node's tiers, then shared ones (each reports the same shared account)."""

    def identity(self) -> dict[str, Any]:
        """What ran: package, version, unmodified, config in the package's own names."""

    def close(self) -> None:
        """Give back memory and descriptors; safe to call twice."""


@runtime_checkable
class SteppedCache(ExternalCache, Protocol):
    """Tiers that decide by the engines' schedules what to store."""

    def scheduled(self, rank: int, batch: Batch, members: list[tuple[CacheRequest, EngineRequest]]) -> None:
        """A schedule() has ended; `members` are the batch's requests, in its order."""

    def executed(self, rank: int, batch: Batch) -> None:
        """The batch has been executed: the KV that it computed is in the GPU."""

    def unsettled(self, rank: int) -> bool:
        """Whether the coming schedules matter, though nothing but decodes may happen in them (then no leap)."""
