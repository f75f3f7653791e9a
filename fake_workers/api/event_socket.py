"""KV events of one worker over real ZMQ: vLLM 0.32's PUB socket and replay socket (distributed/kv_events.py).

Replay: a client sends `["", start sequence (8 bytes)]` from a DEALER; it gets `["", topic, sequence, payload]` for
every batch from there on that is still kept, then the end marker `["", "", ff x 8, ""]`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import zmq
import zmq.asyncio

from fake_workers.api import kv_events as wire
from fake_workers.api.block_names import BlockNames, chunk_hash
from fake_workers.engine.events import Cleared, KvEvent, Removed, TierEvent
from fake_workers.errors import InputError

END_OF_REPLAY = b"\xff" * 8
BUFFER_STEPS = 10_000


class EventSocket:
    """Publishes a rank's events; call `serve_replay` in the event loop for the second socket."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        topic: bytes,
        rank: int,
        names: BlockNames,
        wire_form: wire.EventsWire = "map",
        buffer_steps: int = BUFFER_STEPS,
    ) -> None:
        self._context = zmq.asyncio.Context()
        self._topic, self._rank, self._names, self._form = topic, rank, names, wire_form
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self.sequence = 0
        """Of the next batch."""
        self.forgotten = 0
        """Events left out because their blocks' names are no longer known."""
        self._socket: zmq.Socket[bytes] = zmq.Context.shadow(self._context.underlying).socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, 100_000)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._replay: zmq.asyncio.Socket | None = None
        try:
            self._socket.bind(endpoint)
            if replay_endpoint:
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.setsockopt(zmq.LINGER, 0)
                self._replay.bind(replay_endpoint)
        except zmq.ZMQError as error:
            self.close()
            where = f"{endpoint} or {replay_endpoint}"
            raise InputError(f"KV events at {where}", f"cannot be bound ({error})", "choose a free port") from None

    def publish(self, events: Sequence[KvEvent]) -> None:
        """One batch: a step's events, in order."""
        batch = [found for event in events if (found := self._translate(event)) is not None]
        if not batch:
            return
        payload = wire.encode_batch(batch, time.time(), self._rank, self._form)
        self._socket.send_multipart([self._topic, wire.sequence_frame(self.sequence), payload])
        self._kept.append((self.sequence, payload))
        self.sequence += 1

    async def serve_replay(self) -> None:
        """Answer replay requests until cancelled."""
        if self._replay is None:
            return
        while True:
            frames = await self._replay.recv_multipart()
            if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
                continue
            client, start = frames[0], int.from_bytes(frames[2], "big")
            for number, payload in list(self._kept):
                if number >= start:
                    await self._replay.send_multipart([client, b"", self._topic, wire.sequence_frame(number), payload])
            await self._replay.send_multipart([client, b"", b"", END_OF_REPLAY, b""])

    def close(self) -> None:
        """Close both sockets."""
        self._socket.close(0)
        if self._replay is not None:
            self._replay.close(0)
        self._context.term()

    def _translate(self, event: KvEvent) -> wire.WireEvent | None:
        if isinstance(event, Cleared):
            return wire.AllBlocksCleared()
        if isinstance(event, TierEvent):
            return self._tier(event)
        found = self._names.describe(event.origin, event.start, event.count)
        if found is None:
            self.forgotten += 1
            return None
        hashes, tokens = found
        if isinstance(event, Removed):
            return wire.removed(hashes[::-1])
        parent = self._names.describe(*event.parent, 1) if event.parent else None
        size = self._names.block_tokens
        stored = wire.stored(hashes, parent[0][0] if parent else None, tokens, size)
        keys = self._names.extra_keys(event.origin)
        if keys is not None:
            adapter, salt = keys
            stored.lora_name = adapter
            names = [adapter] if adapter else []
            stored.extra_keys = [
                [*names, salt] if salt and event.start + i == 0 else names or None for i in range(event.count)
            ]
        return stored

    def _tier(self, event: TierEvent) -> wire.WireEvent | None:
        """Neighbouring chunks in one event, where LMCache and vLLM have one each."""
        found = self._names.chain(event.origin, event.start, event.count)
        if found is None:
            self.forgotten += 1
            return None
        hashes, tokens = found
        size = event.hash_blocks
        if event.hashes != "block":
            hashes = hashes[size - 1 :: size]
        chunk = event.hashes == "chunk"
        if chunk:
            hashes = [chunk_hash(last) for last in hashes]
        if not event.stored:
            return wire.removed(hashes, medium=event.medium, group_idx=None if chunk else 0)
        if event.hashes == "placeholder":
            return wire.placeholder_stored(hashes, event.medium)
        before = self._names.chain(event.origin, event.start - 1, 1) if event.start else None
        parent = before[0][0] if before else None
        block = self._names.block_tokens
        if chunk:
            parent = None if parent is None else chunk_hash(parent)
            return wire.chunk_stored(hashes, parent, tokens, size * block, event.medium)
        return wire.offload_stored(hashes, parent, tokens, block, event.medium)
