"""The study of llm-d's configs: a ladder of loads, configs of the studies, parameters from the profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from fake_workers.pricing.registry import load_profile
from harness.errors import InputError
from harness.studies.finding import ROUTER_CONFIGS, Check, Figure, Scale, broken, judged, load_finding, ours
from harness.studies.finding_run import FindingResult
from harness.studies.finding_text import _plots, as_data, render_page
from harness.studies.prefill import prefill_ns

LADDER = {"a at 1": {"x": 1.0}, "a at 2": {"x": 2.0}, "b at 1": {"x": 3.0}, "b at 2": {"x": 1.5}}
SCORERS = ROUTER_CONFIGS.parent / "findings" / "scorers.yaml"
UP = Check(path="x", rising=["a", "b"], says="up")


def test_a_direction_must_come_out_at_every_rung() -> None:
    assert broken(UP, LADDER, [1.0]) is None
    wrong = broken(UP, LADDER, [1.0, 2.0])
    assert wrong is not None and "b at 2 1.5" in wrong
    assert judged(UP, LADDER, [2.0]) and not judged(UP, LADDER, [3.0])
    assert ours(Figure(name="f", path="x", arm="b", over="a", at=2.0), LADDER) == 0.75


def test_every_arm_takes_its_rungs_and_its_config(tmp_path: Path) -> None:
    scorers = load_finding("scorers")
    arms = {arm.name: arm for arm in scorers.arms}
    assert scorers.rungs_at("full", arms["load"]) == [2, 4.75, 6]
    assert scorers.rungs_at("full", arms["blend v0.7.1"]) == [4.75]
    for scale in scorers.scales:
        for arm in scorers.arms_at(scale):
            for rung in scorers.rungs_at(scale, arm):
                made = scorers.experiment_of(arm, scale, tmp_path / "t", 1, rung)
                assert made.load.sessions_per_hour_per_node == rung
                config = Path(made.router.config)
                assert not config.is_absolute() or config.parent == ROUTER_CONFIGS / made.router.release


def test_a_rung_that_the_ladder_has_not_is_named(tmp_path: Path) -> None:
    document: dict[str, Any] = yaml.safe_load(SCORERS.read_text())
    document["base"] = str(SCORERS.with_name("_agentic.yaml"))
    document["scales"]["small"]["rungs"] = [3]
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(InputError, match=r"scales\.small\.rungs: 3 is no value of the ladder"):
        load_finding(str(path))


@pytest.mark.parametrize("name", ["affinity-tokens", "affinity-requests", "affinity-tokens-precise"])
def test_peak_prefill_throughput_is_the_profiles(name: str) -> None:
    """llm-d's rule: the step budget over the time to first token of one such prompt on an idle rank."""
    document = yaml.safe_load((ROUTER_CONFIGS / "v0.10.0" / f"{name}.yaml").read_text())
    filters = [p["parameters"] for p in document["plugins"] if p["type"] == "prefix-cache-affinity-filter"]
    finding = load_finding("scorers")
    seconds = prefill_ns(load_profile(finding.experiment["model"]["profile"]), 8192, 8192) / 1e9
    assert [f["peakPrefillThroughput"] for f in filters] == [round(8192 / seconds)]


@pytest.mark.parametrize(("scale", "values"), [("full", [2, 4.75, 6]), ("small", [8])])
def test_the_page_draws_lines_over_the_ladder_and_bars_of_one_rung(scale: Scale, values: list[float]) -> None:
    run = {"seed": 1, "digest": "d", "validity": {"valid": True, "reasons": [], "notes": []}, "cache": {}, "load": {}}
    run |= dict.fromkeys(("virtual_s", "wall_s", "cpu_s", "peak_rss_bytes"), 1)
    run |= {"router": {"release": "r", "sha256": "s", "config": "c"}, "load": {"calls": 1, "sessions": 1}}
    finding = load_finding("scorers")
    names = [f"{arm.name} at {rung:g}" for arm in finding.arms_at(scale) for rung in finding.rungs_at(scale, arm)]
    summaries = {name: {"ttft_s": {"p50": 1.23456789}, **run} for name in names}
    result = FindingResult(finding, scale, summaries, {name: [summaries[name]] for name in names}, {"harness": "0"})
    lines = len(values) > 1
    kinds = {trace["type"] for figure, _ in _plots(result).values() for trace in figure["data"]}
    assert kinds == {"scatter" if lines else "bar"}
    assert ('class="legend"' in render_page(result, "harness study scorers")) is lines
    document = as_data(result, "harness study scorers")
    assert document["ladder"] == {"field": "load.sessions_per_hour_per_node", "values": values}
    assert document["arms"][names[0]]["TTFT p50 (s)"] == 1.23457 and document["versions"] == {"harness": "0"}
    assert len(document["date"]) == 10
