"""What the page shows: the workers' own metrics, the gateway's log of decisions, the router's metrics, over time."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from harness.live.response_flags import meanings
from harness.live.tier_watch import TierWatch
from harness.router.base import Endpoint

INTERVAL_S = 0.5
HISTORY = 240
RECENT = 200
WINDOW = 60
"""Samples over which hit rates and mean times are taken: half a minute."""
RATE_WINDOW = 10
"""Samples over which tokens per second are taken: five seconds."""

_GAUGES = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv": "vllm:kv_cache_usage_perc",
}
_COUNTERS = {
    "prompt": "vllm:prompt_tokens_total",
    "generated": "vllm:generation_tokens_total",
    "queries": "vllm:prefix_cache_queries_total",
    "hits": "vllm:prefix_cache_hits_total",
    "external": "vllm:external_prefix_cache_hits_total",
    "requests": "vllm:request_success_total",
    "preemptions": "vllm:num_preemptions_total",
    "ttft_sum": "vllm:time_to_first_token_seconds_sum",
    "ttft_count": "vllm:time_to_first_token_seconds_count",
}
_ROUTER = {
    "ready": ("llm_d_epp_ready_endpoints", "inference_pool_ready_pods"),
    "events": ("llm_d_router_epp_kv_cache_events_messages_received_total",),
    "admitted": ("llm_d_router_epp_kv_cache_index_admissions_total", "kvcache_index_admissions_total"),
    "evicted": ("llm_d_router_epp_kv_cache_index_evictions_total", "kvcache_index_evictions_total"),
}


def sums(page: str, names: Mapping[str, str]) -> dict[str, float]:
    """Sums over all label sets of the named samples of a metrics page."""
    wanted = {name: key for key, name in names.items()}
    found = dict.fromkeys(names, 0.0)
    for line in page.splitlines():
        if line.startswith("#"):
            continue
        end = line.find("{")
        name = line[:end] if end > 0 else line.split(" ", 1)[0]
        key = wanted.get(name)
        if key is not None:
            with suppress(ValueError):
                found[key] += float(line.rsplit(" ", 1)[1])
    return found


@dataclass(slots=True)
class Watched:
    """One worker's recent past."""

    endpoint: Endpoint
    up: bool = False
    gauges: dict[str, float] = field(default_factory=dict)
    samples: deque[tuple[float, dict[str, float]]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    restarts: int = 0
    """How often its counters began anew: a restarted vLLM also numbers its KV events from 0 again."""

    def take(self, now: float, gauges: dict[str, float], counters: dict[str, float]) -> None:
        """A scrape."""
        self.up, self.gauges = True, gauges
        if self.samples and counters["requests"] < self.samples[-1][1]["requests"]:
            self.samples.clear()
            self.restarts += 1
        self.samples.append((now, counters))

    def view(self) -> dict[str, Any]:
        """For the page."""
        rates = {"prompt_per_s": 0.0, "generated_per_s": 0.0, "hit_rate": None, "tier_rate": None, "ttft_s": None}
        requests = 0.0
        if self.samples:
            (_, first), (t1, last) = self.samples[0], self.samples[-1]
            t0, before = self.samples[max(0, len(self.samples) - 1 - RATE_WINDOW)]
            requests = last["requests"]
            span = t1 - t0
            if span > 0:
                rates["prompt_per_s"] = (last["prompt"] - before["prompt"]) / span
                rates["generated_per_s"] = (last["generated"] - before["generated"]) / span
            if last["queries"] > first["queries"]:
                asked = last["queries"] - first["queries"]
                rates["hit_rate"] = (last["hits"] - first["hits"]) / asked
                rates["tier_rate"] = (last["external"] - first["external"]) / asked
            if last["ttft_count"] > first["ttft_count"]:
                rates["ttft_s"] = (last["ttft_sum"] - first["ttft_sum"]) / (last["ttft_count"] - first["ttft_count"])
        e = self.endpoint
        return {
            "name": e.name,
            "address": f"{e.address}:{e.port}",
            "role": e.labels.get("llm-d.ai/role", ""),
            "node": e.node,
            "up": self.up,
            "restarts": self.restarts,
            "requests": requests,
            **{key: self.gauges.get(key, 0.0) for key in _GAUGES},
            **rates,
        }


class Watch:
    """Collects in the background; `state` is what the page draws."""

    def __init__(
        self,
        endpoints: list[Endpoint],
        *,
        facts: dict[str, Any],
        router_metrics: str | None,
        results: Path | None = None,
        benches: str = "*",
    ) -> None:
        """`benches`: which folders in `results` are of replays through this gateway, as a glob."""
        self._workers = [Watched(endpoint) for endpoint in endpoints]
        self._names = {f"{e.address}:{e.port}": e.name for e in endpoints}
        self._facts = facts
        self._router_url = router_metrics
        self._results, self._bench_folders = results, benches
        self._router: dict[str, float | None] = {}
        self._history: deque[dict[str, float]] = deque(maxlen=HISTORY)
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self._served = self._failed = 0
        self._tiers = TierWatch()
        self.problems: list[str] = []

    # ------------------------------------------------------------------ in

    def access(self, entry: dict[str, Any]) -> None:
        """A line of the gateway's log (any thread)."""
        if entry.get("access") != 1:
            return
        status = int(entry.get("status") or 0)
        self._served += 1
        if status >= 400 or status == 0:
            self._failed += 1
        picked = entry.get("picked") or entry.get("upstream") or ""
        scores = entry.get("scores") if isinstance(entry.get("scores"), dict) else {}
        with suppress(TypeError, ValueError):
            self._recent.append(
                {
                    "t": float(entry.get("start") or time.time()),
                    "id": str(entry.get("id") or ""),
                    "path": str(entry.get("path") or ""),
                    "status": status,
                    "flags": meanings(str(entry.get("flags") or "").strip("-")),
                    "worker": self._names.get(picked, picked),
                    "prefiller": self._names.get(str(entry.get("prefiller") or ""), ""),
                    "scores": {self._names.get(k, k): float(v) for k, v in (scores or {}).items()},
                    "first_byte_ms": entry.get("first_byte_ms"),
                    "duration_ms": entry.get("duration_ms"),
                }
            )

    async def run(self) -> None:
        """Scrape until cancelled."""
        limits = httpx.Limits(max_connections=64, max_keepalive_connections=64)
        async with httpx.AsyncClient(timeout=2.0, limits=limits, trust_env=False) as client:
            number = 0
            while True:
                began = time.monotonic()
                await asyncio.gather(*(self._scrape(client, worker) for worker in self._workers))
                if self._router_url and number % 4 == 0:
                    await self._scrape_router(client)
                self._remember()
                number += 1
                await asyncio.sleep(max(0.05, INTERVAL_S - (time.monotonic() - began)))

    async def _scrape(self, client: httpx.AsyncClient, worker: Watched) -> None:
        e = worker.endpoint
        try:
            page = (await client.get(f"http://{e.address}:{e.port}/metrics")).text
        except httpx.HTTPError:
            worker.up = False
            worker.gauges = {}
            return
        worker.take(time.monotonic(), sums(page, _GAUGES), sums(page, _COUNTERS))
        self._tiers.take(page)

    async def _scrape_router(self, client: httpx.AsyncClient) -> None:
        assert self._router_url is not None
        try:
            page = (await client.get(self._router_url)).text
        except httpx.HTTPError:
            self._router = {"up": 0.0}
            return
        found: dict[str, float | None] = {"up": 1.0}
        for key, names in _ROUTER.items():
            there = [name for name in names if f"\n{name}" in page]
            found[key] = sums(page, {key: there[0]})[key] if there else None
        self._router = found

    def _remember(self) -> None:
        self._tiers.remember()
        views = [worker.view() for worker in self._workers]
        self._history.append(
            {
                "t": time.time(),
                "running": sum(v["running"] for v in views),
                "waiting": sum(v["waiting"] for v in views),
                "generated": sum(v["generated_per_s"] for v in views),
                "prompt": sum(v["prompt_per_s"] for v in views),
                "kv": sum(v["kv"] for v in views) / max(1, len(views)),
            }
        )

    # ------------------------------------------------------------------ out

    def state(self) -> dict[str, Any]:
        """Everything, as JSON."""
        return {
            **self._facts,
            "now": time.time(),
            "workers": [worker.view() for worker in self._workers],
            "router_metrics": self._router,
            "history": list(self._history),
            "recent": list(self._recent)[-60:][::-1],
            "served": self._served,
            "failed": self._failed,
            "problems": self.problems,
            "benches": self._benches(),
            **self._tiers.view(),
        }

    def _benches(self) -> list[dict[str, Any]]:
        """Replays through the gateway: how far they are, and their reports."""
        found = []
        if self._results is not None and self._results.is_dir():
            paths = self._results.glob(f"{self._bench_folders}/progress.json")
            for path in sorted(paths, key=lambda path: path.parent.stat().st_ctime)[-5:]:
                with suppress(OSError, ValueError):
                    progress = json.loads(path.read_text(encoding="utf-8"))
                    progress["name"] = path.parent.name
                    progress["report"] = (path.parent / "report.html").is_file()
                    found.append(progress)
        return found
