"""Which model replicas stand on which nodes: one pool that does everything, or pools of prefill and decode workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from fake_workers.engine.scheduler import SchedulerConfig
from fake_workers.pricing.calibration import Calibration
from fake_workers.pricing.known import known_kv
from fake_workers.pricing.node_price import DraftingPrice, ProfilePrice
from fake_workers.pricing.profile import StepProfile
from fake_workers.pricing.registry import load_profile
from harness.disagg.config import parse_notation
from harness.errors import InputError
from harness.experiment import Calibration as ModelCalibration
from harness.experiment import Engine, Experiment, Pool
from harness.front_end import scheduler_ns
from harness.router.base import Endpoint
from harness.router.endpoints import loopback_endpoints

MOST_ENDPOINTS = 10_000
ROLE_LABEL = "llm-d.ai/role"
"""The label by which the router's prefill-filter and decode-filter know a worker."""


@dataclass(slots=True)
class PoolPlan:
    """Workers of one role (empty: no roles in this cluster) and what they run; `groups` step in lock-step each."""

    role: str
    profile: StepProfile
    engine: SchedulerConfig
    gpus_per_node: int
    nodes: range
    groups: list[list[Endpoint]] = field(default_factory=list)
    cached: bool = True
    """Whether the cache tiers lie below these workers."""

    @property
    def gpus(self) -> int:
        """GPUs that hold replicas."""
        return len(self.groups) * self.profile.layout.gpus

    @property
    def endpoints(self) -> list[Endpoint]:
        """All endpoints of the pool."""
        return [endpoint for group in self.groups for endpoint in group]


def engine_config(engine: Engine, profile: StepProfile, where: str) -> SchedulerConfig:
    """vLLM's engine arguments resolved against the profile, refused where vLLM would refuse to start."""
    block = engine.block_size or profile.block_tokens
    blocks = engine.num_gpu_blocks or profile.kv_capacity_tokens // block
    if blocks < 2:
        raise InputError(
            f"profile {where}",
            "its KV cache does not fit this GPU's memory",
            "choose another layout or set cluster.engine.num_gpu_blocks",
        )
    max_len = engine.max_model_len or profile.max_model_len
    if engine.max_model_len is None and (blocks - 1) * block < max_len:
        # what vLLM's --max-model-len auto does: as long as the KV cache can hold one request
        max_len = (blocks - 1) * block
    if (blocks - 1) * block < max_len:
        raise InputError(
            "cluster.engine.max_model_len",
            f"{max_len} tokens do not fit {blocks - 1} KV blocks of {block} tokens (vLLM refuses to start)",
            f"set it to {(blocks - 1) * block} or less, or raise num_gpu_blocks",
        )
    return SchedulerConfig(
        num_gpu_blocks=blocks,
        block_tokens=block,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_seqs=engine.max_num_seqs,
        max_model_len=max_len,
        async_scheduling=engine.async_scheduling,
        enable_prefix_caching=engine.enable_prefix_caching,
        watermark=engine.watermark,
        long_prefill_token_threshold=engine.long_prefill_token_threshold,
        policy=engine.scheduling_policy,
        num_speculative_tokens=engine.num_speculative_tokens,
        draft_acceptance_share=engine.draft_acceptance_share if engine.num_speculative_tokens else 0.0,
    )


def place_endpoints(experiment: Experiment, profile: StepProfile) -> list[list[Endpoint]]:
    """Lock-step groups of endpoints: as many replicas per node as its GPUs allow, one endpoint per rank of each."""
    layout = profile.layout
    replicas = _replicas_per_node(experiment.cluster.gpus_per_node, profile)
    count = experiment.cluster.nodes * replicas * layout.dp
    _check_count(count)
    endpoints = loopback_endpoints(count, ranks_per_node=replicas * layout.dp)
    return [endpoints[i : i + layout.dp] for i in range(0, count, layout.dp)]


def plan_pools(experiment: Experiment) -> list[PoolPlan]:
    """The cluster's pools with their endpoints, prefill before decode as the experiment lists them.

    Without pools: one, of no role. Pools do not share nodes; a replica of more GPUs than a node has takes several
    nodes. All pools hold the same model in blocks of the same size: vLLM's NIXL connector moves whole blocks.
    """
    cluster = experiment.cluster
    if not cluster.pools and cluster.disaggregation is None:
        profile = profile_of(experiment, None)
        engine = engine_config(cluster.engine, profile, experiment.model.profile)
        groups = place_endpoints(experiment, profile)
        return [PoolPlan("", profile, engine, cluster.gpus_per_node, range(cluster.nodes), groups)]
    plans: list[PoolPlan] = []
    sizes: list[int] = []
    first_node = 0
    for pool in cluster.pools or (Pool(role="prefill"), Pool(role="decode")):
        merged = merged_engine(cluster.engine, pool.engine)
        profile = profile_of(experiment, pool.profile, merged)
        name = pool.profile or experiment.model.profile
        gpus = pool.gpus_per_node or cluster.gpus_per_node
        engine = engine_config(merged, profile, name)
        replicas, nodes = _size(experiment, pool, profile, gpus)
        sizes.append(replicas)
        here = range(first_node, first_node + nodes)
        plans.append(PoolPlan(pool.role, profile, engine, gpus, here, cached=pool.cache))
        first_node += nodes
    _check_pools(plans)
    _check_count(sum(size * plan.profile.layout.dp for size, plan in zip(sizes, plans, strict=True)))
    _place(plans, sizes)
    return plans


def with_nodes(experiment: Experiment, plans: list[PoolPlan]) -> Experiment:
    """The experiment with the number of nodes that its pools take."""
    nodes = plans[-1].nodes.stop
    if nodes == experiment.cluster.nodes:
        return experiment
    return experiment.model_copy(update={"cluster": experiment.cluster.model_copy(update={"nodes": nodes})})


def merged_engine(base: Engine, changes: Engine | None) -> Engine:
    """cluster.engine with the fields that a pool sets itself."""
    if changes is None:
        return base
    return base.model_copy(update={name: getattr(changes, name) for name in changes.model_fields_set})


def profile_of(experiment: Experiment, name: str | None, engine: Engine | None = None) -> StepProfile:
    """The step-time profile of a pool (None: the cluster's), calibrated as the experiment says.

    What the front end says of the engine's scheduler is added to every step, where the engine does not overlap it.
    """
    profile = load_profile(name or experiment.model.profile)
    if experiment.model.kv_bytes_per_token is not None:
        profile = profile.with_kv_bytes(experiment.model.kv_bytes_per_token)
    wanted = experiment.model.calibration or ModelCalibration()
    sync = engine or experiment.cluster.engine
    per_step_ns, per_seq_ns = scheduler_ns(experiment.front_end, sync.async_scheduling)
    calibration = Calibration.of(
        wanted.scale_prefill,
        wanted.scale_decode,
        round(wanted.per_step_ms * 1e6) + per_step_ns,
        round(wanted.per_seq_ms * 1e6) + per_seq_ns,
    )
    return profile if calibration == profile.calibration else profile.calibrated(calibration)


def price_of(pool: PoolPlan) -> ProfilePrice:
    """What steps of the pool's engines cost, drafting included."""
    drafts = pool.engine.num_speculative_tokens
    if not drafts:
        return ProfilePrice(pool.profile)
    kv = known_kv(pool.profile.model)
    if kv is None:
        raise InputError(
            "cluster.engine.num_speculative_tokens",
            f"the layers of {pool.profile.model} are not known, so a draft cannot be priced",
            "leave it at 0 with profiles of your own",
        )
    return DraftingPrice(pool.profile, drafts, kv.layers)


def _size(experiment: Experiment, pool: Pool, profile: StepProfile, gpus: int) -> tuple[int, int]:
    """(replicas, nodes) of a pool."""
    text = experiment.cluster.disaggregation
    per_node = gpus // profile.layout.gpus
    if text is None:
        replicas = pool.replicas or 1
    else:
        prefill, decode, counted = parse_notation(text)
        mine = prefill if pool.role == "prefill" else decode
        if not counted:
            nodes = experiment.cluster.nodes
            share, rest = divmod(nodes * mine, prefill + decode)
            if rest:
                raise InputError(
                    "cluster.disaggregation",
                    f"{nodes} nodes cannot be divided {text}",
                    f"give a multiple of {prefill + decode} nodes",
                )
            if not per_node:
                span = _span(profile, gpus)
                if share % span:
                    what = f"a replica takes {span} nodes, the pool {pool.role} has {share}"
                    raise InputError("cluster.disaggregation", what, f"give it a multiple of {span} nodes")
                return share // span, share
            return share * per_node, share
        replicas = mine
    return replicas, -(-replicas // per_node) if per_node else replicas * _span(profile, gpus)


def _span(profile: StepProfile, gpus: int) -> int:
    """Nodes of a replica that does not fit on one."""
    layout = profile.layout
    if layout.tp > gpus or gpus % layout.tp or layout.gpus % gpus:
        raise InputError(
            "cluster.gpus_per_node",
            f"nodes of {gpus} GPUs do not hold {profile.name}, which needs {layout.gpus}",
            "choose another layout, or nodes that its ranks fill",
        )
    return layout.gpus // gpus


def _place(plans: list[PoolPlan], sizes: list[int]) -> None:
    labels: list[dict[str, str]] = []
    nodes: list[int] = []
    for plan, size in zip(plans, sizes, strict=True):
        layout = plan.profile.layout
        per_node = plan.gpus_per_node // layout.gpus
        for replica in range(size):
            for rank in range(layout.dp):
                # replicas stand one after the other; one that spans nodes fills them in order of its ranks
                gpu = replica * layout.gpus + rank * layout.tp
                nodes.append(plan.nodes.start + (replica // per_node if per_node else gpu // plan.gpus_per_node))
                labels.append({ROLE_LABEL: plan.role})
    endpoints = loopback_endpoints(len(nodes), labels=labels)
    for endpoint, node in zip(endpoints, nodes, strict=True):
        endpoint.node = node
    at = 0
    for plan, size in zip(plans, sizes, strict=True):
        dp = plan.profile.layout.dp
        plan.groups = [endpoints[at + i * dp : at + (i + 1) * dp] for i in range(size)]
        at += size * dp


def _check_pools(plans: list[PoolPlan]) -> None:
    first = plans[0]
    for plan in plans[1:]:
        same = plan.profile.model == first.profile.model
        if not same or plan.profile.kv_bytes_per_token != first.profile.kv_bytes_per_token:
            raise InputError(
                "cluster.pools",
                f"{first.profile.name} and {plan.profile.name} do not hold the same KV",
                "give all pools profiles of one model",
            )
        if plan.engine.block_tokens != first.engine.block_tokens:
            raise InputError(
                "cluster.pools",
                f"KV blocks of {first.engine.block_tokens} and of {plan.engine.block_tokens} tokens",
                "set cluster.engine.block_size, so that blocks can be moved as they are",
            )
    roles = {plan.role for plan in plans}
    if "both" not in roles and "decode" not in roles:
        raise InputError("cluster.pools", "nobody decodes", "add a pool of role decode or both")


def _replicas_per_node(gpus: int, profile: StepProfile) -> int:
    replicas = gpus // profile.layout.gpus
    if replicas < 1:
        raise InputError(
            "cluster.gpus_per_node",
            f"{gpus} GPUs do not hold one replica of {profile.name}, which needs {profile.layout.gpus}",
            "raise it or choose a smaller layout",
        )
    return replicas


def _check_count(count: int) -> None:
    if count > MOST_ENDPOINTS:
        raise InputError("cluster", f"{count:,} endpoints", f"at most {MOST_ENDPOINTS:,} loopback addresses are used")
