"""The decode side of disaggregated prefill: a prompt whose KV another worker has computed is fetched, not computed.

Stands in for vLLM's NIXL connector: the whole prompt counts as an external hit, the request is held out of the batch
until its bytes have crossed the link, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fake_workers.engine.node import Node
from fake_workers.engine.request import EngineRequest

CallAt = Callable[[int, Callable[[], None]], None]


class RemotePrefill:
    """`tokens_of(rank)`: prompt tokens by engine request id that a prefill worker holds."""

    def __init__(
        self,
        tokens_of: Callable[[int], Mapping[str, int]],
        call_at: CallAt,
        kv_bytes_per_token: float,
        bytes_per_s: float,
        latency_ns: int,
    ) -> None:
        self._tokens_of, self._call_at = tokens_of, call_at
        self._ns_per_token = kv_bytes_per_token / bytes_per_s * 1e9
        self._latency_ns = latency_ns
        self._link_free_ns = 0
        self.node: Node
        self.tokens_fetched = 0

    def attach(self, node: Node) -> None:
        """The node whose requests are held."""
        self.node = node

    def lookup(self, rank: int, request: EngineRequest, local_hit_tokens: int) -> tuple[int, bool] | None:
        """The rest of the prompt, fetched while the request waits; nothing for others, or after a preemption."""
        held = self._tokens_of(rank).get(request.request_id, 0)
        if not held or request.external_tokens:
            return 0, False
        return max(held - local_hit_tokens, 0), True

    def start_load(self, rank: int, request: EngineRequest, local_hit_tokens: int, external_tokens: int) -> None:
        """Queue the transfer behind those on the link."""
        if not external_tokens:
            return
        begin = max(self.node.now_ns + self._latency_ns, self._link_free_ns)
        self._link_free_ns = begin + round(external_tokens * self._ns_per_token)
        self.tokens_fetched += external_tokens
        self._call_at(self._link_free_ns, lambda: self.node.load_ended(rank, request))

    def save(self, rank: int, request: EngineRequest, computed_tokens: int) -> None:
        """Nothing is written anywhere."""

    def preempted(self, rank: int, request: EngineRequest) -> None:
        """What was fetched is lost; it will be computed."""

    def finish(self, rank: int, request: EngineRequest) -> bool:
        """Blocks are free at once."""
        return False
