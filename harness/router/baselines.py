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

    def __init__(self, kind: str, endpoints: list[Endpoint], seed: int) -> None:
        if kind not in BASELINES:
            raise ValueError(f"unknown baseline {kind}")
        self.kind = kind
        self._count = len(endpoints)
        self._rng = random.Random(f"baseline/{seed}")
        self._turn = 0
        self._in_flight = [0] * self._count
        self._placed: dict[str, int] = {}
        self._home: dict[str, int] = {}
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
        if self.kind == "round_robin":
            choice = self._turn % self._count
            self._turn += 1
        elif self.kind == "random":
            choice = self._rng.randrange(self._count)
        elif self.kind == "least_loaded":
            choice = self._least_loaded()
        else:
            home = self._home.get(request.session_id)
            choice = self._least_loaded() if home is None else home
            self._home[request.session_id] = choice
        self._in_flight[choice] += 1
        self._placed[request.request_id] = choice
        return Decision(choice)

    def first_token(self, request_id: str) -> dict[str, str]:
        """No headers."""
        return {}

    def finish(self, request_id: str, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, str]:
        """The call is no longer in flight."""
        self._in_flight[self._placed.pop(request_id)] -= 1
        return {}

    def abort(self, request_id: str) -> None:
        """The call is no longer in flight."""
        self._in_flight[self._placed.pop(request_id)] -= 1

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

    def _least_loaded(self) -> int:
        least = min(self._in_flight)
        return self._rng.choice([i for i, n in enumerate(self._in_flight) if n == least])
