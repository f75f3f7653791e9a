"""The report in a real browser: no complaints, everything drawn, readable at desk and phone width, light
and dark.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.results.plots import PLOTS
from harness.results.store import write_comparison, write_run
from harness.results.tier_plots import TIER_PLOTS
from tests.browser.page import Page
from tests.results.synthetic import (
    SHAPES,
    Shape,
    make_info,
    make_records,
    make_tiers,
    make_timeline,
    with_tier_tokens,
)

HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><b>%{x}"


def _comparison(dir: Path, shapes: tuple[Shape, ...], calls: int) -> Path:
    runs = []
    nodes = [e // 8 for e in range(64)]
    for i, shape in enumerate(shapes):
        records = make_records(shape, calls, hours=calls / 10_000)
        info = make_info(shape, records, notes=[HOSTILE], workload={"trace": HOSTILE}, window_ns=(0, None))
        runs.append(write_run(dir / f"run{i}", records, info, make_timeline(records, nodes), report=False))
    return write_comparison(dir, runs)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _comparison(tmp_path_factory.mktemp("report"), SHAPES, 3000)


@pytest.fixture(scope="module")
def tiers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three arms: two with tiers, one of which has a slow store, and one without."""
    dir = tmp_path_factory.mktemp("tiers")
    nodes = [e // 8 for e in range(64)]
    runs = []
    for i, (shape, busy) in enumerate(zip(SHAPES, (0.3, 0.98, None), strict=False)):
        records = make_records(shape, 1000, hours=0.5)
        facts, data = (None, None) if busy is None else make_tiers(with_tier_tokens(records), busy=busy)
        info = make_info(shape, records, notes=[HOSTILE], window_ns=(0, None), tier=facts)
        runs.append(write_run(dir / f"run{i}", records, info, make_timeline(records, nodes), tiers=data, report=False))
    return write_comparison(dir, runs)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_page_with_tiers_shows_them_all(page: Page, tiers: Path, width: int, dark: bool) -> None:
    page.open(tiers, width, dark=dark)
    assert page.console() == []
    drawn = page.js("return [...document.querySelectorAll('.plot')].map(p => [p.id, p.querySelectorAll('svg').length])")
    assert [id for id, _ in drawn] == [f"plot-{plot.key}" for plot in (*PLOTS, *TIER_PLOTS)]
    assert all(svgs >= 1 for _, svgs in drawn)
    lines = "return document.querySelectorAll('#plot-{} .scatterlayer .trace').length"
    counts = {key: page.js(lines.format(f"tier-{key}")) for key in ("restore", "read", "write", "node", "shared")}
    assert counts == {"restore": 4, "read": 4, "write": 4, "node": 4, "shared": 2}
    assert page.js("return document.querySelectorAll('table.tiers tbody tr').length") == 4
    assert page.js("return document.querySelectorAll('table.links tbody tr').length") == 6
    assert page.js("return document.documentElement.scrollWidth") <= width
    assert any(
        "store \u2192 switch" in s
        for s in page.js("return [...document.querySelectorAll('.answer li')].map(e => e.textContent)")
    )
    page.js("document.querySelectorAll('.chip')[0].click()")
    assert page.js(lines.format("tier-restore")) == 2


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_page_is_drawn_without_complaints(page: Page, report: Path, width: int, dark: bool) -> None:
    page.open(report, width, dark=dark)
    assert page.console() == []
    assert [url for url in page.requests() if not url.startswith(("file:", "data:"))] == []
    drawn = page.js("return [...document.querySelectorAll('.plot')].map(p => [p.id, p.querySelectorAll('svg').length])")
    assert [id for id, _ in drawn] == [f"plot-{plot.key}" for plot in PLOTS]
    assert all(svgs >= 1 for _, svgs in drawn)
    assert page.js("return document.querySelectorAll('#plot-ttft .scatterlayer .trace').length") == len(SHAPES)
    assert page.js("return document.querySelectorAll('#plot-heat .heatmaplayer image').length") == len(SHAPES)
    assert page.js("return document.documentElement.scrollWidth") <= width
    assert page.js("return document.body.scrollWidth") <= width


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_cut_table_is_shaded_at_the_edge_until_its_end_is_reached(page: Page, tiers: Path, dark: bool) -> None:
    page.open(tiers, 390, dark=dark)
    box = page.js(
        """
        const scroll = document.querySelector('#comparison .scroll'), r = scroll.getBoundingClientRect();
        return { room: scroll.scrollWidth - scroll.clientWidth, right: r.right + scrollX, y: r.top + scrollY + 8 };
        """
    )
    assert box["room"] > 100

    def shade() -> int:
        return abs(page.pixel(box["right"] - 4, box["y"]) - page.pixel(box["right"] - 24, box["y"]))

    assert shade() > 60
    page.js("document.querySelector('#comparison .scroll').scrollLeft = 1e6")
    assert shade() < 6


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("kind", ["report", "tiers"])
def test_no_text_of_a_plot_leaves_its_card(page: Page, kind: str, request: pytest.FixtureRequest, width: int) -> None:
    page.open(request.getfixturevalue(kind), width)
    outside = page.js(
        """
        const found = [];
        for (const card of document.querySelectorAll('.card')) {
          const box = card.getBoundingClientRect();
          for (const text of card.querySelectorAll('svg text')) {
            const at = text.getBoundingClientRect();
            const out = at.left < box.left - 1 || at.right > box.right + 1;
            if (at.width && out) found.push(text.textContent);
          }
        }
        return found;
        """
    )
    assert outside == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_and_lines_stand_out(page: Page, report: Path, dark: bool) -> None:
    """Contrast as WCAG counts it: text 4.5 to its background, lines of the plots 2.5 to the cards'."""
    page.open(report, 1280, dark=dark)
    ratios = page.js(
        """
        const probe = document.createElement('span'); document.body.append(probe);
        const light = (color) => {
          probe.style.color = color;
          const rgb = getComputedStyle(probe).color.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255);
          const lin = rgb.map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
          return 0.2126 * lin[0] + 0.7152 * lin[1] + 0.0722 * lin[2];
        };
        const css = getComputedStyle(document.documentElement);
        const of = (name) => light(css.getPropertyValue('--' + name).trim());
        const ratio = (a, b) => (Math.max(of(a), of(b)) + 0.05) / (Math.min(of(a), of(b)) + 0.05);
        const result = {};
        for (const name of ['ink', 'muted', 'accent'])
          result[name] = Math.min(ratio(name, 'surface'), ratio(name, 'bg'));
        result['bad'] = ratio('bad', 'bad-bg');
        for (let i = 0; i < 8; i++) result['run' + i] = ratio('run' + i, 'surface');
        probe.remove();
        return result;
        """
    )
    assert {k: v for k, v in ratios.items() if v < (2.5 if k.startswith("run") else 4.5)} == {}
    background = page.js("return getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(19, 22, 25)") is dark


def test_the_theme_button_redraws_the_plots(page: Page, report: Path) -> None:
    page.open(report, 1280)
    color = "return document.querySelector('#plot-ttft .scatterlayer .trace path.js-line').style.stroke"
    light = page.js(color)
    page.js("document.getElementById('theme').click()")
    assert page.js("return document.documentElement.dataset.theme") == "dark"
    assert page.js(color) != light
    page.js("document.getElementById('theme').click()")
    assert page.js(color) == light
    assert page.console() == []


def test_the_legend_hides_a_run_everywhere(page: Page, report: Path) -> None:
    page.open(report, 1280)
    count = "return document.querySelectorAll('#plot-{} .scatterlayer .trace').length"
    page.js("document.querySelectorAll('.chip')[1].click()")
    assert [page.js(count.format(key)) for key in ("ttft", "e2e", "cluster", "gap")] == [4, 4, 4, 1]
    assert page.js("return document.querySelectorAll('.chip')[1].getAttribute('aria-pressed')") == "false"
    page.js("document.querySelectorAll('.chip')[1].click()")
    assert page.js(count.format("ttft")) == 5


def test_a_run_keeps_its_colour_from_table_to_plot(page: Page, report: Path) -> None:
    page.open(report, 1280)
    colors = page.js(
        """
        const color = (e) => getComputedStyle(e).borderTopColor;
        const rows = [...document.querySelectorAll('.comparison .swatch')].map(color);
        const chips = [...document.querySelectorAll('.chip .swatch')].map(color);
        const drawn = document.querySelectorAll('#plot-ttft .scatterlayer path.js-line');
        const lines = [...drawn].map(p => p.style.stroke);
        return [rows, chips, lines];
        """
    )
    assert len(set(colors[0])) == len(SHAPES)
    assert colors[0] == colors[1] == colors[2]


def test_narrower_and_wider_again(page: Page, report: Path) -> None:
    page.open(report, 1280)
    size = {"width": 390, "height": 900, "deviceScaleFactor": 1, "mobile": True}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    page.wait("document.querySelector('.plot').dataset.width < 390")
    page.wait("document.documentElement.scrollWidth <= 390")
    size |= {"width": 1280, "mobile": False}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    page.wait("document.querySelector('.plot').dataset.width > 390")
    assert page.console() == []


def test_plots_follow_their_cards_whatever_changes_them(page: Page, report: Path) -> None:
    page.open(report, 400)
    page.js("document.body.style.width = '300px'")
    page.wait(
        "[...document.querySelectorAll('.plot')].every((p) => p.clientWidth < 300 &&"
        " p.querySelector('svg.main-svg').clientWidth === p.clientWidth)"
    )


def test_printing_opens_everything_and_puts_the_page_back(page: Page, report: Path) -> None:
    page.open(report, 1280, dark=True)
    page.js("dispatchEvent(new Event('beforeprint'))")
    assert page.js("return document.querySelectorAll('details:not([open])').length") == 0
    assert page.js("return document.documentElement.dataset.theme") == "light"
    widths = page.js("return [...document.querySelectorAll('.plot svg.main-svg')].map(s => s.clientWidth)")
    assert max(widths) <= 640
    page.js("dispatchEvent(new Event('afterprint'))")
    assert page.js("return document.querySelectorAll('details.run:not([open])').length") == len(SHAPES)
    assert page.js("return document.documentElement.dataset.theme ?? null") is None


def test_hostile_names_do_nothing(page: Page, tmp_path: Path) -> None:
    path = _comparison(tmp_path, (Shape(HOSTILE), Shape("x" * 300), SHAPES[4]), 500)
    for width in (1280, 390):
        page.open(path, width)
        assert page.js("return document.title") != "owned"
        assert page.js("return document.images.length") == 0
        assert page.js("return document.querySelectorAll('svg a, svg [onerror]').length") == 0
        assert page.js("return document.querySelector('.comparison tbody .label').textContent") == HOSTILE
        assert page.js("return document.documentElement.scrollWidth") <= width
        assert page.console() == []


def test_a_page_without_any_call_opens(page: Page, tmp_path: Path) -> None:
    write_run(tmp_path, [], make_info(SHAPES[0], []))
    page.open(tmp_path / "report.html", 390)
    assert page.console() == []
    assert page.js("return document.documentElement.scrollWidth") <= 390
