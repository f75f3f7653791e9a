"""A shared tier as LMCache's in-process engine sees it: a storage plugin. Importing this module imports lmcache.

Named in LMCache's configuration as storage_plugins: [shared] with extra_config storage_plugin.shared.module_path and
.class_name. All its calls are synchronous, so state changes at once and the harness lets the time of a transfer pass
before (loads) or after (stores) it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

from harness.cache.tier import SharedTier


@dataclass(slots=True)
class PluginLink:
    """What a plugin instance needs of the harness."""

    tier: SharedTier
    now_ns: Callable[[], int]
    store: Callable[[list[Any]], None]
    """Chunks (by chunk hash) begin their way to the tier."""


LINKS: dict[str, PluginLink] = {}
"""By the name in extra_config["harness.link"]."""


class SharedStoragePlugin(StoragePluginInterface):  # type: ignore[misc]
    """Metadata of a shared tier; objects that come from it are allocated in the engine's DRAM cache."""

    def __init__(self, config: Any, dst_device: str, metadata: Any, local_cpu_backend: Any, loop: Any) -> None:
        super().__init__(dst_device, config, metadata, local_cpu_backend, loop)
        self._link = LINKS[config.extra_config["harness.link"]]
        self._meta: tuple[Any, Any, Any] | None = None

    def contains(self, key: Any, pin: bool = False) -> bool:
        """Whether the tier holds the chunk."""
        return self.batched_contains([key], pin) == 1

    def batched_contains(self, keys: list[Any], pin: bool = False) -> int:
        """How many leading chunks the tier holds."""
        tier = self._link.tier
        tier.sweep(self._link.now_ns())
        count = 0
        for key in keys:
            if key.chunk_hash not in tier.objects:
                break
            count += 1
        if pin:
            tier.lock_found([key.chunk_hash for key in keys[:count]], self._link.now_ns())
        return count

    def exists_in_put_tasks(self, key: Any) -> bool:
        """The harness, not LMCache, keeps track of stores under way."""
        return False

    def batched_submit_put_task(
        self,
        keys: Sequence[Any],
        objs: list[Any],
        transfer_spec: Any = None,
        on_complete_callback: Any = None,
    ) -> None:
        """Chunks are on their way; LMCache does not wait for them."""
        if objs:
            meta = objs[0].meta
            self._meta = (meta.shape, meta.dtype, meta.fmt)
        self._link.store([key.chunk_hash for key in keys])

    def get_blocking(self, key: Any) -> Any:
        """One object, in the engine's DRAM."""
        return self.batched_get_blocking([key])[0]

    def batched_get_blocking(self, keys: list[Any]) -> list[Any]:
        """Objects whose transfer has ended, in the engine's DRAM; LMCache evicts there to make room."""
        tier = self._link.tier
        out: list[Any] = []
        got: list[Any] = []
        for key in keys:
            if key.chunk_hash not in tier.objects:
                out.append(None)
                continue
            out.append(self.local_cpu_backend.allocate(*self._shape()))
            got.append(key.chunk_hash)
        tier.read(got, self._link.now_ns())
        return out

    def _shape(self) -> tuple[Any, Any, Any]:
        if self._meta is None:
            from lmcache.v1.memory_management import MemoryFormat

            self._meta = (self.metadata.get_shapes(1), self.metadata.get_dtypes(), MemoryFormat.KV_2LTD)
        return self._meta

    def pin(self, key: Any) -> bool:
        """Pins are taken by lookups."""
        return True

    def unpin(self, key: Any) -> bool:
        """A lookup's lock is returned."""
        self._link.tier.unlock([key.chunk_hash])
        return True

    def touch_cache(self) -> None:
        """The tier's order is kept where it is used."""

    def remove(self, key: Any, force: bool = True) -> bool:
        """Drop a chunk."""
        return bool(self._link.tier.evict([key.chunk_hash]))

    def get_allocator_backend(self) -> Any:
        """Objects live in the engine's DRAM cache."""
        return self.local_cpu_backend

    def close(self) -> None:
        """Nothing is held."""
