"""Findings: figures and directions from summaries, files checked, and one small study run for real."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml

from harness.disagg.handoff import HandoffTotals
from harness.errors import InputError
from harness.identity import harness_code, harness_version
from harness.results.runinfo import write_info
from harness.results.store import INFO, write_run
from harness.studies.anatomy import kv_sizes, workload
from harness.studies.cli import _run_finding
from harness.studies.finding import Check, Figure, Finding, broken, derived, finding_names, load_finding, only, ours
from harness.studies.finding_paths import _numbers, check_paths
from harness.studies.finding_run import FindingResult, mean_of, run_finding, versions_of
from harness.studies.finding_text import figure_cells, holds, render_page, run_notes, why
from harness.studies.taken_over import stranger
from tests.harness.test_cli import _environment
from tests.results.synthetic import SHAPES, make_info, make_records, make_tiers, with_tier_tokens

ARMS = {"a": {"x": {"y": 2.0}}, "b": {"x": {"y": 5.0}}, "c": {"x": {"y": 4.0}}}


def _figure(**more: Any) -> Figure:
    return Figure(name="f", path="x.y", arm="b", **more)


def test_a_figure_alone_over_and_minus_another_arm() -> None:
    assert ours(_figure(), ARMS) == 5.0
    assert ours(_figure(over="a"), ARMS) == 2.5
    assert ours(_figure(minus="a", scale=100), ARMS) == 300.0
    assert ours(_figure(over="missing"), ARMS) is None
    assert ours(Figure(name="f", path="x.z", arm="a"), ARMS) is None


def test_a_direction_holds_or_says_what_is_wrong() -> None:
    assert broken(Check(path="x.y", rising=["a", "c", "b"], says="up"), ARMS) is None
    assert broken(Check(path="x.y", falling=["b", "c", "a"], says="down"), ARMS) is None
    wrong = broken(Check(path="x.y", rising=["a", "b", "c"], says="up"), ARMS)
    assert wrong is not None and wrong.startswith("up: not so") and "c 4.0" in wrong
    assert broken(Check(path="x.y", rising=["a", "a"], says="up"), ARMS), "equal is not rising"
    assert broken(Check(path="x.z", rising=["a", "b"], says="up"), ARMS), "a number that is not there does not pass"
    assert broken(Check(path="x.y", rising=["a", "gone"], says="up"), ARMS) is None, "arms of another scale"


def test_means_over_seeds() -> None:
    runs = [
        {"n": 1, "v": {"p": 2.0, "q": None}, "s": "x", "b": True},
        {"n": 3, "v": {"p": 4.0, "q": 1.0}, "s": "y", "b": True},
    ]
    assert mean_of(runs) == {"n": 2, "v": {"p": 3.0, "q": None}, "s": "x", "b": True}


@pytest.mark.parametrize("name", finding_names())
def test_shipped_findings_are_valid_at_every_scale(name: str, tmp_path: Path) -> None:
    finding = load_finding(name)
    known = {arm.name for arm in finding.arms}
    for scale in finding.scales:
        for arm in finding.arms_at(scale):
            finding.experiment_of(arm, scale, tmp_path / "t.jsonl", 1)
    named = {n for f in finding.figures for n in (f.arm, f.over, f.minus) if n}
    named |= {n for c in finding.checks for n in (*(c.rising or ()), *(c.falling or ()))}
    assert named <= known
    small = {arm.name for arm in finding.arms_at("small")}
    assert all(len([n for n in (c.rising or c.falling or []) if n in small]) >= 2 for c in finding.checks)


def test_a_file_of_one_s_own_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("name: own\nwhat: else\n")
    with pytest.raises(InputError, match="own.yaml"):
        load_finding(str(path))
    with pytest.raises(InputError, match="no such study"):
        load_finding("nothing")


OWN: dict[str, Any] = {
    "name": "own",
    "title": "Own",
    "question": "Which?",
    "source": "nobody",
    "trace": {"profile": "claude-code", "seed": 3, "sessions": 2},
    "experiment": {
        "load": {"arrivals": "at_once", "client_timeout_s": None},
        "cluster": {"nodes": 1},
        "model": {"profile": "glm-5.2-nvfp4-dp8ep8-b200"},
        "router": {"kind": "session_sticky"},
    },
    "scales": {"small": {}, "full": {}},
    "arms": [{"name": "cached"}, {"name": "cold", "set": {"cluster.engine.enable_prefix_caching": False}}],
    "figures": [
        {"name": "TTFT", "path": "ttft_s.p50", "arm": "cold", "over": "cached", "published": 2.0, "because": "why not"}
    ],
    "shown": {"TTFT p50 (s)": "ttft_s.p50"},
    "checks": [
        {"says": "caching computes less", "path": "derived.computed_tokens_per_call", "rising": ["cached", "cold"]}
    ],
}


SMALLER = {"name": "cold", "set": {"cluster.engine.enable_prefix_caching": False, "cluster.engine.max_num_seqs": 1}}
"""An arm with the name of another study's, and not its experiment."""


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"arms": [{"name": ".."}, {"name": "cold"}]}, "field arms.0.name"),
        ({"arms": [{"name": "study.json"}]}, "field arms.0.name"),
        ({"arms": [{"name": "a" * 81}]}, "field arms.0.name"),
        ({"arms": [{"name": "cold"}, {"name": "cold"}]}, "field arms.1.name: cold stands twice"),
        ({"arms": []}, "field arms: holds none"),
        ({"scales": {}}, "field scales"),
        ({"scales": {"small": {"arms": ["gone"]}}}, "field scales.small.arms: no arm is called gone"),
        ({"scales": {"small": {"arms": []}}}, "field scales.small.arms: names none"),
        ({"scales": {"small": {"set": {"seed": 2}}}}, "field scales.small.set.seed"),
        ({"arms": [{"name": "cached"}, {"name": "cold", "set": {"trace": {"path": "x"}}}]}, "field arms.1.set.trace"),
        ({"experiment": {**OWN["experiment"], "trace": {"path": "/x"}}}, "field experiment.trace.path"),
        ({"figures": [{**OWN["figures"][0], "over": "gone"}]}, "field figures.0.over: no arm is called gone"),
        ({"figures": [{**OWN["figures"][0], "published": float("nan")}]}, "field figures.0.published"),
        ({"checks": [{**OWN["checks"][0], "rising": ["cold"]}]}, "field checks.0.rising"),
        ({"checks": [{**OWN["checks"][0], "falling": ["cold", "cached"]}]}, "field checks.0"),
        ({"checks": [{"says": "x", "path": "y"}]}, "field checks.0"),
        ({"trace": {"sessions": 10**12}}, "field trace.sessions"),
        ({"base": "gone.yaml"}, "own.yaml: field base: there is no file .*gone.yaml"),
        ({"base": "own.yaml"}, "own.yaml: field base: .*has a base, too"),
        ({"base": ["own.yaml"]}, "own.yaml: field base"),
    ],
)
def test_fields_that_do_not_fit_each_other_are_named(tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(OWN))
    assert load_finding(str(path)).name == "own"
    path.write_text(yaml.safe_dump(OWN | change))
    with pytest.raises(InputError, match=complaint):
        load_finding(str(path))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"shown": {"TTFT (s)": "ttft_s.p51"}}, r"field shown.TTFT \(s\): ttft_s.p51 is no field .*; .*ttft_s.p50"),
        (
            {"shown": {"read": "teir.read_bytes"}},
            "field shown.read: teir.read_bytes is no .*tier.read_bytes_per_s_mean",
        ),
        ({"shown": {"tokens": "derived.gpu"}}, "field shown.tokens: .*; choose one of: derived.gpu_share "),
        (
            {"shown": {"TTFT": "ttft_s"}},
            "field shown.TTFT: ttft_s is a section; choose one of: ttft_s.mean, ttft_s.p50",
        ),
        ({"shown": {"batch": "pools.0.batch_mean"}}, "goes into a list"),
        ({"shown": {"which": "digest"}}, "digest is no number"),
        ({"shown": {"which": "router.release"}}, "router.release is no number"),
        ({"shown": {"deeper": "ttft_s.p50.x"}}, "ttft_s.p50.x is no field"),
        ({"figures": [{**OWN["figures"][0], "path": "ttft.p50"}]}, "field figures.0.path: ttft.p50 is no field"),
        ({"checks": [{**OWN["checks"][0], "path": "ttft_s.p5"}]}, "field checks.0.path: ttft_s.p5 is no field"),
    ],
)
def test_a_path_to_no_number_is_named_before_anything_runs(
    tmp_path: Path, change: dict[str, Any], complaint: str
) -> None:
    finding = Finding.model_validate(OWN | change)
    with pytest.raises(InputError, match=f"^own.yaml: .*{complaint}") as caught:
        _run_finding(finding, "own.yaml", ["finding", "own.yaml"], "small", tmp_path / "o", 1, 1, (), (), True)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value) and not (tmp_path / "o").exists()


def test_a_path_that_only_some_runs_have_is_not_refused() -> None:
    """Numbers of cache tiers, prices and prefill workers; this experiment has none of them."""
    some = ("tier.restores.bytes.p90", "tier.resident_bytes_per_node_max", "cost.per_session", "restore_s.p99")
    split = ("disaggregation.ttft_parts_s.transfer.p99", "disaggregation.expired", "disaggregation.decode_hit_rate")
    paths = (*some, *split, "batch_mean", "derived.shared_tib_per_node_max", "interference.time", "steps")
    check_paths(Finding.model_validate(OWN | {"shown": {path: path for path in paths}}), "own.yaml")


def test_every_number_of_a_run_is_a_path(tmp_path: Path) -> None:
    """Of one with tiers, prices and prefill workers."""
    records = with_tier_tokens(make_records(SHAPES[0], 50))
    facts, tiers = make_tiers(records)
    cache, moved = {"kind": "lmcache", "release": "1", "mode": "mp"}, {"protocol": "nixl", **asdict(HandoffTotals())}
    info = make_info(SHAPES[0], records, tier=facts, cache=cache, kv_transfer=moved)
    summary = derived(write_run(tmp_path, records, info, tiers=tiers, report=False).summary, 8)
    paths = list(_numbers(summary))
    assert len(paths) > 100
    check_paths(Finding.model_validate(OWN | {"shown": {path: path for path in paths}}), "own.yaml")


@pytest.mark.parametrize("name", finding_names())
def test_paths_of_shipped_findings_lead_to_numbers(name: str) -> None:
    check_paths(load_finding(name), name)


def test_an_experiment_s_trace_that_is_no_section_is_named(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(OWN | {"experiment": {**OWN["experiment"], "trace": "abc"}}))
    finding = load_finding(str(path))
    with pytest.raises(InputError, match="field trace"):
        finding.experiment_of(finding.arms[0], "small", tmp_path / "t", 1)


def test_paths_in_a_finding_are_relative_to_its_file(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below/base.yaml").write_text(yaml.safe_dump(OWN | {"experiment": {"model": {"profile": "./g.npz"}}}))
    more = {"base": "below/base.yaml", "arms": [{"name": "a", "set": {"router.config": "r.yaml"}}]}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(more | {"figures": [], "checks": []}))
    finding = load_finding(str(tmp_path / "own.yaml"))
    assert finding.experiment["model"]["profile"] == str(tmp_path / "below/g.npz")
    assert finding.arms[0].set == {"router.config": str(tmp_path / "r.yaml")}


LADDER = {"field": "cluster.nodes", "title": "nodes", "values": [1, 2]}


def test_a_part_of_a_study_has_the_arms_and_rungs_asked_for() -> None:
    arms = [OWN["arms"][0], {**OWN["arms"][1], "rungs": [2]}]
    finding = Finding.model_validate(OWN | {"ladder": LADDER, "arms": arms, "figures": []})

    def runs(part: Finding) -> list[tuple[str, float | None]]:
        return [(arm.name, rung) for arm in part.arms_at("small") for rung in part.rungs_at("small", arm)]

    assert runs(only(finding, "small", (), ())) == [("cached", 1), ("cached", 2), ("cold", 2)]
    assert runs(only(finding, "small", ("cold",), ())) == [("cold", 2)]
    first = only(finding, "small", (), (1,))
    assert runs(first) == [("cached", 1)] and [arm.name for arm in first.arms_at("small")] == ["cached"]
    with pytest.raises(InputError, match="--arm gone: not in study own at scale small; choose from: cached, cold"):
        only(finding, "small", ("gone",), ())
    with pytest.raises(InputError, match="--rung 3: not in .*; choose from: 1, 2"):
        only(finding, "small", (), (3,))


@pytest.mark.parametrize(
    ("arms", "rungs", "complaint"),
    [
        (
            ("cold",),
            (1.0,),
            "--rung 1: not a value of the ladder at which arm cold runs at scale small; .* 2",
        ),
        ((), (1.0,), "--rung 1: not a value of the ladder at which any arm runs at scale small; choose from: 2"),
        ((), (1.0, 3.0), "--rung 1, 3: .*; choose from: 2"),
    ],
)
def test_a_rung_at_which_nothing_runs_is_told_with_those_that_there_are(
    arms: tuple[str, ...], rungs: tuple[float, ...], complaint: str
) -> None:
    arms_of_2 = [{**arm, "rungs": [2]} for arm in OWN["arms"]]
    ladder = {**LADDER, "values": [1, 2, 3]}
    finding = Finding.model_validate(OWN | {"ladder": ladder, "arms": arms_of_2, "figures": []})
    with pytest.raises(InputError, match=complaint):
        only(finding, "small", arms, rungs)


def test_arms_that_have_no_rung_at_a_scale_name_the_scale() -> None:
    arms = [OWN["arms"][0], {**OWN["arms"][1], "rungs": [2]}]
    scales = {"small": {"rungs": [1]}}
    finding = Finding.model_validate(OWN | {"ladder": LADDER, "arms": arms, "figures": [], "scales": scales})
    with pytest.raises(InputError, match="--scale small: no value of the ladder there for arm cold"):
        only(finding, "small", ("cold",), ())


def test_rungs_are_not_for_a_study_without_a_ladder() -> None:
    with pytest.raises(InputError, match="own has no ladder"):
        only(Finding.model_validate(OWN), "small", (), (1,))


def test_what_cannot_be_told_is_not_said_to_hold() -> None:
    up = Check(path="x.y", rising=["a", "gone"], says="up")
    assert holds(up, ARMS) is None and holds(Check(path="x.y", rising=["a", "b"], says="up"), ARMS) is True
    assert holds(Check(path="x.y", falling=["a", "b"], says="up"), ARMS) is False


def test_a_path_without_a_number_is_noted() -> None:
    finding = Finding.model_validate(OWN | {"shown": {"typo": "ttft_s.p51"}})
    summary = {"ttft_s": {"p50": 1.0}, "validity": {"reasons": [], "notes": []}}
    notes = run_notes(FindingResult(finding, "full", {"cached": summary}, {"cached": [summary]}))
    assert notes == ["no arm has a number at ttft_s.p51"]


def test_the_page_leads_to_its_runs_pages_where_there_are_any() -> None:
    finding = Finding.model_validate(OWN | {"arms": [{"name": n} for n in ("a + b", "cached", "cold")], "figures": []})
    run = {"ttft_s": {"p50": 1.0}, "seed": 3, "validity": {"reasons": [], "notes": []}}
    runs = {"a + b": [run], "cached": [run, {**run, "seed": 4}], "cold": [run]}
    pages = {"a + b": ["a + b/report.html"], "cached": ["", "cached,seed=4/report.html"], "cold": [""]}
    arms = dict.fromkeys(runs, run)
    page = render_page(FindingResult(finding, "small", arms, runs, pages=pages), "harness study own")
    assert '<a href="a%20%2B%20b/report.html">a + b</a>' in page
    links = [unquote(link) for link in re.findall(r'<th scope="row">.*?<a href="([^"]*)"', page)]
    assert links == ["a + b/report.html", "cached,seed=4/report.html"]
    assert ">seed\N{NO-BREAK SPACE}4</a>" in page and '<th scope="row">cold</th>' in page


def test_why_ours_differs_is_said_of_full_scale_alone() -> None:
    figure = Finding.model_validate(OWN).figures[0]
    assert [why(figure, scale) for scale in ("small", "medium", "full")] == ["", "", "why not"]


def test_kv_sizes_are_the_published_ones() -> None:
    sizes = {size.bytes_per_token: size for size in kv_sizes()}
    assert list(sizes) == [163_840, 61_440, 42_944, 47_616]
    assert all(size.bytes_per_token == size.published_bytes_per_token for size in sizes.values())
    assert sizes[42_944].average_call_gb == pytest.approx(9.4, abs=0.05)
    assert sizes[47_616].million_tokens_gb == pytest.approx(49.9, abs=0.05)


@pytest.mark.slow
def test_workload_stays_near_the_published_trace() -> None:
    rows = workload([1])
    assert len(rows) > 50
    assert sum(row.met[0] for row in rows) >= 0.95 * len(rows)


def test_versions_of_runs_that_differ_are_all_named() -> None:
    assert versions_of(
        [{"python": "3.11", "harness": "1"}, {"python": "3.11"}, {"python": "3.11", "harness": "2"}]
    ) == {
        "python": "3.11",
        "harness": "1, unknown, 2",
    }


def test_a_run_of_another_harness_is_said_to_be_one(tmp_path: Path) -> None:
    records = make_records(SHAPES[0], 3)
    ours = {"harness": harness_version(), "harness code": harness_code()}
    for versions, said in (
        (ours, ""),
        ({}, "made by another harness (unknown; this is "),
        (ours | {"harness code": "0123456789ab"}, f"made by another harness ({harness_version()}, 0123456789ab; this"),
    ):
        write_info(tmp_path / INFO, make_info(SHAPES[0], records, versions=versions))
        assert stranger(tmp_path).startswith(said) and bool(stranger(tmp_path)) == bool(said)


@pytest.mark.slow
def test_a_small_study_runs_and_is_not_repeated(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(OWN))
    command = [sys.executable, "-m", "harness", "study", "finding", "own.yaml", "--out", "o", "--json"]
    first = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=_environment(), timeout=300)
    assert first.returncode == 0, first.stderr
    document = json.loads(first.stdout)
    assert document["directions"] == [{"says": "caching computes less", "holds": True}]
    assert document["figures"][0]["ours"] > 1 and document["figures"][0]["because"] == "", "said of full scale"
    text = (tmp_path / "o" / "study.md").read_text()
    assert "why not" not in text and "do not compare with the published ones" in text
    written = (tmp_path / "o" / "cold" / "summary.json").stat().st_mtime_ns
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=_environment(), timeout=300)
    assert json.loads(again.stdout)["runs"] == document["runs"]
    assert (tmp_path / "o" / "cold" / "summary.json").stat().st_mtime_ns == written
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(OWN | {"name": "other", "arms": [*OWN["arms"][:1], SMALLER]}))
    other = run_finding(load_finding(str(tmp_path / "other.yaml")), "small", tmp_path / "p", show_progress=False)
    assert other.pages == {name: [f"{name}/report.html"] for name in ("cached", "cold")}
    digests = {run["arm"]: run["digest"] for run in document["runs"]}
    assert other.runs["cached"][0]["digest"] == digests["cached"]
    assert (tmp_path / "p" / "cached" / "calls.parquet").stat().st_mtime_ns == (
        (tmp_path / "o" / "cached" / "calls.parquet").stat().st_mtime_ns
    ), "the common arm is copied"
    none = tmp_path / "part.yaml"
    none.write_text(yaml.safe_dump(OWN | {"name": "part", "arms": OWN["arms"][:1], "checks": [], "figures": []}))
    part = run_finding(load_finding(str(none)), "small", tmp_path / "s", show_progress=False)
    assert part.runs["cached"][0]["digest"] == digests["cached"]
    assert not list((tmp_path / "s").glob("*trace-*")), "no trace is made for runs that are taken over"
    assert other.runs["cold"][0]["digest"] != digests["cold"], "another arm of that name is run"
    prices = {"name": "dear", "input_uncached": 4.0, "input_cached": 2.0, "output": 1.0}
    dear = OWN | {"name": "dear", "arms": [{"name": "cached", "set": {"prices": prices}}, SMALLER]}
    (tmp_path / "dear.yaml").write_text(yaml.safe_dump(dear | {"checks": [], "figures": []}))
    priced = run_finding(load_finding(str(tmp_path / "dear.yaml")), "small", tmp_path / "q", show_progress=False)
    costs = priced.runs["cached"][0].pop("cost")
    unpriced = {**other.runs["cached"][0], "experiment": "dear"}
    assert unpriced.pop("cost")["per_session"] is None and priced.runs["cached"][0] == unpriced
    assert costs["per_million_input"] == pytest.approx(4 - 2 * unpriced["hit_rate"]["token"])
    assert costs["per_session"] > 0 and costs["priced_with"] == "dear"
    assert "input_cached: 2.0" in (tmp_path / "q" / "cached" / "experiment.resolved.yaml").read_text()
    for study in ("o", "p", "q", "s"):
        (tmp_path / study / "cached" / "calls.parquet").write_bytes(b"PAR1")
    dearer = dear | {"arms": [{"name": "cached", "set": {"prices": prices | {"output": 2.0}}}, SMALLER]}
    (tmp_path / "dearer.yaml").write_text(yaml.safe_dump(dearer | {"checks": [], "figures": []}))
    run = run_finding(load_finding(str(tmp_path / "dearer.yaml")), "small", tmp_path / "r", show_progress=False)
    assert run.runs["cached"][0]["digest"] == digests["cached"], "records that cannot be read are made again"
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(OWN).replace("nodes: 1", "nodes: 2"))
    edited = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=_environment(), timeout=300)
    assert edited.returncode == 2 and "give another folder" in edited.stderr, "results of two studies never mix"


def test_a_ratio_is_only_given_where_the_load_is_the_published_one() -> None:
    figure = Figure(name="f", path="x", arm="a", published=3700.0, unit="tok")
    assert figure_cells(figure, 7400.0, "full") == ["3,700 tok", "7,400 tok", "2.00"]
    assert figure_cells(figure, 7400.0, "medium") == ["3,700 tok", "7,400 tok", "2.00"]
    assert figure_cells(figure, 7400.0, "small") == ["3,700 tok", "7,400 tok", "-"]
    assert figure_cells(figure, None, "full") == ["3,700 tok", "-", "-"]
