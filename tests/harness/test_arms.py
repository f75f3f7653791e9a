"""Arms of a comparison: any setting may differ, the load may not, and nothing runs before all of them are right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from harness.arms import arms_of, differences, parse_arm, router_arms, vary
from harness.errors import InputError
from harness.experiment import Experiment, load_experiment, validated
from harness.results.compare import compare as table_of
from harness.results.table import markdown_table, plain_table
from harness.runner import compare, run_experiment
from harness.workload import load_sessions
from tests.harness.test_cli import EXPERIMENT, _harness
from tests.harness.test_runner import TRACE, _experiment

ARMS = """\
arms:
- name: one
- name: small-blocks
  set: {cluster.engine.num_gpu_blocks: 100, router: {kind: random}}
"""


def _file(tmp_path: Path, arms: str = ARMS) -> Path:
    (tmp_path / "trace.jsonl").write_text(TRACE)
    path = tmp_path / "e.yaml"
    path.write_text(EXPERIMENT + arms)
    return path


def test_arms_of_the_file_are_whole_experiments(tmp_path: Path) -> None:
    one, small = arms_of(load_experiment(_file(tmp_path)))
    assert one.experiment.router.kind == "round_robin" and one.experiment.arms is None
    assert small.experiment.cluster.engine.num_gpu_blocks == 100
    assert small.experiment.router.kind == "random"
    assert small.experiment.cluster.nodes == one.experiment.cluster.nodes == 1


def test_set_on_the_command_line_reaches_every_arm_and_an_arm_wins(tmp_path: Path) -> None:
    experiment = load_experiment(_file(tmp_path), ["cluster.engine.num_gpu_blocks=200", "cluster.nodes=3"])
    one, small = arms_of(experiment)
    assert one.experiment.cluster.engine.num_gpu_blocks == 200
    assert small.experiment.cluster.engine.num_gpu_blocks == 100
    assert {arm.experiment.cluster.nodes for arm in (one, small)} == {3}


def test_a_section_as_value_replaces_the_section(tmp_path: Path) -> None:
    base = _experiment(tmp_path, cluster={"nodes": 5, "scrape_interval_ms": 10})
    varied = vary(base, {"cluster": {"nodes": 2}}, "arm x")
    assert (varied.cluster.nodes, varied.cluster.scrape_interval_ms) == (2, 50)


def test_entries_of_a_list_have_numbers(tmp_path: Path) -> None:
    tiers = {"kind": "lmcache", "lmcache": {"l1_size_gb": 1, "l2_adapters": [{"name": "a"}, {"name": "b"}]}}
    varied = vary(_experiment(tmp_path, cache=tiers), {"cache.lmcache.l2_adapters.1.capacity_gb": 7}, "arm x")
    assert varied.cache.lmcache is not None
    assert [tier.capacity_gb for tier in varied.cache.lmcache.l2_adapters] == [None, 7]
    with pytest.raises(InputError, match="arm x: field cache.lmcache.l2_adapters.2.name: the list has no entry 2"):
        vary(_experiment(tmp_path, cache=tiers), {"cache.lmcache.l2_adapters.2.name": "c"}, "arm x")


def test_paths_in_arms_are_relative_to_the_file(tmp_path: Path) -> None:
    text = (
        "arms:\n- {name: a, set: {router.config: mine.yaml, router.kind: llm-d, fabric.topology: sub/t.yaml}}\n"
        "- {name: b, set: {router: {config: precise, kind: llm-d}, model.profile: p.npz}}\n"
    )
    a, b = arms_of(load_experiment(_file(tmp_path, text)))
    assert a.experiment.router.config == str(tmp_path / "mine.yaml")
    assert a.experiment.fabric.topology == str(tmp_path / "sub/t.yaml")
    assert b.experiment.router.config == "precise"
    assert b.experiment.model.profile == str(tmp_path / "p.npz")


def test_router_configs_on_the_command_line_are_files_of_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (arm,) = router_arms(_experiment(tmp_path), ["./mine.yaml"])
    assert (arm.name, arm.experiment.router.config) == ("mine", str(tmp_path / "mine.yaml"))


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("a", None),
        ("a:", {}),
        ("a+b: router.kind=random", {"router.kind": "random"}),
        ("a:x.y=1,x.z=2.5", {"x.y": 1, "x.z": 2.5}),
        ("a:x=[1, 2],y={k: v, m: [3]}", {"x": [1, 2], "y": {"k": "v", "m": [3]}}),
        ("a:x='1,2',y=null", {"x": "1,2", "y": None}),
        ("a:x=b=c", {"x": "b=c"}),
    ],
)
def test_arms_on_the_command_line(text: str, settings: dict[str, object] | None) -> None:
    assert parse_arm(text)[1] == settings


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text("ab,'\"[]{}: =", max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("kmn"), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(["a.b", "c", "d.e.0.f"]), _VALUES, max_size=3))
def test_what_yaml_can_write_in_a_line_an_arm_can_say(settings: dict[str, object]) -> None:
    text = ",".join(f"{name}={json.dumps(value)}" for name, value in settings.items())
    assert parse_arm(f"arm:{text}") == ("arm", settings)


def test_one_arm_of_the_file_by_its_name(tmp_path: Path) -> None:
    experiment = load_experiment(_file(tmp_path))
    assert [arm.name for arm in arms_of(experiment, ["small-blocks", "new:cluster.nodes=2"])] == ["small-blocks", "new"]
    with pytest.raises(InputError, match="no such arm in the experiment; choose from: one, small-blocks"):
        arms_of(experiment, ["none"])


def test_what_differs_is_told_field_by_field(tmp_path: Path) -> None:
    tiers = {"kind": "lmcache", "lmcache": {"l1_size_gb": 1, "l2_adapters": [{"name": "store"}]}}
    texts = ["gpu:", "local:cache={kind: lmcache, lmcache: {l1_size_gb: 1}}", f"shared:cache={json.dumps(tiers)}"]
    gpu, local, shared = differences(arms_of(_experiment(tmp_path), texts))
    assert gpu == {"cache.kind": "none"}
    assert local == {"cache.kind": "lmcache", "cache.lmcache.l1_size_gb": 1}
    assert shared == {**local, "cache.lmcache.l2_adapters.0.name": "store"}


@pytest.mark.parametrize(
    ("arm", "complaint"),
    [
        ("{name: a, set: {cluster.nodes: many}}", "arm a: field cluster.nodes"),
        ("{name: a, set: {cluster.knots: 3}}", "arm a: field cluster.knots: unknown key"),
        ("{name: a, set: {trace.sessions: 3}}", "arm a: field trace.sessions: all arms share it"),
        ("{name: a, set: {load: {arrivals: at_once}}}", "arm a: field load: all arms share it"),
        ("{name: a, set: {seed: 2}}", "arm a: field seed"),
        ("{name: a, set: {name: b}}", "arm a: field name: it does not belong into an arm"),
        ("{name: a, set: {seed.x: 2}}", "arm a: field seed.x"),
        ("{name: a, set: {name.x.y: 2}}", "arm a: field name.x.y"),
        ("{name: a, set: {cluster.nodes.x: 2}}", "arm a: field cluster.nodes.x: nodes is not a section"),
        ("{name: a/b}", "field arms.1.name"),
        ("{name: '..'}", "field arms.1.name"),
        ("{name: a, sets: {}}", "arm a: field arms.1.sets: unknown key"),
        ("{name: a, set: [1]}", "arm a: field arms.1.set"),
        ("{name: a}\n- {name: a}", "field arms: value error, two arms are called a"),
        ("7", "field arms.1"),
        # what only putting the parts together can show
        ("{name: a, set: {model.profile: nope}}", "arm a: "),
        ("{name: a, set: {cluster.gpus_per_node: 4}}", "arm a: cluster.gpus_per_node"),
        ("{name: a, set: {cluster.engine.max_model_len: 100000000}}", "arm a: cluster.engine.max_model_len"),
        ("{name: a, set: {router.kind: llm-d, router.config: nope}}", "arm a: router config nope"),
        ("{name: a, set: {router: {kind: llm-d, block_tokens: 65}}}", "arm a: router.block_tokens"),
    ],
)
def test_a_wrong_arm_is_named_before_anything_runs(tmp_path: Path, arm: str, complaint: str) -> None:
    path = _file(tmp_path, f"arms:\n- {{name: good}}\n- {arm}\n")
    with pytest.raises(InputError) as caught:
        compare(arms_of(load_experiment(path)), tmp_path / "out")
    assert complaint in str(caught.value) and "\n" not in str(caught.value)
    assert not list(tmp_path.glob("out/*/calls.parquet"))


@pytest.mark.parametrize(
    ("tiers", "complaint"),
    [
        ({"chunk_size": 100}, "cache.chunk_size"),
        ({"l2_adapters": [{"name": "x", "at": "cellar"}]}, "cellar"),
        ({"gpu_load": {"cost": "guess"}}, "guess"),
        ({"mode": "inproc", "l2_prefetch_policy": "retain"}, "mode inproc has no l2_prefetch_policy"),
    ],
)
def test_a_wrong_tier_is_named_before_anything_runs(
    tmp_path: Path, tiers: dict[str, object], complaint: str, lmcache: None
) -> None:
    settings = {"cache": {"kind": "lmcache", "lmcache": {"l1_size_gb": 1, **tiers}}}
    arms = arms_of(_experiment(tmp_path), ["good:", f"bad:cache={json.dumps(settings['cache'])}"])
    with pytest.raises(InputError, match=f"^arm bad: .*{complaint}"):
        compare(arms, tmp_path / "out")
    assert not list(tmp_path.glob("out/*/calls.parquet"))


def test_an_arm_runs_as_the_experiment_that_it_describes(tmp_path: Path) -> None:
    arms = arms_of(load_experiment(_file(tmp_path)))
    runs = compare(arms, tmp_path / "out")
    assert [run.info.title for run in runs] == ["one", "small-blocks"]
    alone = run_experiment(arms[1].experiment, tmp_path / "alone", show_progress=False)
    assert alone.summary["digest"] == runs[1].summary["digest"]
    resolved = load_experiment(tmp_path / "out/small-blocks/experiment.resolved.yaml")
    assert load_sessions(resolved).calls == 2 and resolved.cluster.engine.num_gpu_blocks == 100
    assert resolved.arms is None


def test_table_and_page_say_in_what_arms_differ(tmp_path: Path) -> None:
    runs = compare(arms_of(load_experiment(_file(tmp_path))), tmp_path / "out")
    comparison = table_of([run.summary for run in runs])
    assert comparison.heading == "Arm"
    text = plain_table(comparison)
    assert "small-blocks: cluster.engine.num_gpu_blocks=100, router.kind=random" in text
    assert "one: cluster.engine.num_gpu_blocks=null, router.kind=round_robin" in text
    assert "router.kind=random" in markdown_table(comparison)
    page = (tmp_path / "out/report.html").read_text()
    assert "In what the arms differ" in page and "cluster.engine.num_gpu_blocks" in page
    assert json.loads((tmp_path / "out/one/summary.json").read_text())["settings"]["router.kind"] == "round_robin"


def test_compare_runs_the_files_arms_and_router_config_still_wins(tmp_path: Path) -> None:
    _file(tmp_path)
    done = _harness("compare", "e.yaml", "--out", "o", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "small-blocks (ours)" in done.stdout and done.stdout.startswith(" " * 20)
    routers = _harness("compare", "e.yaml", "--router-config", "random", "--out", "r", "--json", cwd=tmp_path)
    assert json.loads(routers.stdout)["label"] == "random"
    given = _harness(
        "compare", "e.yaml", "--arm", "one", "--arm", "two:cluster.nodes=2", "--trace", "trace.jsonl",
        "--set", "load.client_timeout_s=9", "--out", "g", "--json", cwd=tmp_path,
    )  # fmt: skip
    rows = json.loads(given.stdout)
    assert [row["settings"] for row in rows] == [{"cluster.nodes": 1}, {"cluster.nodes": 2}]
    resolved = yaml.safe_load((tmp_path / "g/two/experiment.resolved.yaml").read_text())
    assert resolved["load"]["client_timeout_s"] == 9
    both = _harness("compare", "e.yaml", "--arm", "one", "--router-config", "random", cwd=tmp_path)
    assert both.returncode == 2 and "--arm: does not go with --router-config" in both.stderr


@pytest.mark.parametrize("text", ["a b:x=1", ":x=1", "..:x=1", "a:x", "a:=1", "a:x=[1", "a:x=1,,y"])
def test_arms_that_cannot_be_read(text: str) -> None:
    with pytest.raises(InputError, match="--arm"):
        parse_arm(text)


def test_an_experiment_with_arms_still_runs_by_itself(tmp_path: Path) -> None:
    experiment: Experiment = load_experiment(_file(tmp_path))
    run = run_experiment(experiment, tmp_path / "out", show_progress=False)
    assert run.summary["outcome"]["completed"] == 2 and run.summary["settings"] == {}


@pytest.mark.parametrize("name", ["report.html", "comparison.json", "logs"])
def test_an_arm_is_not_called_as_a_file_of_the_comparison(tmp_path: Path, name: str) -> None:
    arms = arms_of(load_experiment(_file(tmp_path)), [f"{name}:router.kind=random"])
    with pytest.raises(InputError, match="name it otherwise"):
        compare(arms, tmp_path / "o")
    assert not (tmp_path / "o").exists(), "nothing has run"


def test_an_arm_may_set_what_a_default_depends_on(tmp_path: Path) -> None:
    base = validated({"name": "a", "trace": {"path": "t"}, "model": {"profile": "p"}}, "here")
    assert vary(base, {"cluster.engine.kind": "vllm"}, "arm").cluster.engine.leaping is False


def test_naming_another_kind_of_cache_puts_the_section_aside() -> None:
    cache = {"kind": "lmcache", "lmcache": {"l1_size_gb": 1}}
    base = validated({"name": "a", "trace": {"path": "t"}, "model": {"profile": "p"}, "cache": cache}, "here")
    off = vary(base, {"cache.kind": "none"}, "arm")
    assert (off.cache.kind, off.cache.lmcache) == ("none", None)
    with pytest.raises(InputError, match="kind: lmcache and a section lmcache go together"):
        validated(
            {"name": "a", "trace": {"path": "t"}, "model": {"profile": "p"}, "cache": {"lmcache": {"l1_size_gb": 1}}},
            "here",
        )
