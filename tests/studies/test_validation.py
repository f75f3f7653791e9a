"""The validation study: its closed loop, its fit, its scores, its data; a small part of it end to end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fake_workers.pricing.calibration import RAW, Calibration
from fake_workers.pricing.registry import load_profile
from harness.cli import app
from harness.studies.validation import silicon
from harness.studies.validation.closed_loop import Loop, engine_config, run_loop
from harness.studies.validation.fit import fit, fit_concurrencies, predict
from harness.studies.validation.longcontext import run_longcontext
from harness.studies.validation.points import (
    Correction,
    Layout,
    Point,
    doubtful,
    load_corrections,
    load_groups,
    profile_of,
)
from tests.harness.simple_price import SimplePrice


def test_one_client_sees_the_engines_own_times() -> None:
    """Prefill as one step, then one token a step: TTFT and TPOT are the prices themselves."""
    price = SimplePrice()
    loop = Loop(1, 100, 11, 1.0, 3)
    seen = run_loop(price, engine_config(100_000, loop), loop)
    from fake_workers.pricing.steps import RankBatch

    first = price.step_ns([RankBatch(((100, 0),))])
    rest = sum(price.step_ns([RankBatch((), 1, 100 + k)]) for k in range(1, 11))
    assert seen.ttft_ms == pytest.approx(first / 1e6)
    assert seen.tpot_ms == pytest.approx(rest / 10 / 1e6)
    assert seen.duration_s == pytest.approx(3 * (first + rest) / 1e9)


def test_clients_begin_at_once_and_wait_for_each_other() -> None:
    price = SimplePrice()
    alone, crowd = Loop(1, 8192, 50, 1.0, 1), Loop(8, 8192, 50, 1.0, 8)
    one = run_loop(price, engine_config(1_000_000, alone), alone)
    many = run_loop(price, engine_config(1_000_000, crowd), crowd)
    assert many.ttft_ms > 3.5 * one.ttft_ms  # eight prompts of one step each: 4.5 on average


def test_scarce_blocks_make_requests_wait() -> None:
    price = SimplePrice()
    loop = Loop(8, 1000, 100, 1.0, 16)
    plenty = run_loop(price, engine_config(1_000_000, loop), loop)
    scarce = run_loop(price, engine_config(3_400, loop), loop)
    assert scarce.ttft_ms > 2 * plenty.ttft_ms


def _layout(correction: Calibration, around_ms: float) -> Layout:
    """Points that the engine itself makes with a known correction."""
    bare = Layout("g", "tp8", "llama-3.3-70b-fp8-tp8-h200", (), 0.8, 8192, None)
    profile = load_profile(bare.profile)
    points = []
    for prompt in (1024, 8192):
        for clients in (4, 8, 32):
            point = Point(prompt, 256, clients, 0.0, 0.0, "", f"{prompt}-{clients}")
            seen = predict(profile, bare, point, correction)
            points.append(replace(point, ttft_ms=seen.ttft_ms + around_ms, tpot_ms=seen.tpot_ms))
    return replace(bare, points=tuple(points))


@pytest.mark.slow
def test_a_fit_finds_what_was_put_in() -> None:
    layout = _layout(Calibration.of(1.25, 1.1, 800_000, 10_000), 20.0)
    profile = profile_of(layout)
    correction = fit(profile, layout)
    assert fit_concurrencies(layout.points) == (4, 32)
    held = [r for r in silicon.run_layout(layout, correction, 64) if not r.fitted]
    assert {r.concurrency for r in held} == {8}
    for r in held:
        assert r.tpot_corrected_ms == pytest.approx(r.tpot_ms, rel=0.02)
        assert r.ttft_corrected_ms == pytest.approx(r.ttft_ms, rel=0.05)
        assert abs(r.raw_tpot_ms / r.tpot_ms - 1) > 0.08


def test_a_point_slower_than_with_more_clients_is_set_aside() -> None:
    points = tuple(
        Point(1024, 1024, clients, 10.0, tpot, "", str(clients)) for clients, tpot in ((4, 5.0), (8, 9.0), (16, 7.0))
    )
    assert doubtful(points) == {"8"}
    results = [
        silicon.Result("g", "l", "", 1, 1, c, c == 4, c == 8, 10.0, 10.0, 11.0, 9.0, 10.5, 10.2) for c in (4, 8, 16)
    ]
    score = silicon.score("g", results)
    assert (score.points, score.held, score.doubtful) == (3, 1, 1)
    assert score.raw_tpot == pytest.approx(0.1) and score.tpot == pytest.approx(0.02)
    assert score.ttft == pytest.approx(0.05) and not score.judged


def test_data_is_whole() -> None:
    """Every layout has points, a profile that fits it, and a fitted correction; the goals' groups are there."""
    groups, corrections = load_groups(), load_corrections()
    assert sum(len(layout.points) for group in groups for layout in group.layouts) > 800
    for group in groups:
        for layout in group.layouts:
            assert layout.points, layout.name
            profile = profile_of(layout)
            assert layout.layout.startswith(f"tp{profile.layout.tp}")
            correction = corrections[layout.name]
            assert isinstance(correction, Correction) and correction.steps != RAW
    assert len({group.name for group in groups}) == len(groups) >= 20


def test_long_context_within_the_goal() -> None:
    """Raw tables, nothing fitted: only two comparisons, which the document explains, miss."""
    compared, document = run_longcontext()
    assert len(compared) > 60 and len(document["not_covered"]) > 5
    missed = {one.target for one in compared if abs(one.error) > 0.22}
    batch = {f"llama-3.1-8b h100 {kv} kv, eight clients" for kv in ("bf16", "fp8")}
    assert missed <= batch | {one.target for one in compared if "prefill" in one.target}


def test_the_command(tmp_path: Path) -> None:
    arguments = ["study", "validation", "--scale", "small", "--group", "gpt-oss-120b mxfp4 h200", "--jobs", "1"]
    done = CliRunner().invoke(app, [*arguments, "--part", "silicon", "--out", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads((tmp_path / "study.json").read_text())
    (score,) = document["silicon"]["scores"]
    assert score["raw_tpot"] < 0.12 and score["tpot"] < 0.1
    assert all(point["concurrency"] <= silicon.SMALL_CONCURRENCY for point in document["silicon"]["points"])
    assert "gpt-oss-120b mxfp4 h200 vllm" in (tmp_path / "study.md").read_text()
