"""Builds the cache tiers of a cluster: one LMCache per node, shared tiers behind them, the fabric between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.cache import upstream
from harness.cache.chunks import ChunkKeys
from harness.cache.config import CacheConfig, FabricConfig
from harness.cache.retention import Retention
from harness.cache.tier import SharedTier
from harness.cache.transfers import NodePaths, TierPaths, Wires
from harness.clock import VirtualClock, to_ns
from harness.errors import InputError
from harness.fabric.flows import Fabric
from harness.fabric.topology import Topology, load_topology

GIB = 1 << 30


def build_fabric(clock: VirtualClock, config: FabricConfig, nodes: int, gpus_per_node: int) -> tuple[Fabric, Topology]:
    """The fabric of a topology; its counts n (nodes) and g (GPUs per node) follow the cluster where it has them."""
    counts = {"n": nodes, "g": gpus_per_node, **config.counts}
    topology = load_topology(config.topology, counts, config.gbytes_per_s)
    return Fabric(clock, topology.links, to_ns(config.meter_s)), topology


def l1_chunks(config: CacheConfig, kv_bytes_per_token: int) -> int:
    """Chunks that one node's DRAM holds."""
    return int(config.l1_size_gb * GIB // (config.chunk_size * kv_bytes_per_token))


def check_cluster(
    config: CacheConfig,
    *,
    ranks: Sequence[int],
    block_tokens: int,
    kv_bytes_per_token: int,
    topology: Topology | None,
) -> None:
    """InputError for what cannot be built; `ranks[k]`: engines of node k. Needs no LMCache."""
    if config.chunk_size % block_tokens:
        raise InputError(
            "cache.chunk_size",
            f"{config.chunk_size} tokens are not whole blocks of {block_tokens}",
            "give a multiple of the engine's block size",
        )
    _check_mode(config)
    chunk_bytes = config.chunk_size * kv_bytes_per_token
    capacity = l1_chunks(config, kv_bytes_per_token)
    if capacity < 2 or (config.mode == "inproc" and capacity < 2 * max(ranks)):
        raise InputError(
            "cache.l1_size_gb",
            f"{config.l1_size_gb} GiB hold {capacity} chunks of {chunk_bytes} bytes",
            "give node DRAM for at least two chunks (inproc: per replica)",
        )
    if len({tier.name for tier in config.l2_adapters}) != len(config.l2_adapters):
        raise InputError("cache.l2_adapters", "two tiers have the same name", "name them apart")
    if topology is not None:
        for node, engines in enumerate(ranks):
            paths = NodePaths(topology, node, engines)
            for tier in config.l2_adapters:
                TierPaths(tier, paths, chunk_bytes)


def _check_mode(config: CacheConfig) -> None:
    """What LMCache's in-process mode does not have."""
    if config.mode != "inproc":
        return
    wrong = [
        name
        for name, bad in (
            # the package keeps plugins in a set: with more than one their order would change from run to run
            ("l2_adapters: more than one", len(config.l2_adapters) > 1),
            ("retention_s of node DRAM", config.retention_s is not None),
            ("l2_store_policy", config.l2_store_policy != "default"),
            ("l2_prefetch_policy", config.l2_prefetch_policy != "default"),
            ("wait", config.wait != "hold"),
            # its store events have no parent where a prompt is saved in parts, and evictions are not reported
            ("kv_events that a router could use", config.kv_events),
        )
        if bad
    ]
    if wrong:
        raise InputError("cache", f"mode inproc has no {', '.join(wrong)}", "leave it out or use mode: mp")


class CacheCluster:
    """All nodes' tiers. `nodes[k]` is node k's ExternalCache."""

    def __init__(
        self,
        clock: VirtualClock,
        config: CacheConfig,
        *,
        nodes: int,
        ranks_per_node: int | Sequence[int],
        block_tokens: int,
        kv_bytes_per_token: int,
        model_name: str,
        fabric: Fabric | None = None,
        topology: Topology | None = None,
        seed: int = 1,
        make_stack: Any = None,
    ) -> None:
        ranks = [ranks_per_node] * nodes if isinstance(ranks_per_node, int) else list(ranks_per_node)
        check_cluster(
            config, ranks=ranks, block_tokens=block_tokens, kv_bytes_per_token=kv_bytes_per_token, topology=topology
        )
        upstream.prepare()
        from harness.cache import adapter
        from harness.cache.keys import key_maker
        from harness.cache.mp import MpNode
        from harness.cache.stack import PumpStack, StackSettings

        self.config = config
        self.clock = clock
        self.fabric = fabric
        self.chunk_bytes = config.chunk_size * kv_bytes_per_token
        make_key = key_maker(model_name.replace("@", "_"))
        self.keys: ChunkKeys[Any] = ChunkKeys(config.chunk_size // block_tokens, make_key)
        capacity = l1_chunks(config, kv_bytes_per_token)
        self._serial = _next_serial()
        self.tiers: list[SharedTier] = []
        self._owners: list[Any] = []
        for tier_config in config.l2_adapters:
            tier, owner = self._make_tier(tier_config, to_ns(config.tick_s))
            self.tiers.append(tier)
            self._owners.append(owner)
            adapter.TIERS[self._tier_key(tier.name)] = tier
        wires = Wires(fabric, lambda: clock.now_ns)
        self.traffic = wires.traffic
        self.kv_bytes_per_token = kv_bytes_per_token
        self.peers = frozenset(tier.name for tier in config.l2_adapters if tier.placement == "writer")
        """Shared tiers that are the memory of other nodes."""
        check = upstream.check_package()
        identity = {
            "component": "lmcache",
            "version": check.version,
            "unmodified": check.unmodified,
            "changed_files": list(check.changed + check.added),
            "mode": config.mode,
            "config": config.model_dump(mode="json"),
        }
        self.nodes: list[Any] = []
        paths = [None if topology is None else NodePaths(topology, node, ranks[node]) for node in range(nodes)]
        for node in range(nodes):
            if config.mode == "inproc":
                from harness.cache.inproc import InprocNode

                in_process = InprocNode(
                    clock,
                    config,
                    keys=self.keys,
                    tiers=self.tiers,
                    wires=wires,
                    paths=paths[node],
                    node=node,
                    ranks=ranks[node],
                    capacity=capacity // ranks[node],
                    block_tokens=block_tokens,
                    kv_bytes_per_token=kv_bytes_per_token,
                    model_name=model_name,
                    identity=identity,
                    link_name=f"{self._serial}/{node}",
                    seed=seed,
                )
                self.nodes.append(in_process)
                continue
            settings = StackSettings(
                name=f"node{node}",
                capacity=capacity,
                eviction=config.eviction,
                store_policy=config.l2_store_policy,
                prefetch_policy=config.l2_prefetch_policy,
                prefetch_max_in_flight=config.l2_prefetch_max_in_flight,
                adapters=tuple({"tier": self._tier_key(tier.name), "node": node, "auto": False} for tier in self.tiers),
            )
            stack = (make_stack or PumpStack)(settings)
            made = MpNode(
                clock,
                config,
                stack,
                keys=self.keys,
                tiers=self.tiers,
                wires=wires,
                paths=paths[node],
                node=node,
                capacity=capacity,
                block_tokens=block_tokens,
                kv_bytes_per_token=kv_bytes_per_token,
                identity=identity,
                seed=seed,
                # servers are not started at the same moment: their checks are spread over the interval
                phase_ns=to_ns(config.tick_s) * (node + 1) // nodes,
            )
            self.nodes.append(made)

    def close(self) -> None:
        """Give memory and descriptors back; safe to call twice."""
        from harness.cache import adapter

        for node in self.nodes:
            node.close()
        for owner in self._owners:
            if owner is not None:
                owner.close()
        self._owners = []
        for tier in self.tiers:
            adapter.TIERS.pop(self._tier_key(tier.name), None)

    def _tier_key(self, name: str) -> str:
        return f"{self._serial}/{name}"

    def _make_tier(self, config: Any, tick_ns: int) -> tuple[SharedTier, Any]:
        """A shared tier, with LMCache's eviction of L2 adapters at work on it if it has a capacity."""
        from harness.cache.l2_eviction import attach_eviction

        tier = SharedTier(
            name=config.name,
            chunk_bytes=self.chunk_bytes,
            capacity=None if config.capacity_gb is None else int(config.capacity_gb * GIB // self.chunk_bytes),
            retention=None if config.retention_s is None else Retention(to_ns(config.retention_s)),
            use_on_lookup=config.retention_use == "lookup",
        )
        if config.eviction is None or tier.capacity is None:
            return tier, None
        return tier, attach_eviction(tier, config.eviction, tick_ns)


_serials = iter(range(1, 1 << 62))


def _next_serial() -> int:
    return next(_serials)
