"""Builds vLLM's own CPU tier below every engine of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fake_workers.engine.connector import ConnectorOptions
from harness.cache.config import OffloadingConfig
from harness.cache.offload import OffloadNode
from harness.cache.offload_scheduler import WindowGroups
from harness.cache.tier import SharedTier
from harness.cache.transfers import NodePaths, Wires
from harness.clock import VirtualClock
from harness.errors import InputError
from harness.fabric.flows import Fabric
from harness.fabric.topology import Topology

RULES_OF = "0.32.0"
"""vLLM's release whose rules are followed."""
_ALIGNMENT_BYTES = 4096
"""A chunk's bytes over all workers are rounded up to a page (SharedOffloadRegion.BLOCK_SIZE_ALIGNMENT)."""


def connector_options(config: OffloadingConfig) -> ConnectorOptions:
    """The engines' side: a dropped save is only a later miss, so nothing waits for it (requires_kv_delivery)."""
    return ConnectorOptions(kv_load_failure_policy=config.kv_load_failure_policy, requires_kv_delivery=False)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The engines of one node, those of a replica on several nodes with the first of them."""

    ranks: int
    """Engines (replicas times data-parallel ranks); 0: all of this node's belong to a replica that begins elsewhere."""
    tp: int
    """GPUs of each."""
    kv_bytes_per_token_rank: int
    """What one GPU holds of a token's KV."""
    nodes: int = 1
    """Nodes that they are on, this one and those after it."""


class OffloadCluster:
    """All nodes' tiers. `nodes[k]` is node k's ExternalCache; nothing is shared between nodes."""

    def __init__(
        self,
        clock: VirtualClock,
        config: OffloadingConfig,
        engines: Sequence[EngineFacts],
        *,
        block_tokens: int,
        kv_bytes_per_token: int,
        prefix_caching: bool = True,
        fabric: Fabric | None = None,
        topology: Topology | None = None,
        seed: int = 1,
    ) -> None:
        """`engines[k]`: of node k. kv_bytes_per_token: of the whole model, each byte once."""
        self.tiers: list[SharedTier] = []
        chunk_blocks = config.chunk_blocks(block_tokens)
        windows = None if config.window_tokens is None else WindowGroups(config.window_tokens, config.window_groups)
        wires = Wires(fabric, lambda: clock.now_ns)
        self.clock = clock
        self.fabric = fabric
        self.traffic = wires.traffic
        self.kv_bytes_per_token = kv_bytes_per_token
        self.peers: frozenset[str] = frozenset()
        identity = {
            "kind": "offloading",
            "component": "vLLM OffloadingConnector",
            "version": RULES_OF,
            "unmodified": None,
            "mode": config.eviction_policy,
            "config": config.model_dump(mode="json"),
        }
        self.nodes: list[OffloadNode] = []
        for node, engine in enumerate(engines):
            # every worker keeps what it holds, replicated heads too; where all hold the same (MLA) there is one copy,
            # which one of them writes and each reads
            one_copy = engine.tp > 1 and engine.kv_bytes_per_token_rank >= kv_bytes_per_token
            on_gpu = _group_bytes(config, engine.kv_bytes_per_token_rank)
            in_tier = on_gpu * (1 if one_copy else engine.tp)
            self.nodes.append(
                OffloadNode(
                    clock,
                    config,
                    ranks=engine.ranks,
                    capacity=_chunks(config, in_tier * block_tokens * chunk_blocks),
                    block_tokens=block_tokens,
                    chunk_blocks=chunk_blocks,
                    tier_bytes_per_token=in_tier,
                    gpu_bytes_per_token=on_gpu * engine.tp,
                    store_gpus=1 if one_copy else None,
                    wires=wires,
                    paths=None
                    if topology is None or not engine.ranks
                    else NodePaths(topology, node, engine.ranks, engine.nodes),
                    identity=identity,
                    prefix_caching=prefix_caching,
                    seed=f"{seed}/{node}",
                    windows=windows,
                )
            )

    def close(self) -> None:
        """Nothing is held."""


def _group_bytes(config: OffloadingConfig, token_bytes: int) -> int:
    """What one GPU holds of a token's KV in the layers of one group."""
    if token_bytes % config.groups:
        raise InputError(
            "cache.offloading.window_groups",
            f"a token's {token_bytes:,} bytes of KV are not the same in {config.groups} groups of layers",
            "give the number of groups of window layers that vLLM makes of the model",
        )
    return token_bytes // config.groups


def _chunks(config: OffloadingConfig, chunk_bytes: int) -> int:
    """How many chunks the memory holds, each rounded up to pages."""
    capacity = config.cpu_bytes_to_use // (-(-chunk_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
    if capacity < 1:
        raise InputError(
            "cache.offloading.cpu_bytes_to_use",
            f"{config.cpu_bytes_to_use:,} bytes do not hold one chunk of {chunk_bytes:,}",
            "raise it or make chunks smaller",
        )
    return capacity
