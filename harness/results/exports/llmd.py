"""llm-d's benchmark report, schema 0.2.1 (PyPI llmd-benchmark-report): what its own harnesses write.

Latencies are over calls completed in the measured window, as in summary.json. The times of the run are virtual: they
start at the epoch, and the description says so.
"""

from __future__ import annotations

import datetime
import hashlib
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl
import yaml

from harness.folders import write_whole
from harness.results.numbers import Floats, seconds
from harness.results.records import COMPLETED, IN_FLIGHT
from harness.results.store import Run
from harness.results.summary import DECODE, E2E, TTFT, decoding, measured

VERSION: Final = "0.2.1"
_PERCENTILES: Final = {
    "p0p1": 0.1,
    "p1": 1,
    "p5": 5,
    "p10": 10,
    "p25": 25,
    "p50": 50,
    "p75": 75,
    "p90": 90,
    "p95": 95,
    "p99": 99,
    "p99p9": 99.9,
}


def write(run: Run, path: Path) -> None:
    """Write the file."""
    text = yaml.safe_dump(report(run), sort_keys=False, allow_unicode=True, width=110)
    write_whole(path, text)


def report(run: Run) -> dict[str, Any]:
    """The report as data."""
    info, summary = run.info, run.summary
    window = measured(run.calls, info)
    done = window.filter(pl.col("outcome") == COMPLETED)
    throughput = summary["throughput"]
    total = sum(throughput[key] or 0.0 for key in ("input_tokens_per_s", "output_tokens_per_s"))
    per_output = decoding(done)
    tpot = seconds(per_output, DECODE.cast(pl.Float64) / (pl.col("output_tokens") - 1))
    some = done.filter(pl.col("output_tokens") > 0)
    normalised = seconds(some, E2E.cast(pl.Float64) / pl.col("output_tokens"))
    aggregate = {
        "requests": {
            "total": len(window),
            "failures": len(window) - len(done),
            "incomplete": int((run.calls["outcome"] == IN_FLIGHT).sum()),
            **_given("input_length", done["input_tokens"].cast(pl.Float64).to_numpy(), "count"),
            **_given("output_length", done["output_tokens"].cast(pl.Float64).to_numpy(), "count"),
        },
        "throughput": {
            "input_token_rate": _mean(throughput["input_tokens_per_s"], "tokens/s"),
            "output_token_rate": _mean(throughput["output_tokens_per_s"], "tokens/s"),
            "total_token_rate": _mean(total, "tokens/s"),
            "request_rate": _mean(throughput["calls_per_s"], "queries/s"),
        },
        "latency": {
            **_given("time_to_first_token", seconds(done, TTFT), "s"),
            **_given("time_per_output_token", tpot, "s/token"),
            **_given("normalized_time_per_output_token", normalised, "s/token"),
            **_given("request_latency", seconds(done, E2E), "s"),
        },
    }
    return {
        "version": VERSION,
        "run": {
            "uid": summary["digest"][:32],
            "eid": _hash(info.experiment_yaml),
            "time": {
                "start": _instant(summary["measured"]["start_s"]),
                "end": _instant(summary["measured"]["end_s"]),
                "duration": f"PT{summary['measured']['end_s'] - summary['measured']['start_s']:.6f}S",
            },
            "description": f"{info.name}: simulated, in virtual time; the router is the real one",
            "keywords": ["simulated", info.title],
        },
        "scenario": {"stack": [*_engines(run), _router(run)], "load": _load(run, done)},
        "results": {"request_performance": {"aggregate": aggregate}},
    }


def _given(name: str, values: Floats, units: str) -> dict[str, Any]:
    """Statistics under their name, or nothing where there are no values."""
    if not len(values):
        return {}
    found: dict[str, Any] = {
        "units": units,
        "mean": float(values.mean()),
        "stddev": float(values.std()),
        "min": float(values.min()),
    }
    found |= {key: float(np.percentile(values, level)) for key, level in _PERCENTILES.items()}
    return {name: found | {"max": float(values.max())}}


def _mean(value: float | None, units: str) -> dict[str, Any]:
    return {"units": units, "mean": value or 0.0}


def _instant(virtual_s: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(virtual_s, datetime.UTC)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _engines(run: Run) -> list[dict[str, Any]]:
    """One component per role; a cluster without roles has replicas only."""
    info = run.info
    roles = [worker.role for worker in info.workers] or [""] * len(info.endpoint_nodes)
    engine = info.experiment["cluster"]["engine"]
    profile = info.profile
    layout = _layout(str(info.cluster.get("layout", "")))
    found = []
    for role in dict.fromkeys(roles):
        count = roles.count(role)
        gpus = sum(w.gpus for w in info.workers if w.role == role) or count * layout["tp"]
        found.append(
            {
                "metadata": {
                    "label": f"vllm-{role or 'replica'}",
                    "cfg_id": _hash(repr(engine)),
                    "description": f"simulated; step times from {profile.get('name')}",
                },
                "standardized": {
                    "kind": "inference_engine",
                    "tool": "vllm (simulated)",
                    "tool_version": "0.32",
                    "role": role if role in ("prefill", "decode") else "replica",
                    "replicas": max(1, count // layout["dp"]),
                    "model": {"name": str(info.cluster.get("model", "unknown"))},
                    "accelerator": {
                        "model": str(info.cluster.get("GPU", "unknown")),
                        "count": gpus,
                        "parallelism": {**layout, "dp_local": layout["dp"], "workers": 1, "pp": 1},
                    },
                },
                "native": {"config": engine},
            }
        )
    return found


def _layout(text: str) -> dict[str, int]:
    """TP8 DP1 EP8 as numbers."""
    found = {"tp": 1, "dp": 1, "ep": 1}
    for word in text.split():
        key, digits = word.rstrip("0123456789").lower(), word.lstrip("TPDEtpde")
        if key in found and digits.isdecimal():
            found[key] = int(digits)
    return found


def _router(run: Run) -> dict[str, Any]:
    router = run.info.router
    config = router.get("config_text")
    return {
        "metadata": {"label": "router", "cfg_id": _hash(str(config or router.get("config")))},
        "standardized": {
            "kind": "generic",
            "tool": "llm-d-router" if router.get("kind") == "llm-d" else "baseline",
            "tool_version": str(router.get("release") or "-"),
            "sha256": str(router.get("sha256") or "-"),
            "config_name": str(router.get("config")),
        },
        "native": {"config": yaml.safe_load(config) if isinstance(config, str) else None},
    }


def _load(run: Run, done: pl.DataFrame) -> dict[str, Any]:
    experiment = run.info.experiment

    def length(column: str) -> dict[str, Any]:
        mean = done[column].mean()
        return {"distribution": "other", "value": float(mean) if isinstance(mean, (int, float)) else 0.0}

    return {
        "metadata": {"cfg_id": _hash(repr(experiment["load"]) + repr(run.info.load)), "description": "trace replay"},
        "standardized": {
            "tool": "llm-cluster-harness",
            "tool_version": str(run.info.versions.get("harness", "0.1.0")),
            "source": "sampled",
            "input_seq_len": length("input_tokens"),
            "output_seq_len": length("output_tokens"),
            "multi_turn": {"enabled": True},
        },
        "native": {"config": {"trace": Path(experiment["trace"]["path"]).name, "load": experiment["load"]}},
    }
