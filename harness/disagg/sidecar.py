"""What llm-d's P/D sidecar does with one request: which bodies it sends to whom, and when.

The real sidecar stands before the decode engine and reads `x-prefiller-host-port`. In replay there is no HTTP, so the
harness plays it; the bodies are those of the router release v0.10.0 (pkg/sidecar/proxy), held against the real program
by tests/disagg/test_sidecar_wire.py. What virtual time passes between two sends is the caller's business.

    exchange = Exchange("nixlv2", body, "10.0.0.1:8000", new_id)
    for send in exchange.start(): ...            # to the prefill worker (and, in concurrent protocols, to decode)
    for send in exchange.answered(status, body): ...    # the prefill worker's answer: now to decode
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

PREFILLER = "x-prefiller-host-port"
REQUEST_ID = "x-request-id"
PROTOCOLS = ("nixlv2", "shared-storage", "sglang", "offloading")
SGLANG_BOOTSTRAP_PORT = 8998
P2P_PORT = 7777

Body = dict[str, Any]
_TOKEN_LIMITS = ("max_tokens", "max_completion_tokens", "min_tokens")
_KV = "kv_transfer_params"


@dataclass(frozen=True, slots=True)
class Send:
    """One request that the sidecar makes."""

    leg: Literal["prefill", "decode"]
    body: Body
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers that the sidecar adds to the client's."""


class Exchange:
    """One client request at the sidecar of its decode worker. `prefiller` None: it is passed on as it is."""

    def __init__(
        self, protocol: str, body: Mapping[str, Any], prefiller: str | None, new_id: Callable[[], str]
    ) -> None:
        """`new_id` makes the id of this exchange (a UUID; for sglang the digits of a room number)."""
        if protocol not in PROTOCOLS:
            raise ValueError(f"unknown protocol {protocol}")
        self.protocol = protocol
        self.prefiller = prefiller
        self.failed: tuple[int, Any] | None = None
        """Status and body that the client gets where prefill failed and decode is not asked."""
        self._body = dict(body)
        self._new_id = new_id
        self._headers: dict[str, str] = {}
        self._waits = False

    @property
    def concurrent(self) -> bool:
        """Whether both workers are asked at once."""
        return self.prefiller is not None and self.protocol in ("sglang", "offloading")

    def start(self) -> list[Send]:
        """What is sent when the client's request has come in."""
        if self.prefiller is None:
            return [Send("decode", dict(self._body))]
        host = self.prefiller.rpartition(":")[0]
        body = dict(self._body)
        if self.protocol == "nixlv2":
            self._waits = True
            self._headers = {REQUEST_ID: self._new_id()}
            return [Send("prefill", nixl_prefill(body), self._headers)]
        if self.protocol == "shared-storage":
            self._waits = True
            body.update(max_tokens=1, max_completion_tokens=1, cache_hit_threshold=0)
            return [Send("prefill", body)]
        if self.protocol == "sglang":
            room = {
                "bootstrap_host": host,
                "bootstrap_port": SGLANG_BOOTSTRAP_PORT,
                "bootstrap_room": int(self._new_id()),
            }
            return [Send("prefill", body | room), Send("decode", body | room)]
        exchange_id = self._new_id()
        remote = {"kv_request_id": exchange_id, "remote_host": host, "remote_port": P2P_PORT}
        return [
            Send("prefill", _single_token(body) | {_KV: {"remote_decoder": {"kv_request_id": exchange_id}}}),
            Send("decode", body | {_KV: {"remote_prefiller": remote}}),
        ]

    def answered(self, status: int, answer: Mapping[str, Any]) -> list[Send]:
        """The prefill worker has answered. Serial protocols now ask decode; concurrent ones discard the answer."""
        if not self._waits:
            return []
        self._waits = False
        if status < 200 or status >= 300:
            self.failed = (status, answer)
            return []
        body = dict(self._body)
        if self.protocol == "shared-storage":
            body["cache_hit_threshold"] = 0
            return [Send("decode", body)]
        # verbatim; where it is missing the sidecar only warns and sends null
        body[_KV] = answer.get(_KV)
        return [Send("decode", body, self._headers)]


def nixl_prefill(body: Mapping[str, Any]) -> Body:
    """The prefill request of nixlv2: one token, no stream, KV to be kept for a remote decode."""
    made = {key: value for key, value in body.items() if key != "stream_options"}
    made[_KV] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    made["stream"] = False
    made.update(dict.fromkeys(_TOKEN_LIMITS, 1))
    return made


def client_cached_tokens(prefill_answer: Mapping[str, Any]) -> int:
    """nixlv2: the client's usage shows the prefill worker's cached tokens, whatever decode found (none: 0)."""
    usage = prefill_answer.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


def _single_token(body: Mapping[str, Any]) -> Body:
    made = {key: value for key, value in body.items() if key != "stream_options"}
    made.update(max_tokens=1, stream=False)
    if "max_completion_tokens" in body:
        made["max_completion_tokens"] = 1
    return made
