"""The experiment file: strict, with one clear line for whatever is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from harness.errors import InputError
from harness.experiment import Experiment, json_schema, load_experiment, resolved_yaml
from harness.experiment_docs import markdown

MINIMAL = "name: x\ntrace: {path: t.jsonl}\nmodel: {profile: p}\n"


def _write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "experiment.yaml"
    path.write_text(text)
    return path


def test_paths_in_the_file_are_relative_to_it(tmp_path: Path) -> None:
    text = MINIMAL + "router: {config: configs/mine.yaml, binary: bin/epp}\n"
    experiment = load_experiment(_write(tmp_path, text))
    assert experiment.trace.path == str(tmp_path / "t.jsonl")
    assert experiment.router.config == str(tmp_path / "configs/mine.yaml")
    assert experiment.router.binary == str(tmp_path / "bin/epp")


def test_paths_on_the_command_line_are_relative_to_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _write(tmp_path, MINIMAL)
    monkeypatch.chdir(tmp_path.parent)
    experiment = load_experiment(path, ["router.config=configs/mine.yaml", "trace.path=t.jsonl"])
    assert experiment.router.config == str(tmp_path.parent / "configs/mine.yaml")
    assert experiment.trace.path == str(tmp_path.parent / "t.jsonl"), "so the run can be told from any other folder"


def test_a_list_that_holds_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="recursive"):
        load_experiment(_write(tmp_path, MINIMAL + "cache: &c [*c]\n"))


def test_a_shipped_config_name_stays_a_name(tmp_path: Path) -> None:
    assert load_experiment(_write(tmp_path, MINIMAL + "router: {config: precise}\n")).router.config == "precise"


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    path = _write(tmp_path, MINIMAL + "cluster: {nodes: 2}\n")
    experiment = load_experiment(
        path, ["cluster.nodes=5", "load.gap_cap_s=1.5", "cluster.engine.max_num_seqs=7"], "a.gz"
    )
    assert (experiment.cluster.nodes, experiment.load.gap_cap_s) == (5, 1.5)
    assert experiment.cluster.engine.max_num_seqs == 7
    assert experiment.trace.path == str(Path("a.gz").resolve())


def test_the_resolved_file_repeats_the_experiment(tmp_path: Path) -> None:
    experiment = load_experiment(_write(tmp_path, MINIMAL), ["seed=9"])
    again = tmp_path / "again.yaml"
    again.write_text(resolved_yaml(experiment))
    assert load_experiment(again) == experiment


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("name: x\n", "field trace"),
        (MINIMAL + "routers: {}\n", "field routers: unknown key"),
        (MINIMAL + "cluster: {nodes: 0}\n", "field cluster.nodes"),
        (MINIMAL + "cluster: {nodes: many}\n", "field cluster.nodes"),
        (MINIMAL + "load: {arrivals: poisson, sessions_per_hour_per_node: null}\n", "sessions_per_hour_per_node"),
        (MINIMAL.replace("name: x", "name: a/b"), "field name"),
        (MINIMAL.replace("name: x", "name: '..'"), "field name"),
        ("- a\n", "holds no mapping"),
        ("a: [1\n", "YAML error"),
        ("", "holds no mapping"),
        (MINIMAL + "cache: {kind: lmcached}\n", "field cache.kind"),
    ],
)
def test_bad_files_name_file_field_and_remedy(tmp_path: Path, text: str, complaint: str) -> None:
    path = _write(tmp_path, text)
    with pytest.raises(InputError) as caught:
        load_experiment(path)
    line = str(caught.value)
    assert str(path) in line and complaint in line and "\n" not in line


def test_a_missing_file_and_a_binary_one_are_input_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such experiment file"):
        load_experiment(tmp_path / "none.yaml")
    path = tmp_path / "junk.yaml"
    path.write_bytes(b"\xff\xfe\x00junk")
    with pytest.raises(InputError, match="cannot be read"):
        load_experiment(path)


@pytest.mark.parametrize("override", ["nodes", "=3", "name.deeper=1", "cluster.nodes=[", "trace.path.x=1"])
def test_bad_overrides_are_refused(tmp_path: Path, override: str) -> None:
    with pytest.raises(InputError, match="--set"):
        load_experiment(_write(tmp_path, MINIMAL), [override])


def test_every_field_of_the_schema_is_described() -> None:
    """docs/experiment.md is made from these descriptions."""
    schema = json.loads(json_schema())
    for name, definition in schema["$defs"].items():
        assert definition.get("description"), name
    assert set(schema["required"]) == {"name", "trace", "model"}


def test_examples_are_valid() -> None:
    for path in sorted(Path("examples").glob("*.yaml")):
        experiment = load_experiment(path)
        assert isinstance(experiment, Experiment)
        assert yaml.safe_load(path.read_text())["name"] == experiment.name
        assert Path(experiment.trace.path).exists(), path


def test_the_page_about_the_file_is_up_to_date() -> None:
    root = Path(__file__).parents[2]
    wanted = markdown(root / "examples/compare.yaml")
    assert (root / "docs/experiment.md").read_text() == wanted, "python -m harness.experiment_docs docs/experiment.md"


def test_a_key_that_stands_twice_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    path.write_text("name: a\ncluster:\n  nodes: 1\n  nodes: 2\n")
    with pytest.raises(InputError, match=r"line 4: key nodes stands twice"):
        load_experiment(path)


@pytest.mark.parametrize(
    ("value", "what"),
    [("2024-13-45", "line 1: month must be"), ("9" * 5000, "line 1: Exceeds"), ("[" * 5000, "nested too deeply")],
)
def test_yaml_that_only_its_own_constructors_refuse(tmp_path: Path, value: str, what: str) -> None:
    path = tmp_path / "e.yaml"
    path.write_text(f"name: {value}")
    with pytest.raises(InputError, match=what):
        load_experiment(path)
    path.write_text("name: a\ntrace: {path: t}\nmodel: {profile: p}\n")
    with pytest.raises(InputError, match=f"name={re.escape(value[:8])}.*not YAML"):
        load_experiment(path, [f"name={value}"])


def test_a_number_that_is_text_to_yaml_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    path.write_text("name: a\ntrace: {path: t}\nmodel: {profile: p}\nload: {until_s: 1e-3}\n")
    with pytest.raises(InputError, match=r"load.until_s: .* 1e-3 is text"):
        load_experiment(path)


@pytest.mark.parametrize("value", ["true", "'2'", "2.0"])
def test_values_of_another_type_are_refused(tmp_path: Path, value: str) -> None:
    path = tmp_path / "e.yaml"
    path.write_text("name: a\ntrace: {path: t}\nmodel: {profile: p}\n")
    with pytest.raises(InputError, match="cluster.nodes"):
        load_experiment(path, [f"cluster.nodes={value}"])


def test_a_pools_profile_is_relative_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    path.write_text(
        "name: a\ntrace: {path: t}\nmodel: {profile: p}\ncluster:\n  pools:\n"
        "  - {role: prefill, replicas: 1, profile: mine/p.npz}\n  - {role: decode, replicas: 1, profile: p}\n"
    )
    pools = load_experiment(path).cluster.pools
    assert [pool.profile for pool in pools] == [str(tmp_path / "mine/p.npz"), "p"]
