"""Cold prefills next to published times: the same time as an engine's, shipped data, blind files, bad files."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from fake_workers.engine.scheduler import SchedulerConfig
from fake_workers.pricing.node_price import ProfilePrice
from fake_workers.pricing.registry import load_profile
from harness.errors import InputError
from harness.front_end import FrontEndConfig, FrontEndTimes
from harness.router.baselines import BaselineRouter
from harness.router.endpoints import loopback_endpoints
from harness.simulation import Simulation, SimulationConfig
from harness.studies.front_end import tokenise_us_per_token
from harness.studies.prefill import DEFAULT, front_end_ns, load_points, markdown, measure, prefill_ns
from harness.trace.model import Call, Session


@pytest.mark.parametrize(("name", "tokens"), [("qwen3-32b-bf16-tp2-h100", 20_000), ("glm-5.2-fp8-dp8ep8-b200", 12_288)])
def test_a_lone_prefill_costs_what_an_engine_takes(name: str, tokens: int) -> None:
    profile = load_profile(name)
    block = profile.block_tokens
    endpoints = loopback_endpoints(profile.layout.dp, ranks_per_node=profile.layout.dp)
    router = BaselineRouter("round_robin", endpoints, 1)
    front_end = FrontEndConfig.model_validate(
        {"parts": "measured", "tokenise_us_per_token": tokenise_us_per_token(tokens)}
    )
    for times, extra_ns in ((None, 0), (FrontEndTimes.of(front_end), front_end_ns(tokens, True))):
        config = SimulationConfig(
            SchedulerConfig(tokens, block, 8192, 256, 40_000), "m", scrape_interval_ns=50_000_000, front_end=times
        )
        session = Session("s", block, [Call(0, 0.0, None, "main", tokens, 1, -1, 0, tokens // block)])
        simulation = Simulation(config, ProfilePrice(profile), [endpoints], router, [session], [0])
        simulation.run()
        record = simulation.records[0]
        assert record.first_token_ns is not None
        assert record.first_token_ns - record.arrival_ns == prefill_ns(profile, tokens, 8192) + extra_ns


def test_the_shipped_points_have_profiles_and_sources() -> None:
    file = load_points(DEFAULT)
    results = [measure(series) for series in file.series]
    assert all(series.source != "-" for series in file.series)
    text = markdown(file, results)
    assert text.count("extrapolated") > 0 and "514.3 | 476.1 (0.93)" in text
    for series, points in zip(file.series, results, strict=True):
        if "glm" not in series.profile:  # two nodes' dispatch is a formula: docs/studies/prefill.md
            assert all(0.75 < p.client_ms / p.published_ms < 1.3 for p in points if p.published_ms)


def test_points_without_a_time_are_priced_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    series = {"name": "mine", "profile": "llama-3.1-8b-bf16-tp1-h100", "points": [[10_000, None], [30_000, None]]}
    path.write_text(yaml.safe_dump({"name": "mine", "title": "mine", "series": [series]}))
    file = load_points(str(path))
    points = measure(file.series[0])
    assert points[0].gpu_ms < points[0].client_ms < points[1].gpu_ms
    assert "| 10,000 | - |" in markdown(file, [points])


def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="choose one of: llmd"):
        load_points("nobody")
    path = tmp_path / "bad.yaml"
    path.write_text("name: x\ntitle: y\nseries: [{name: a, profile: b, points: [[0, 1]]}]\n")
    with pytest.raises(InputError, match="points"):
        load_points(str(path))
