"""The cache tiers below the nodes that an experiment wants: checked, built."""

from __future__ import annotations

from harness.cache import upstream
from harness.cache.build import CacheCluster, check_cluster
from harness.cache.offload_build import EngineFacts, OffloadCluster
from harness.clock import VirtualClock
from harness.errors import InputError
from harness.experiment import Experiment
from harness.fabric.flows import Fabric
from harness.fabric.topology import Topology
from harness.placement import PoolPlan


def check_tiers(experiment: Experiment, pools: list[PoolPlan], topology: Topology) -> None:
    """InputError for what cannot be built, found without loading LMCache."""
    config = experiment.cache.lmcache
    if config is None:
        return
    _check_lmcache(pools)
    check_cluster(
        config,
        ranks=_engines_per_node(pools),
        block_tokens=pools[0].engine.block_tokens,
        kv_bytes_per_token=pools[0].profile.kv_bytes_per_token,
        topology=topology,
    )


def _check_lmcache(pools: list[PoolPlan]) -> None:
    """What LMCache needs of the pools, and that it is there; CacheCluster checks the rest."""
    if any(len({endpoint.node for endpoint in group}) > 1 for pool in pools for group in pool.groups):
        raise InputError(
            "cache.kind", "LMCache serves one node, a replica here spans several", "use kind: offloading, or no tiers"
        )
    check_installed()


def check_installed() -> None:
    """InputError without LMCache."""
    if not upstream.available():
        raise InputError(
            "cache.kind",
            "LMCache is not installed",
            "pip install '.[lmcache]', or a third of its size for machines without GPU: docs/cache.md",
        )


def build_tiers(
    experiment: Experiment,
    clock: VirtualClock,
    pools: list[PoolPlan],
    model: str,
    wires: tuple[Fabric, Topology],
) -> CacheCluster | OffloadCluster | None:
    """The cache tiers below every node that the experiment wants, if it wants any."""
    if experiment.cache.kind == "none":
        return None
    fabric, topology = wires
    if experiment.cache.offloading is not None:
        return OffloadCluster(
            clock,
            experiment.cache.offloading,
            [facts for pool in pools for facts in _engine_facts(pool)],
            block_tokens=pools[0].engine.block_tokens,
            kv_bytes_per_token=pools[0].profile.kv_bytes_per_token,
            prefix_caching=pools[0].engine.enable_prefix_caching,
            fabric=fabric,
            topology=topology,
            seed=experiment.seed,
        )
    config = experiment.cache.lmcache
    assert config is not None
    _check_lmcache(pools)
    return CacheCluster(
        clock,
        config,
        nodes=experiment.cluster.nodes,
        ranks_per_node=_engines_per_node(pools),
        block_tokens=pools[0].engine.block_tokens,
        kv_bytes_per_token=pools[0].profile.kv_bytes_per_token,
        model_name=model,
        fabric=fabric,
        topology=topology,
        seed=experiment.seed,
    )


def _engines_per_node(pools: list[PoolPlan]) -> list[int]:
    return [pool.gpus_per_node // pool.profile.layout.tp for pool in pools for _ in pool.nodes]


def _engine_facts(pool: PoolPlan) -> list[EngineFacts]:
    """The engines of each of a pool's nodes; those of a replica on several nodes all count with its first."""
    ranks, spans = dict.fromkeys(pool.nodes, 0), dict.fromkeys(pool.nodes, 1)
    for group in pool.groups:
        home = group[0].node
        ranks[home] += len(group)
        spans[home] = max(spans[home], len({endpoint.node for endpoint in group}))
    layout, kv_bytes = pool.profile.layout, pool.profile.kv_bytes_per_token_rank
    return [EngineFacts(ranks[node], layout.tp, kv_bytes, spans[node]) for node in pool.nodes]
