"""The part of vLLM's /metrics page that routers read, in Prometheus text format."""

from __future__ import annotations

from fake_workers.engine.gauges import Gauges

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render(
    gauges: Gauges,
    *,
    model: str,
    block_tokens: int,
    num_gpu_blocks: int,
    extra: dict[str, float] | None = None,
) -> bytes:
    """One scrape. `extra` adds gauges of the harness's own (names outside vLLM's), e.g. `{"sim:tiebreak":
    3.0}`.
    """
    labels = f'{{engine="0",model_name="{model}"}}'
    lines = [
        "# HELP vllm:num_requests_running Number of requests in model execution batches.",
        "# TYPE vllm:num_requests_running gauge",
        f"vllm:num_requests_running{labels} {gauges.running}",
        "# HELP vllm:num_requests_waiting Number of requests waiting to be processed.",
        "# TYPE vllm:num_requests_waiting gauge",
        f"vllm:num_requests_waiting{labels} {gauges.waiting}",
        "# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.",
        "# TYPE vllm:kv_cache_usage_perc gauge",
        f"vllm:kv_cache_usage_perc{labels} {gauges.kv_usage!r}",
        "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig",
        "# TYPE vllm:cache_config_info gauge",
        f'vllm:cache_config_info{{block_size="{block_tokens}",engine="0",num_gpu_blocks="{num_gpu_blocks}"}} 1.0',
        "# HELP vllm:lora_requests_info Running stats on lora requests.",
        "# TYPE vllm:lora_requests_info gauge",
        'vllm:lora_requests_info{max_lora="0",running_lora_adapters="",waiting_lora_adapters=""} 1.0',
    ]
    for name, value in (extra or {}).items():
        lines.append(f"# TYPE {name} gauge")
        lines.append(f'{name}{{engine="0"}} {value!r}')
    lines.append("")
    return "\n".join(lines).encode()
