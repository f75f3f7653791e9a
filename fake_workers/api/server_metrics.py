"""vLLM 0.32's base metrics (v1/metrics/loggers.py, buckets.py): same names, labels, bounds and rules of counting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fake_workers.api.exposition import Histogram, Registry, Series

REQUEST_LATENCY = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
TIME_TO_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
INTER_TOKEN_LATENCY = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PARAMS_N = (1, 2, 5, 10, 20)
NUM_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)

FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
PROMPT_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
HIT_SOURCES = ("device", "host", "p2p", "disk", "external_unspecified")
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
REJECTIONS = ("max_num_queued_reqs", "max_num_queued_tokens")
WAITING_REASONS = ("capacity", "deferred")


def request_token_bounds(max_model_len: int) -> list[float]:
    """1, 2, 5, 10, ... up to the longest sequence."""
    bounds: list[float] = []
    exponent = 0
    while True:
        for mantissa in (1, 2, 5):
            value = mantissa * 10**exponent
            if value > max_model_len:
                return bounds
            bounds.append(value)
        exponent += 1


@dataclass(slots=True)
class Finished:
    """A request that has ended, in seconds and tokens, as vLLM's FinishedRequestStats."""

    reason: str
    e2e_s: float
    queued_s: float
    prefill_s: float
    decode_s: float
    inference_s: float
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    max_tokens: int | None


class ServerMetrics:
    """The metrics of one worker (one engine)."""

    def __init__(
        self, *, model: str, engine: int, max_model_len: int, cache_info: dict[str, str], max_lora: int
    ) -> None:
        self.registry = registry = Registry()
        self._labels = labels = {"model_name": model, "engine": str(engine)}
        self._max_lora = max_lora

        def gauge(name: str, text: str, **more: str) -> Series:
            return registry.family(f"vllm:{name}", text, "gauge").series({**labels, **more})

        def split(name: str, text: str, kind: str, label: str, values: tuple[str, ...]) -> dict[str, Series]:
            family = registry.family(f"vllm:{name}", text, kind)
            return {value: family.series({**labels, label: value}) for value in values}

        def counter(name: str, text: str) -> Series:
            return registry.family(f"vllm:{name}", text, "counter").series(labels)

        def histogram(name: str, text: str, bounds: Sequence[float]) -> Histogram:
            return registry.family(f"vllm:{name}", text, "histogram").histogram(labels, bounds)

        self.running = gauge("num_requests_running", "Number of requests in model execution batches.")
        self.waiting = gauge("num_requests_waiting", "Number of requests waiting to be processed.")
        self.waiting_by = split(
            "num_requests_waiting_by_reason",
            "Number of waiting requests by reason.",
            "gauge",
            "reason",
            WAITING_REASONS,
        )
        self.sleep = split("engine_sleep_state", "Engine sleep state.", "gauge", "sleep_state", SLEEP_STATES)
        self.kv_usage = gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.")
        self.prefix_queries = counter(
            "prefix_cache_queries", "Prefix cache queries, in terms of number of queried tokens."
        )
        self.prefix_hits = counter("prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.")
        self.external_queries = counter(
            "external_prefix_cache_queries", "External prefix cache queries, in terms of number of queried tokens."
        )
        self.external_hits = counter(
            "external_prefix_cache_hits", "External prefix cache hits, in terms of number of cached tokens."
        )
        self.mm_queries = counter("mm_cache_queries", "Multi-modal cache queries, in terms of number of queried items.")
        self.mm_hits = counter("mm_cache_hits", "Multi-modal cache hits, in terms of number of cached items.")
        self.preemptions = counter("num_preemptions", "Cumulative number of preemption from the engine.")
        self.prompt_tokens = counter("prompt_tokens", "Number of prefill tokens processed.")
        self.prompt_by_source = split(
            "prompt_tokens_by_source", "Number of prompt tokens by source.", "counter", "source", PROMPT_SOURCES
        )
        self.prompt_cached = counter("prompt_tokens_cached", "Number of cached prompt tokens (local + external).")
        self.cached_by_source = split(
            "prompt_tokens_cached_by_source",
            "Prefix-cache hit tokens by the cache tier that supplied them.",
            "counter",
            "source",
            HIT_SOURCES,
        )
        self.generation_tokens = counter("generation_tokens", "Number of generation tokens processed.")
        self.success = split(
            "request_success", "Count of successfully processed requests.", "counter", "finished_reason", FINISH_REASONS
        )
        rejections = registry.family(
            "vllm:admission_rejections", "Number of admission attempts rejected by a queue limit, by reason.", "counter"
        )
        self.rejections = {r: rejections.series({"model_name": model, "reason": r}) for r in REJECTIONS}
        lengths = request_token_bounds(max_model_len)
        self.h_prompt = histogram("request_prompt_tokens", "Number of prefill tokens processed.", lengths)
        self.h_generation = histogram("request_generation_tokens", "Number of generation tokens processed.", lengths)
        self.h_iteration = histogram(
            "iteration_tokens_total", "Histogram of number of tokens per engine_step.", ITERATION_TOKENS
        )
        self.h_max_generation = histogram(
            "request_max_num_generation_tokens", "Histogram of maximum number of requested generation tokens.", lengths
        )
        self.h_n = histogram("request_params_n", "Histogram of the n request parameter.", PARAMS_N)
        self.h_max_tokens = histogram(
            "request_params_max_tokens", "Histogram of the max_tokens request parameter.", lengths
        )
        self.h_ttft = histogram(
            "time_to_first_token_seconds", "Histogram of time to first token in seconds.", TIME_TO_FIRST_TOKEN
        )
        self.h_itl = histogram(
            "inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", INTER_TOKEN_LATENCY
        )
        self.h_tpot = histogram(
            "request_time_per_output_token_seconds",
            "Histogram of time_per_output_token_seconds per request.",
            INTER_TOKEN_LATENCY,
        )

        def latency(name: str, text: str) -> Histogram:
            return histogram(name, text, REQUEST_LATENCY)

        self.h_e2e = latency("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.")
        self.h_queue = latency("request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.")
        self.h_inference = latency(
            "request_inference_time_seconds", "Histogram of time spent in RUNNING phase for request."
        )
        self.h_prefill = latency(
            "request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request."
        )
        self.h_decode = latency("request_decode_time_seconds", "Histogram of time spent in DECODE phase for request.")
        self.h_preemptions = histogram(
            "request_num_preemptions", "Histogram of the number of times a request was preempted.", NUM_PREEMPTIONS
        )
        self.h_computed = histogram(
            "request_prefill_kv_computed_tokens",
            "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
            lengths,
        )
        info = registry.family("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", "gauge")
        info.series({**cache_info, "engine": str(engine)}).set(1.0)
        self._lora = registry.family("vllm:lora_requests_info", "Running stats on lora requests.", "gauge")
        self.set_lora([], [], 0.0)
        self.set_sleep(None)

    def set_lora(self, running: list[str], waiting: list[str], now_s: float) -> None:
        """Adapters with running and waiting requests."""
        labels = {
            "max_lora": str(self._max_lora),
            "waiting_lora_adapters": ",".join(waiting),
            "running_lora_adapters": ",".join(running),
        }
        self._lora.only(labels, now_s)

    def set_sleep(self, level: int | None) -> None:
        """Asleep at a level (1: weights offloaded, 2: all discarded), or awake."""
        self.sleep["awake"].set(1.0 if level is None else 0.0)
        self.sleep["weights_offloaded"].set(1.0 if level == 1 else 0.0)
        self.sleep["discard_all"].set(1.0 if level == 2 else 0.0)

    def first_token(self, prompt_tokens: int, local_tokens: int, external_tokens: int, ttft_s: float) -> None:
        """A prefill has ended."""
        cached = local_tokens + external_tokens
        self.prompt_tokens.inc(prompt_tokens)
        self.prompt_cached.inc(cached)
        self.prompt_by_source["local_compute"].inc(prompt_tokens - cached)
        self.prompt_by_source["local_cache_hit"].inc(local_tokens)
        self.prompt_by_source["external_kv_transfer"].inc(external_tokens)
        self.h_ttft.observe(ttft_s)

    def admitted(self, tokens: int, local_tokens: int, external_tokens: int, source: str | None) -> None:
        """A request's prefix has been looked up; `source`: where external tokens come from, None without connector."""
        self.prefix_queries.inc(tokens)
        self.prefix_hits.inc(local_tokens)
        self.cached_by_source["device"].inc(local_tokens)
        if source is not None:
            self.external_queries.inc(tokens - local_tokens)
            self.external_hits.inc(external_tokens)
            self.cached_by_source[source].inc(external_tokens)

    def finished(self, request: Finished) -> None:
        """A request has ended, for whatever reason."""
        self.success[request.reason].inc()
        self.h_e2e.observe(request.e2e_s)
        self.h_queue.observe(request.queued_s)
        self.h_prefill.observe(request.prefill_s)
        self.h_inference.observe(request.inference_s)
        self.h_decode.observe(request.decode_s)
        self.h_preemptions.observe(request.preemptions)
        self.h_computed.observe(request.prompt_tokens - request.cached_tokens)
        self.h_prompt.observe(request.prompt_tokens)
        self.h_generation.observe(request.generated_tokens)
        steps = request.generated_tokens - 1
        self.h_tpot.observe(request.decode_s / steps if steps > 0 else 0.0)
        if request.max_tokens:
            self.h_max_tokens.observe(request.max_tokens)
