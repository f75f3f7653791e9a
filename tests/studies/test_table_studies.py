"""The studies that are one table: restore against published figures, and the shared tier's bandwidth cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.cli import main
from harness.errors import InputError
from harness.studies.bandwidth import run_steps
from harness.studies.restore import Result, Row, case_names, load_case, run_case
from harness.studies.restore_report import restore_study
from harness.studies.tables import markdown, render


def test_published_figures_name_their_source_and_cover_every_length() -> None:
    for name in case_names():
        case = load_case(name)
        assert case.name == name and len(case.source) > 40
        assert [row[0] for row in case.published] == sorted(row[0] for row in case.published)


def test_unknown_cases_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="choose one of: llama-3.1-8b-h100-dram"):
        load_case("none")
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\n")
    with pytest.raises(InputError, match="mine.yaml"):
        load_case(str(path))


def _result(name: str, rows: list[tuple[float, float, float, float]]) -> Result:
    made = [Row(1000 * (i + 1), *row, restored_tokens=1000 * (i + 1)) for i, row in enumerate(rows)]
    return Result(load_case(name), made, "d")


def test_what_misses_comes_first_with_its_cause_and_what_is_met_after_it() -> None:
    good = _result("llama-3.1-8b-h100-dram", [(95, 19, 100, 20), (190, 21, 200, 20)])
    off = _result("gpt-oss-120b-h200-rdma", [(95, 5, 100, 20), (190, 30, 200, 40)])
    study = restore_study([good, off], "cmd")
    assert study.answers[0].startswith(
        "Off, gpt-oss-120b-h200-rdma, load: 0.25 to 0.75 of the published times. Published"
    )
    assert study.answers[1].startswith("Within 20%, llama-3.1-8b-h100-dram, recompute: 0.95")
    assert study.marked == {(2, 7), (3, 7)}
    text = markdown(study)
    assert "| 5.0 | **0.25** |" in text and "| llama-3.1-8b-h100-dram | 1,000 | 100.0 | 95.0 | 0.95 |" in text
    assert "Content-Security-Policy" in render(study)


def test_where_loading_begins_to_pay_is_interpolated() -> None:
    slow = _result("gpt-oss-120b-h200-slow", [(100, 150, 100, 200), (300, 250, 300, 250)])
    assert slow.crossover_tokens(published=False) == pytest.approx(1500)
    assert slow.crossover_tokens(published=True) == pytest.approx(1667, abs=1)
    assert not slow.missed("load"), "what was given is not compared"


@pytest.mark.slow
def test_llama_on_h100_is_within_a_fifth_of_what_was_published(tmp_path: Path, lmcache: None) -> None:
    result = run_case(load_case("llama-3.1-8b-h100-dram"), tmp_path, show_progress=False)
    assert not result.invalid
    assert [row.restored_tokens for row in result.rows] == [row.tokens for row in result.rows]
    assert not result.missed("recompute") and not result.missed("load")


@pytest.mark.slow
def test_a_peers_recompute_is_met_its_pull_is_not_and_a_slow_link_loses_to_recompute(
    tmp_path: Path, lmcache: None
) -> None:
    july = run_case(load_case("gpt-oss-120b-h200-rdma-july"), tmp_path / "july", show_progress=False)
    assert all(abs(row.recompute_ratio - 1) < 0.06 for row in july.rows)
    assert len(july.missed("load")) == len(july.rows), "if these are met now, the study's text is wrong"
    slow = run_case(load_case("gpt-oss-120b-h200-slow"), tmp_path / "slow", show_progress=False)
    assert slow.rows[0].load_ms > slow.rows[0].recompute_ms and slow.rows[-1].load_ms < slow.rows[-1].recompute_ms


@pytest.mark.slow
def test_the_restore_study_from_the_command_line(
    tmp_path: Path, lmcache: None, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["study", "restore", "--case", "gpt-oss-120b-h200-rdma", "--out", str(tmp_path), "--json"]
    with pytest.raises(SystemExit) as done:
        main(words)
    assert done.value.code == 0
    data = json.loads(capsys.readouterr().out)
    assert [row["tokens"] for row in data["cases"][0]["rows"]] == [2048, 8192]
    assert "ratio" in (tmp_path / "study.md").read_text() and "plot-0" in (tmp_path / "study.html").read_text()


@pytest.mark.slow
def test_less_bandwidth_makes_a_longer_tail(tmp_path: Path, lmcache: None) -> None:
    wide, narrow = run_steps("small", tmp_path, steps=(120.0, 20.0), show_progress=False)
    assert wide.calls == narrow.calls == 64 * 7
    assert narrow.ttft_p90_s > 3 * wide.ttft_p90_s and narrow.ttft_p50_s > 1.5 * wide.ttft_p50_s
    assert 5 < narrow.link_use / wide.link_use < 6.5, "the same bytes over a sixth of the rate"
