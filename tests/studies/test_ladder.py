"""Ladder files: what ships is complete, what is wrong is refused with a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from fake_workers.pricing.registry import load_profile
from harness.errors import InputError
from harness.front_end import FrontEndConfig
from harness.router import config
from harness.studies.front_end import tokenise_us_per_token
from harness.studies.ladder import DATA, RELEASES, ladder_names, load_ladder, router_config
from harness.studies.llmd import Options, chosen_arms, experiment_of


@pytest.mark.parametrize("name", ladder_names())
def test_shipped_ladders_hold_figures_for_their_own_stages(name: str) -> None:
    ladder = load_ladder(name)
    assert ladder.name == name
    reported = {stage.rate for stage in ladder.load.at("full")[ladder.load.warmup_stages :]}
    for arm in ladder.arms:
        published = ladder.published(arm)
        assert set(published) == reported or (name == "qwen3-32b-cpu-tier" and set(published) < reported)
        assert all(values["ttft_p90_s"] >= 0.5 * values["ttft_mean_s"] > 0 for values in published.values())
        assert ladder.arms[arm].source
    assert len(ladder.load.at("small")) == 4
    profile = load_profile(ladder.profile)
    assert ladder.nodes * (ladder.gpus_per_node // profile.layout.gpus) in (4, 8)
    pinned = (ladder.engine.num_gpu_blocks or 0) * (ladder.engine.block_size or 0)
    assert pinned == pytest.approx(profile.kv_capacity_tokens, rel=0.15), "a figure of this model, GPU and layout"


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", ladder_names())
def test_every_arm_has_a_router_config_for_every_release(name: str, release: str) -> None:
    ladder = load_ladder(name)
    for arm in chosen_arms(ladder, Options(scale="full")):
        experiment = experiment_of(ladder, arm, 1, Options(release=release))
        if experiment.router.kind == "llm-d":
            _, document = config.load(Path(experiment.router.config))
            assert any(p["type"].endswith("-scorer") for p in document["plugins"])


def test_a_ladder_of_ones_own_may_have_no_published_figures(tmp_path: Path) -> None:
    document = yaml.safe_load((DATA / "qwen3-32b-8xtp2.yaml").read_text())
    for arm in document["arms"].values():
        arm.pop("published")
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(document))
    assert load_ladder(str(path)).published("precise") == {}


def test_mistakes_are_refused_with_the_field(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="kvcache-73"):
        load_ladder("no-such-ladder")
    document = yaml.safe_load((DATA / "qwen3-32b-8xtp2.yaml").read_text())
    document["arms"]["precise"]["published"][0] = [3, 1]
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(InputError, match="arm precise: a published row needs 4 values"):
        load_ladder(str(path))
    with pytest.raises(InputError, match="does not ship"):
        router_config("load", "v9")
    with pytest.raises(InputError, match="choose from: k8s-service"):
        chosen_arms(load_ladder("qwen3-32b-8xtp2"), Options(arms=("nobody",)))


def test_tokenising_random_text_costs_what_was_measured() -> None:
    assert tokenise_us_per_token(7_556) == 2.10
    assert tokenise_us_per_token(17_087) == 3.46
    assert 2.10 < tokenise_us_per_token(8_000) < 2.57


def test_arms_have_the_front_end_that_their_fleet_has() -> None:
    ladder = load_ladder("qwen3-32b-8xtp2")
    of = {arm: experiment_of(ladder, arm, 1, Options()).front_end for arm in ("k8s-service", "approximate", "precise")}
    assert of["k8s-service"].value("router_ms") == of["k8s-service"].value("gateway_ms") == 0
    assert of["approximate"].value("router_ms") > 0 and of["approximate"].value("router_tokenise_us_per_token") == 0
    assert of["precise"].value("router_tokenise_us_per_token") == of["precise"].value("tokenise_us_per_token") > 2
    without = experiment_of(ladder, "precise", 1, Options(front_end=False)).front_end
    assert without == FrontEndConfig()


def test_a_ladder_may_state_its_own_front_end() -> None:
    ladder = load_ladder("qwen3-32b-8xtp2").model_copy(update={"front_end": FrontEndConfig(client_ms=9)})
    assert experiment_of(ladder, "precise", 1, Options()).front_end.value("client_ms") == 9
