"""Exports: checked by the tools they are for, where those can be had."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import polars as pl
import pytest

from harness.cli import main
from harness.results.store import load_run
from harness.runner import run_experiment
from tests.harness.test_runner import _experiment


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("export")
    run_experiment(_experiment(base), base / "run", show_progress=False)
    return base / "run"


def _export(folder: Path, format: str, name: str) -> Path:
    with pytest.raises(SystemExit) as ended:
        main(["export", str(folder), "--format", format])
    assert ended.value.code == 0
    return folder / name


def test_csv_holds_the_records(folder: Path) -> None:
    frame = pl.read_csv(_export(folder, "csv", "calls.csv"))
    run = load_run(folder)
    assert frame.columns == run.calls.columns
    assert frame["finish_ns"].to_list() == run.calls.sort("call_id")["finish_ns"].to_list()


def test_llmd_s_own_package_accepts_its_report(folder: Path) -> None:
    package = pytest.importorskip("llmd_benchmark_report")
    path = _export(folder, "llmd", "benchmark_report.yaml")
    report = package.load_benchmark_report(package.import_yaml(str(path)))
    assert report.version == "0.2.1"
    aggregate = report.results.request_performance.aggregate
    summary = load_run(folder).summary
    assert aggregate.requests.total == 2 and aggregate.requests.failures == 0
    assert aggregate.latency.time_to_first_token.p90 == pytest.approx(summary["ttft_s"]["p90"])
    assert aggregate.latency.request_latency.mean == pytest.approx(summary["e2e_s"]["mean"])
    assert aggregate.latency.time_per_output_token.mean == pytest.approx(summary["itl_s"]["mean"])
    engine = report.scenario.stack[0].standardized
    assert (engine.replicas, engine.accelerator.count, engine.accelerator.parallelism.dp) == (2, 16, 8)


def test_perfetto_spans_are_closed_nested_and_add_up(folder: Path) -> None:
    with gzip.open(_export(folder, "perfetto", "trace.perfetto.json.gz")) as file:
        events = json.load(file)["traceEvents"]
    open_spans: dict[tuple[str, str], float] = {}
    lengths: dict[str, dict[str, float]] = {}
    for event in events:
        if event["ph"] == "b":
            open_spans[event["id"], event["name"]] = event["ts"]
        elif event["ph"] == "e":
            start = open_spans.pop((event["id"], event["name"]))
            lengths.setdefault(event["id"], {})[event["name"]] = event["ts"] - start
    assert not open_spans
    assert len(lengths) == 2
    for call in lengths.values():
        whole = next(length for name, length in call.items() if "#" in name)
        parts = sum(length for name, length in call.items() if "#" not in name)
        assert parts == pytest.approx(whole)


def test_an_unknown_format_is_one_clear_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["export", str(folder), "--format", "xml"])
    assert ended.value.code == 2
    assert "choose one of: csv, perfetto, llmd" in capsys.readouterr().err
