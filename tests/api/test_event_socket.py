"""KV events of a live worker: what is on the wire is what its cache holds; a late reader gets it by replay."""

from __future__ import annotations

from typing import Any

import msgpack
import zmq

from fake_workers.api.block_names import block_hash, event_hash
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
