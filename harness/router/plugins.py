"""What the coupling must know about the router's plugin types (v0.7.1 and v0.10.0)."""

from __future__ import annotations

PREFIX_V071 = "prefix-cache-scorer"
PRECISE_V071 = "precise-prefix-cache-scorer"
PREFIX_SCORER = "prefix-cache-scorer"
PRECISE_PRODUCER = "precise-prefix-cache-producer"
PRECISE_LEGACY = "precise-prefix-cache-scorer"
APPROX_PRODUCER = "approx-prefix-cache-producer"
SESSION_AFFINITY = ("session-affinity-scorer", "session-affinity-filter")

SCORERS = frozenset(
    {
        "active-request-scorer",
        "context-length-aware",
        "endpoint-attribute-scorer",
        "header-label-affinity-scorer",
        "kv-cache-utilization-scorer",
        "latency-scorer",
        "load-aware-scorer",
        "lora-affinity-scorer",
        "mm-embeddings-cache-scorer",
        "no-hit-lru-scorer",
        "precise-prefix-cache-scorer",
        "predicted-latency-scorer",
        "prefix-cache-scorer",
        "queue-scorer",
        "running-requests-size-scorer",
        "session-affinity-scorer",
        "token-load-scorer",
        "topology-affinity-scorer",
    }
)

GAUGE_READERS = (
    "kv-cache-utilization-scorer",
    "load-aware-scorer",
    "probabilistic-admitter",
    "queue-scorer",
    "running-requests-size-scorer",
    "utilization-detector",
    "utilization-filter",
)

TOKEN_COUNTERS = (
    "concurrency-detector",
    "context-length-aware",
    "p2p-source-producer",
    "prefix-based-pd-decider",
    "prefix-cache-affinity-filter",
    "token-load-scorer",
)
"""Plugins whose answer depends on how many tokens or bytes a prompt has: they must see real-sized prompts."""

IN_BLOCKS = {
    "prefix-cache-affinity-filter": ("peakPrefillThroughput", 15928.0),
    "prefix-cache-scorer": ("matchLengthScaleTokens", 8192),
    "token-load-scorer": ("queueThresholdTokens", 4194304),
}
"""Counters of v0.10.0 whose one measure in tokens, with its default, can be given in blocks as well (adapt_v0100)."""

AFFINITY_FILTER = "prefix-cache-affinity-filter"

NO_HIT_LRU = "no-hit-lru-scorer"
"""Ranks endpoints that had no cold request yet in the order of a map (see Adapted.cold_start)."""

IN_FLIGHT_PRODUCER = "inflight-load-producer"

PD_DECIDER = "prefix-based-pd-decider"
"""Compares tokens that the decode worker lacks with a threshold: it can count in blocks as well (adapt_v0100)."""

HEADER_HANDLER = "header-profile-handler"
"""Runs the profile that a request header names: the coordinator's way of disaggregation, one decision per phase."""

IN_FLIGHT_TOKENS = ("concurrency-detector", "token-load-scorer")
"""Plugins that count the prompt tokens in flight."""

NOT_SIMULATED: dict[str, str] = {
    "burst-prefix-cache-producer": "groups requests within wall-clock windows, virtual time has none",
    "edf-ordering-policy": "deadlines are counted from wall-clock arrival",
    "latency-scorer": "learns from wall-clock latencies",
    "latency-slo-admitter": "learns from wall-clock latencies",
    "predicted-latency-producer": "learns from wall-clock latencies",
    "predicted-latency-scorer": "learns from wall-clock latencies",
    "probabilistic-admitter": "draws from a random source that has no seed, two runs differ",
    "program-aware-fairness-policy": "its half-life runs on the wall clock",
    "random-picker": "draws from a random source that has no seed, two runs differ",
    "slo-deadline-ordering-policy": "deadlines are counted from wall-clock arrival",
    "slo-headroom-tier-filter": "learns from wall-clock latencies and draws without a seed",
    "weighted-random-picker": "draws from a random source that has no seed, two runs differ",
}
