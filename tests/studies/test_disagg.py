"""Disaggregation studies: their loads, where lines cross, their tables, and one of them with the real router."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from harness.studies.cli import app
from harness.studies.disagg import fabric, kv_dtype, point, ratio
from harness.studies.disagg.arms import ArmResult
from harness.studies.disagg.evict import evict_arms
from harness.studies.disagg.loads import lanes, unique_prompts
from harness.studies.disagg.page import markdown, render
from harness.studies.disagg.point import read
from harness.trace.model import Call, Session


def test_unique_prompts_arrive_at_the_rate_and_share_nothing() -> None:
    loaded = unique_prompts(45, 20, 5000, 250, 1)
    assert len(loaded.sessions) == 900
    starts = [session.start_s or 0.0 for session in loaded.sessions]
    assert starts == sorted(starts) and 19 < starts[-1] < 20.001
    assert all(call.input_tokens == 5000 and call.ref == -1 for s in loaded.sessions for call in s.calls)
    assert unique_prompts(45, 20, 5000, 250, 2).sessions[5].start_s != loaded.sessions[5].start_s


def _session(name: str, calls: int) -> Session:
    made = [
        Call(i, 0.0, None, "main", 64, 5, i - 1, 1 if i else 0, 0 if i else 1, (i - 1,) if i else ())
        for i in range(calls)
    ]
    return Session(name, 64, made)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.integers(1, 6))
def test_users_work_through_all_sessions_one_after_the_other(sizes: list[int], count: int) -> None:
    loaded = lanes([_session(f"s{i}", size) for i, size in enumerate(sizes)], count)
    assert len(loaded.sessions) == min(count, len(sizes))
    assert sum(len(s.calls) for s in loaded.sessions) == sum(sizes)
    for user in loaded.sessions:
        for number, call in enumerate(user.calls):
            assert call.index == number
            assert (call.deps == ()) == (number == 0), "one call at a time"
            assert all(dep < number for dep in call.deps) and call.ref < number


def test_users_begin_between_two_shares_of_what_they_send() -> None:
    loaded = ratio.users(6, 6, 1, 142_000, (0.25, 0.75))
    again = ratio.users(6, 6, 1, 142_000, (0.25, 0.75))
    assert [len(s.calls) for s in loaded.sessions] == [len(s.calls) for s in again.sessions]
    for user, session in zip(loaded.sessions, ratio.sessions(6, 1), strict=True):
        sent = sum(call.sequence_tokens <= 142_000 for call in session.calls)
        left = sum(call.sequence_tokens <= 142_000 for call in user.calls)
        assert 0.25 <= (sent - left) / sent <= 0.75 and user.calls[0].sequence_tokens <= 142_000


def _result(series: str, x: float, ttft_s: float) -> ArmResult:
    return ArmResult(f"{series} {x}", {"ttft_mean_s": ttft_s, "e2e_mean_s": 2 * ttft_s}, {}, series, x)


def test_the_crossover_lies_between_the_networks_that_it_separates() -> None:
    results = [_result("aggregated 45/s", 25, 0.2), _result("aggregated 45/s", 400, 0.2)]
    results += [_result("8P2D 45/s", x, t) for x, t in ((25, 3.2), (100, 0.4), (400, 0.1))]
    at = fabric.crossover(results, "45/s", "ttft_mean_s")
    assert at is not None and abs(at - 200) < 1e-6
    assert fabric.crossover(results[:2] + results[3:4], "45/s", "ttft_mean_s") is None
    study = fabric.study(results, "full")
    assert "45/s: aggregated serving wins in mean TTFT below 200 Gbit/s per node" in study.answers
    page = render(study, results, "harness study pd-fabric")
    assert "plot-ttft_mean_s" in page and "200 Gbit/s" in page


def test_without_a_crossover_the_answer_says_who_wins() -> None:
    split = [_result("8P2D 15/s", x, t) for x, t in ((25, 0.3), (400, 0.2))]
    slow, fast = _result("aggregated 15/s", 25, 0.4), _result("aggregated 15/s", 25, 0.1)
    assert fabric.aggregated_wins([slow, *split], "15/s", "ttft_mean_s") == "at no bandwidth tried"
    assert fabric.aggregated_wins([fast, *split], "15/s", "ttft_mean_s") == "at every bandwidth tried"


def test_published_figures_stand_next_to_ours() -> None:
    arms = ratio.ratio_arms("full", 1, ("1P1D",))
    assert arms[1].published["output_tok_s"] == 1492
    results = [ArmResult("1P1D c64", {"ttft_p50_s": 2.0, "output_tok_s": 1000.0}, arms[1].published, "1P1D", 64.0)]
    text = markdown(ratio.study(results, "full"), results)
    assert "2,320 / 2,000 / 0.86" in text and "1,492 / 1,000 / 0.67" in text
    stages = evict_arms("full", 1)[2].published
    assert stages["40:e2e_p90_s"] == 3.511 and stages["ttft_mean_s"] == 0.491


def test_replicas_of_one_node_hold_what_the_blog_states_by_whether_they_draft() -> None:
    plain, drafting = (ratio.ratio_arms("full", 1, (name,), (64,))[0] for name in ("1P1D-DP8", "1P1D-DP8 MTP+CPU"))
    assert (plain.published["output_tok_s"], drafting.published["output_tok_s"]) == (851, 1336)
    for arm, kv_tokens in ((plain, 220_000), (drafting, 182_000)):
        pools = arm.experiment.cluster.pools
        assert [pool.profile for pool in pools] == ["glm-5.2-fp8-dp8ep8-h200"] * 2
        assert [pool.engine.num_gpu_blocks for pool in pools] == [kv_tokens // 64] * 2
    assert drafting.experiment.cluster.pools[1].engine.num_speculative_tokens == 3
    assert not plain.experiment.cluster.pools[1].engine.num_speculative_tokens
    wide = ratio.ratio_arms("full", 1, ("1P1D",), (64,))[0].experiment.cluster.pools
    assert [pool.profile for pool in wide] == [None, None], "the study's own profile, of sixteen GPUs"


def test_every_arm_is_a_valid_experiment(tmp_path: Path) -> None:
    arms = [
        *point.point_arms("full", 1, True),
        *fabric.fabric_arms("full", 1, tmp_path),
        *kv_dtype.dtype_arms("full", 1),
        *ratio.ratio_arms("full", 1, ratio.known_arms()),
    ]
    assert set(read("pd-ratio")["full"]["arms"]) <= set(ratio.known_arms())
    assert len({arm.name for arm in arms if not arm.name.startswith("aggregated ")}) > 15
    assert all(arm.experiment.output.report is False for arm in arms)


def test_eight_bit_kv_holds_twice_as_much() -> None:
    answers = kv_dtype.study([], "small").answers
    assert "(2.00 times)" in answers[0]


def test_an_unknown_scale_is_refused() -> None:
    result = CliRunner().invoke(app, ["pd-point", "--scale", "huge"])
    assert result.exit_code != 0 and "choose small or full" in str(result.exception)


@pytest.mark.router
@pytest.mark.slow
def test_the_point_runs_with_the_real_router_and_is_not_run_twice(tmp_path: Path, router_v0100: Path) -> None:
    first = CliRunner().invoke(app, ["pd-point", "--out", str(tmp_path), "--json"])
    assert first.exit_code == 0, first.output
    document = json.loads((tmp_path / "study.json").read_text())
    split, aggregated = document["arms"]
    assert not split["invalid"] and split["figures"]["completed"] == 360
    assert split["figures"]["tpot_mean_s"] < aggregated["figures"]["tpot_mean_s"]
    assert split["figures"]["interference_steps"] == 0 < aggregated["figures"]["interference_steps"]
    assert (tmp_path / "study.html").stat().st_size > 100_000
    before = (tmp_path / "8P2D" / "arm.json").stat().st_mtime_ns
    assert CliRunner().invoke(app, ["pd-point", "--out", str(tmp_path), "--json"]).exit_code == 0
    assert (tmp_path / "8P2D" / "arm.json").stat().st_mtime_ns == before


def _run(name: str, tmp_path: Path) -> dict[str, dict[str, Any]]:
    result = CliRunner().invoke(app, [name, "--out", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    arms = json.loads((tmp_path / "study.json").read_text())["arms"]
    assert not any(arm["invalid"] for arm in arms)
    return {arm["name"]: arm for arm in arms}


@pytest.mark.router
@pytest.mark.slow
def test_a_scored_cpu_tier_is_worth_most_under_eviction_pressure(tmp_path: Path, router_v0100: Path) -> None:
    arms = _run("pd-evict", tmp_path)
    none, blind, aware = (arms[name]["parts"]["40"] for name in ("no CPU tier", "CPU-blind", "CPU-aware"))
    assert none["reused_share"] == none["hit_share"] < blind["reused_share"] < aware["reused_share"]
    assert aware["ttft_p90_s"] < blind["ttft_p90_s"] < none["ttft_p90_s"]
    assert aware["e2e_p90_s"] < none["e2e_p90_s"]


@pytest.mark.router
@pytest.mark.slow
def test_slow_networks_make_splitting_lose(tmp_path: Path, router_v0100: Path) -> None:
    arms = {name: arm["figures"] for name, arm in _run("pd-fabric", tmp_path).items()}
    times = [arms[f"RDMA {size} 45/s"]["ttft_mean_s"] for size in ("8x400G", "400G", "200G", "100G", "50G", "25G")]
    assert times == sorted(times)
    flat = arms["aggregated 45/s"]
    assert arms["RDMA 8x400G 45/s"]["e2e_mean_s"] < flat["e2e_mean_s"] < arms["RDMA 25G 45/s"]["e2e_mean_s"]


@pytest.mark.router
@pytest.mark.slow
def test_eight_bit_kv_hits_more_and_moves_less(tmp_path: Path, router_v0100: Path) -> None:
    arms = {name: arm["figures"] for name, arm in _run("kv-dtype", tmp_path).items()}
    for layout in ("aggregated", "1P1D"):
        assert arms[f"{layout} FP8"]["hit_share"] > arms[f"{layout} BF16"]["hit_share"]
        assert arms[f"{layout} FP8"]["ttft_mean_s"] < arms[f"{layout} BF16"]["ttft_mean_s"]
    assert arms["1P1D FP8"]["kv_moved_bytes"] < 0.6 * arms["1P1D BF16"]["kv_moved_bytes"]


@pytest.mark.router
@pytest.mark.slow
def test_decode_workers_of_their_own_have_even_steps(tmp_path: Path, router_v0100: Path) -> None:
    arms = {name: arm["figures"] for name, arm in _run("pd-ratio", tmp_path).items()}
    flat, split, drafting = (arms[f"{name} c12"] for name in ("aggregated", "3P1D", "1P1D MTP+CPU"))
    assert split["interference_steps"] == 0 < flat["interference_steps"]
    assert split["tpot_p99_s"] < flat["tpot_p99_s"]
    assert drafting["tpot_p50_s"] < 0.6 * split["tpot_p50_s"] and drafting["reused_share"] >= drafting["hit_share"]
