"""The complete, threaded StorageManager of LMCache behind the same interface as the pump."""

from __future__ import annotations

import time
from typing import Any

from lmcache.v1.distributed.api import GroupedObjectKeys, PrefetchTaskSpec
from lmcache.v1.distributed.config import EvictionConfig, StorageManagerConfig
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
from lmcache.v1.distributed.storage_controllers.prefetch_controller import PrefetchPhase
from lmcache.v1.distributed.storage_manager import StorageManager

from harness.cache.stack import (
    LAYOUT,
    WRITE_TAG,
    Evictor,
    Found,
    L1Watch,
    Reserved,
    StackSettings,
    adapter_config,
    found_of,
    l1_config,
)


class ThreadedStack:
    """StorageManager with its threads running; `pump` waits until they have nothing left to do.

    Its own eviction thread is given the noop policy, because it works by wall time; eviction passes come from `evictor`
    at virtual ticks, as for the pump.
    """

    def __init__(self, settings: StackSettings) -> None:
        config = StorageManagerConfig(
            l1_manager_config=l1_config(settings, settings.name),
            eviction_config=EvictionConfig("noop"),
            l2_adapter_config=L2AdaptersConfig([adapter_config(params, settings.name) for params in settings.adapters]),
            store_policy=settings.store_policy,
            prefetch_policy=settings.prefetch_policy,
            prefetch_max_in_flight=settings.prefetch_max_in_flight,
        )
        self.manager = StorageManager(config)
        self.l1 = self.manager._l1_manager
        self.evictor = Evictor(self.l1, settings.eviction)
        self.watch = L1Watch()
        self.l1.register_listener(self.watch)
        self.adapters: list[Any] = [adapter for _, adapter in self.manager.l2_adapters()]
        self._tickets: dict[int, Any] = {}
        self._asked = 0
        """Prefetches submitted to the controller's thread."""
        self._closed = False

    def prefetch(self, keys: list[Any], l1_only: bool = False) -> int:
        spec = PrefetchTaskSpec([GroupedObjectKeys(keys, 0, LAYOUT)])
        handle = self.manager.submit_prefetch_task(spec, skip_l2=l1_only)
        self._asked += bool(self.adapters and not l1_only)
        self._tickets[handle.prefetch_request_id] = handle
        return handle.prefetch_request_id

    def found(self, ticket: int) -> Found | None:
        result = self.manager.query_prefetch_status(self._tickets[ticket])
        return None if result is None else found_of(result)

    def release(self, keys: list[Any]) -> None:
        self.manager.finish_read_prefetched(keys)

    def reserve(self, keys: list[Any]) -> Reserved:
        ready = list(self.manager.reserve_write(keys, LAYOUT))
        # of the keys without a buffer, those that neither are in L1 nor are being saved there found it full
        staging = self.l1._staging
        held = sum(1 for key in keys if self.l1.get_object_state(key) is not None or WRITE_TAG in staging.get(key, ()))
        return Reserved(ready, len(keys) - held)

    def written(self, keys: list[Any]) -> None:
        self.manager.finish_write(keys)

    def touch(self, keys: list[Any]) -> None:
        self.manager.touch_l1_keys(keys)

    def pump(self) -> None:
        deadline = time.monotonic() + 60
        calm = 0
        while calm < 2:
            # seen at rest twice, with a moment for the threads between
            calm = calm + 1 if self._at_rest() else 0
            time.sleep(0.0002)
            assert time.monotonic() < deadline, "LMCache's threads do not come to rest"

    def _at_rest(self) -> bool:
        store, prefetch = self.manager._store_controller, self.manager._prefetch_controller
        adapters = self.adapters
        if any(adapter.finished[kind] for adapter in adapters for kind in ("store", "lookup", "load")):
            return False
        if store._listener.pending_count():
            return False
        if any(adapter.submitted_keys["store"] != self.watch.written for adapter in adapters):
            return False
        if len(store._in_flight_tasks) != sum(adapter.open["store"] for adapter in adapters):
            return False
        started = self._asked - len(prefetch._pending_queue)
        if prefetch._submission_queue or any(adapter.submitted["lookup"] != started for adapter in adapters):
            return False
        requests = list(prefetch._in_flight_requests.values())
        if prefetch._pending_queue and len(requests) < prefetch._max_in_flight:
            return False
        lookups = sum(len(request.inflight_lookup_tasks) for request in requests)
        loads = sum(len(request.inflight_load_tasks) for request in requests)
        if lookups != sum(adapter.open["lookup"] for adapter in adapters):
            return False
        if loads != sum(adapter.open["load"] for adapter in adapters):
            return False
        return all(
            request.inflight_lookup_tasks if request.phase == PrefetchPhase.LOOKUP else request.inflight_load_tasks
            for request in requests
        )

    @property
    def stores_in_flight(self) -> int:
        return len(self.manager._store_controller._in_flight_tasks)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.manager.close()
