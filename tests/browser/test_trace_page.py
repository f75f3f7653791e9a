"""The page of a trace in a real browser: no complaints, everything drawn, nothing cut off, on paper too."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from harness.trace.generate import generate_sessions
from harness.trace.model import Call, Session
from harness.trace.page import render_trace_page
from harness.trace.plots import TRACE_PLOTS
from harness.trace.profile import load_profile
from harness.trace.shape import Shape
from harness.trace.stats import trace_stats
from tests.browser.page import Page

HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><b>%{x}"


def written(folder: Path, name: str, sessions: list[Session]) -> Path:
    shape = Shape()
    found = trace_stats(shape.watch(sessions))
    (folder / "page.html").write_text(render_trace_page(name, found, shape), encoding="utf-8")
    return folder / "page.html"


@pytest.fixture(scope="module")
def trace_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sessions = list(generate_sessions(load_profile("claude-code"), 3, 12))
    return written(tmp_path_factory.mktemp("trace"), "claude-code.jsonl.gz", sessions)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_page_is_drawn_without_complaints(page: Page, trace_page: Path, width: int, dark: bool) -> None:
    page.open(trace_page, width, dark=dark)
    assert page.console() == []
    assert [url for url in page.requests() if not url.startswith(("file:", "data:"))] == []
    drawn = page.js("return [...document.querySelectorAll('.plot')].map(p => [p.id, p.querySelectorAll('svg').length])")
    assert [id for id, _ in drawn] == [f"plot-{plot.key}" for plot in TRACE_PLOTS]
    assert all(svgs >= 1 for _, svgs in drawn)
    assert page.js("return document.querySelectorAll('#plot-gaps .barlayer .trace').length") == 2
    assert page.js("return document.querySelectorAll('#plot-flight .scatterlayer .trace').length") == 3
    assert page.js("return document.documentElement.scrollWidth") <= width
    outside = page.js(
        """
        const found = [];
        for (const card of document.querySelectorAll('.card')) {
          const box = card.getBoundingClientRect();
          for (const text of card.querySelectorAll('svg text')) {
            const at = text.getBoundingClientRect();
            if (at.width && (at.left < box.left - 1 || at.right > box.right + 1)) found.push(text.textContent);
          }
        }
        return found;
        """
    )
    assert outside == []


@pytest.mark.parametrize("width", [1280, 390])
def test_the_names_of_the_modes_do_not_overlap(page: Page, trace_page: Path, width: int) -> None:
    page.open(trace_page, width)
    boxes = page.js(
        """
        return [...document.querySelectorAll('#plot-gaps .annotation-text')]
          .map(t => t.getBoundingClientRect()).map(b => [b.left, b.right]).sort((a, b) => a[0] - b[0]);
        """
    )
    assert len(boxes) == 3
    assert all(left[1] <= right[0] for left, right in pairwise(boxes))


def test_a_colour_means_the_same_in_legend_and_plot(page: Page, trace_page: Path) -> None:
    page.open(trace_page, 1280)
    named = page.js(
        "return [...document.querySelectorAll('.card:has(#plot-flight) .swatch')]"
        ".map(e => getComputedStyle(e).borderTopColor)"
    )
    lines = page.js("return [...document.querySelectorAll('#plot-flight path.js-line')].map(p => p.style.stroke)")
    assert named == lines and len(set(named)) == 3


def test_printing_opens_the_full_table(page: Page, trace_page: Path) -> None:
    page.open(trace_page, 1280, dark=True)
    page.js("dispatchEvent(new Event('beforeprint'))")
    assert page.js("return document.querySelectorAll('details:not([open])').length") == 0
    assert page.js("return document.documentElement.dataset.theme") == "light"
    assert max(page.js("return [...document.querySelectorAll('.plot svg.main-svg')].map(s => s.clientWidth)")) <= 640
    page.js("dispatchEvent(new Event('afterprint'))")
    assert page.js("return document.querySelectorAll('details:not([open])').length") == 1


def test_hostile_names_and_an_odd_trace(page: Page, tmp_path: Path) -> None:
    lone = Call(0, 0.0, None, "main", 5, 1, -1, 0, 0, model=HOSTILE)
    page.open(written(tmp_path, HOSTILE, [Session(HOSTILE, 64, [lone])]), 390)
    assert page.js("return document.title").startswith("</script>")
    assert page.js("return document.images.length") == 0
    assert page.js("return document.documentElement.scrollWidth") <= 390
    assert page.console() == []
