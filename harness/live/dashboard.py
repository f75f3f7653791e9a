"""The Grafana dashboard of the live cluster: vLLM's metrics, the router's, Envoy's. `PANELS` says what is asked."""

from __future__ import annotations

from typing import Any

Panel = tuple[str, str, str, list[tuple[str, str]]]
"""Title, unit, kind, and (query, legend) for each line."""

PANELS: list[Panel] = [
    ("Requests running", "short", "timeseries", [("sum by (instance) (vllm:num_requests_running)", "{{instance}}")]),
    ("Requests waiting", "short", "timeseries", [("sum by (instance) (vllm:num_requests_waiting)", "{{instance}}")]),
    (
        "KV cache in use",
        "percentunit",
        "timeseries",
        [("max by (instance) (vllm:kv_cache_usage_perc)", "{{instance}}")],
    ),
    (
        "Prefix cache hit rate",
        "percentunit",
        "timeseries",
        [
            (
                "sum by (instance) (rate(vllm:prefix_cache_hits_total[1m]))"
                " / sum by (instance) (rate(vllm:prefix_cache_queries_total[1m]))",
                "{{instance}}",
            )
        ],
    ),
    (
        "Time to first token",
        "s",
        "timeseries",
        [
            (
                f"histogram_quantile({q}, sum by (le) (rate(vllm:time_to_first_token_seconds_bucket[1m])))",
                f"p{int(100 * q)}",
            )
            for q in (0.5, 0.9, 0.99)
        ],
    ),
    (
        "Time per output token",
        "s",
        "timeseries",
        [
            (
                f"histogram_quantile({q}, sum by (le) (rate(vllm:inter_token_latency_seconds_bucket[1m])))",
                f"p{int(100 * q)}",
            )
            for q in (0.5, 0.9)
        ],
    ),
    (
        "End to end",
        "s",
        "timeseries",
        [
            (
                f"histogram_quantile({q}, sum by (le) (rate(vllm:e2e_request_latency_seconds_bucket[1m])))",
                f"p{int(100 * q)}",
            )
            for q in (0.5, 0.9)
        ],
    ),
    (
        "Tokens per second",
        "short",
        "timeseries",
        [
            ("sum(rate(vllm:generation_tokens_total[1m]))", "generated"),
            ('sum(rate(vllm:prompt_tokens_by_source_total{source="local_compute"}[1m]))', "prompt, computed"),
            ('sum(rate(vllm:prompt_tokens_by_source_total{source="local_cache_hit"}[1m]))', "prompt, from cache"),
        ],
    ),
    (
        "Requests by end",
        "reqps",
        "timeseries",
        [("sum by (finished_reason) (rate(vllm:request_success_total[1m]))", "{{finished_reason}}")],
    ),
    ("Preemptions", "cps", "timeseries", [("sum(rate(vllm:num_preemptions_total[1m]))", "preemptions")]),
    (
        "Gateway: requests by status",
        "reqps",
        "timeseries",
        [
            (
                "sum by (envoy_response_code_class) (rate(envoy_http_downstream_rq_xx"
                '{envoy_http_conn_manager_prefix="gateway"}[1m]))',
                "{{envoy_response_code_class}}xx",
            )
        ],
    ),
    (
        "Gateway: open requests",
        "short",
        "timeseries",
        [
            ('sum(envoy_http_downstream_rq_active{envoy_http_conn_manager_prefix="gateway"})', "open"),
        ],
    ),
    ("Router: ready endpoints", "short", "stat", [("max(llm_d_epp_ready_endpoints)", "ready")]),
    ("Workers up", "short", "stat", [('sum(up{job="vllm"})', "up")]),
]


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    panels = []
    for number, (title, unit, kind, queries) in enumerate(PANELS):
        panels.append(
            {
                "id": number + 1,
                "title": title,
                "type": kind,
                "datasource": {"type": "prometheus", "uid": "prometheus"},
                "gridPos": {"h": 7, "w": 8, "x": 8 * (number % 3), "y": 7 * (number // 3)},
                "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
                "targets": [
                    {
                        "refId": chr(ord("A") + i),
                        "expr": expr,
                        "legendFormat": legend,
                        "datasource": {"type": "prometheus", "uid": "prometheus"},
                    }
                    for i, (expr, legend) in enumerate(queries)
                ],
            }
        )
    return {
        "uid": "llm-cluster",
        "title": "LLM serving cluster",
        "tags": ["vllm", "llm-d"],
        "timezone": "browser",
        "schemaVersion": 39,
        "version": 1,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "templating": {"list": []},
        "annotations": {"list": []},
        "panels": panels,
    }
