"""KV events of a live worker: what is on the wire is what its cache holds; a late reader gets it by replay."""

from __future__ import annotations

from typing import Any

import msgpack
import zmq

from fake_workers.api.block_names import BlockNames, block_hash, chunk_hash, event_hash
from fake_workers.api.event_socket import EventSocket
from fake_workers.engine.events import TierEvent
from harness.router.process import free_ports
from tests.api.live_server import Live, serving, spec


def subscriber(context: zmq.Context, live: Live, worker: int = 0) -> zmq.Socket:
    place = live.spec.groups[worker][0]
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"kv@")
    socket.setsockopt(zmq.RCVTIMEO, 5000)
    socket.connect(f"tcp://{place.host}:{live.spec.events_port}")
    return socket


def replay(context: zmq.Context, live: Live, start: int) -> list[tuple[int, Any]]:
    place = live.spec.groups[0][0]
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVTIMEO, 5000)
    socket.connect(f"tcp://{place.host}:{live.spec.replay_port}")
    try:
        socket.send_multipart([b"", start.to_bytes(8, "big")])
        found = []
        while True:
            empty, topic, sequence, payload = socket.recv_multipart()
            assert empty == b""
            if sequence == b"\xff" * 8:
                assert topic == payload == b""
                return found
            found.append((int.from_bytes(sequence, "big"), msgpack.unpackb(payload)))
    finally:
        socket.close(0)


def test_events_on_the_wire_and_by_replay() -> None:
    prompt = list(range(100, 164))
    with serving(spec(events=True, blocks=12)) as live, live.client() as http:
        context = zmq.Context()
        place = live.spec.groups[0][0]
        try:
            body = {"prompt": prompt, "max_tokens": 1, "ignore_eos": True}
            http.post("/v1/completions", json=body)
            batches = replay(context, live, 0)
            assert [n for n, _ in batches] == list(range(len(batches)))
            timestamp, events, rank = batches[0][1]
            assert timestamp > 1e9 and rank == 0
            stored = events[0]
            assert stored["type"] == "BlockStored" and stored["token_ids"] == prompt[: len(stored["token_ids"])]
            digest = None
            for i, found in enumerate(stored["block_hashes"]):
                digest = block_hash(digest, prompt[16 * i : 16 * i + 16])
                assert found == event_hash(digest)
            late = subscriber(context, live)
            http.post("/v1/completions", json={**body, "prompt": prompt[:16] + [7] * 150, "cache_salt": "s"})
            http.post("/v1/completions", json={**body, "prompt": [9] * 150})
            http.post("/reset_prefix_cache")
            held: dict[int, int] = {}
            topic = f"kv@{place.host}:{place.port}@{live.spec.model}".encode()
            seen = late.recv_multipart()
            assert seen[0] == topic and int.from_bytes(seen[1], "big") >= len(batches)
            late.close(0)
            kinds = set()
            for _, (_, events, _) in replay(context, live, 0):
                for event in events:
                    kinds.add(event["type"])
                    if event["type"] == "BlockStored":
                        if event.get("extra_keys") and event["extra_keys"][0]:
                            assert event["extra_keys"][0] == ["s"] and event["parent_block_hash"] is None
                        for h in event["block_hashes"]:
                            held[h] = held.get(h, 0) + 1
                    elif event["type"] == "BlockRemoved":
                        for h in event["block_hashes"]:
                            held[h] -= 1
                    else:
                        held.clear()
            assert kinds == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
            assert not held
            assert http.get("/kv_event_sources").json()["0"]["replay_endpoint"]
            assert replay(context, live, 10**6) == []
        finally:
            context.destroy(0)


def test_events_of_tiers() -> None:
    """LMCache's chunks with hashes of their own, vLLM's blocks with the engine's, placeholders without tokens."""
    names = BlockNames(4, 100)
    ids = list(range(16))
    before = names.name(ids[:8], [])
    after = names.name(ids, [])
    assert after.runs[0][0] == before.origin
    hashes, digest = [], None
    for i in range(4):
        digest = block_hash(digest, ids[4 * i : 4 * i + 4])
        hashes.append(event_hash(digest))
    (port,) = free_ports(1)
    socket = EventSocket(f"tcp://127.0.0.1:{port}", None, b"kv@a", 0, names)
    context = zmq.Context()
    reader = context.socket(zmq.SUB)
    reader.setsockopt(zmq.SUBSCRIBE, b"")
    reader.setsockopt(zmq.RCVTIMEO, 5000)
    reader.connect(f"tcp://127.0.0.1:{port}")

    def said(*events: TierEvent) -> list[dict[str, Any]]:
        socket.publish(events)
        return list(msgpack.unpackb(reader.recv_multipart()[2])[1])

    def event(stored: bool, start: int, count: int, kind: Any, size: int) -> TierEvent:
        return TierEvent(0, "CPU", stored, after.origin, start, count, kind, size)

    try:
        while not reader.poll(20):
            socket.publish([event(False, 0, 2, "chunk", 2)])
        while reader.poll(100):
            reader.recv_multipart()
        # the second chunk of two blocks, then one of three whose first blocks another prompt brought
        second, crossing = said(event(True, 2, 2, "chunk", 2), event(True, 0, 3, "chunk", 3))
        assert second["block_hashes"] == [chunk_hash(hashes[3])] and second["token_ids"] == ids[8:]
        assert second["parent_block_hash"] == chunk_hash(hashes[1])
        assert (second["block_size"], second["medium"], "group_idx" in second) == (8, "CPU", False)
        assert crossing["token_ids"] == ids[:12] and crossing["parent_block_hash"] is None
        block, gone = said(event(True, 1, 3, "block", 1), event(False, 1, 3, "block", 1))
        assert block["block_hashes"] == hashes[1:] and block["token_ids"] == ids[4:]
        assert (block["parent_block_hash"], block["block_size"], block["group_idx"]) == (hashes[0], 4, 0)
        assert gone["block_hashes"] == hashes[1:] and gone["type"] == "BlockRemoved"
        (place,) = said(event(True, 0, 4, "placeholder", 2))
        assert place["block_hashes"] == [hashes[1], hashes[3]] and place["token_ids"] == []
        socket.publish([TierEvent(0, "CPU", True, 99, 0, 2, "chunk", 2)])
        assert socket.forgotten == 1
    finally:
        reader.close(0)
        context.term()
        socket.close()
