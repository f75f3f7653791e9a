"""Tiers and links in Prometheus' format, beside vLLM's own metrics: `sim_tier_*`, `sim_link_*`, `sim_clock_seconds`.

Every worker of a process shows the same samples: node tiers with their node, shared tiers and links once.
"""

from __future__ import annotations

import time

from fake_workers.api.exposition import Registry, Series
from harness.cache.base import NODE_DRAM, TierStats
from harness.cache.build import CacheCluster
from harness.cache.offload_build import OffloadCluster
from harness.fabric.meter import NS_PER_S

_FRESH_S = 0.25
"""Twenty scrapes a second and worker share one look at the tiers."""

TIER_COUNTERS = {
    "read_bytes": "Bytes that left the tier towards the GPU (node DRAM) or towards a node.",
    "written_bytes": "Bytes that entered the tier from above.",
    "promoted_bytes": "Bytes that entered the tier from below.",
    "evicted_bytes": "Bytes that were evicted.",
    "skipped_bytes": "Bytes that were not stored because the tier was full.",
    "asked_tokens": "Tokens that were looked up in the tier.",
    "hit_tokens": "Of those, tokens that the tier held first.",
}
TIER_GAUGES = {
    "resident_bytes": "Bytes that the tier holds.",
    "capacity_bytes": "Bytes that the tier can hold; 0: unlimited.",
}


class TierMetrics:
    """Of one process; `nodes`: those whose tiers are its own."""

    def __init__(self, cluster: CacheCluster | OffloadCluster, nodes: list[int]) -> None:
        self._cluster, self._nodes = cluster, nodes
        self._registry = registry = Registry()
        self._counters = {
            name: registry.family(f"sim_tier_{name}", text, "counter") for name, text in TIER_COUNTERS.items()
        }
        self._gauges = {name: registry.family(f"sim_tier_{name}", text, "gauge") for name, text in TIER_GAUGES.items()}
        self._clock = registry.family("sim_clock_seconds", "The engines' time.", "counter").series()
        self._link_bytes = registry.family("sim_link_bytes", "Bytes that the link has carried.", "counter")
        self._link_capacity = registry.family("sim_link_capacity_bytes_per_second", "What the link can carry.", "gauge")
        self._text = b""
        self._made = -1.0

    def render(self) -> bytes:
        """The samples; of a moment ago, where somebody has just asked."""
        now = time.monotonic()
        if now - self._made > _FRESH_S:
            self._refresh()
            self._text, self._made = self._registry.render(), now
        return self._text

    def _refresh(self) -> None:
        _raise(self._clock, self._cluster.clock.now_ns / NS_PER_S)
        for node in self._nodes:
            for stats in self._cluster.nodes[node].stats():
                self._show(stats, {"tier": stats.name, "node": str(node) if stats.name == NODE_DRAM else ""})
        fabric = self._cluster.fabric
        if fabric is None:
            return
        for number, link in enumerate(fabric.links()):
            meter = fabric.meter(number)
            if meter.nanobytes:
                labels = {"link": link.name}
                _raise(self._link_bytes.series(labels), meter.nanobytes // NS_PER_S)
                self._link_capacity.series(labels).set(link.bytes_per_s)

    def _show(self, stats: TierStats, labels: dict[str, str]) -> None:
        for name, family in self._counters.items():
            _raise(family.series(labels), getattr(stats, name))
        for name, family in self._gauges.items():
            family.series(labels).set(getattr(stats, name) or 0)


def _raise(counter: Series, total: float) -> None:
    counter.inc(total - counter.value)
