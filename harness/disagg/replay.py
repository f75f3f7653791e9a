"""One call whose prompt is computed on one worker and whose answer on another, in replay: the sidecar's two requests.

The exchange of bodies is `sidecar.Exchange`'s; the engines' requests are made from the bodies that it sends, and the
prefill worker's answer carries what vLLM 0.32 returns, so that the decode worker finds its KV by what the wire says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fake_workers.engine.request import EngineRequest
from harness.clock import VirtualClock, to_ns
from harness.disagg.connector import PdConnector
from harness.disagg.handoff import Handoff, KvExchange
from harness.disagg.sidecar import Exchange, Send
from harness.results.records import CallRecord
from harness.router.base import Endpoint

OnEngine = Callable[[int, EngineRequest], None]
"""Brings an endpoint's node up to now and hands it a request."""
Make = Callable[[int], EngineRequest]
"""An engine request of the call for so many output tokens."""


@dataclass(slots=True)
class Disaggregation:
    """What all split calls of a run share."""

    kv: KvExchange
    clock: VirtualClock
    endpoints: list[Endpoint]
    connectors: dict[int, tuple[PdConnector, int]] = field(default_factory=dict)
    """By endpoint: the connector of its group and its rank there."""
    _serial: Iterator[int] = field(default_factory=lambda: iter(range(1, 1 << 62)))

    @property
    def protocol(self) -> str:
        """The sidecar's connector."""
        return self.kv.config.protocol

    @property
    def moves_kv(self) -> bool:
        """Whether KV goes from worker to worker; else through the shared cache tier."""
        return self.protocol != "shared-storage"

    def new_id(self) -> str:
        """An id of its own for every exchange; a number, as sglang's rooms are."""
        return str(next(self._serial))


class SplitCall:
    """The two requests of one call."""

    def __init__(
        self,
        shared: Disaggregation,
        record: CallRecord,
        model: str,
        make: Make,
        on_engine: OnEngine,
        prefill_endpoint: int,
        decode_endpoint: Callable[[], int | None],
    ) -> None:
        """`decode_endpoint` is asked when the decode request is sent; None: the router refused it."""
        self.shared = shared
        self.record = record
        self._make, self._on_engine = make, on_engine
        self._decode_endpoint = decode_endpoint
        self.prefill_endpoint = prefill_endpoint
        self.prefill: EngineRequest | None = None
        self.decode: EngineRequest | None = None
        self.handoff: Handoff | None = None
        where = shared.endpoints[prefill_endpoint]
        body = {
            "model": model,
            "prompt": record.call_id,
            "max_tokens": record.requested_output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self.exchange = Exchange(shared.protocol, body, f"{where.address}:{where.port}", shared.new_id)

    def start(self) -> None:
        """The client's request has come in at the sidecar."""
        for send in self.exchange.start():
            self._send(send)

    def prefill_ended(self) -> str | None:
        """The prefill worker answers; returns why the call fails, None if it goes on."""
        request, shared = self.prefill, self.shared
        assert request is not None
        status = 500 if request.failed else 200
        sends = self.exchange.answered(status, self._answer(request))
        if self.exchange.failed is not None:
            return f"prefill answered {status}"
        delay_ns = to_ns(shared.kv.config.sidecar_us / 1e6)
        for send in sends:
            shared.clock.call_later(delay_ns, self._send_later, send)
        return None

    def legs(self) -> Iterator[tuple[int, EngineRequest]]:
        """The requests that are in engines, with their endpoints."""
        if self.prefill is not None:
            yield self.prefill_endpoint, self.prefill
        if self.decode is not None and self.record.endpoint is not None:
            yield self.record.endpoint, self.decode

    def abandon(self) -> None:
        """The client went away: what the workers have not begun to exchange is let go."""
        for endpoint, request in self.legs():
            if self.handoff is not None:
                self.shared.connectors[endpoint][0].abandon(request)

    def copy_progress(self) -> None:
        """What is known of the two requests so far, into the record."""
        record, prefill, decode = self.record, self.prefill, self.decode
        record.prefill_endpoint = self.prefill_endpoint
        record.prefill_node = self.shared.endpoints[self.prefill_endpoint].node
        if prefill is not None:
            record.admitted_ns = prefill.admitted_ns
            record.prefill_done_ns = prefill.finish_ns
            record.restore_ns = prefill.restore_ns
            record.preemptions = prefill.preemptions
        if decode is not None:
            record.output_tokens = decode.outputs
            record.preemptions += decode.preemptions
            record.decode_admitted_ns = decode.admitted_ns
            record.decode_hit_tokens = decode.hit_tokens
        handoff = self.handoff
        if handoff is not None and handoff.started_ns is not None:
            record.transfer_start_ns = handoff.started_ns
            record.transfer_end_ns = handoff.ended_ns
            record.transfer_bytes, record.transfer_tokens = handoff.bytes, handoff.tokens

    # ------------------------------------------------------------------ sending

    def _send_later(self, send: Send) -> None:
        if self.record.finish_ns is None:
            self._send(send)

    def _send(self, send: Send) -> None:
        if send.leg == "prefill":
            # sglang's prefill servers are asked for the whole answer and stop after one token all the same
            self.prefill = self._make(1)
            if self.shared.moves_kv:
                connector, rank = self.shared.connectors[self.prefill_endpoint]
                self.handoff = self.shared.kv.begin(f"{self.record.call_id}#{rank}", connector.sides[rank])
                connector.keeps(self.prefill, self.handoff)
            self._on_engine(self.prefill_endpoint, self.prefill)
            return
        endpoint = self._decode_endpoint()
        if endpoint is None:
            if self.handoff is not None:
                self.shared.kv.drop(self.handoff)
            return
        self.decode = self._make(int(send.body["max_tokens"]))
        if self.handoff is not None:
            connector, rank = self.shared.connectors[endpoint]
            connector.reads(rank, self.decode, self._named(send))
        self._on_engine(endpoint, self.decode)

    def _named(self, send: Send) -> Handoff:
        """The KV that the decode request's parameters name."""
        assert self.handoff is not None
        params = send.body.get("kv_transfer_params") or {}
        name = params.get("remote_request_id", self.handoff.key)
        return self.shared.kv.open.get(name, self.handoff)

    def _answer(self, request: EngineRequest) -> dict[str, Any]:
        """The prefill worker's answer, as far as the sidecar and the decode worker read it (vLLM 0.32)."""
        if self.handoff is None:
            return {}
        where = self.shared.endpoints[self.prefill_endpoint]
        return {
            "usage": {"prompt_tokens_details": {"cached_tokens": request.hit_tokens or 0}},
            "kv_transfer_params": {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_block_ids": [[request.prompt_tokens]],
                "remote_engine_id": where.name,
                "remote_request_id": self.handoff.key,
                "remote_host": where.address,
                "remote_port": where.port,
                "tp_size": len(self.handoff.source.gpus),
                "remote_num_tokens": request.prompt_tokens,
                "transfer_mode": "pull",
            },
        }
