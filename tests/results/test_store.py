"""Folders of runs: what is written, that it suffices to render again, that nothing in it can break the
page.
"""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from harness.errors import InputError
from harness.results import series
from harness.results.figure import safe_text
from harness.results.markup import Markup, tag
from harness.results.page_shell import json_block
from harness.results.plots import PLOTS, figures
from harness.results.records import digest, to_records
from harness.results.report import render_html
from harness.results.runinfo import write_info
from harness.results.store import (
    INFO,
    REPORT,
    Run,
    distinct,
    find_runs,
    load_run,
    render,
    report,
    write_comparison,
    write_run,
)
from harness.results.timeline import TimelineRecorder
from tests.harness.test_folders import room_for
from tests.results.synthetic import SHAPES, S, Shape, make_info, make_records, make_timeline

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u2028 %{x} <a href='javascript:1'>"


def _write(dir: Path, shape: Shape, calls: int = 300, **changes: object) -> Run:
    records = make_records(shape, calls, hours=calls / 10_000)
    nodes = [e // 8 for e in range(64)]
    changes.setdefault("window_ns", (0, None))
    info, timeline = make_info(shape, records, **changes), make_timeline(records, nodes)
    return write_run(dir, records, info, timeline, arrived=calls, drained=True, report=False)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    base = tmp_path_factory.mktemp("runs")
    return [_write(base / shape.label, shape) for shape in SHAPES]


def test_a_run_is_read_back_as_it_was_written(runs: list[Run]) -> None:
    for run in runs:
        again = load_run(run.dir)
        assert again.info == run.info
        assert again.summary == run.summary == json.loads((run.dir / "summary.json").read_text())
        assert again.calls.equals(run.calls.sort("call_id"))
        assert again.timeline is not None and run.timeline is not None
        assert (again.timeline.running_ns == run.timeline.running_ns).all()
        assert (run.dir / "experiment.resolved.yaml").read_text() == run.info.experiment_yaml


def test_the_digest_in_the_summary_is_that_of_the_records(runs: list[Run]) -> None:
    assert runs[0].summary["digest"] == digest(make_records(SHAPES[0], 300, hours=0.03))
    assert len({run.summary["digest"] for run in runs}) == len(runs)


def test_broken_invariants_make_the_run_invalid(tmp_path: Path) -> None:
    records = make_records(SHAPES[0], 50)
    records[0].outcome = "lost"
    run = write_run(tmp_path, records, make_info(SHAPES[0], records), arrived=51, report=False)
    assert not run.summary["validity"]["valid"]
    assert [reason[:5] for reason in run.summary["validity"]["reasons"]] == ["INV-1", "INV-1"]
    assert load_run(tmp_path).summary == run.summary


def test_report_is_rendered_again_from_the_folders_alone(runs: list[Run], tmp_path: Path) -> None:
    dir = tmp_path / "comparison"
    copies = []
    for run in runs:
        shutil.copytree(run.dir, dir / run.dir.name)
        copies.append(load_run(dir / run.dir.name))
    first = write_comparison(dir, copies).read_text(encoding="utf-8")
    moved = tmp_path / "elsewhere"
    shutil.move(dir, moved)
    (moved / "report.html").unlink()
    assert report([moved]).read_text(encoding="utf-8") == first
    assert [path.name for path in find_runs([moved])] == [shape.label for shape in SHAPES]
    (moved / "comparison.json").unlink()
    assert [p.name for p in find_runs([moved, moved / "load-only"])] == sorted(s.label for s in SHAPES)


def test_what_does_not_fit_on_the_disk_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    run = _write(tmp_path, SHAPES[0])
    render([run], tmp_path / REPORT)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for write in (
        lambda: render([run], tmp_path / REPORT),
        lambda: write_comparison(tmp_path, [run]),
        lambda: write_run(tmp_path, to_records(run.calls), run.info),
        lambda: write_info(tmp_path / INFO, run.info),
    ):
        with pytest.raises((OSError, pl.exceptions.PolarsError), match="File too large"), room_for(64):
            write()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    def labels(*changes: dict[str, object]) -> list[str]:
        made = [_write(tmp_path / str(i), SHAPES[0], 20, **c) for i, c in enumerate(changes)]
        told = distinct(made)
        assert [run.summary["label"] for run in told] == [run.info.title for run in told]
        assert [run.info.title for run in made] == [str(c.get("label", "precise-prefix")) for c in changes]
        return [run.info.title for run in told]

    assert labels({}, {"label": "b"}) == ["precise-prefix", "b"]
    assert labels({}, {"seed": 2}) == ["precise-prefix seed 1", "precise-prefix seed 2"]
    old = {"kind": "llm-d", "config": "precise-prefix", "release": "v0.7.1"}
    assert labels({}, {"router": old}) == ["precise-prefix v0.10.0", "precise-prefix v0.7.1"]
    assert labels({}, {}, {"seed": 2}) == [
        "precise-prefix seed 1 #1",
        "precise-prefix seed 1 #2",
        "precise-prefix seed 2",
    ]


def test_folders_without_runs_are_input_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run in it"):
        find_runs([tmp_path])
    with pytest.raises(InputError, match="no such file"):
        load_run(tmp_path)
    for text in ("[]", '{"calls": 3}'):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(InputError, match="schema None"):
            load_run(tmp_path)
    for text in ("{", '{"schema": 1}'):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(InputError, match="not a run record"):
            load_run(tmp_path)
    (tmp_path / "comparison.json").write_text('{"runs": 3}')
    (tmp_path / "run.json").unlink()
    with pytest.raises(InputError, match="not a list of runs"):
        find_runs([tmp_path])
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(InputError, match="schema None"):
        load_run(tmp_path)
    (tmp_path / "run.json").write_text('{"schema": 99}')
    with pytest.raises(InputError, match="schema 99"):
        load_run(tmp_path)


class _Outline(HTMLParser):
    """Collects the elements and event handlers of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[dict[str, str | None]] = []
        self.handlers: list[str] = []
        self.loads: list[str] = []
        self.images = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "script":
            self.scripts.append(dict(attrs))
        self.images += tag == "img"
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]


def _hostile_page(tmp_path: Path) -> str:
    shape = Shape(HOSTILE)
    run = _write(
        tmp_path / "hostile",
        shape,
        name=HOSTILE,
        experiment_yaml=f"name: {HOSTILE}\n",
        workload={HOSTILE: HOSTILE, "list": [HOSTILE], "dict": {HOSTILE: [HOSTILE]}},
        profile={"source": HOSTILE},
        notes=[HOSTILE],
        invalid=[HOSTILE],
        command=HOSTILE,
        router_stats={HOSTILE: HOSTILE},
        router={
            "kind": "llm-d",
            "release": HOSTILE,
            "config": HOSTILE,
            "config_text": HOSTILE,
            "added": HOSTILE,
        },
    )
    return render_html([run, _write(tmp_path / "other", SHAPES[3])])


def test_hostile_strings_stay_text(tmp_path: Path) -> None:
    page = _hostile_page(tmp_path)
    outline = _Outline()
    outline.feed(page)
    assert [script.get("type") for script in outline.scripts] == ["application/json", None, None]
    assert outline.handlers == [] and outline.loads == [] and outline.images == 0
    assert "<script>alert" not in page and "<img" not in page.split("<script>")[0]
    data = re.search(r'id="figures">(.*?)</script>', page, re.S)
    assert data is not None and "<" not in data[1]
    names = {trace["name"] for trace in json.loads(data[1])["ttft"]["data"]}
    assert all("<" not in name for name in names)


def test_the_policy_names_exactly_the_two_scripts(runs: list[Run]) -> None:
    page = render_html(runs[:1])
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    scripts = policy[1].split("script-src")[1].split(";")[0].split()
    assert len(scripts) == 2 and all(s.startswith("'sha256-") for s in scripts)


def test_nothing_is_loaded_from_elsewhere(runs: list[Run]) -> None:
    outline = _Outline()
    outline.feed(render_html(runs))
    assert outline.loads == []


def test_json_blocks_survive_any_string() -> None:
    block = json_block("x", {"a": HOSTILE})
    inner = re.fullmatch(r'<script type="application/json" id="x">(.*)</script>', block, re.S)
    assert inner is not None and "<" not in inner[1] and "\u2028" not in inner[1]
    assert json.loads(inner[1]) == {"a": HOSTILE}


def test_markup_escapes_text_and_attributes() -> None:
    assert tag("b", "<i>", Markup("<u>"), None, [1, "&"], title='"<', hidden=False, open=True, class_="c") == (
        '<b title="&quot;&lt;" open class="c">&lt;i&gt;<u>1&amp;</b>'
    )


def test_names_in_plots_are_escaped_and_short() -> None:
    assert safe_text("<b>&") == "&lt;b&gt;&amp;"
    assert len(safe_text("x" * 100)) == 40


def test_every_plot_is_made_and_runs_keep_their_colour(runs: list[Run]) -> None:
    made = figures(runs)
    assert list(made) == [plot.key for plot in PLOTS]
    for key in ("ttft", "e2e", "time", "cluster", "rate"):
        assert [t["line"]["color"] for t in made[key]["data"]] == [f"@run{i}" for i in range(5)]
    for key in ("hits", "balance", "parts"):
        assert all(t["marker"]["color"] == [f"@run{i}" for i in range(5)] for t in made[key]["data"])
    assert {t["meta"]["run"] for t in made["gap"]["data"]} == {0, 1}, "only configs that score prefixes"


def test_what_has_one_point_in_time_is_left_out_or_a_dot_beside_curves(tmp_path: Path, runs: list[Run]) -> None:
    records = make_records(SHAPES[0], calls=40, hours=0.5 / 3600)
    timeline = TimelineRecorder([e // 8 for e in range(64)]).finish(S // 2)
    short = write_run(tmp_path, records, make_info(SHAPES[0], records, window_ns=(0, None)), timeline)
    assert {"time", "cluster"}.isdisjoint(figures([short])) and "ttft" in figures([short])
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Not shown, for want of data: Time to first token over the run; Requests in the cluster" in page
    for key in ("time", "cluster"):
        curve, dot = figures([runs[0], short])[key]["data"]
        assert (curve["mode"], dot["mode"], len(dot["x"])) == ("lines", "markers", 1)
        assert dot["marker"]["color"] == "@run1"


def test_axes_carry_units(runs: list[Run]) -> None:
    for key, figure in figures(runs).items():
        for name, axis in figure["layout"].items():
            if name[1:].startswith("axis") and "title" in axis:
                text = axis["title"]["text"]
                assert re.search(r"\((s|s, logarithmic|min|%|points|tok/s|requests)\)|requests", text), (
                    key,
                    text,
                )


def test_a_run_without_calls_or_timeline_still_has_a_page(tmp_path: Path) -> None:
    run = write_run(tmp_path, [], make_info(SHAPES[0], []), arrived=0, drained=True)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert run.summary["validity"]["valid"]
    assert "no call completed in the measured window" in page and "Not shown, for want of data" in page


def test_invalid_runs_are_boxed(tmp_path: Path) -> None:
    run = _write(tmp_path, SHAPES[0], invalid=["the producer timed out 3 times"])
    page = render_html([run])
    assert 'id="invalid"' in page and "the producer timed out 3 times" in page
    assert 'id="invalid"' not in render_html([_write(tmp_path / "fine", SHAPES[0])])


def test_the_page_stays_small_for_long_runs(tmp_path: Path) -> None:
    """Data are decimated: three runs with ten times the calls grow the page by little."""
    few = render_html([_write(tmp_path / f"few{i}", s, 400) for i, s in enumerate(SHAPES[:3])])
    many = render_html([_write(tmp_path / f"many{i}", s, 4000) for i, s in enumerate(SHAPES[:3])])
    assert len(many) < len(few) + 150_000
    assert len(many) < 6_000_000


def test_distribution_is_monotone_and_ends_at_the_share_that_completed() -> None:
    rng = np.random.default_rng(3)
    values = rng.lognormal(0, 1, 5000)
    x, y = series.distribution(values, 6000)
    assert (np.diff(x) >= 0).all() and (np.diff(y) > 0).all()
    assert y[-1] == pytest.approx(5 / 6) and x[-1] == values.max()
    assert float(np.interp(0.75, y, x)) == pytest.approx(np.quantile(values, 0.9), rel=0.02)
    assert len(x) < 250


def test_batch_of_a_call_is_the_mean_while_it_decoded() -> None:
    records = make_records(SHAPES[0], 40, nodes=1, per_node=1)
    for i, record in enumerate(records):
        record.outcome, record.output_tokens = "completed", 11
        start = i * 100 * S
        record.arrival_ns = record.routed_ns = record.admitted_ns = start
        record.first_token_ns, record.finish_ns = start + 10 * S, start + 20 * S
    info = make_info(SHAPES[0], records, nodes=1, per_node=1, window_ns=(0, None))
    found = series.rate_by_batch(_frame(records), info)
    assert found.calls.sum() == 40
    np.testing.assert_allclose(found.p50, 1.1)
    np.testing.assert_allclose(found.batch, 1.0)
    for i, record in enumerate(records):  # now in pairs that decode side by side for half of the time
        start = (i // 2) * 100 * S + (i % 2) * 5 * S
        record.arrival_ns = record.routed_ns = record.admitted_ns = start
        record.first_token_ns, record.finish_ns = start + 10 * S, start + 20 * S
    np.testing.assert_allclose(series.rate_by_batch(_frame(records), info).batch, 1.5)


def _frame(records: list) -> pl.DataFrame:  # type: ignore[type-arg]
    from harness.results.records import to_frame

    return to_frame(records)
