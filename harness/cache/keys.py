"""LMCache's object keys, made once per chunk. Importing this module imports lmcache."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from lmcache.v1.distributed.api import ObjectKey

KV_RANK = 0x01000100
"""World size 1, rank 0, as LMCache packs it: a replica's KV is one object per chunk, however many GPUs hold it."""

_INDEX_BITS = 32


class ChunkKey(ObjectKey, int):  # type: ignore[misc]
    """An ObjectKey that is also the number of its chunk: (origin + 1) * 2**32 + index.

    LMCache hashes and compares keys some twenty times per chunk and request. The dataclass does that field by field in
    Python; a whole number does it at once, and always to the same value.
    """

    __hash__ = int.__hash__
    __eq__ = int.__eq__
    __ne__ = int.__ne__

    @property
    def origin(self) -> int:
        """Which call or shared prefix brought the chunk's last block."""
        return (int(self) >> _INDEX_BITS) - 1

    @property
    def index(self) -> int:
        """The chunk's place in the prompt."""
        return int(self) & ((1 << _INDEX_BITS) - 1)

    @property
    def chunk_hash(self) -> bytes:
        """16 bytes, as LMCache's token hasher would give."""
        return int(self).to_bytes(16, "big")

    def __repr__(self) -> str:
        return f"ChunkKey({self.origin}, {self.index})"


@cache
def key_maker(model_name: str) -> Callable[[int, int], Any]:
    """Makes keys of one model: (origin, chunk index) -> key."""
    ObjectKey(b"", model_name, KV_RANK)  # raises on a name that LMCache refuses
    fields = {"model_name": model_name, "kv_rank": KV_RANK, "object_group_id": 0, "cache_salt": "", "__slots__": ()}
    kind: Any = type("ChunkKey", (ChunkKey,), fields)
    new = int.__new__

    def make(origin: int, index: int) -> Any:
        return new(kind, ((origin + 1) << _INDEX_BITS) | index)

    return make
