"""LMCache's official plugin L2 adapter, on the virtual clock: every task waits until the harness says that it is done.

Named in LMCache's configuration as {"type": "plugin", "module_path": "harness.cache.adapter", "class_name":
"HeldL2Adapter", "adapter_params": {"tier": NAME}}. Importing this module imports lmcache.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from harness.cache.tier import SharedTier

TIERS: dict[str, SharedTier] = {}
"""Tiers by the name that adapter_params give; a name that is not here stands for a tier of the adapter's own."""

Kind = Literal["store", "lookup", "load"]
ORDER: tuple[Kind, ...] = ("store", "lookup", "load")


@dataclass(slots=True, eq=False)
class Task:
    """One task as LMCache submitted it."""

    kind: Kind
    number: int
    keys: list[Any]
    object_bytes: int


class HeldL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """Collects tasks; the harness takes them, lets their time pass, and completes them.

    adapter_params: `tier` names the SharedTier; `node` the node number; `auto` completes every task at once, for
    LMCache's own server process, where no harness is; `capacity` is the byte capacity that LMCache's eviction sees;
    `signal: false` leaves the event descriptors alone where no thread polls them.
    """

    def __init__(self, params: dict[str, Any], l1_memory_desc: Any = None) -> None:
        super().__init__(max_capacity_bytes=int(params.get("capacity", 0)))
        name = str(params.get("tier", ""))
        self.tier = TIERS.get(name) or SharedTier(name, chunk_bytes=1)
        self.node = int(params.get("node", 0))
        self.auto = bool(params.get("auto", name not in TIERS))
        self._signal = bool(params.get("signal", True))
        self._events = {kind: create_event_notifier() for kind in ORDER}
        self._lock = threading.Lock()
        self.submitted: dict[Kind, int] = dict.fromkeys(ORDER, 0)
        """Tasks so far."""
        self._new: dict[Kind, list[Task]] = {kind: [] for kind in ORDER}
        self.open: dict[Kind, int] = dict.fromkeys(ORDER, 0)
        """Tasks that are submitted and not complete."""
        self.finished: dict[Kind, dict[int, Any]] = {kind: {} for kind in ORDER}
        """Results that LMCache has not fetched yet, by task number."""
        self.submitted_keys: dict[Kind, int] = dict.fromkeys(ORDER, 0)

    # ------------------------------------------------------------------ LMCache's side

    def get_store_event_fd(self) -> int:
        """Readable when stores have ended."""
        return int(self._events["store"].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Readable when lookups have ended."""
        return int(self._events["lookup"].fileno())

    def get_load_event_fd(self) -> int:
        """Readable when loads have ended."""
        return int(self._events["load"].fileno())

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Objects wait to be written to the tier."""
        return self._submit("store", keys, objects[0].get_size() if objects else 0)

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Any) -> int:
        """Keys wait to be looked up."""
        return self._submit("lookup", keys, 0)

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Objects wait to be filled from the tier."""
        return self._submit("load", keys, objects[0].get_size() if objects else 0)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Ended stores since the last call."""
        with self._lock:
            done, self.finished["store"] = self.finished["store"], {}
        return done

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Which keys the tier holds, once, when the lookup has ended."""
        with self._lock:
            return self.finished["lookup"].pop(task_id, None)

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Which keys were brought, once, when the load has ended."""
        with self._lock:
            return self.finished["load"].pop(task_id, None)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Locks of a lookup are returned."""
        with self._lock:
            self.tier.unlock(keys)

    def delete(self, keys: list[Any]) -> None:
        """LMCache's eviction drops objects; those that a lookup has locked stay."""
        with self._lock:
            self.tier.evict(keys)

    def close(self) -> None:
        """Give the descriptors back."""
        events, self._events = self._events, {}
        for event in events.values():
            event.close()

    def report_status(self) -> dict[str, Any]:
        """Health, as LMCache's server reports it."""
        return {"is_healthy": True, "objects": len(self.tier.objects)}

    # ------------------------------------------------------------------ the harness's side

    def take(self) -> list[Task]:
        """Tasks submitted since the last call: stores, lookups, loads, each in order of submission."""
        with self._lock:
            new = [task for kind in ORDER for task in self._new[kind]]
            for kind in ORDER:
                self._new[kind] = []
        return new

    def complete(self, task: Task, held: Sequence[int] | None, stored: int = 0) -> None:
        """The task has ended: with the indexes of the keys found or loaded, or the number of chunks stored.

        `held` None fails a store.
        """
        with self._lock:
            self._finish(task, held, stored)
        if self._signal:
            self._events[task.kind].notify()

    def note_stored(self, keys: list[Any], object_bytes: int) -> None:
        """Tell LMCache's listeners (its eviction policy and byte account) what has arrived."""
        if keys:
            self._notify_keys_stored(keys, [object_bytes] * len(keys))

    def note_used(self, keys: list[Any]) -> None:
        """Tell LMCache's listeners what was loaded."""
        if keys:
            self._notify_keys_accessed(keys)

    def note_deleted(self, keys: list[Any], object_bytes: int) -> None:
        """Tell LMCache's listeners what is gone."""
        if keys:
            self._notify_keys_deleted(keys, [object_bytes] * len(keys))

    def _submit(self, kind: Kind, keys: list[Any], object_bytes: int) -> int:
        with self._lock:
            number = self.submitted[kind]
            self.submitted[kind] = number + 1
            self.submitted_keys[kind] += len(keys)
            self.open[kind] += 1
            task = Task(kind, number, keys, object_bytes)
            if self.auto:
                self._complete_now(task)
            else:
                self._new[kind].append(task)
        if self.auto:
            self._events[kind].notify()
        return number

    def _complete_now(self, task: Task) -> None:
        tier = self.tier
        if task.kind == "store":
            self._finish(task, (), len(tier.arrive(tier.accept(task.keys, 0), self.node, 0)))
        elif task.kind == "lookup":
            self._finish(task, tier.lock_found(task.keys, 0), 0)
        else:
            self._finish(task, tier.read(task.keys, 0), 0)

    def _finish(self, task: Task, held: Sequence[int] | None, stored: int) -> None:
        self.open[task.kind] -= 1
        if task.kind == "store":
            self.finished["store"][task.number] = L2StoreResult(held is not None, stored * task.object_bytes)
            return
        bits = Bitmap(len(task.keys))
        bits.batched_set(held if isinstance(held, list) else list(held or ()))
        self.finished[task.kind][task.number] = bits
