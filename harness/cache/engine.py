"""LMCache's in-process engine for one replica, on precomputed chunk keys. Importing this module imports lmcache.

One "token" of this engine is one chunk: chunk_size is 1 and a token database gives each chunk key its engine key, so no
prompt is hashed. The in-process engine lives in the engine's worker: each replica has a cache of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.cache_engine import LMCacheEngine
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.token_database import ChunkedTokenDatabase

from harness.cache.l1 import OBJECT_BYTES

NEVER_S = 10**9


class ChunkDatabase(ChunkedTokenDatabase):  # type: ignore[misc]
    """Chunk keys instead of tokens: no hashing, keys made once."""

    def __init__(self, config: Any, metadata: Any) -> None:
        super().__init__(config, metadata)
        self._made: dict[Any, Any] = {}

    def process_tokens(
        self,
        tokens: Any = None,
        hashes: Any = None,
        offsets: Any = None,
        mask: Any = None,
        make_key: bool = True,
        request_configs: Any = None,
    ) -> Iterable[tuple[int, int, Any]]:
        """(place, place + 1, key) of every chunk that the mask asks for."""
        skip = 0 if mask is None else int(mask.numel() - mask.sum().item())
        made = self._made
        for place in range(skip, len(tokens)):
            chunk = tokens[place]
            key = made.get(chunk)
            if key is None:
                key = made[chunk] = self._make_key_by_hash(chunk, None)
            yield place, place + 1, (key if make_key else chunk)

    def engine_key(self, chunk: Any) -> CacheEngineKey:
        """The engine's key of a chunk."""
        key = self._made.get(chunk)
        if key is None:
            key = self._made[chunk] = self._make_key_by_hash(chunk, None)
        return key


class DramWatch:
    """Stands where LMCache's controller would listen, and counts what enters and leaves the DRAM cache."""

    def __init__(self) -> None:
        self.on_stored: list[Any] = []
        self.on_deleted: list[Any] = []
        self.on_used: list[Any] = []

    def add_kv_op(self, op_type: Any, key: Any) -> None:
        """One chunk admitted or evicted."""
        for told in self.on_stored if op_type.name == "ADMIT" else self.on_deleted:
            if op_type.name == "ADMIT":
                told([key], self.promoting)
            else:
                told([key])

    promoting = False
    """Whether what enters now comes from a shared tier."""

    def close(self) -> None:
        """Nothing is held."""


class DramSize:
    """The DRAM cache as an account sees it (see L1Account)."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def get_memory_usage(self) -> tuple[int, int]:
        """Bytes of chunk objects in the cache, and nothing else that is of use here."""
        return len(self._backend.hot_cache) * OBJECT_BYTES, 0

    def delete(self, keys: list[Any]) -> None:
        """The in-process engine offers no deletion that respects its pins."""
        raise NotImplementedError


def make_engine(name: str, capacity: int, cache_policy: str, model_name: str, link: str | None) -> LMCacheEngine:
    """An engine whose DRAM holds `capacity` chunks, with a shared tier behind it if `link` names one."""
    extra: dict[str, Any] = {"local_cpu.pinned_align_bytes": OBJECT_BYTES}
    options: dict[str, Any] = {}
    if link is not None:
        options["storage_plugins"] = ["shared"]
        extra["storage_plugin.shared.module_path"] = "harness.cache.storage_plugin"
        extra["storage_plugin.shared.class_name"] = "SharedStoragePlugin"
        extra["harness.link"] = link
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=1,
        local_cpu=True,
        max_local_cpu_size=capacity * OBJECT_BYTES / 1024**3,
        cache_policy=cache_policy,
        lmcache_instance_id=name,
        pin_timeout_sec=NEVER_S,
        extra_config=extra,
        **options,
    )
    metadata = LMCacheMetadata(
        model_name=model_name,
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.uint8,
        kv_shape=(1, 1, 1, 1, OBJECT_BYTES),
        chunk_size=1,
    )
    connector = MockGPUConnector(metadata.kv_shape)
    engine = LMCacheEngine(
        config,
        metadata,
        ChunkDatabase(config, metadata),
        connector,
        lambda tensor, source: None,
        lambda value, source: value,
    )
    engine.post_init()
    return engine
