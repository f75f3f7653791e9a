"""Part llmservingsim of the validation study: logged requests through the engine, one by one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.cli import app
from harness.studies.validation.replay import (
    Logged,
    Times,
    compare,
    engine_of,
    load_log,
    load_runs,
    profile_named,
    prompt_runs,
    replay,
    replay_document,
    replay_markdown,
    replay_of,
    run_replay,
)
from harness.studies.validation.replay_extract import extract, shared_prefixes


def test_shared_prefixes_are_found_and_become_the_same_content() -> None:
    a, b, c = [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9, 9], [1, 2, 3, 4, 9, 9, 7, 7]
    found = shared_prefixes([a, b, c, [8, 8]], 2)
    assert found == [(-1, 0), (0, 2), (1, 3), (-1, 0)]
    log = [Logged(0, 16 * n, 2, like, blocks, 1, 2) for n, (like, blocks) in zip((3, 3, 4, 1), found, strict=True)]
    assert prompt_runs(log) == [[(0, 0, 3)], [(0, 0, 2), (1, 2, 3)], [(0, 0, 2), (1, 2, 3), (2, 3, 4)], [(3, 0, 1)]]


def test_stamps_of_two_clocks(tmp_path: Path) -> None:
    """The engine's clock is set to the client's where the engine saw a request soonest."""
    log = [
        {"input_toks": 3, "output_toks": 2, "arrival_time": 100.0, "queued_ts": 7.5, "first_token_ts": 8.0,
         "last_token_ts": 9.0},
        {"input_toks": 3, "output_toks": 2, "arrival_time": 101.0, "queued_ts": 8.25, "first_token_ts": 9.0,
         "last_token_ts": 9.5},
    ]  # fmt: skip
    (tmp_path / "log").write_text("\n".join(map(json.dumps, log)))
    (tmp_path / "work").write_text('{"input_tok_ids": [1, 2, 3]}\n{"input_tok_ids": [1, 2, 4]}\n')
    rows = extract(tmp_path, {"log": "log", "workload": "work"}, 2)
    assert [(r["arrival_us"], r["ttft_us"], r["latency_us"]) for r in rows] == [
        (0, 750_000, 1_750_000),
        (1_000_000, 750_000, 1_250_000),
    ]
    assert (rows[1]["like"], rows[1]["shared_blocks"]) == (0, 1)


def test_metrics() -> None:
    ttft = compare([Times(100, 10, 200), Times(300, 10, 400)], [Times(200, 10, 200), Times(200, 10, 400)])[0]
    assert (ttft.error, ttft.request_error) == (0, pytest.approx(0.5))


def test_a_full_card_is_met_request_by_request() -> None:
    """RTX 4090, KV blocks as logged: waiting and preemption come out; nothing was fitted."""
    (one,) = run_replay(["rtx4090"])
    assert (one.requests, one.prices) == (300, "their layers")
    assert one.preemptions > 100
    for metric in one.metrics:
        assert abs(metric.error) < 0.01, metric
        assert metric.request_error < 0.03, metric


def test_the_mixed_rows_matter() -> None:
    """Without preemption or any wait for blocks: the known misses stay what the page says."""
    results = {(one.run, one.prices): one for one in run_replay(["rtxpro6000"])}
    errors = {key: one.metrics[1].error for key, one in results.items()}
    assert errors["rtxpro6000-llama-3.1-8b", "their layers"] == pytest.approx(-0.055, abs=0.005)
    assert errors["rtxpro6000-qwen3-32b-tp2", "their layers"] == pytest.approx(-0.079, abs=0.005)
    assert all(one.preemptions == 0 for one in results.values())
    kept = replay_of(json.loads(json.dumps(replay_document(list(results.values())))))
    assert replay_markdown(kept) == replay_markdown(list(results.values()))


def test_twice_the_same() -> None:
    """A replay twice gives the same, and prefixes that requests share are found."""
    settings, log = load_runs()["rtx4090-llama-3.1-8b"], load_log("rtx4090-llama-3.1-8b")[:60]
    profile = profile_named("llama-3.1-8b-bf16-tp1-rtx4090")
    config = engine_of(settings, profile)
    assert replay(profile, log, config) == replay(profile, log, config)
    assert sum(one.shared_blocks for one in log) > 0


def test_command(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["study", "validation", "--part", "llmservingsim", "--json", "--out", str(tmp_path)]
    )
    assert result.exit_code == 0, result.output
    assert len(json.loads((tmp_path / "study.json").read_text())["llmservingsim"]) == 5
    assert "rtx4090-llama-3.1-8b" in (tmp_path / "study.md").read_text()
