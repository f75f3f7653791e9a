"""The harness's own placements to compare with: plainly marked as ours, they are not what llm-d does."""

from __future__ import annotations

import random
from typing import Any

from fake_workers.engine.events import KvEvent
from fake_workers.engine.gauges import Gauges
from harness.router.base import Decision, Endpoint, RouteRequest

BASELINES = ("round_robin", "random", "least_loaded", "session_sticky")

_WHAT = {
    "round_robin": "endpoints in turn",
    "random": "a uniformly random endpoint",
    "least_loaded": "the endpoint with the fewest calls in flight, a random one among equals",
    "session_sticky": "a session's first call to the endpoint with the fewest calls in flight, the others after it",
}


class BaselineRouter:
    """Places calls by one of `BASELINES`; knows exactly what is in flight, reads neither gauges nor KV events."""

    reads_kv_events = False
    reads_gauges = False
    blocks_per_router_block = 1
    phase_header: str | None = None

    def __init__(self, kind: str, endpoints: list[Endpoint], seed: int) -> None:
        if kind not in BASELINES:
            raise ValueError(f"unknown baseline {kind}")
        self.kind = kind
        # with roles, the policy is applied among those that decode and again among those that prefill
        roles = [endpoint.labels.get("llm-d.ai/role", "") for endpoint in endpoints]
        self._decoders = [i for i, role in enumerate(roles) if role != "prefill"]
        self._prefillers = [i for i, role in enumerate(roles) if role == "prefill"]
        self._rng = random.Random(f"baseline/{seed}")
        self._turns: dict[int, int] = {}
        self._in_flight = [0] * len(endpoints)
        self._placed: dict[str, list[int]] = {}
        self._home: dict[tuple[int, str], int] = {}
        self._decisions = 0

    def start(self) -> None:
        """Nothing to start."""

    def push_gauges(self, updates: dict[int, Gauges]) -> None:
        """Baselines read no gauges."""

    def publish_kv_events(self, events: dict[int, list[KvEvent]]) -> None:
        """Baselines read no KV events."""

    def decide(self, request: RouteRequest) -> Decision:
        """Place the call."""
        self._decisions += 1
        choice = self._choose(self._decoders, request.session_id)
        prefill = self._choose(self._prefillers, request.session_id) if self._prefillers else None
        placed = [choice] if prefill is None else [choice, prefill]
        for endpoint in placed:
            self._in_flight[endpoint] += 1
        self._placed[request.request_id] = placed
        return Decision(choice, prefill_endpoint=prefill)

    def _choose(self, among: list[int], session_id: str) -> int:
        if self.kind == "round_robin":
            turn = self._turns[among[0]] = self._turns.get(among[0], -1) + 1
            return among[turn % len(among)]
        if self.kind == "random":
            return among[self._rng.randrange(len(among))]
        if self.kind == "least_loaded":
            return self._least_loaded(among)
        home = self._home.get((among[0], session_id))
        if home is None:
            home = self._home[among[0], session_id] = self._least_loaded(among)
        return home

    def first_token(self, request_id: str) -> dict[str, str]:
        """No headers."""
        return {}

    def finish(self, request_id: str, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, str]:
        """The call is no longer in flight."""
        self.abort(request_id)
        return {}

    def tell_first_token(self, request_id: str) -> None:
        """Nothing to tell."""

    def tell_end(self, request_id: str, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """The call is no longer in flight."""
        self.abort(request_id)

    def settle(self) -> None:
        """Everything always is in place."""

    def abort(self, request_id: str) -> None:
        """The call is no longer in flight."""
        for endpoint in self._placed.pop(request_id):
            self._in_flight[endpoint] -= 1

    def identity(self) -> dict[str, Any]:
        """Marked as a baseline of the harness."""
        return {
            "kind": "baseline",
            "release": None,
            "sha256": None,
            "config": self.kind,
            "config_text": _WHAT[self.kind],
            "added": [],
            "unmodified": None,
        }

    def stats(self) -> dict[str, Any]:
        """Decisions taken and calls still in flight."""
        return {"decisions": self._decisions, "in_flight": sum(self._in_flight), "fallbacks": 0}

    def stop(self) -> None:
        """Nothing to stop."""

    def _least_loaded(self, among: list[int]) -> int:
        least = min(self._in_flight[i] for i in among)
        return self._rng.choice([i for i in among if self._in_flight[i] == least])
