"""What a grid consists of."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import InputError
from harness.sweep.points import grid, parse_axis, specification
from tests.harness.test_cli import EXPERIMENT
from tests.harness.test_runner import TRACE


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "trace.jsonl").write_text(TRACE)
    path = tmp_path / "e.yaml"
    path.write_text(EXPERIMENT)
    return path


def test_commas_inside_brackets_and_quotes_belong_to_a_value() -> None:
    assert parse_axis("a.b=1, 2,3").values == ("1", "2", "3")
    assert parse_axis("a=[1, 2],{b: 3, c: 4},'x,y',null").values == ("[1, 2]", "{b: 3, c: 4}", "'x,y'", "null")


@pytest.mark.parametrize("text", ["a.b", "=1,2", "a=", "a=1,1"])
def test_axes_that_say_nothing_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        parse_axis(text)


def test_all_combinations_the_last_axis_fastest(file: Path) -> None:
    axes = [parse_axis("cluster.nodes=1,2"), parse_axis("seed=5,6")]
    points = grid(file, axes, ["load.client_timeout_s=9"])
    assert [p.name for p in points] == ["nodes=1,seed=5", "nodes=1,seed=6", "nodes=2,seed=5", "nodes=2,seed=6"]
    assert [(p.experiment.cluster.nodes, p.experiment.seed) for p in points] == [(1, 5), (1, 6), (2, 5), (2, 6)]
    assert all(p.experiment.load.client_timeout_s == 9 for p in points)


def test_every_point_is_checked_before_anything_runs(file: Path) -> None:
    with pytest.raises(InputError, match="cluster.nodes"):
        grid(file, [parse_axis("cluster.nodes=1,0")])
    with pytest.raises(InputError, match="given twice"):
        grid(file, [parse_axis("seed=1"), parse_axis("seed=2")])


@pytest.mark.parametrize(
    ("over", "overrides", "complaint"),
    [
        ("cluster.nodes=1,0", [], "--over cluster.nodes=0: field cluster.nodes: input should be greater"),
        ("cluster.nodes=[1", [], r"--over cluster.nodes=\[1: the value is not YAML"),
        ("name.x=1", [], "--over name.x=1: field name.x: name is not a section"),
        ("cluster.nope=1", ["cluster={nodes: 1}"], "--over cluster.nope=1: field cluster.nope: unknown key"),
        ("seed=1", ["cluster={nodes: 0}"], "--set cluster={nodes: 0}: field cluster.nodes: input should be greater"),
        ("seed=1", ["cluster.nodes=0", "cluster={nodes: -1}"], "--set cluster={nodes: -1}: field cluster.nodes"),
        ("cluster.nodes=1,0", ["cluster.nodes=-1"], "--over cluster.nodes=0: field cluster.nodes"),
    ],
)
def test_a_fault_is_called_by_the_option_that_gives_it(
    file: Path, over: str, overrides: list[str], complaint: str
) -> None:
    with pytest.raises(InputError, match=f"^{complaint}"):
        grid(file, [parse_axis(over)], overrides)


@pytest.mark.parametrize("text", ["seed=1,01", "load.sessions_per_hour_per_node=4,4.0"])
def test_one_value_in_two_spellings_is_not_run_twice(file: Path, text: str) -> None:
    with pytest.raises(InputError, match="is the same experiment as"):
        grid(file, [parse_axis(text)])


def test_folder_names_are_safe_and_unique(file: Path) -> None:
    points = grid(file, [parse_axis("model.name=../a,b/a,'c d'")])
    assert len({p.name for p in points}) == 3
    assert all("/" not in p.name and " " not in p.name for p in points)


def test_the_specification_tells_sweeps_apart(file: Path) -> None:
    one, other = (specification(grid(file, [parse_axis(text)])) for text in ("seed=1,2", "seed=1,3"))
    assert one != other
    assert one == specification(grid(file, [parse_axis("seed=1,2")]))


def test_an_edited_trace_makes_another_sweep(file: Path) -> None:
    axes = [parse_axis("seed=1,2")]
    before = specification(grid(file, axes))
    trace = file.with_name("trace.jsonl")
    assert list(before["files"]) == [str(trace.resolve())]
    trace.write_text(TRACE.replace("2000", "2001"))
    assert specification(grid(file, axes)) != before
