"""Our KV-event frames against those of vLLM 0.32's own publisher, byte by byte.

golden_kv_events.json is made by tests/differential/golden_kv_events.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fake_workers.api import kv_events

GOLDEN: dict[str, Any] = json.loads(Path(__file__).with_name("golden_kv_events.json").read_text())
BATCHES: list[dict[str, Any]] = GOLDEN["batches"]


def ours(event: dict[str, Any]) -> kv_events.WireEvent:
    """The event as our own functions make it from its content."""
    if event["type"] == "BlockStored":
        return kv_events.stored(
            event["block_hashes"], event["parent_block_hash"], event["token_ids"], event["block_size"]
        )
    if event["type"] == "BlockRemoved":
        return kv_events.removed(event["block_hashes"])
    return kv_events.AllBlocksCleared()


def test_every_kind_of_event_is_there() -> None:
    kinds = {event["type"] for batch in BATCHES for event in batch["events"]}
    assert kinds == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
    parents = [e["parent_block_hash"] for b in BATCHES for e in b["events"] if e["type"] == "BlockStored"]
    assert None in parents and any(parent is not None for parent in parents)


@pytest.mark.parametrize("sequence", range(len(BATCHES)))
def test_frames_are_those_of_vllm(sequence: int) -> None:
    batch = BATCHES[sequence]
    topic, number, payload = (bytes.fromhex(part) for part in batch["frames"])
    host, port = "127.0.1.10", 8000
    assert kv_events.topic(host, port, "some/model") == topic
    assert kv_events.sequence_frame(sequence) == number
    events = [ours(event) for event in batch["events"]]
    assert kv_events.encode_batch(events, batch["ts"], GOLDEN["data_parallel_rank"]) == payload
    ts, decoded, rank = msgspec.msgpack.decode(payload)
    assert (ts, rank, len(decoded)) == (batch["ts"], GOLDEN["data_parallel_rank"], len(events))


def test_replayed_payloads_are_the_published_ones() -> None:
    """The replay protocol: one reply per batch from the asked sequence on, then the end marker."""
    start = int(GOLDEN["replay"]["request"][1], 16)
    *replies, end = GOLDEN["replay"]["replies"]
    topic = GOLDEN["topic"].encode().hex()
    assert replies == [["", topic, *batch["frames"][1:]] for batch in BATCHES[start:]]
    assert end == ["", "", "ff" * 8, ""]
