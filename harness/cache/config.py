"""Options of the cache tiers and the fabric, LMCache's under LMCache's own names (`lmcache server --help`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from harness.errors import InputError

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]


class Strict(BaseModel):
    """Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


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


class OffloadingConfig(Strict):
    """vLLM's OffloadingConnector with its CPU tier, in every engine; kv_connector_extra_config under vLLM's names."""

    cpu_bytes_to_use: Annotated[int, Field(ge=1, le=2**60)] = Field(
        description="host memory for KV per engine (all GPUs of a replica, one data-parallel rank), bytes"
    )
    blocks_per_chunk: Count | None = Field(
        None, description="GPU blocks per offloaded chunk; null: 1, or by block_size"
    )
    block_size: Count | None = Field(None, description="the same in tokens; only one of the two may be given")
    window_tokens: Annotated[int, Field(ge=2)] | None = Field(
        None,
        description="sliding window of the model's window layers, tokens: every group of layers has chunks of its own, "
        "and a load of window layers moves only what the window needs; null: all layers attend to everything",
    )
    window_groups: Annotated[int, Field(ge=1, le=15)] = Field(
        1,
        description="KV-cache groups of window layers, as vLLM makes them: of as many layers as attend to everything",
    )
    eviction_policy: Literal["lru", "arc"] = Field("lru", description="vLLM's eviction policy")
    store_threshold: Annotated[int, Field(ge=0)] = Field(
        0, description="store a chunk when it is offered for the n-th time; below 2: at once"
    )
    max_tracker_size: Count = Field(64_000, description="most chunks whose offers are counted for store_threshold")
    offload_prompt_only: bool = Field(
        True, description="store chunks of prompts only; false: generated tokens too (then steps are taken one by one)"
    )
    self_describing_kv_events: bool = Field(
        False,
        description="KV events of the tier say which tokens a chunk holds; false: only the hash of its last block",
    )
    kv_events: bool = Field(
        True, description="publish KV events of the tier where the router reads KV events, as vLLM does (medium CPU)"
    )
    kv_load_failure_policy: Literal["fail", "recompute"] = Field(
        "fail", description="what becomes of a request whose load failed"
    )
    load_failure_share: Share = Field(0.0, description="share of loads that fail (seeded)")
    gpu_load: Transfer = Field(default_factory=lambda: Transfer(), description="cost of copies to a GPU")
    gpu_store: Transfer = Field(default_factory=lambda: Transfer(), description="cost of copies to host memory")

    @property
    def groups(self) -> int:
        """KV-cache groups, each with chunks of its own."""
        return 1 if self.window_tokens is None else 1 + self.window_groups

    def chunk_blocks(self, block_tokens: int) -> int:
        """GPU blocks per chunk, refused where vLLM refuses."""
        where = "cache.offloading"
        if self.blocks_per_chunk is not None and self.block_size is not None:
            raise InputError(where, "both blocks_per_chunk and block_size are given", "leave one of them out")
        if self.window_tokens is None and self.window_groups > 1:
            raise InputError(f"{where}.window_groups", "has no window_tokens beside it", "give the window, or neither")
        if self.block_size is None:
            return self.blocks_per_chunk or 1
        if self.block_size % block_tokens:
            raise InputError(
                f"{where}.block_size",
                f"{self.block_size} tokens are not whole GPU blocks of {block_tokens}",
                f"use {-(-self.block_size // block_tokens) * block_tokens}, or give blocks_per_chunk",
            )
        return self.block_size // block_tokens


class FabricConfig(Strict):
    """The wires."""

    topology: str = Field("one-switch", description="a name from harness/fabric/topologies or a path")
    counts: dict[str, int] = Field(default_factory=dict, description="overrides of the topology's counts")
    gbytes_per_s: dict[str, Positive] = Field(
        default_factory=dict,
        description="rates, both ways, of links that lead to a vertex named as in the topology: {store: 32}",
    )
    meter_s: Positive = Field(1.0, description="interval of the links' load series, virtual seconds")
