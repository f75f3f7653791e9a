"""Puts the exchange of KV into a run: which GPUs an endpoint has, what moves between them, who may ask whom."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from harness.clock import VirtualClock
from harness.disagg.handoff import KvExchange, Side
from harness.disagg.layout import check_tp, kv_shape
from harness.disagg.replay import Disaggregation
from harness.errors import InputError
from harness.experiment import Experiment
from harness.fabric.flows import Fabric
from harness.fabric.topology import Topology
from harness.placement import PoolPlan


def is_split(plans: Sequence[PoolPlan]) -> bool:
    """Whether some workers only prefill, so that KV has to move."""
    return any(plan.role == "prefill" for plan in plans)


def build_disaggregation(
    experiment: Experiment, plans: Sequence[PoolPlan], clock: VirtualClock, fabric: Fabric, topology: Topology
) -> Disaggregation:
    """The exchange of a cluster with pools; KV goes over the same fabric as the cache tiers' traffic."""
    config = experiment.kv_transfer
    _check(experiment)
    for one, other in combinations(plans, 2):
        check_tp(one.profile.layout.tp, other.profile.layout.tp)
    first = plans[0]
    shape = kv_shape(first.profile, config.descriptors_per_block, config.bytes_per_token)
    exchange = KvExchange(clock, config, shape, first.engine.block_tokens, fabric, topology, experiment.seed)
    return Disaggregation(exchange, clock, [endpoint for plan in plans for endpoint in plan.endpoints])


def sides(plans: Sequence[PoolPlan], topology: Topology) -> list[list[Side]]:
    """GPUs of every group's ranks, groups in the order of the pools."""
    hosts, gpus = topology.vertices_of("host"), topology.vertices_of("gpu")
    per_host = len(gpus) // max(1, len(hosts))
    out: list[list[Side]] = []
    for plan in plans:
        if plan.nodes.stop > len(hosts) or per_host < plan.gpus_per_node:
            raise InputError(
                f"topology {topology.name}",
                f"has {len(hosts)} hosts of {per_host} GPUs, the cluster {plan.nodes.stop} of {plan.gpus_per_node}",
                "raise its counts (fabric.counts)",
            )
        layout = plan.profile.layout
        per_node = plan.gpus_per_node // layout.gpus
        for number, group in enumerate(plan.groups):
            ranks = []
            for rank, endpoint in enumerate(group):
                at = (number % per_node if per_node else number) * layout.gpus + rank * layout.tp
                start = endpoint.node * per_host + at % plan.gpus_per_node
                ranks.append(Side(tuple(gpus[start : start + layout.tp])))
            out.append(ranks)
    return out


def _check(experiment: Experiment) -> None:
    config = experiment.kv_transfer
    shared = experiment.cache.lmcache is not None and experiment.cache.lmcache.l2_adapters
    if config.protocol == "shared-storage" and not shared:
        raise InputError(
            "kv_transfer.protocol",
            "shared-storage without a shared cache tier: the decode workers would compute every prompt again",
            "give cache.lmcache.l2_adapters, or another protocol",
        )
    if config.mode == "layerwise" and config.protocol in ("nixlv2", "shared-storage"):
        raise InputError(
            "kv_transfer.mode",
            f"{config.protocol} asks decode when prefill has ended, nothing can be sent before",
            "use protocol: sglang or offloading, or mode: whole",
        )
