"""The three gauges of a vLLM worker that routers read."""

from __future__ import annotations

import msgspec


class Gauges(msgspec.Struct, frozen=True):
    """vllm:num_requests_running, vllm:num_requests_waiting, vllm:kv_cache_usage_perc (0..1) at one scrape."""

    running: int
    waiting: int
    kv_usage: float
