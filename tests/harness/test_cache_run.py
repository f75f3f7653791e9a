"""The real LMCache below the engines in a whole run: what each tier served, conservation, determinism."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import InputError
from harness.experiment import Experiment
from harness.results.store import Run
from harness.runner import run_experiment

CALLS = "".join(
    f'{{"i":{i},"t":{i * 60},"chain":"main","in":{6400 + 640 * i},"out":20,"ref":{i - 1},'
    f'"keep":{(100 + 10 * (i - 1)) if i else 0},'
    f'"new":{10 if i else 100},"deps":[{i - 1}],"gap":40}}\n'
    for i in range(1, 6)
)
TRACE = "".join(
    f'{{"v":1,"session":"s{s}","block":64}}\n'
    '{"i":0,"t":0,"chain":"main","in":6400,"out":20,"ref":-1,"keep":0,"new":100,"deps":[]}\n' + CALLS
    for s in range(3)
)


def _run(tmp_path: Path, name: str, **lmcache: object) -> Run:
    path = tmp_path / "trace.jsonl"
    path.write_text(TRACE)
    experiment = Experiment.model_validate(
        {
            "name": "t",
            "trace": {"path": str(path)},
            "cluster": {"nodes": 2, "gpus_per_node": 8},
            "load": {"arrivals": "uniform", "sessions_per_hour_per_node": 30},
            "model": {"profile": "glm-5.2-fp8-dp8ep8-b200"},
            "router": {"kind": "round_robin"},
            "cache": {"kind": "lmcache", "lmcache": {"l1_size_gb": 64, **lmcache}},
            "output": {"report": False},
        }
    )
    return run_experiment(experiment, tmp_path / name, show_progress=False)


@pytest.mark.slow
def test_a_shared_store_serves_what_round_robin_scatters(tmp_path: Path, lmcache: None) -> None:
    shared = _run(tmp_path, "shared", l2_adapters=[{"name": "store"}])
    local = _run(tmp_path, "local")
    for run in (shared, local):
        assert run.summary["validity"]["valid"], run.summary["validity"]
        assert run.summary["outcome"]["completed"] == 18
        assert run.summary["cache"]["release"] == "0.5.6"
    sources = shared.summary["tokens_by_source"]
    assert sum(sources.values()) == shared.summary["load"]["input_tokens"]
    assert sources["shared"] > 0 and sources["dram"] > 0
    assert local.summary["tokens_by_source"]["shared"] == 0
    assert shared.summary["hit_rate"]["token"] > local.summary["hit_rate"]["token"]
    assert shared.summary["restore_s"]["mean"] > 0
    told = ["loads from store cost the wire alone" in " ".join(run.info.notes) for run in (shared, local)]
    assert told == [True, False]
    assert [tier["name"] for tier in shared.summary["tier"]["tiers"]] == ["dram", "store"]


@pytest.mark.slow
def test_a_run_with_tiers_repeats_to_the_last_byte(tmp_path: Path, lmcache: None) -> None:
    one = _run(tmp_path, "one", l2_adapters=[{"name": "store"}])
    two = _run(tmp_path, "two", l2_adapters=[{"name": "store"}])
    assert one.summary["digest"] == two.summary["digest"]


def test_tiers_without_lmcache_are_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.cache.upstream.available", lambda: False)
    with pytest.raises(InputError, match=r"pip install '\.\[lmcache\]'"):
        _run(tmp_path, "out")


def _offloading(tmp_path: Path, name: str, **options: object) -> Run:
    path = tmp_path / "trace.jsonl"
    path.write_text(TRACE)
    experiment = Experiment.model_validate(
        {
            "name": "t",
            "trace": {"path": str(path)},
            "cluster": {"nodes": 1, "gpus_per_node": 2, "engine": {"num_gpu_blocks": 701, "max_model_len": 11000}},
            "load": {"arrivals": "uniform", "sessions_per_hour_per_node": 600},
            "model": {"profile": "qwen3-32b-bf16-tp2-h200"},
            "router": {"kind": "round_robin"},
            "cache": {"kind": "offloading", "offloading": {"cpu_bytes_to_use": 1 << 36, **options}},
            "output": {"report": False},
        }
    )
    return run_experiment(experiment, tmp_path / name, show_progress=False)


def test_vllms_cpu_tier_serves_what_the_gpu_lost(tmp_path: Path) -> None:
    """The GPUs hold hardly more than one prompt of three sessions in turn; nothing of LMCache is needed."""
    run, again = _offloading(tmp_path, "one"), _offloading(tmp_path, "two")
    assert run.summary["validity"]["valid"], run.summary["validity"]
    assert run.summary["outcome"]["completed"] == 18
    assert run.summary["cache"] == {"kind": "offloading", "release": "0.32.0", "mode": "lru"}
    sources = run.summary["tokens_by_source"]
    assert sum(sources.values()) == run.summary["load"]["input_tokens"]
    (tier,) = run.summary["tier"]["tiers"]
    assert tier["name"] == "dram" and tier["written_bytes"] > 0
    assert tier["hit_tokens"] >= sources["dram"] > 0 and run.summary["restore_s"]["mean"] > 0
    assert run.summary["digest"] == again.summary["digest"]


def test_offloading_settings_are_checked_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="block_size"):
        _offloading(tmp_path, "out", block_size=100)
    with pytest.raises(InputError, match="one chunk"):
        _offloading(tmp_path, "out", cpu_bytes_to_use=1000)
