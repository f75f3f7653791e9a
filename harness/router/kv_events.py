"""KV events towards the router: blocks as runs in, vLLM's wire format out, on one socket for all workers.

The router binds a SUB socket and works with one queue (`concurrency: 1`), so messages take effect in the
order in which they are sent. What marks the end of a batch is therefore a last message of ours whose effect
can be seen (a sentinel).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import zmq

from fake_workers.api import kv_events as wire
from fake_workers.engine.events import Cleared, KvEvent, Removed, Stored
from harness.errors import ComponentError
from harness.router import tokens
from harness.router.base import Endpoint
from harness.router.tier_events import RouterTierEvent

_RECONNECT_MS = 10


class KvEventPublisher:
    """One PUB socket that speaks for every worker; the topic says for which."""

    def __init__(
        self,
        url: str,
        endpoints: Sequence[Endpoint],
        model: str,
        tokens_per_block: int,
        wire_form: wire.EventsWire,
    ) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.connect(url)
        self._topics = [wire.topic(e.address, e.port, model) for e in endpoints]
        self._sequence = [0] * len(endpoints)
        self._tokens_per_block = tokens_per_block
        self._wire_form = wire_form
        self.messages = 0
        self.blocks = 0

    def wait_subscribed(self, timeout_s: float) -> None:
        """Until the router's subscription has arrived: what is published before is lost."""
        if not self._socket.poll(int(timeout_s * 1000)):
            raise ComponentError("router", f"did not subscribe to KV events within {timeout_s:g} s")
        self._socket.recv()

    def publish(self, index: int, events: Iterable[KvEvent | RouterTierEvent]) -> None:
        """One message with a worker's events, in order."""
        batch: list[wire.WireEvent] = []
        ts = 0.0
        for event in events:
            ts = event.t_ns / 1e9
            batch.append(self._translate(event))
        self.send(index, batch, ts)

    def send(self, index: int, events: Sequence[wire.WireEvent], ts: float = 0.0) -> None:
        """One message with events as they are on the wire."""
        payload = wire.encode_batch(events, ts, 0, self._wire_form)
        self._socket.send_multipart([self._topics[index], wire.sequence_frame(self._sequence[index]), payload])
        self._sequence[index] += 1
        self.messages += 1

    def send_raw(self, index: int, payload: bytes) -> None:
        """One message with a payload of the caller's making."""
        self._socket.send_multipart([self._topics[index], wire.sequence_frame(self._sequence[index]), payload])
        self._sequence[index] += 1

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close(0)
        self._context.term()

    def _tier(self, event: RouterTierEvent) -> wire.WireEvent:
        """Neighbouring chunks in one event, where LMCache and vLLM have one each."""
        chunk = event.hashes == "chunk"
        name = tokens.chunk_hashes if chunk else tokens.block_hashes
        hashes = [label for run in event.labels for label in name(*run)]
        if not event.stored:
            return wire.removed(hashes, medium=event.medium, group_idx=None if chunk else 0)
        if event.hashes == "placeholder":
            return wire.placeholder_stored(hashes, event.medium)
        ids = tokens.prompt_tokens(event.blocks)
        if self._tokens_per_block > 1:
            ids = ids.repeat(self._tokens_per_block)
        parent = None if event.parent is None else name(event.parent[0], event.parent[1], event.parent[1] + 1)[0]
        make = wire.chunk_stored if chunk else wire.offload_stored
        return make(hashes, parent, ids.tolist(), event.label_blocks * self._tokens_per_block, event.medium)

    def _translate(self, event: KvEvent | RouterTierEvent) -> wire.WireEvent:
        if isinstance(event, RouterTierEvent):
            return self._tier(event)
        if isinstance(event, Stored):
            self.blocks += event.count
            ids = tokens.tokens(event.origin, event.start, event.start + event.count)
            if self._tokens_per_block > 1:
                ids = ids.repeat(self._tokens_per_block)
            return wire.stored(
                tokens.block_hashes(event.origin, event.start, event.start + event.count),
                tokens.block_hash(*event.parent) if event.parent is not None else None,
                ids.tolist(),
                self._tokens_per_block,
            )
        if isinstance(event, Removed):
            self.blocks += event.count
            hashes = tokens.block_hashes(event.origin, event.start, event.start + event.count)
            hashes.reverse()
            return wire.removed(hashes)
        assert isinstance(event, Cleared)
        return wire.AllBlocksCleared()
