"""The prefix share that the router scored for the endpoint which it chose.

v0.10.0 emits each endpoint's weighted total. All scorers but the prefix scorer are known functions of what
the harness itself told the router, so the prefix score is the rest; it must come out as a whole number of
blocks. v0.7.1 emits nothing (its debug log would say it, at several milliseconds per decision): for precise
scoring the share follows from the KV events that it has acknowledged, for approximate scoring from its
counter of matched bytes.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fake_workers.engine.events import Cleared, KvEvent, Removed, Stored
from fake_workers.engine.gauges import Gauges
from harness.router import adapt_v0100
from harness.router.config import Scorer
from harness.router.endpoints import NAMESPACE
from harness.router.tokens import Runs

_TOLERANCE_BLOCKS = 1e-3


class ScoreModel:
    """Scores of the gauge-based scorers of v0.10.0, as the router computes them."""

    def __init__(self, scorers: Sequence[Scorer], names: Sequence[str], prefix_scorer: str | None) -> None:
        self._names = list(names)
        self.prefix_weight = 0.0
        self.unknown: list[str] = []
        self._others: list[tuple[float, Callable[..., float]]] = []
        for scorer in scorers:
            if scorer.name == prefix_scorer:
                self.prefix_weight = scorer.weight
                if float(scorer.parameters.get("matchLengthWeight") or 0) > 0:
                    self.unknown.append(f"{scorer.name} with matchLengthWeight")
            elif scorer.type in _MODELS and _is_modelled(scorer):
                self._others.append((scorer.weight, _MODELS[scorer.type]))
            else:
                self.unknown.append(scorer.name)

    @property
    def usable(self) -> bool:
        """Whether the prefix score can be told from the total."""
        return self.prefix_weight > 0 and not self.unknown

    def prefix_share(
        self,
        total: float,
        chosen: int,
        candidates: Sequence[int],
        gauges: Sequence[Gauges],
        rank: int,
        session_token: str | None,
        blocks: int,
    ) -> float | None:
        """Share 0..1 of the prompt's `blocks`; None where the total does not fit (then something is not as
        modelled).
        """
        rest = total - adapt_v0100.TIE_BREAK_WEIGHT * (1 - rank / adapt_v0100.TIE_BREAK_RANGE)
        for weight, model in self._others:
            rest -= weight * model(chosen, candidates, gauges, self._names, session_token)
        matched = rest / self.prefix_weight * blocks
        whole = round(matched)
        if blocks == 0 or abs(matched - whole) > _TOLERANCE_BLOCKS or not 0 <= whole <= blocks:
            return None
        return whole / blocks


def _is_modelled(scorer: Scorer) -> bool:
    return scorer.type != "session-affinity-scorer" or (
        scorer.parameters.get("strategy", "encoded_endpoint_header") == "encoded_endpoint_header"
    )


def _least(value: Callable[[Gauges], int]) -> Callable[..., float]:
    def score(chosen: int, candidates: Sequence[int], gauges: Sequence[Gauges], *_: object) -> float:
        values = [value(gauges[i]) for i in candidates]
        low, high = min(values), max(values)
        return 1.0 if low == high else (high - value(gauges[chosen])) / (high - low)

    return score


def _kv_usage(chosen: int, candidates: Sequence[int], gauges: Sequence[Gauges], *_: object) -> float:
    return min(1.0, max(0.0, 1.0 - gauges[chosen].kv_usage))


def _session(
    chosen: int, candidates: Sequence[int], gauges: Sequence[Gauges], names: Sequence[str], token: str | None
) -> float:
    return 1.0 if token == session_token(names[chosen]) else 0.0


_MODELS: Mapping[str, Callable[..., float]] = {
    "kv-cache-utilization-scorer": _kv_usage,
    "queue-scorer": _least(lambda g: g.waiting),
    "running-requests-size-scorer": _least(lambda g: g.running),
    "session-affinity-scorer": _session,
}


def session_token(name: str) -> str:
    """The token with which the router names an endpoint to a client."""
    return base64.b64encode(f"{NAMESPACE}/{name}".encode()).decode()


def pod_name(endpoint: str, discovery: str) -> str:
    """What the router calls the endpoint: over the Kubernetes API a pod has one endpoint per port, numbered
    as ranks.
    """
    return f"{endpoint}-rank-0" if discovery == "kubernetes" else endpoint


class PublishedBlocks:
    """Which blocks the router believes each endpoint to hold: the events published so far, in their order."""

    def __init__(self, endpoints: int) -> None:
        self._held: list[dict[int, NDArray[np.bool_]]] = [{} for _ in range(endpoints)]

    def apply(self, index: int, events: Sequence[KvEvent]) -> None:
        """An index entry is a set member: a block stored twice is gone after one removal (as in v0.7.1)."""
        held = self._held[index]
        for event in events:
            if isinstance(event, Stored):
                end = event.start + event.count
                blocks = held.get(event.origin)
                if blocks is None or len(blocks) < end:
                    grown = np.zeros(max(end, 2 * len(blocks) if blocks is not None else end), dtype=np.bool_)
                    if blocks is not None:
                        grown[: len(blocks)] = blocks
                    held[event.origin] = blocks = grown
                blocks[event.start : end] = True
            elif isinstance(event, Removed):
                blocks = held.get(event.origin)
                if blocks is not None:
                    blocks[event.start : event.start + event.count] = False
                    if not blocks.any():
                        del held[event.origin]
            else:
                assert isinstance(event, Cleared)
                held.clear()

    def matched(self, index: int, runs: Runs) -> int:
        """Leading blocks of the prompt that the endpoint is believed to hold."""
        held = self._held[index]
        found = 0
        for origin, start, end in runs:
            blocks = held.get(origin)
            if blocks is None:
                return found
            part = blocks[start:end]
            missing = np.flatnonzero(~part)
            if len(missing):
                return found + int(missing[0])
            found += len(part)
            if len(part) < end - start:
                return found
        return found
