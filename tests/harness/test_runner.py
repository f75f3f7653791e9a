"""Putting an experiment together: engine arguments, placement, choices, and results on disk."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import polars as pl
import pytest

from fake_workers.pricing.registry import load_profile
from harness.arms import router_arms, router_choices
from harness.errors import ComponentError, InputError
from harness.experiment import Engine, Experiment
from harness.placement import engine_config, place_endpoints
from harness.results.store import report
from harness.runner import Interrupted, compare, run_experiment
from harness.simulation import Simulation

TRACE = """\
{"v":1,"session":"a","block":64,"scope":"local"}
{"i":0,"t":0,"chain":"main","in":2000,"out":30,"ref":-1,"keep":0,"new":31,"deps":[]}
{"i":1,"t":5,"chain":"main","in":2200,"out":30,"ref":0,"keep":31,"new":3,"deps":[0],"gap":2}
"""


def _experiment(tmp_path: Path, trace: str | dict[str, object] = TRACE, **changes: object) -> Experiment:
    path = tmp_path / "trace.jsonl"
    if isinstance(trace, str):
        path.write_text(trace)
    document = {
        "name": "t",
        "trace": {"path": str(path)} if isinstance(trace, str) else trace,
        "cluster": {"nodes": 2, "gpus_per_node": 8},
        "load": {"arrivals": "at_once"},
        "model": {"profile": "glm-5.2-fp8-dp8ep8-b200"},
        "router": {"kind": "round_robin"},
        **changes,
    }
    return Experiment.model_validate(document)


def test_engine_arguments_come_from_the_profile_unless_given() -> None:
    profile = load_profile("glm-5.2-fp8-dp8ep8-b200")
    config = engine_config(Engine(), profile, "p")
    assert config.block_tokens == profile.block_tokens == 64
    assert config.num_gpu_blocks == profile.kv_capacity_tokens // 64
    assert config.max_model_len == (config.num_gpu_blocks - 1) * 64 < profile.max_model_len
    pinned = engine_config(Engine(num_gpu_blocks=1000, block_size=16, max_model_len=8000), profile, "p")
    assert (pinned.num_gpu_blocks, pinned.block_tokens, pinned.max_model_len) == (1000, 16, 8000)


def test_a_model_length_that_cannot_fit_is_refused_as_vllm_refuses_it() -> None:
    with pytest.raises(InputError, match="do not fit 999 KV blocks"):
        engine_config(Engine(num_gpu_blocks=1000, max_model_len=200_000), load_profile("glm-5.2-fp8-dp8ep8-b200"), "p")


def test_ranks_of_a_group_are_endpoints_of_one_node(tmp_path: Path) -> None:
    groups = place_endpoints(_experiment(tmp_path), load_profile("glm-5.2-fp8-dp8ep8-b200"))
    assert [len(group) for group in groups] == [8, 8]
    assert [{e.node for e in group} for group in groups] == [{0}, {1}]
    dense = place_endpoints(_experiment(tmp_path), load_profile("qwen3-32b-bf16-tp2-h100"))
    assert [e.node for group in dense for e in group] == [0] * 4 + [1] * 4
    assert len({e.address for group in groups for e in group}) == 16


def test_a_node_too_small_for_the_layout_is_refused(tmp_path: Path) -> None:
    small = _experiment(tmp_path, cluster={"nodes": 1, "gpus_per_node": 4})
    with pytest.raises(InputError, match="do not hold one replica"):
        place_endpoints(small, load_profile("glm-5.2-fp8-dp8ep8-b200"))


def test_choices_are_checked_before_anything_runs(tmp_path: Path) -> None:
    experiment = _experiment(tmp_path)
    assert router_choices(experiment, ["precise,load", "random", "load"]) == ["precise", "load", "random"]
    assert router_choices(experiment, None)[-2:] == ["round_robin", "least_loaded"]
    with pytest.raises(InputError, match="choose one of: .*precise"):
        router_choices(experiment, ["precize"])
    with pytest.raises(InputError, match="no such file"):
        router_choices(experiment, ["./none.yaml"])


def test_a_run_leaves_everything_that_the_contract_names(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run = run_experiment(_experiment(tmp_path), out, show_progress=False)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["schema"] == 1 and summary["experiment"] == "t" and summary["digest"] == run.summary["digest"]
    assert summary["outcome"]["completed"] == 2 and summary["validity"]["valid"]
    assert summary["router"]["kind"] == "baseline"
    assert pl.read_parquet(out / "calls.parquet").height == 2
    assert "plotly" in (out / "report.html").read_text().lower()
    assert (out / "experiment.resolved.yaml").exists()


def test_a_trace_without_calls_runs(tmp_path: Path) -> None:
    run = run_experiment(_experiment(tmp_path, trace=""), tmp_path / "out", show_progress=False)
    assert run.summary["outcome"]["completed"] == 0
    assert any("no call was completed" in note for note in run.summary["validity"]["notes"])


def test_comparing_keeps_one_folder_per_choice_and_one_page(tmp_path: Path) -> None:
    runs = compare(router_arms(_experiment(tmp_path), ["round_robin", "random"]), tmp_path / "out")
    assert [run.info.title for run in runs] == ["round_robin", "random"]
    assert (tmp_path / "out/report.html").exists()
    assert (tmp_path / "out/random/calls.parquet").exists()
    assert not (tmp_path / "out/random/report.html").exists()


def test_sessions_of_one_name_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (folder / name).write_text(TRACE)
    experiment = _experiment(tmp_path, trace={"path": str(folder)})
    with pytest.raises(InputError, match="two sessions are called a"):
        run_experiment(experiment, tmp_path / "out", show_progress=False)


def test_calls_that_are_all_too_long_are_an_error_with_its_remedy(tmp_path: Path) -> None:
    path = str(tmp_path / "trace.jsonl")
    Path(path).write_text(TRACE)
    with pytest.raises(InputError, match="all 2 calls are longer than trace.max_call_tokens"):
        run_experiment(_experiment(tmp_path, trace={"path": path, "max_call_tokens": 100}), tmp_path / "out")


def test_the_summary_is_written_when_all_else_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("harness.results.store.render", full)
    with pytest.raises(ComponentError, match="No space left"):
        run_experiment(_experiment(tmp_path), tmp_path / "out", show_progress=False)
    assert (tmp_path / "out/calls.parquet").exists() and not (tmp_path / "out/summary.json").exists()


def test_whatever_ends_a_run_its_calls_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object) -> None:
        raise ZeroDivisionError("boom")

    monkeypatch.setattr("harness.simulation.Simulation.settle", broken)
    with pytest.raises(ZeroDivisionError, match="kept: 2 calls"):
        run_experiment(_experiment(tmp_path), tmp_path / "out", show_progress=False)
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["outcome"]["completed"] == 2
    assert "boom" in summary["validity"]["reasons"][0]


@pytest.mark.parametrize(
    ("ended", "shown", "missing"),
    [(0, ["round_robin"], "random, least_loaded"), (1, ["round_robin", "random"], "least_loaded")],
)
def test_an_interrupted_comparison_has_its_page_which_says_that_it_is_partial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: int, shown: list[str], missing: str
) -> None:
    settled = Simulation.settle
    left = [ended]

    def interrupted(self: Simulation) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        settled(self)

    monkeypatch.setattr(Simulation, "settle", interrupted)
    arms = router_arms(_experiment(tmp_path), ["round_robin", "random", "least_loaded"])
    with pytest.raises(Interrupted, match=r"the comparison so far \(.*report.html"):
        compare(arms, tmp_path / "out")
    listing = json.loads((tmp_path / "out/comparison.json").read_text())
    assert [run["label"] for run in listing["runs"]] == shown
    again = report([tmp_path / "out"], tmp_path / "again.html")
    for page in (tmp_path / "out/report.html", again):
        text = page.read_text()
        assert f"Partial: the comparison ended before {missing} could run." in text
        assert "the run was interrupted" in text


def test_results_that_cannot_be_written_are_a_failed_component(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("harness.runner.write_run", full)
    with pytest.raises(ComponentError, match="No space left"):
        run_experiment(_experiment(tmp_path), tmp_path / "out", show_progress=False)


def test_a_run_may_begin_in_the_middle_of_its_load(tmp_path: Path) -> None:
    """Sessions arrive at -4 and 6 s: of the first, the call at 5 s is left, a second after the run has begun."""
    later = TRACE.replace('"session":"a"', '"session":"b"')
    load = {"arrivals": "uniform", "sessions_per_hour_per_node": 180, "history_s": 4}
    run = run_experiment(_experiment(tmp_path, TRACE + later, load=load), tmp_path / "out", show_progress=False)
    calls = run.calls.sort("arrival_ns")
    assert calls.select("session", "arrival_ns").rows()[:2] == [("a", 1_000_000_000), ("b", 6_000_000_000)]
    assert calls["input_tokens"].to_list() == [2200, 2000, 2200]
    assert calls["gpu_tokens"].to_list()[0] == 0, "what it sent before is in no cache"
    assert run.info.load.sessions == 2 and run.info.load.calls == 3
    assert any("had been arriving for 4 s" in note for note in run.info.notes)
