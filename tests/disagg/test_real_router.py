"""The real router's own profile handlers and deciders choose prefill and decode workers, in both releases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.experiment import Experiment
from harness.results.records import COMPLETED, CallRecord, to_records
from harness.results.store import Run
from harness.router.select import CONFIGS
from harness.runner import run_experiment

pytestmark = pytest.mark.router

TRACE = "".join(
    f'{{"v":1,"session":"s{s}","block":16}}\n'
    '{"i":0,"t":0,"chain":"main","in":3200,"out":20,"ref":-1,"keep":0,"new":200,"deps":[]}\n'
    '{"i":1,"t":0,"chain":"main","in":3360,"out":20,"ref":0,"keep":200,"new":10,"deps":[0],"gap":0.5}\n'
    '{"i":2,"t":0,"chain":"main","in":6560,"out":20,"ref":1,"keep":210,"new":200,"deps":[1],"gap":0.5}\n'
    f'{{"v":1,"session":"t{s}","block":16}}\n'
    '{"i":0,"t":0,"chain":"main","in":160,"out":20,"ref":-1,"keep":0,"new":10,"deps":[]}\n'
    for s in range(4)
)


def run(tmp_path: Path, release: str, binary: Path, config: str, name: str = "out", **changes: Any) -> Run:
    path = tmp_path / "trace.jsonl"
    path.write_text(TRACE)
    document: dict[str, Any] = {
        "name": "t",
        "trace": {"path": str(path)},
        "cluster": {"gpus_per_node": 8, "disaggregation": "2P2D"},
        "load": {"arrivals": "uniform", "sessions_per_hour_per_node": 3600},
        "model": {"profile": "qwen3-32b-bf16-tp2-h200"},
        "router": {"release": release, "binary": str(binary), "config": config},
        "output": {"report": False},
    }
    for key, value in changes.items():
        document[key] = document.get(key, {}) | value
    return run_experiment(Experiment.model_validate(document), tmp_path / name, show_progress=False)


def records_of(result: Run) -> list[CallRecord]:
    assert result.summary["validity"]["valid"], result.summary["validity"]
    records = to_records(result.calls)
    assert {r.outcome for r in records} == {COMPLETED}
    return records


def test_every_call_goes_to_a_prefill_worker_and_a_decode_worker(
    tmp_path: Path, router_release: tuple[str, Path]
) -> None:
    records = records_of(run(tmp_path, *router_release, "pd-always"))
    assert {r.prefill_endpoint for r in records} == {0, 1}
    assert {r.endpoint for r in records} == {2, 3}
    assert all((r.transfer_bytes or 0) > 0 for r in records)


def test_the_decider_spares_short_and_cached_prompts_the_way(tmp_path: Path, router_release: tuple[str, Path]) -> None:
    records = {r.call_id: r for r in records_of(run(tmp_path, *router_release, "pd-prefix"))}
    split = {name: r.prefill_endpoint is not None for name, r in records.items()}
    for s in range(4):
        assert split[f"s{s}/0"], "3,200 new tokens"
        assert not split[f"s{s}/1"], "160 new tokens, the rest is with the decode worker"
        assert split[f"s{s}/2"], "3,200 new tokens again"
        assert not split[f"t{s}/0"], "160 tokens in all"
        last = records[f"s{s}/2"]
        assert last.decode_hit_tokens is not None and last.transfer_tokens is not None
        assert last.decode_hit_tokens + last.transfer_tokens == 6560
        if last.endpoint == records[f"s{s}/1"].endpoint:
            assert last.decode_hit_tokens >= 3360


def test_a_pd_run_repeats_to_the_last_byte(tmp_path: Path, router_release: tuple[str, Path]) -> None:
    one = run(tmp_path, *router_release, "pd-always", "one")
    two = run(tmp_path, *router_release, "pd-always", "two")
    assert one.summary["digest"] == two.summary["digest"]


def test_the_coordinator_places_decode_when_prefill_has_ended(tmp_path: Path, router_v0100: Path) -> None:
    result = run(tmp_path, "v0.10.0", router_v0100, "pd-coordinator")
    records = records_of(result)
    assert {r.prefill_endpoint for r in records} == {0, 1}
    assert {r.endpoint for r in records} == {2, 3}
    assert result.info.router_stats["decisions"] == 2 * len(records)
    assert result.info.router_stats["router_in_flight"] in (0, None)


def test_the_router_learns_of_blocks_from_both_pools(tmp_path: Path, router_v0100: Path) -> None:
    result = run(tmp_path, "v0.10.0", router_v0100, "pd-prefix", router={"block_tokens": None})
    records = {r.call_id: r for r in records_of(result)}
    again = [records[f"s{s}/2"] for s in range(4)]
    assert all(r.prefill_endpoint == records[f"{r.session}/0"].prefill_endpoint for r in again), "its prefix is there"
    assert all(r.gpu_tokens >= 3200 for r in again)
    assert result.summary["router_truth_gap"]["mean"] == 0


def test_a_config_with_speculative_indexing_runs_without_it(tmp_path: Path, router_v0100: Path) -> None:
    text = (CONFIGS / "v0.10.0" / "pd-prefix.yaml").read_text()
    config = tmp_path / "speculative.yaml"
    config.write_text(text.replace("    kvEventsConfig:", "    speculativeIndexing: true\n    kvEventsConfig:"))
    result = run(tmp_path, "v0.10.0", router_v0100, str(config))
    records_of(result)
    assert any("speculativeIndexing" in note for note in result.summary["validity"]["notes"])
