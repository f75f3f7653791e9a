"""KV-cache events of one engine, and of tiers below it, as runs of blocks.

They become vLLM's wire events only where somebody reads them.

A block is (origin, pos): the call that first brought its content and the index of the block in the prompt of that call.
Chained identity: the block's content includes everything before it, as vLLM's block hash does.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Stored(msgspec.Struct):
    """Blocks start .. start+count-1 of `origin` entered the prefix cache; `parent` is the block before (None: root)."""

    t_ns: int
    origin: int
    start: int
    count: int
    parent: tuple[int, int] | None


class Removed(msgspec.Struct):
    """Blocks start .. start+count-1 of `origin` were evicted, highest position first (one vLLM event per block)."""

    t_ns: int
    origin: int
    start: int
    count: int


class Cleared(msgspec.Struct):
    """The whole prefix cache was reset."""

    t_ns: int


class TierEvent(msgspec.Struct):
    """KV of blocks start .. start+count-1 of `origin` entered (`stored`) or left a tier below the GPU.

    A tier has hashes of its own grain, `hash_blocks` engine blocks each, of which the first may hold blocks of what the
    origin continues. `hashes` says what goes on the wire: "chunk" (LMCache: one hash of its own per chunk), "block"
    (vLLM's OffloadingConnector with self_describing_kv_events: the engine's hash of each block) or "placeholder" (the
    same without: the engine's hash of the chunk's last block, no tokens).
    """

    t_ns: int
    medium: str
    """As it stands on the wire."""
    stored: bool
    origin: int
    start: int
    count: int
    hashes: Literal["chunk", "block", "placeholder"] = "chunk"
    hash_blocks: int = 1
    rank: int | None = None
    """The engine of the node that says so; None: every one."""


KvEvent = Stored | Removed | Cleared | TierEvent
