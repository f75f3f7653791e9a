"""KV-cache events in the wire format of vLLM 0.32: one ZMQ payload per batch, encoded with msgspec.

A payload is the msgpack array `[ts, events, data_parallel_rank]`. vLLM 0.32 writes each event as a map with
the key "type" (form "map"); older releases wrote positional arrays, tag first (form "array"). Both are read
by llm-d's router. Block hashes are unsigned integers, as vLLM publishes them with
`VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=1`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

EventsWire = Literal["map", "array"]

MEDIUM_GPU = "GPU"
MEDIUM_CPU = "CPU"
FULL_ATTENTION = "full_attention"


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True):
    """Newly full blocks of one request and step; fields without a default are always on the wire."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True):
    """Evicted blocks (vLLM: one event per block)."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """The whole prefix cache was reset."""


WireEvent = BlockStored | BlockRemoved | AllBlocksCleared


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None


_ENCODER = msgspec.msgpack.Encoder()


def stored(
    hashes: list[int], parent: int | None, token_ids: list[int], block_size: int, *, medium: str = MEDIUM_GPU
) -> BlockStored:
    """A BlockStored as a full-attention model without LoRA publishes it."""
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=parent,
        token_ids=token_ids,
        block_size=block_size,
        lora_id=None,
        medium=medium,
        lora_name=None,
        extra_keys=[None] * len(hashes),
        group_idx=0,
        kv_cache_spec_kind=FULL_ATTENTION,
    )


def removed(hashes: list[int], *, medium: str = MEDIUM_GPU, group_idx: int | None = 0) -> BlockRemoved:
    """A BlockRemoved as a full-attention model publishes it (LMCache: without a group)."""
    return BlockRemoved(block_hashes=hashes, medium=medium, group_idx=group_idx)


def chunk_stored(
    hashes: list[int], parent: int | None, token_ids: list[int], block_size: int, medium: str
) -> BlockStored:
    """A BlockStored as LMCacheMPConnector 0.5.6 publishes it: LMCache's hashes, chunks as blocks, no group."""
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=parent,
        token_ids=token_ids,
        block_size=block_size,
        lora_id=None,
        medium=medium,
        lora_name=None,
    )


def offload_stored(
    hashes: list[int], parent: int | None, token_ids: list[int], block_size: int, medium: str
) -> BlockStored:
    """One of vLLM's OffloadingConnector with self_describing_kv_events: the engine's hashes, no extra keys."""
    event = chunk_stored(hashes, parent, token_ids, block_size, medium)
    event.group_idx, event.kv_cache_spec_kind = 0, FULL_ATTENTION
    return event


def placeholder_stored(hashes: list[int], medium: str) -> BlockStored:
    """The same without self_describing_kv_events: only that something with this hash is in the tier now."""
    event = chunk_stored(hashes, None, [], 0, medium)
    event.group_idx = 0
    return event


def as_array(event: WireEvent) -> list[Any]:
    """The event as a positional array, tag first, trailing defaults left out (vLLM before the map form)."""
    fields: list[Any] = [type(event).__name__]
    fields.extend(getattr(event, name) for name in type(event).__struct_fields__)
    required = 1 + sum(f.required for f in msgspec.structs.fields(type(event)))
    while len(fields) > required and fields[-1] is None:
        fields.pop()
    return fields


def encode_batch(events: Sequence[WireEvent], ts: float, dp_rank: int | None = 0, wire: EventsWire = "map") -> bytes:
    """One payload. `ts` is in seconds since the epoch (here: virtual time)."""
    body: list[Any] = list(events) if wire == "map" else [as_array(e) for e in events]
    return _ENCODER.encode(_Batch(ts, body, dp_rank))


def topic(address: str, port: int, model: str) -> bytes:
    """The topic that llm-d's router expects: `kv@<ip:port>@<model>`, the pod id being the endpoint's address."""
    return f"kv@{address}:{port}@{model}".encode()


def sequence_frame(sequence: int) -> bytes:
    """Second ZMQ frame: the publisher's batch counter, 8 bytes, big endian."""
    return sequence.to_bytes(8, "big")
