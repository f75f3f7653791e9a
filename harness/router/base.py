"""What every router, real or baseline, offers to the simulation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from fake_workers.engine.events import KvEvent
from fake_workers.engine.gauges import Gauges


@dataclass(slots=True)
class Endpoint:
    """One routable worker (a DP rank is an endpoint of its own); `labels` are the pod's."""

    index: int
    name: str
    address: str
    port: int
    node: int
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class RouteRequest:
    """A call on its way to the router. `runs` are (origin, start, end) in engine blocks from 0 on, end exclusive."""

    request_id: str
    session_id: str
    model: str
    runs: list[tuple[int, int, int]]
    prompt_tokens: int
    output_tokens: int
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Decision:
    """The router's answer: an endpoint (status 200) or an immediate refusal (429, 503, 400, ...).

    `believed_share` is the share of the prompt (0..1) that the router took to be cached on the chosen endpoint;
    None where the config scores no prefix.
    """

    endpoint: int | None
    believed_share: float | None = None
    status: int = 200
    message: str = ""
    response_headers: dict[str, str] = field(default_factory=dict)
    prefill_endpoint: int | None = None
    """Where the prompt is to be computed, if elsewhere (x-prefiller-host-port)."""


class Router(Protocol):
    """Drives one router in lock-step with virtual time: what a method does is in place at the next decision."""

    @property
    def reads_kv_events(self) -> bool:
        """Whether KV events reach it."""

    @property
    def phase_header(self) -> str | None:
        """Header that names the phase (prefill, decode), where each has a decision of its own; else None."""

    @property
    def reads_gauges(self) -> bool:
        """Whether the workers' gauges reach it."""

    @property
    def blocks_per_router_block(self) -> int:
        """Engine blocks in one block of the router's prefix scoring."""

    def start(self) -> None:
        """Bring the router up with all endpoints known and their first gauges read."""

    def push_gauges(self, updates: dict[int, Gauges]) -> None:
        """New scrape values by endpoint index; the router has ingested them when the next decision is made."""

    def publish_kv_events(self, events: dict[int, list[KvEvent]]) -> None:
        """KV events by endpoint index, in order; the router has ingested them when the next decision is made."""

    def decide(self, request: RouteRequest) -> Decision:
        """Where the request goes. It counts as in flight until `finish` or `abort`."""

    def first_token(self, request_id: str) -> dict[str, str]:
        """Response headers and first streamed token passed through; returns the headers that the client sees."""

    def finish(self, request_id: str, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, str]:
        """Last token passed through with its usage; returns headers that the client sees late, if any."""

    def tell_first_token(self, request_id: str) -> None:
        """As `first_token`, but in place only when the next decision or abort is made."""

    def tell_end(self, request_id: str, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """As `finish`, but in place only when the next decision or abort is made."""

    def settle(self) -> None:
        """Returns when everything that was told is in place; for the end of a run."""

    def abort(self, request_id: str) -> None:
        """The client went away (time-out); returns once the router has let go of the request."""

    def identity(self) -> dict[str, Any]:
        """kind, release, sha256, config name and text, what the harness added, whether the program is unmodified."""

    def stats(self) -> dict[str, Any]:
        """Costs per call in wall seconds and whatever makes the run invalid (silent fall-backs)."""

    def stop(self) -> None:
        """End the child process and free the ports; safe to call twice."""
