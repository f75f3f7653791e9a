"""LMCache's object keys, made once per chunk. Importing this module imports lmcache."""

from __future__ import annotations

from functools import cache
from typing import Any

from lmcache.v1.distributed.api import ObjectKey

KV_RANK = 0x01000100
"""World size 1, rank 0, as LMCache packs it: a replica's KV is one object per chunk, however many GPUs hold it."""


@cache
def key_class(model_name: str) -> type[Any]:
    """A subclass of ObjectKey whose hash is computed once; equality is that of the chunk hash.

    LMCache hashes and compares keys several times per operation, and the dataclass's own methods do so field by field.
    """

    class ChunkKey(ObjectKey):
        """An ObjectKey of one model and rank."""

        def __init__(self, origin: int, index: int) -> None:
            # ObjectKey is frozen; what all keys of the class share are the class's attributes
            own = self.__dict__
            own["chunk_hash"] = origin.to_bytes(8, "big") + index.to_bytes(8, "big")
            own["_hash"] = hash((origin, index))
            own["origin"] = origin
            own["index"] = index

        def __hash__(self) -> int:
            return self.__dict__["_hash"]  # type: ignore[no-any-return]

        def __eq__(self, other: object) -> bool:
            return self is other or (isinstance(other, ObjectKey) and self.chunk_hash == other.chunk_hash)

    for name, value in (
        ("model_name", model_name),
        ("kv_rank", KV_RANK),
        ("object_group_id", 0),
        ("cache_salt", ""),
    ):
        setattr(ChunkKey, name, value)
    ObjectKey(b"", model_name, KV_RANK)  # raises on a name that LMCache refuses
    return ChunkKey
