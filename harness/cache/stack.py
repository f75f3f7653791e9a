"""LMCache's multi-process storage stack of one node, without its threads. Importing this module imports lmcache.

`lmcache server` builds a StorageManager: an L1Manager, a StoreController and a PrefetchController with a thread each,
an eviction thread, L2 adapters. `PumpStack` builds the same objects from the same classes with the same settings, never
starts the threads, and runs the bodies of their loops itself: `_store_loop`, `_prefetch_loop` and `eviction_loop` of
release 0.5.6. Nothing of LMCache is replaced or patched; tests/cache/test_threaded.py holds the outcome equal to the
real StorageManager's. Locks never expire by themselves (LMCache's expire by wall time).

LMCache cuts a tensor for every chunk that it writes to L1. In torch's inference mode, in which a serving engine works
too, that takes a third less time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, PrefetchTaskSpec
from lmcache.v1.distributed.config import EvictionConfig, L1ManagerConfig, L1MemoryManagerConfig
from lmcache.v1.distributed.error import L1Error
from lmcache.v1.distributed.eviction import L1EvictionPolicy
from lmcache.v1.distributed.eviction_policy import CreateEvictionPolicy
from lmcache.v1.distributed.internal_api import L1ManagerListener
from lmcache.v1.distributed.l1_manager import L1Manager
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.distributed.storage_controllers import PrefetchController, StoreController
from lmcache.v1.distributed.storage_controllers.prefetch_controller import PrefetchPhase
from lmcache.v1.distributed.storage_controllers.prefetch_policy import create_prefetch_policy
from lmcache.v1.distributed.storage_controllers.store_policy import create_store_policy
from lmcache.v1.distributed.storage_controllers.utils import L1ManagerDescriptor, L2AdapterDescriptor

from harness.cache.adapter import HeldL2Adapter
from harness.cache.config import Eviction
from harness.cache.l1 import OBJECT_BYTES

NEVER_S = 10**9
"""Life of LMCache's wall-time locks."""

WRITE_TAG = "storage_manager"
"""The writer's tag that StorageManager uses for all stores."""

LAYOUT = MemoryLayoutDesc([torch.Size([OBJECT_BYTES])], [torch.uint8])


@dataclass(frozen=True, slots=True)
class StackSettings:
    """LMCache's settings of one node, capacity in chunks."""

    name: str
    capacity: int
    eviction: Eviction
    store_policy: str
    prefetch_policy: str
    prefetch_max_in_flight: int
    adapters: tuple[dict[str, Any], ...]
    """adapter_params of each L2 adapter, in order."""


@dataclass(frozen=True, slots=True)
class Found:
    """The end of a prefetch: the first `chunks` keys are in L1 and read-locked; those at `from_l2` came from L2."""

    chunks: int
    from_l2: list[int]


@dataclass(frozen=True, slots=True)
class Reserved:
    """What a store may write: keys with a buffer, and how many keys found L1 full."""

    keys: list[Any]
    no_room: int


class Stack(Protocol):
    """What the node does with LMCache; the pump and the threaded StorageManager both offer it."""

    adapters: list[HeldL2Adapter]
    l1: Any
    watch: L1Watch
    evictor: Evictor

    def prefetch(self, keys: list[Any], l1_only: bool = False) -> int:
        """Begin to bring the keys' prefix to L1; returns a ticket."""

    def found(self, ticket: int) -> Found | None:
        """The result, once."""

    def release(self, keys: list[Any]) -> None:
        """Return one read lock of each key."""

    def reserve(self, keys: list[Any]) -> Reserved:
        """Buffers for a store."""

    def written(self, keys: list[Any]) -> None:
        """The buffers hold the data."""

    def touch(self, keys: list[Any]) -> None:
        """The keys were used."""

    def pump(self) -> None:
        """Everything that LMCache can do now is done when this returns."""

    def close(self) -> None:
        """Give all resources back."""


class Evictor:
    """LMCache's eviction policy on its L1, one pass of `L1EvictionController.eviction_loop` per call."""

    def __init__(self, l1: Any, eviction: Eviction) -> None:
        self._l1 = l1
        self._settings = eviction
        self.policy = CreateEvictionPolicy(
            EvictionConfig(eviction.eviction_policy, eviction.trigger_watermark, eviction.eviction_ratio)
        )
        l1.register_listener(L1EvictionPolicy(self.policy))

    def tick(self) -> int:
        """One pass; returns how many keys it chose."""
        used, total = self._l1.get_memory_usage()
        if (0 if total == 0 else used / total) < self._settings.trigger_watermark:
            return 0
        chosen = 0
        for action in self.policy.get_eviction_actions(
            self._settings.eviction_ratio, key_eligible_filter=self._l1.is_key_evictable
        ):
            self._l1.delete(action.keys)
            chosen += len(action.keys)
        return chosen


class L1Watch(L1ManagerListener):  # type: ignore[misc]
    """Passes on what enters and leaves L1."""

    def __init__(self) -> None:
        self.written = 0
        """Keys written from above: these go to the store controller."""
        self.on_stored: list[Any] = []
        self.on_deleted: list[Any] = []
        self.on_used: list[Any] = []

    def on_l1_keys_reserved_read(self, keys: list[Any]) -> None:
        """Not of interest."""

    def on_l1_keys_read_finished(self, keys: list[Any]) -> None:
        """Not of interest."""

    def on_l1_keys_reserved_write(self, keys: list[Any]) -> None:
        """Not of interest."""

    def on_l1_keys_write_finished(self, keys: list[Any]) -> None:
        """Saved chunks are in L1."""
        self.written += len(keys)
        for told in self.on_stored:
            told(keys, False)

    def on_l1_keys_finish_write_and_reserve_read(self, keys: list[Any]) -> None:
        """Chunks loaded from L2 are in L1."""
        for told in self.on_stored:
            told(keys, True)

    def on_l1_keys_deleted_by_manager(self, keys: list[Any]) -> None:
        """Chunks left L1, for whatever reason."""
        for told in self.on_deleted:
            told(keys)

    def on_l1_keys_accessed(self, keys: list[Any]) -> None:
        """Chunks were used."""
        for told in self.on_used:
            told(keys)


def l1_config(settings: StackSettings, tag: str) -> L1ManagerConfig:
    """L1 for so many chunks, with locks that do not expire."""
    memory = L1MemoryManagerConfig(
        size_in_bytes=settings.capacity * OBJECT_BYTES, use_lazy=False, align_bytes=OBJECT_BYTES, shm_name=""
    )
    return L1ManagerConfig(memory_config=memory, write_ttl_seconds=NEVER_S, read_ttl_seconds=NEVER_S, tag=tag)


def adapter_config(params: dict[str, Any], tag: str) -> PluginL2AdapterConfig:
    """The plugin adapter as `--l2-adapter` JSON would name it."""
    config = PluginL2AdapterConfig.from_dict(
        {"module_path": "harness.cache.adapter", "class_name": "HeldL2Adapter", "adapter_params": params}
    )
    config.affinity_tag = tag
    config.shared = True
    return config


def found_of(result: Any) -> Found:
    """LMCache's result of a prefetch of one key group."""
    indexes = list(result.l2_hit_cells[0].get_indices_list()) if result.l2_hit_count else []
    return Found(result.l1_hit_count + result.l2_hit_count, indexes)


class PumpStack:
    """The stack driven step by step; see the module's head."""

    @torch.inference_mode()
    def __init__(self, settings: StackSettings) -> None:
        config = l1_config(settings, settings.name)
        self.l1 = L1Manager(config)
        self.evictor = Evictor(self.l1, settings.eviction)
        self.watch = L1Watch()
        self.l1.register_listener(self.watch)
        self.adapters: list[HeldL2Adapter] = []
        descriptors = []
        for index, params in enumerate(settings.adapters):
            plugin = adapter_config({**params, "signal": False}, settings.name)
            adapter = create_l2_adapter(plugin, self.l1.get_l1_memory_desc())
            assert isinstance(adapter, HeldL2Adapter)
            descriptor = L2AdapterDescriptor(index=index, config=plugin)
            adapter.set_backend_identity(descriptor.type_name, shared=True)
            self.adapters.append(adapter)
            descriptors.append(descriptor)
        self._store = StoreController(
            self.l1, list(self.adapters), descriptors, create_store_policy(settings.store_policy)
        )
        self._prefetch = PrefetchController(
            l1_managers=[self.l1],
            l1_manager_descriptors=[L1ManagerDescriptor(index=self.l1.l1_manager_id, config=config)],
            l2_adapters=list(self.adapters),
            adapter_descriptors=descriptors,
            policy=create_prefetch_policy(settings.prefetch_policy),
            max_in_flight=settings.prefetch_max_in_flight,
        )
        self._closed = False

    def prefetch(self, keys: list[Any], l1_only: bool = False) -> int:
        """See Stack."""
        spec = PrefetchTaskSpec([GroupedObjectKeys(keys, 0, LAYOUT)])
        return int(self._prefetch.submit_prefetch_request(spec, skip_l2=l1_only))

    def found(self, ticket: int) -> Found | None:
        """See Stack."""
        result = self._prefetch.query_prefetch_result(ticket)
        return None if result is None else found_of(result)

    def release(self, keys: list[Any]) -> None:
        """See Stack."""
        self.l1.finish_read(keys)

    @torch.inference_mode()
    def reserve(self, keys: list[Any]) -> Reserved:
        """See Stack; as StorageManager.reserve_write with one L1."""
        results = self.l1.reserve_write(keys, [False] * len(keys), LAYOUT, tag=WRITE_TAG)
        ready: list[Any] = []
        no_room = 0
        for key, (error, memory) in results.items():
            if memory is not None:
                ready.append(key)
            elif error == L1Error.OUT_OF_MEMORY:
                no_room += 1
        return Reserved(ready, no_room)

    def written(self, keys: list[Any]) -> None:
        """See Stack."""
        self.l1.finish_write(keys, tag=WRITE_TAG)

    def touch(self, keys: list[Any]) -> None:
        """See Stack."""
        self.l1.touch_keys(keys)

    def pump(self) -> None:
        """One turn of both loops after the other until neither has anything to do."""
        store, prefetch = self._store, self._prefetch
        again = True
        while again:
            again = False
            keys = store._listener.pop_pending_keys()
            if keys:
                store._process_new_keys(keys)
            stored = self._finished("store")
            if stored:
                again = True
                store._drain_l2_store_completions(stored)
                for task_key, task in list(store._in_flight_tasks.items()):
                    store._advance_request(task_key, task)
            prefetch._drain_submission_queue()
            looked_up, loaded = self._finished("lookup"), self._finished("load")
            if looked_up or loaded:
                again = True
                signaled = {PrefetchPhase.LOOKUP: looked_up, PrefetchPhase.PLAN_AND_LOAD: loaded}
                with torch.inference_mode():
                    for request in list(prefetch._in_flight_requests.values()):
                        prefetch._advance_request(request, signaled)
            prefetch._start_pending_requests()

    def _finished(self, kind: Any) -> set[int]:
        return {index for index, adapter in enumerate(self.adapters) if adapter.finished[kind]}

    @property
    def stores_in_flight(self) -> int:
        """Store tasks whose read locks are still held."""
        return len(self._store._in_flight_tasks)

    def close(self) -> None:
        """Give memory and descriptors back."""
        if self._closed:
            return
        self._closed = True
        for adapter in self.adapters:
            adapter.close()
        self._store._listener.close()
        self._store._adapter_ctrl_efd.close()
        self._prefetch._submission_efd.close()
        self._prefetch._adapter_ctrl_efd.close()
        self.l1.close()
