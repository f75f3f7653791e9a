"""Pieces that pages share: the legend that switches lines on and off, cards with a plot, tables that scroll."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.results.figure import PALETTE_SIZE
from harness.results.markup import Markup, tag


def swatch(index: int, baseline: bool = False) -> Markup:
    """A short line in the run's colour, as the plots draw it."""
    style = "dotted" if baseline else "solid" if index < PALETTE_SIZE else "dashed"
    return tag(
        "span",
        class_="swatch",
        style=f"border-top: 3px {style} var(--run{index % PALETTE_SIZE})",
        aria_hidden="true",
    )


def legend(labels: Sequence[str], about: str, baselines: Sequence[bool] = ()) -> Markup:
    """A button per line of the plots, in their order; `about` says aloud what they are."""
    chips = [
        tag(
            "button",
            swatch(i, i < len(baselines) and baselines[i]),
            label,
            type="button",
            class_="chip",
            data_run=i,
            aria_pressed="true",
        )
        for i, label in enumerate(labels)
    ]
    return tag("div", chips, class_="legend", role="group", aria_label=about)


def plot_card(key: str, figure: dict[str, Any], title: str = "", caption: str = "") -> Markup:
    """A plot with what it shows and how to read it; report.js draws the figure of this key into it."""
    words = tag("figcaption", tag("h3", title), tag("p", caption) if caption else None) if title else None
    plot = tag("div", id=f"plot-{key}", class_="plot", style=f"height: {figure['height']}px")
    return tag("figure", words, plot, class_="card")


def scrolled(table: Markup, label: str = "Table") -> Markup:
    """A table in a frame that scrolls where the window is too narrow."""
    return tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=label)


def comparison_table(head: Sequence[Markup], rows: Sequence[Markup], label: str = "Table") -> Markup:
    """Cells of the head and rows of the body as a table that scrolls, its first column in view; long heads wrap."""
    table = tag("table", tag("thead", tag("tr", list(head))), tag("tbody", list(rows)), class_="comparison wide")
    return scrolled(table, label)
