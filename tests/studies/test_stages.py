"""Figures per stage on records whose answers can be worked out by hand."""

from __future__ import annotations

import math

import pytest

from harness.results.records import COMPLETED, TIMED_OUT, CallRecord
from harness.studies.ladder import Stage, load_ladder
from harness.studies.llmd import ArmResult
from harness.studies.page import render_page
from harness.studies.sidebyside import arm_table, markdown
from harness.studies.stages import StageResult, mean_over_seeds, saturation_rate, stage_results

S = 1_000_000_000


def _record(index: int, arrival_s: float, ttft_s: float, end_s: float, outcome: str = COMPLETED) -> CallRecord:
    return CallRecord(
        call_id=f"ladder/{index}",
        session="ladder",
        index=index,
        chain="",
        arrival_ns=round(arrival_s * S),
        input_tokens=100,
        requested_output_tokens=11,
        outcome=outcome,
        first_token_ns=round((arrival_s + ttft_s) * S),
        finish_ns=round(end_s * S),
        output_tokens=11,
        gpu_tokens=50,
        computed_tokens=50,
    )


def test_a_stage_is_measured_from_its_first_request_to_its_last_answer() -> None:
    records = [_record(0, 0, 9, 99), _record(1, 10, 1, 13), _record(2, 12, 2, 20), _record(3, 12, 1, 15, TIMED_OUT)]
    stages = [Stage(rate=1, duration=1), Stage(rate=2, duration=2)]
    (result,) = stage_results(records, [0, 1, 1, 1], stages, warmup=1)
    assert (result.requests, result.completed) == (3, 2)
    assert result.span_s == pytest.approx(10)
    assert result.output_tok_s == pytest.approx(22 / 10)
    assert result.ttft_mean_s == pytest.approx(1.5)
    assert result.ttft_p90_s == pytest.approx(1.9)
    assert result.itl_mean_s == pytest.approx((2 + 6) / 20)
    assert result.hit_share == pytest.approx(0.5)


def test_a_stage_that_answered_nothing_has_no_figures() -> None:
    (result,) = stage_results([_record(0, 0, 1, 2, TIMED_OUT)], [0], [Stage(rate=1, duration=1)], warmup=0)
    assert result.completed == 0 and math.isnan(result.output_tok_s)


def test_saturation_lies_between_the_stages_that_bracket_the_bar() -> None:
    assert saturation_rate([(10, 0.1), (20, 0.2)]) is None
    assert saturation_rate([(10, 6.0)]) == 10
    assert saturation_rate([(10, 0.5), (20, 50.0)]) == pytest.approx(15)


def _run(ratio: float) -> list[StageResult]:
    ladder = load_ladder("qwen3-32b-8xtp2")
    return [
        StageResult(rate, 10, 10, 1.0, v["output_tok_s"] * ratio, v["ttft_mean_s"], v["ttft_p90_s"], 0.04, 0.5)
        for rate, v in ladder.published("precise").items()
    ]


def test_equal_figures_have_no_error_and_seeds_are_averaged_before_comparing() -> None:
    ladder = load_ladder("qwen3-32b-8xtp2")
    result = ArmResult("precise", ladder.arms["precise"], [1, 2], [_run(0.8), _run(1.2)])
    assert mean_over_seeds(result.runs)[0]["output_tok_s"] == pytest.approx(1707)
    table = arm_table(ladder, result, "full")
    assert table.errors["output_tok_s"].mean_absolute == pytest.approx(0)
    assert table.saturates_at is None and table.published_saturates_at is None
    assert table.ttft_offset_s == pytest.approx(0)
    off = arm_table(ladder, ArmResult("precise", ladder.arms["precise"], [1], [_run(0.9)]), "full")
    assert off.errors["output_tok_s"].bias == pytest.approx(-0.1)
    text = markdown(ladder, [off], [result])
    assert "1,707 / 1,536 / 0.90" in text


def _factor(rate: float) -> float:
    return 2.0 if rate in (15, 20) else 1.0


def test_the_stages_around_the_published_knee_are_left_out_away_from_it() -> None:
    ladder = load_ladder("qwen3-32b-8xtp2")
    published = ladder.published("k8s-service")
    run = [
        StageResult(rate, 1, 1, 1.0, v["output_tok_s"] * _factor(rate), v["ttft_mean_s"], v["ttft_p90_s"], 0.04, 0)
        for rate, v in published.items()
    ]
    table = arm_table(ladder, ArmResult("k8s-service", ladder.arms["k8s-service"], [1], [run]), "full")
    assert table.errors["output_tok_s"].mean_absolute == pytest.approx(2 / 16)
    assert table.off_knee["output_tok_s"].mean_absolute == pytest.approx(0)
    assert table.off_knee["output_tok_s"].stages == 14


def test_small_stages_stand_alone_and_say_why() -> None:
    ladder = load_ladder("qwen3-32b-8xtp2")
    result = ArmResult("precise", ladder.arms["precise"], [1], [_run(1.0)])
    small, full = arm_table(ladder, result, "small"), arm_table(ladder, result, "full")
    why = "the stages of scale small do not match the published ones"
    text, page = markdown(ladder, [small], [result]), render_page(ladder, [small], [result], "")
    assert why in text and why in page
    assert "- precise: saturation not reached" in text
    for absent in ("Errors", "- / ", "Dotted"):
        assert absent not in text and absent not in page.split("<script")[0]
    text, page = markdown(ladder, [full], [result]), render_page(ladder, [full], [result], "")
    assert why not in text + page and "### Errors" in text and "Dotted: published." in page
