"""Drives one node's LMCache: pumps it, puts the tasks of its L2 adapters on the fabric, and tells it of their ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.cache.adapter import HeldL2Adapter, Task
from harness.cache.config import CacheConfig
from harness.cache.stack import Stack
from harness.cache.tier import SharedTier
from harness.cache.transfers import TierPaths, Wires
from harness.clock import VirtualClock
from harness.fabric.goodput import TransferCost

_FREE = TransferCost()


class TierTasks:
    """`run` after everything that happens; `settled` is called when LMCache has nothing left to do now."""

    def __init__(
        self,
        clock: VirtualClock,
        config: CacheConfig,
        stack: Stack,
        wires: Wires,
        paths: list[TierPaths],
        node: int,
        advance: Callable[[], None],
        settled: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._config = config
        self._stack = stack
        self._wires = wires
        self._paths = paths
        self._node = node
        self._advance = advance
        self._settled = settled
        self.source: dict[Any, str] = {}
        """Which tier brought a chunk to node DRAM, while lookups are under way; empty where there is only one."""
        self._running = False
        self._again = False

    def run(self) -> None:
        """Let LMCache do what it can, put its new tasks on the wires, and so on until nothing is left to do now."""
        if self._running:
            self._again = True
            return
        self._running = True
        try:
            self._again = True
            while self._again:
                self._again = False
                self._stack.pump()
                for place, adapter in enumerate(self._stack.adapters):
                    for task in adapter.take():
                        self._again = True
                        self._start(place, adapter, task)
            self._settled()
        finally:
            self._running = False

    def _start(self, place: int, adapter: HeldL2Adapter, task: Task) -> None:
        tier = adapter.tier
        now = self._clock.now_ns
        if task.kind == "lookup":
            latency = round(self._config.l2_adapters[place].lookup_latency_us * 1000)
            if latency:
                self._clock.call_later(latency, self._end_lookup, adapter, task)
            else:
                adapter.complete(task, tier.lock_found(task.keys, now))
            return
        paths = self._paths[place] if self._paths else None
        if task.kind == "store":
            keys = tier.accept(task.keys, now)
            parts = paths.store(keys, self._node) if paths else []
            cost = paths.store_cost if paths else _FREE
            writes = self._wires.traffic.writes(tier.name)
            self._wires.send(parts, cost, lambda: self._end_store(adapter, task, keys), writes)
            return
        parts = paths.load(task.keys, self._writers(tier, task.keys, paths)) if paths else []
        cost = paths.load_cost if paths else _FREE
        reads = self._wires.traffic.reads(tier.name)
        self._wires.send(parts, cost, lambda: self._end_load(adapter, task), reads)

    def _writers(self, tier: SharedTier, keys: list[Any], paths: TierPaths) -> list[int]:
        """The nodes that wrote the keys, where their place depends on it."""
        return [tier.objects.get(key, self._node) for key in keys] if paths.by_writer else []

    def _end_lookup(self, adapter: HeldL2Adapter, task: Task) -> None:
        self._advance()
        adapter.complete(task, adapter.tier.lock_found(task.keys, self._clock.now_ns))
        self.run()

    def _end_store(self, adapter: HeldL2Adapter, task: Task, keys: list[Any]) -> None:
        self._advance()
        new = adapter.tier.arrive(keys, self._node, self._clock.now_ns)
        adapter.complete(task, (), len(new))
        self.run()

    def _end_load(self, adapter: HeldL2Adapter, task: Task) -> None:
        self._advance()
        held = adapter.tier.read(task.keys, self._clock.now_ns)
        if len(self._stack.adapters) > 1:
            name, source = adapter.tier.name, self.source
            for index in held:
                source[task.keys[index]] = name
        adapter.complete(task, held)
        self.run()
