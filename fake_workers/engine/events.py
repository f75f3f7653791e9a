"""KV-cache events of one engine as runs of blocks; they become vLLM's wire events only where somebody reads them.

A block is (origin, pos): the call that first brought its content and the index of the block in the prompt of that call.
Chained identity: the block's content includes everything before it, as vLLM's block hash does.
"""

from __future__ import annotations

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


KvEvent = Stored | Removed | Cleared
