"""Whole runs with the real LMCache below both roles: prefixes from tiers, prompts from prefill workers or the store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.errors import InputError
from harness.experiment import Experiment
from harness.results.records import COMPLETED, CallRecord, to_records
from harness.results.store import Run
from harness.runner import run_experiment

TRACE = "".join(
    f'{{"v":1,"session":"s{s}","block":64}}\n'
    '{"i":0,"t":0,"chain":"main","in":6400,"out":20,"ref":-1,"keep":0,"new":100,"deps":[]}\n'
    + "".join(
        f'{{"i":{i},"t":0,"chain":"main","in":{6400 + 640 * i},"out":20,"ref":{i - 1},'
        f'"keep":{100 + 10 * (i - 1)},"new":10,"deps":[{i - 1}],"gap":5}}\n'
        for i in range(1, 5)
    )
    for s in range(4)
)


def run(tmp_path: Path, name: str, kv: dict[str, Any], cache: dict[str, Any] | None, **cluster: Any) -> Run:
    path = tmp_path / "trace.jsonl"
    path.write_text(TRACE)
    document = {
        "name": "t",
        "trace": {"path": str(path)},
        "cluster": {"gpus_per_node": 8, "disaggregation": "2P2D", **cluster},
        "load": {"arrivals": "at_once"},
        "model": {"profile": "qwen3-32b-bf16-tp2-h200"},
        # round robin scatters sessions over prefill workers, so that only the tiers can have their prefixes
        "router": {"kind": "random"},
        "kv_transfer": kv,
        "output": {"report": False},
    }
    if cache is not None:
        document["cache"] = {"kind": "lmcache", "lmcache": cache}
    return run_experiment(Experiment.model_validate(document), tmp_path / name, show_progress=False)


def records_of(result: Run) -> list[CallRecord]:
    assert result.summary["validity"]["valid"], result.summary["validity"]
    records = to_records(result.calls)
    assert len(records) == 20 and {r.outcome for r in records} == {COMPLETED}
    assert all(r.prefill_endpoint is not None for r in records)
    return records


STORE = {"l1_size_gb": 64, "l2_adapters": [{"name": "store"}]}


@pytest.mark.slow
def test_tiers_serve_prefill_workers_and_transfers_serve_decode_workers(tmp_path: Path, lmcache: None) -> None:
    alone = records_of(run(tmp_path, "alone", {}, None))
    both = records_of(run(tmp_path, "both", {}, STORE))
    assert sum(r.dram_tokens + r.shared_tokens for r in alone) == 0
    assert sum(r.dram_tokens + r.shared_tokens for r in both) > 0
    assert sum(r.computed_tokens for r in both) < sum(r.computed_tokens for r in alone)
    for record in both:
        assert (record.transfer_tokens or 0) + (record.decode_hit_tokens or 0) == record.input_tokens


@pytest.mark.slow
def test_shared_storage_moves_the_prompt_through_the_store(tmp_path: Path, lmcache: None) -> None:
    result = run(tmp_path, "out", {"protocol": "shared-storage"}, STORE)
    records = records_of(result)
    assert all(r.transfer_bytes is None for r in records), "nothing goes from worker to worker"
    assert result.summary["disaggregation"]["transfers"] == 0
    # each decode worker loads what was stored and computes the rest of a chunk
    decode = next(pool for pool in result.summary["pools"] if pool["role"] == "decode")
    assert decode["scheduled_tokens"] < 0.3 * sum(r.input_tokens for r in records)


@pytest.mark.slow
def test_a_pd_run_with_tiers_repeats_to_the_last_byte(tmp_path: Path, lmcache: None) -> None:
    one, two = (run(tmp_path, name, {}, STORE).summary["digest"] for name in ("one", "two"))
    assert one == two


def test_engines_of_a_replica_on_two_nodes_have_cpu_tiers_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    path.write_text("".join(TRACE.replace('"session":"s', f'"session":"r{i}s') for i in range(8)))
    pools: list[dict[str, Any]] = [
        {"role": role, "replicas": 1, "engine": {"num_gpu_blocks": 150}} for role in ("prefill", "decode")
    ]
    pools[1]["cache"] = False
    document = {
        "name": "t",
        "trace": {"path": str(path)},
        "cluster": {"gpus_per_node": 8, "pools": pools},
        "load": {"arrivals": "at_once"},
        "model": {"profile": "glm-5.2-fp8-dp16ep16-h200"},
        "router": {"kind": "session_sticky"},
        "cache": {"kind": "offloading", "offloading": {"cpu_bytes_to_use": 10**10}},
        "output": {"report": False},
    }
    result = run_experiment(Experiment.model_validate(document), tmp_path / "out", show_progress=False)
    records = to_records(result.calls)
    assert {r.outcome for r in records} == {COMPLETED} and len(records) == 160
    by_rank: dict[str, int] = {}
    for record in records:
        assert record.prefill_endpoint is not None
        by_rank[record.prefill_endpoint] = by_rank.get(record.prefill_endpoint, 0) + record.dram_tokens
    loaded = [endpoint for endpoint, tokens in by_rank.items() if tokens]
    assert len(by_rank) == 16 and len(loaded) > 8, "ranks on both nodes"
    assert result.tiers is not None
    moved = {row["link"]: row["bytes"] for row in result.tiers.links.to_dicts()}
    for node in range(2):
        assert any(moved.get(f"host[{node}]>gpu[{node},{gpu}]") for gpu in range(8)), "over the PCIe of their own node"


def test_shared_storage_without_a_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="without a shared cache tier"):
        run(tmp_path, "out", {"protocol": "shared-storage"}, None)
    with pytest.raises(InputError, match="nothing can be sent before"):
        run(tmp_path, "out", {"mode": "layerwise"}, None)
