"""The metrics page: vLLM 0.32's names, labels and bounds (read from its source), sums that agree with the calls."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fake_workers.api import server_metrics
from fake_workers.api.server_metrics import ServerMetrics, request_token_bounds
from tests.api.live_server import samples, serving, spec


def page() -> str:
    metrics = ServerMetrics(model='m"x', engine=0, max_model_len=40960, cache_info={"block_size": "16"}, max_lora=4)
    return metrics.registry.render().decode()


def test_the_format_parses() -> None:
    names = [family.name for family in text_string_to_metric_families(page())]
    assert len(names) == len(set(names))
    labels = (
        next(f for f in text_string_to_metric_families(page()) if f.name == "vllm:num_requests_running")
        .samples[0]
        .labels
    )
    assert labels == {"model_name": 'm"x', "engine": "0"}


def vllm_source() -> Path:
    from fake_workers.vllm_engine.install import interpreter

    python = interpreter()
    found = list(Path(python).parents[1].glob("lib/python*/site-packages/vllm/v1/metrics")) if python else []
    if not found:
        pytest.skip("vLLM's Python sources are not installed: python -m fake_workers.vllm_engine.install")
    return found[0]


OPTIONAL = {
    # only with a configuration that a simulated engine does not have
    "vllm:num_requests_kv_fetch_by_stage", "vllm:corrupted_requests", "vllm:watermark_requests",
    "vllm:kv_block_lifetime_seconds", "vllm:kv_block_idle_before_evict_seconds", "vllm:kv_block_reuse_gap_seconds",
}  # fmt: skip


def test_names_are_those_of_vllm() -> None:
    text = (vllm_source() / "loggers.py").read_text()
    wanted = set(re.findall(r'name="(vllm:\w+)"', text)) | {"vllm:cache_config_info"}
    ours = {f.name.removesuffix("_created") for f in text_string_to_metric_families(page())}
    ours |= {f"{n}_total" for n in ours if f"{n}_total" in wanted}
    assert wanted - OPTIONAL - ours == set()
    assert {n for n in ours if n not in wanted and n.removesuffix("_total") not in wanted} == set()


def test_bounds_are_those_of_vllm() -> None:
    tree = ast.parse((vllm_source() / "buckets.py").read_text())
    theirs = {}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(node.value, ast.Tuple):
            theirs[node.target.id] = ast.literal_eval(node.value)
    assert theirs["REQUEST_LATENCY_BUCKETS"] == server_metrics.REQUEST_LATENCY
    assert theirs["TIME_TO_FIRST_TOKEN_BUCKETS"] == server_metrics.TIME_TO_FIRST_TOKEN
    assert theirs["INTER_TOKEN_LATENCY_BUCKETS"] == server_metrics.INTER_TOKEN_LATENCY
    assert theirs["ITERATION_TOKENS_BUCKETS"] == server_metrics.ITERATION_TOKENS
    assert theirs["REQUEST_PARAMS_N_BUCKETS"] == server_metrics.PARAMS_N
    assert theirs["REQUEST_NUM_PREEMPTIONS_BUCKETS"] == server_metrics.NUM_PREEMPTIONS
    assert request_token_bounds(300) == [1, 2, 5, 10, 20, 50, 100, 200]


def test_counts_agree_with_the_calls() -> None:
    with serving(spec(speed=20.0)) as live, live.client() as http:
        assert http.get("/v1/responses/resp_none").status_code == 404
        usage = []
        for i in range(6):
            body = {"prompt": "the same beginning " * 30 + str(i % 3), "max_tokens": 5 + i, "ignore_eos": True}
            usage.append(http.post("/v1/completions", json=body).json()["usage"])
        found = samples(http.get("/metrics").text)
        prompt = sum(u["prompt_tokens"] for u in usage)
        output = sum(u["completion_tokens"] for u in usage)
        cached = sum(u["prompt_tokens_details"]["cached_tokens"] for u in usage)
        assert found["vllm:prompt_tokens_total"] == prompt
        assert found["vllm:generation_tokens_total"] == output
        assert found["vllm:prefix_cache_hits_total"] == cached == found["vllm:prompt_tokens_cached_total"]
        assert found["vllm:prefix_cache_queries_total"] == prompt
        assert found["vllm:prompt_tokens_by_source_total{source=local_compute}"] == prompt - cached
        assert found["vllm:request_success_total{finished_reason=length}"] == 6
        assert found["vllm:time_to_first_token_seconds_count"] == 6
        assert found["vllm:inter_token_latency_seconds_count"] == output - 6
        assert found["vllm:iteration_tokens_total_sum"] == prompt - cached + output
        assert found["vllm:request_params_max_tokens_sum"] == output == found["vllm:request_generation_tokens_sum"]
        assert found["http_requests_total{handler=/v1/completions,method=POST,status=2xx}"] == 6
        assert found["http_requests_total{handler=/v1/responses/{response_id},method=GET,status=4xx}"] == 1
        assert found["http_request_duration_seconds_count{handler=/v1/completions,method=POST}"] == 6
        assert not [name for name in found if "handler=/health" in name or "handler=/metrics" in name]
        e2e = found["vllm:e2e_request_latency_seconds_sum"]
        parts = [found[f"vllm:request_{p}_time_seconds_sum"] for p in ("queue", "prefill", "decode")]
        assert e2e == pytest.approx(sum(parts), rel=1e-6)
