"""A study's page of many columns in a real browser: nothing is cut, at desk and phone width."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.studies.finding import Finding
from harness.studies.finding_run import FindingResult
from harness.studies.finding_text import render_page
from tests.browser.page import Page

COLUMNS = 13
ARMS = ("load", "precise affinity + tokens v0.10.0")


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many columns, and as long a name, as the longest study that ships."""
    finding = Finding.model_validate(
        {
            "name": "retention-or-recompute-of-one-s-own",
            "title": "Many columns",
            "question": "Are they seen?",
            "source": "nobody",
            "experiment": {},
            "scales": {"medium": {"sessions": 1}},
            "arms": [{"name": name} for name in ARMS],
            "shown": {f"units per million input tokens {n}": f"x.v{n}" for n in range(COLUMNS)},
            "checks": [],
        }
    )
    run: dict[str, Any] = {"x": {f"v{n}": 12345.6 * n for n in range(COLUMNS)}, "seed": 1}
    run["validity"] = {"reasons": [], "notes": []}
    runs = {ARMS[0]: [run, {**run, "seed": 2}], ARMS[1]: [run]}
    pages = {arm: [f"{arm}/report.html"] * len(some) for arm, some in runs.items()}
    result = FindingResult(finding, "medium", dict.fromkeys(ARMS, run), runs, pages=pages)
    path = tmp_path_factory.mktemp("study") / "study.html"
    path.write_text(render_page(result, "harness study own"), encoding="utf-8")
    return path


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_many_columns_are_reached_inside_their_box(page: Page, study: Path, width: int, dark: bool) -> None:
    page.open(study, width, dark=dark)
    assert page.console() == []
    assert page.js("return document.documentElement.scrollWidth") <= width
    page.js("document.querySelector('.scroll').scrollLeft = 1e6")
    seen = page.js(
        """
        const box = document.querySelector('.scroll').getBoundingClientRect(), row = document.querySelector('tbody tr');
        const at = (cell) => cell.getBoundingClientRect(), name = at(row.cells[0]), last = at([...row.cells].at(-1));
        return [name.left - box.left, box.right - last.right, last.left - name.right];
        """
    )
    assert seen[0] >= 0 and seen[1] >= 0, "the arm's name stays in view, the last column is reached"
    assert seen[2] >= -1, "the name does not cover it"


def test_long_heads_wrap_so_that_twelve_columns_fit_a_desk(page: Page, study: Path) -> None:
    page.open(study, 1400)
    assert page.js("const s = document.querySelector('.scroll'); return s.scrollWidth - s.clientWidth") <= 0


def test_a_long_name_leaves_the_theme_button_whole(page: Page, study: Path) -> None:
    page.open(study, 400)
    button = page.js(
        """
        const b = document.getElementById('theme'), r = b.getBoundingClientRect(), text = document.createRange();
        text.selectNodeContents(b);
        return { lines: text.getClientRects().length, right: r.right };
        """
    )
    assert button["lines"] == 1 and button["right"] <= 400
