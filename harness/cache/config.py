"""Options of the cache tiers and the fabric, LMCache's under LMCache's own names (`lmcache server --help`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]


class Strict(BaseModel):
    """Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Eviction(Strict):
    """LMCache's eviction settings of one tier."""

    eviction_policy: Literal["LRU", "ARC", "noop"] = Field("LRU", description="LMCache's eviction policy")
    trigger_watermark: Share = Field(0.8, description="evict when this share of the capacity is used")
    eviction_ratio: Share = Field(0.2, description="share of the tracked objects that one pass evicts")


class Transfer(Strict):
    """What transfers cost beside the links."""

    cost: str = Field("wire", description="cost table: a name from harness/fabric/tables or a path")
    descriptors_per_chunk: Count = Field(1, description="descriptors (copies, RDMA messages) per chunk")


class SharedTierConfig(Strict):
    """One tier behind all nodes: an L2 adapter of every node's LMCache on the same store."""

    name: str = Field(description="name in results", pattern=r"^[\w.-]+$")
    at: str = Field("store", description="kind of the topology's vertices that hold the data")
    placement: Literal["hash", "stripe", "writer"] = Field(
        "stripe",
        description="hash: each chunk on one of the vertices; stripe: each chunk over all of them; "
        "writer: on the host that wrote it (peer DRAM)",
    )
    capacity_gb: Positive | None = Field(None, description="capacity in GiB; null: unlimited")
    eviction: Eviction | None = Field(
        Eviction(), description="LMCache's watermark eviction (needs a capacity); null: what does not fit is not stored"
    )
    retention_s: Positive | None = Field(
        None, description="drop what was not used for this long, seconds; each use restarts it; null: keep"
    )
    retention_use: Literal["lookup", "load"] = Field(
        "lookup", description="what counts as use: being found by a lookup (of any node), or only being loaded"
    )
    lookup_latency_us: NonNegative = Field(0.0, description="virtual time of a lookup in this tier, microseconds")
    load: Transfer = Field(default_factory=lambda: Transfer(), description="cost of loads into node DRAM")
    store: Transfer = Field(default_factory=lambda: Transfer(), description="cost of stores from node DRAM")


class CacheConfig(Strict):
    """LMCache in multi-process mode on every node."""

    mode: Literal["mp", "inproc"] = Field(
        "mp",
        description="mp: LMCache's multi-process stack (`lmcache server`), one node DRAM for all replicas; inproc: an "
        "engine inside each replica (LMCacheConnectorV1), each with its share of node DRAM, no watermark",
    )
    cache_policy: Literal["LRU", "LFU", "FIFO", "MRU"] = Field("LRU", description="inproc: LMCache's eviction policy")
    chunk_size: Count = Field(256, description="tokens per chunk")
    l1_size_gb: Positive = Field(description="node DRAM for KV, GiB")
    eviction: Eviction = Field(default_factory=lambda: Eviction(), description="eviction of node DRAM")
    retention_s: Positive | None = Field(
        None, description="drop from node DRAM what was not used for this long, seconds; null: keep"
    )
    l2_adapters: list[SharedTierConfig] = Field(
        default_factory=list, description="shared tiers, first is asked first; none: node-local only"
    )
    l2_store_policy: Literal["default", "skip_l1"] = Field(
        "default", description="default: write-through, kept in node DRAM; skip_l1: node DRAM is only a write buffer"
    )
    l2_prefetch_policy: Literal["default", "retain"] = Field(
        "default", description="default: chunks loaded from a shared tier leave node DRAM after use; retain: they stay"
    )
    l2_prefetch_max_in_flight: Count = Field(8, description="most lookups and loads under way at once per node")
    tick_s: Positive = Field(1.0, description="interval of LMCache's watermark checks, virtual seconds")
    wait: Literal["hold", "timeout", "best_effort"] = Field(
        "hold",
        description="a request whose prefix is still on its way to node DRAM: hold waits for all of it (vLLM; SGLang's "
        "wait_complete), timeout waits so long, best_effort does not wait; then only what node DRAM holds is used",
    )
    wait_timeout_s: Positive = Field(2.0, description="for wait: timeout, seconds")
    rpc_us: NonNegative = Field(0.0, description="virtual time of a lookup's way to LMCache's server, microseconds")
    gpu_load: Transfer = Field(default_factory=lambda: Transfer(), description="cost of copies to a GPU")
    gpu_store: Transfer = Field(default_factory=lambda: Transfer(), description="cost of copies to node DRAM")
    abandoned_locks: Literal["release", "expire"] = Field(
        "release",
        description="read locks of a lookup whose request went away: returned when the lookup ends, or only when "
        "they expire (LMCache 0.5.6's own behaviour)",
    )
    l1_read_ttl_seconds: Count = Field(300, description="life of a read lock, for abandoned_locks: expire")
    load_failure_share: Share = Field(0.0, description="share of loads into the GPU that fail (seeded)")
    kv_events: bool = Field(
        False,
        description="every engine of a node publishes the chunks of node DRAM as KV events (medium CPU); mp only",
    )


class FabricConfig(Strict):
    """The wires."""

    topology: str = Field("one-switch", description="a name from harness/fabric/topologies or a path")
    counts: dict[str, int] = Field(default_factory=dict, description="overrides of the topology's counts")
    meter_s: Positive = Field(1.0, description="interval of the links' load series, virtual seconds")
