"""Chunks on the fabric: which ways their bytes take between the GPUs of a node, its DRAM and the shared tiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.cache.base import NODE_DRAM
from harness.cache.config import SharedTierConfig, Transfer
from harness.errors import InputError
from harness.fabric.flows import Fabric, Flow
from harness.fabric.goodput import TransferCost, load_cost
from harness.fabric.meter import NS_PER_S, RateMeter
from harness.fabric.share import Path
from harness.fabric.topology import Topology

ALL_SHARED = ""
"""Stands for all shared tiers together where a tier is named."""


@dataclass(slots=True, eq=False)
class TransferGroup:
    """Flows that belong together; `done` is called when the last one has ended."""

    bytes: int
    started_ns: int
    done: Callable[[], None]
    open: int = 0
    cancelled: bool = False
    flows: list[Flow] | None = None


class Traffic:
    """What each tier of the cluster sends and gets over time, and all shared ones together."""

    def __init__(self, interval_ns: int) -> None:
        self.interval_ns = interval_ns
        self._meters: dict[tuple[str, str], RateMeter] = {}
        self._accounts: dict[tuple[str, str], tuple[RateMeter, ...]] = {}

    def reads(self, tier: str) -> tuple[RateMeter, ...]:
        """Accounts of what leaves the tier: node DRAM towards GPUs, a shared tier towards nodes."""
        return self._accounts_of("read", tier)

    def writes(self, tier: str) -> tuple[RateMeter, ...]:
        """Accounts of what enters the tier from above."""
        return self._accounts_of("write", tier)

    def meter(self, direction: str, tier: str = ALL_SHARED) -> RateMeter:
        """The account of one tier and direction ("read" or "write"), or of all shared tiers."""
        key = direction, tier
        found = self._meters.get(key)
        if found is None:
            found = self._meters[key] = RateMeter(self.interval_ns)
        return found

    def _accounts_of(self, direction: str, tier: str) -> tuple[RateMeter, ...]:
        key = direction, tier
        found = self._accounts.get(key)
        if found is None:
            names = (tier,) if tier == NODE_DRAM else (tier, ALL_SHARED)
            found = self._accounts[key] = tuple(self.meter(direction, name) for name in names)
        return found


class Wires:
    """Starts groups of flows. With `fabric` None every transfer takes no time (for tests and what-if)."""

    def __init__(self, fabric: Fabric | None, now: Callable[[], int]) -> None:
        self.fabric = fabric
        self.traffic = Traffic(NS_PER_S if fabric is None else fabric.meter_interval_ns)
        self._now = now

    def send(
        self,
        parts: Sequence[tuple[Path, int, int]],
        cost: TransferCost,
        done: Callable[[], None],
        accounts: tuple[RateMeter, ...] = (),
    ) -> TransferGroup:
        """Start one flow per (path, bytes, descriptors); `done` may be called at once if nothing takes time.

        `accounts` (of `traffic`) meter the bytes beside the links.
        """
        group = TransferGroup(sum(nbytes for _, nbytes, _ in parts), self._now(), done, flows=[])
        fabric = self.fabric
        if fabric is None:
            done()
            return group
        group.open = 1
        assert group.flows is not None
        for path, nbytes, descriptors in parts:
            group.open += 1
            cap = cost.cap_bytes_per_s(nbytes, descriptors)
            if not path and cap is None:
                for account in accounts:
                    account.add(group.started_ns, nbytes)
                self._one_done(group)
                continue
            group.flows.append(
                fabric.start(
                    path,
                    nbytes,
                    lambda flow: self._one_done(group),
                    setup_ns=cost.start_ns(descriptors),
                    cap_bytes_per_s=cap,
                    accounts=accounts,
                )
            )
        self._one_done(group)
        return group

    def cancel(self, group: TransferGroup) -> None:
        """Take the group's flows off the wires; `done` is not called any more."""
        group.cancelled = True
        if self.fabric is not None:
            for flow in group.flows or ():
                self.fabric.cancel(flow)

    @staticmethod
    def _one_done(group: TransferGroup) -> None:
        group.open -= 1
        if group.open == 0 and not group.cancelled:
            group.done()


class NodePaths:
    """The ways of one node in a topology, or of a replica that goes on over the nodes after it."""

    def __init__(self, topology: Topology, node: int, ranks: int, nodes: int = 1) -> None:
        """`ranks`: engines on the `nodes` nodes from `node` on, in order."""
        hosts = topology.vertices_of("host")
        gpus = topology.vertices_of("gpu")
        if node + nodes > len(hosts):
            raise InputError(
                f"topology {topology.name}",
                f"has {len(hosts)} hosts, node {node + nodes - 1} is missing",
                "raise its counts",
            )
        per_node = len(gpus) // len(hosts)
        available = per_node * nodes
        if available < ranks or available % ranks:
            raise InputError(
                f"topology {topology.name}",
                f"has {per_node} GPUs per host for {ranks // nodes} replicas per node",
                "make the GPUs a multiple of the replicas",
            )
        self.topology = topology
        self.hosts = hosts
        self.host = hosts[node]
        own = gpus[node * per_node : (node + nodes) * per_node]
        share = available // ranks
        self._ranks = [own[rank * share : (rank + 1) * share] for rank in range(ranks)]
        self._host_of = [hosts[node + rank * share // per_node] for rank in range(ranks)]

    def to_gpus(self, rank: int, nbytes: int, descriptors: int) -> list[tuple[Path, int, int]]:
        """A replica's KV from DRAM: every GPU of the replica gets its part over its own PCIe."""
        gpus = self._ranks[rank]
        parts = split_evenly(nbytes, len(gpus))
        host = self._host_of[rank]
        return [(self.topology.path(host, gpu), part, descriptors) for gpu, part in zip(gpus, parts, strict=True)]

    def from_gpus(
        self, rank: int, nbytes: int, descriptors: int, writers: int | None = None
    ) -> list[tuple[Path, int, int]]:
        """A replica's KV to DRAM; `writers`: only so many of its GPUs write (None: all)."""
        gpus = self._ranks[rank][:writers]
        parts = split_evenly(nbytes, len(gpus))
        host = self._host_of[rank]
        return [(self.topology.path(gpu, host), part, descriptors) for gpu, part in zip(gpus, parts, strict=True)]


class TierPaths:
    """Where a shared tier's chunks lie and how they get to and from one node."""

    def __init__(self, config: SharedTierConfig, paths: NodePaths, chunk_bytes: int) -> None:
        self._paths = paths
        self._placement = config.placement
        self._chunk_bytes = chunk_bytes
        self._places = paths.hosts if config.placement == "writer" else paths.topology.vertices_of(config.at)
        if not self._places:
            raise InputError(
                f"cache tier {config.name}", f"topology {paths.topology.name} has no {config.at}", "name its vertices"
            )
        self._load, self._load_descriptors = transfer_cost(config.load)
        self._store, self._store_descriptors = transfer_cost(config.store)

    @property
    def load_cost(self) -> TransferCost:
        """Cost of loads."""
        return self._load

    @property
    def store_cost(self) -> TransferCost:
        """Cost of stores."""
        return self._store

    @property
    def by_writer(self) -> bool:
        """Whether chunks lie where they were written; only then `load` reads its `written_by`."""
        return self._placement == "writer"

    def load(self, keys: Sequence[Any], written_by: Sequence[int]) -> list[tuple[Path, int, int]]:
        """Flows that bring the keys to the node."""
        path = self._paths.topology.path
        host = self._paths.host
        return [
            (path(place, host), nbytes, max(1, chunks * self._load_descriptors))
            for place, nbytes, chunks in self._spread(keys, written_by)
        ]

    def store(self, keys: Sequence[Any], node: int) -> list[tuple[Path, int, int]]:
        """Flows that bring the keys from the node to the tier."""
        path = self._paths.topology.path
        host = self._paths.host
        return [
            (path(host, place), nbytes, max(1, chunks * self._store_descriptors))
            for place, nbytes, chunks in self._spread(keys, [node] * len(keys))
        ]

    def _spread(self, keys: Sequence[Any], written_by: Sequence[int]) -> list[tuple[str, int, int]]:
        places, size = self._places, self._chunk_bytes
        if not keys:
            return []
        if self._placement == "stripe":
            parts = split_evenly(len(keys) * size, len(places))
            return [(place, part, len(keys)) for place, part in zip(places, parts, strict=True)]
        counts: dict[int, int] = {}
        if self._placement == "writer":
            for node in written_by:
                counts[node] = counts.get(node, 0) + 1
        else:
            for key in keys:
                # neighbours in a prompt lie on different places, as consistent hashing would have it on average
                place = (key.origin * 7919 + key.index) % len(places)
                counts[place] = counts.get(place, 0) + 1
        return [(places[place], count * size, count) for place, count in sorted(counts.items())]


def transfer_cost(transfer: Transfer) -> tuple[TransferCost, int]:
    """The named cost table and the descriptors that a chunk takes."""
    return load_cost(transfer.cost), transfer.descriptors_per_chunk


def split_evenly(total: int, parts: int) -> list[int]:
    """Whole numbers that differ by at most one and sum to total."""
    base, more = divmod(total, parts)
    return [base + 1] * more + [base] * (parts - more)
