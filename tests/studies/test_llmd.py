"""A ladder at small scale with the real router: the arms come out in the published order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.cli import main
from harness.studies.ladder import load_ladder
from harness.studies.llmd import Options, run_ladder

LADDER = "qwen3-32b-8xtp2"


@pytest.mark.router
@pytest.mark.slow
def test_the_arms_come_out_in_the_published_order(
    tmp_path: Path, router_v071: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARNESS_ROUTER_V071", str(router_v071))
    results = run_ladder(load_ladder(LADDER), tmp_path, Options(show_progress=False))
    top = {result.name: result.runs[0][-1] for result in results}
    assert set(top) == {"k8s-service", "approximate", "precise"}
    assert not [reason for result in results for reason in result.invalid]
    for arm in ("approximate", "precise"):
        assert top[arm].output_tok_s > 1.3 * top["k8s-service"].output_tok_s
        assert top[arm].ttft_mean_s < 0.1 * top["k8s-service"].ttft_mean_s
        assert top[arm].hit_share > 0.8 > 0.4 > top["k8s-service"].hit_share
    stages = [stage for result in results for stage in result.runs[0]]
    assert all(stage.completed == stage.requests for stage in stages)


def test_one_arm_from_the_command_line_writes_table_data_and_page_and_is_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["study", "llmd", LADDER, "--arm", "k8s-service", "--out", str(tmp_path), "--json"]
    with pytest.raises(SystemExit) as first:
        main(command)
    assert first.value.code == 0
    document = json.loads(capsys.readouterr().out)
    (arm,) = document["arms"]
    assert [stage["ours"]["rate"] for stage in arm["stages"]] == [10, 20, 40]
    assert arm["errors"] == {}, "small stages are not the published ones"
    assert "| 40 |" in (tmp_path / "study.md").read_text()
    page = (tmp_path / "study.html").read_text()
    assert "plot-ttft_p90_s" in page and 'data-run="0"' in page and '"meta":{"run":0}' in page
    calls = tmp_path / "k8s-service" / "seed-1" / "calls.parquet"
    before = calls.stat().st_mtime_ns
    with pytest.raises(SystemExit):
        main(command)
    again = json.loads(capsys.readouterr().out)
    assert calls.stat().st_mtime_ns == before
    assert again["arms"] == document["arms"]


def test_the_list_names_what_ships_and_wrong_words_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["study", "list", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in rows} >= {"qwen3-32b-8xtp2", "kvcache-73", "kvcache-37"}
    with pytest.raises(SystemExit) as wrong:
        main(["study", "llmd", LADDER, "--scale", "huge"])
    assert wrong.value.code == 2
    assert "choose one of: small, full" in capsys.readouterr().err
