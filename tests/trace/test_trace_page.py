"""The curves of a trace's page against plain counts, and the page itself without a browser."""

from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_trace_cli import ok, refused
from test_trace_read import good_trace
from trace_builders import call, explicit_blocks, recorded_sessions

from harness.trace.model import Session
from harness.trace.page import render_trace_page, trace_figures
from harness.trace.plots import TRACE_PLOTS
from harness.trace.shape import LEVELS, Shape, at_least
from harness.trace.stats import trace_stats
from harness.trace.table import flat_stats, published


def shape_of(sessions: list[Session]) -> Shape:
    shape = Shape()
    assert list(shape.watch(sessions)) == sessions
    return shape


@settings(max_examples=60, deadline=None)
@given(st.lists(recorded_sessions(), min_size=1, max_size=3))
def test_curves_pass_through_the_statistics(sessions: list[Session]) -> None:
    shape, found = shape_of(sessions), trace_stats(sessions)
    gaps = found["gaps"]
    assert shape.zero + len(shape.idle_s) == gaps["arrivals"]
    assert sum(shape.idle_s) == pytest.approx(gaps["idle_total_s"])
    assert shape.hit_infinite() == pytest.approx(found["block_hit_infinite"])
    curve = dict(zip(*(x.tolist() for x in shape.hit_curve()), strict=True))
    for row in found["block_hit_by_window"]:
        if row["window_s"] in curve:
            assert curve[row["window_s"]] == pytest.approx(row["hit"])
    assert sorted(curve.values()) == list(curve.values())
    assert max(shape.most) == found["in_flight"]["max"]
    median, pooled = shape.burst_curves()
    for level, name in ((0.5, "half_of_calls"), (0.9, "90_percent_of_calls")):
        assert median[LEVELS.index(level)] == pytest.approx(found["busiest_minutes"][name]["median"])
        assert pooled[LEVELS.index(level)] == pytest.approx(found["busiest_minutes"][name]["pooled"])


@settings(max_examples=60, deadline=None)
@given(recorded_sessions())
def test_every_window_of_the_curve_is_a_count_over_blocks(session: Session) -> None:
    shape = shape_of([session])
    prompts = explicit_blocks(session.calls)
    for window, hits in list(zip(shape.windows_s, shape.hits, strict=True))[::5]:
        used: dict[tuple[int, int], float] = {}
        wanted = 0
        for c, blocks in zip(session.calls, prompts, strict=True):
            wanted += sum(block in used and c.t_s - used[block] <= window for block in blocks)
            used.update(dict.fromkeys(blocks, c.t_s))
        assert hits == wanted


@settings(max_examples=60, deadline=None)
@given(recorded_sessions())
def test_time_in_flight_is_the_calls_time(session: Session) -> None:
    shape = shape_of([session])
    assert sum(level * s for level, s in shape.busy_s.items()) == pytest.approx(
        sum(c.api_s or 0.0 for c in session.calls)
    )


def test_calls_in_flight_by_hand() -> None:
    calls = [call(0, 0.0, 1, api_s=10.0), call(1, 4.0, 1, api_s=6.0), call(2, 10.0, 1, api_s=5.0)]
    shape = shape_of([Session("a", 64, calls)])
    assert shape.busy_s == {1: 9.0, 2: 6.0}
    assert shape.starts == Counter({1: 2, 2: 1}) and shape.most == Counter({2: 1})
    assert at_least(shape.busy_s, 3).tolist() == pytest.approx([1.0, 0.4, 0.0])


def test_context_curves_are_percentiles_of_the_sessions_that_go_on() -> None:
    sessions = [
        Session("s", 64, [call(i, float(i), 10 * (n + 1) + i, chain="main") for i in range(1 + n)]) for n in range(25)
    ]
    numbers, tokens = shape_of(sessions).context_curves()
    assert numbers[-1] == 6  # twenty of the 25 sessions have six calls or more
    sizes = [64 * (10 * (n + 1) + 5) for n in range(5, 25)]
    assert tokens[-1].tolist() == pytest.approx(np.percentile(sizes, (10, 50, 90)).tolist())


class _Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.outside += [v for k, v in attrs if k in ("src", "href", "srcset", "action") and v]


def test_the_page_is_one_file_and_says_every_statistic(tmp_path: Path) -> None:
    calls = [
        call(0, 0.0, 1000, api_s=10.0, model="<b>m</b>"),
        call(1, 4.0, 1100, 0, 1000, api_s=2.0, chain="s1.0"),
        call(2, 70.0, 2000, 0, 1000, api_s=5.0),
        call(3, 2000.0, 2000, 2, 2000, api_s=None),
    ]
    sessions = [Session("a", 64, calls)]
    found = trace_stats(sessions)
    text = render_trace_page("<i>x</i>.jsonl", found, shape_of(sessions))
    elements = _Elements()
    elements.feed(text)
    assert elements.outside == []
    assert "<i>x</i>" not in text and "<b>m</b>" not in text and "1 session, 4 calls" in text
    for name, _ in flat_stats(found):
        assert f">{name.replace('<', '&lt;').replace('>', '&gt;')}</th>" in text
    for _, rows in published(found):
        for name, value in rows:
            assert f"<dt>{name}</dt><dd>{value}</dd>" in text
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', text, re.S)[1])  # type: ignore[index]
    assert list(figures) == [plot.key for plot in TRACE_PLOTS]
    modes = [a["text"] for a in figures["gaps"]["layout"]["annotations"]]
    assert [re.sub("<.*?>", " ", mode) for mode in modes] == [
        " busy  33.3 %  ", " below 30 min  33.3 % of arrivals 3.02 % of idle time",
        " 30 min or more  33.3 % of arrivals 97 % of idle time",
    ]  # fmt: skip


def test_bars_of_gaps_add_up() -> None:
    calls = [call(i, t, 3, api_s=1.0) for i, t in enumerate((0.0, 0.5, 1.5, 1.505, 9.0, 5000.0))]
    figure = trace_figures(shape_of([Session("a", 64, calls)]))["gaps"]
    for bar in figure["data"]:
        assert sum(bar["y"]) == pytest.approx(100, abs=0.05)
        assert all(figure["layout"]["xaxis"]["range"][0] < x < figure["layout"]["xaxis"]["range"][1] for x in bar["x"])
    assert figure["data"][0]["y"][0] == pytest.approx(40) and figure["data"][1]["y"][0] == 0


@pytest.mark.parametrize("sessions", [[], [Session("a", 64, [])], [Session("a", 64, [call(0, 0.0, 0, api_s=None)])]])
def test_next_to_nothing_has_a_page_too(sessions: list[Session]) -> None:
    text = render_trace_page("t", trace_stats(sessions), shape_of(sessions))
    assert "Not shown, since there is nothing to show: Time between arrivals" in text


def test_a_trace_of_lone_calls_says_so() -> None:
    sessions = [Session("a", 64, [call(0, 0.0, 3), call(1, 60.0, 5, 0, 3)])]
    shape = shape_of(sessions)
    text = render_trace_page("t", trace_stats(sessions), shape)
    assert "No session has two calls in flight at any time" in text
    assert "flight" not in trace_figures(shape) and "nothing to show: Calls in flight" in text


def test_stats_writes_the_page_beside_the_table(tmp_path: Path) -> None:
    path = good_trace(tmp_path / "t.jsonl.gz", calls=3)
    found = json.loads(ok("stats", path, "--json", "--html", tmp_path / "p.html"))
    assert found["calls"] == 3
    assert "t.jsonl.gz" in (tmp_path / "p.html").read_text(encoding="utf-8")
    before = path.read_bytes()
    assert "is the trace itself" in refused("stats", path, "--html", path).what
    assert path.read_bytes() == before
    assert "cannot be written" in refused("stats", path, "--html", tmp_path / "no" / "p.html").what
