"""A study that is one table: Markdown for a document, and a self-contained page."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from harness.results.figure import axis_of, rounded, run_color
from harness.results.markup import tag
from harness.results.page_parts import legend, plot_card, scrolled
from harness.results.page_shell import page, page_header

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a plot; `dash` as plotly names it ("solid", "dot")."""

    name: str
    points: list[Point]
    color: int
    dash: str = "solid"


@dataclass(frozen=True, slots=True)
class Plot:
    """One plot; `log` says which axes are logarithmic ("x", "y", "xy", "")."""

    title: str
    caption: str
    x: str
    y: str
    lines: list[Line]
    log: str = ""


@dataclass(slots=True)
class TableStudy:
    """What a study says: first in sentences what a reader must know, then the table, then where it comes from."""

    name: str
    title: str
    answers: list[str]
    headings: list[str]
    rows: list[list[str]]
    plots: list[Plot] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    legend: list[str] = field(default_factory=list)
    """What the lines of each colour are, in order of the colours."""
    legend_note: str = ""
    command: str = ""
    marked: set[tuple[int, int]] = field(default_factory=set)
    """Cells (row, column) that are off by more than the study's aim."""


def markdown(study: TableStudy) -> str:
    """The study as Markdown; marked cells in bold."""
    lines = [f"# {study.title}", "", *(f"- {answer}" for answer in study.answers), ""]
    lines += ["| " + " | ".join(study.headings) + " |", "| :--- |" + " ---: |" * (len(study.headings) - 1)]
    for number, row in enumerate(study.rows):
        cells = [f"**{cell}**" if (number, column) in study.marked else cell for column, cell in enumerate(row)]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", *(f"- {note}" for note in study.notes)]
    if study.command:
        lines += ["", f"Command: `{study.command}`"]
    return "\n".join(lines) + "\n"


def render(study: TableStudy) -> str:
    """The study as one HTML page."""
    figures = {str(number): _figure(plot) for number, plot in enumerate(study.plots)}
    head = tag(
        "tr", [tag("th", text, scope="col", class_=None if i else "name") for i, text in enumerate(study.headings)]
    )
    body = [
        tag(
            "tr",
            tag("th", row[0], scope="row", class_="name"),
            [
                tag("td", cell, class_="best" if (number, column) in study.marked else None)
                for column, cell in enumerate(row[1:], start=1)
            ],
        )
        for number, row in enumerate(study.rows)
    ]
    table = tag("table", tag("thead", head), tag("tbody", body), class_="settings")
    cards = [
        plot_card(str(number), figures[str(number)], plot.title, plot.caption)
        for number, plot in enumerate(study.plots)
    ]
    content: list[Any] = [
        page_header(f"study {study.name}", study.title, study.answers),
        tag(
            "main",
            tag("section", scrolled(table)),
            tag(
                "section",
                legend(study.legend, "Lines shown in the plots"),
                tag("p", study.legend_note, class_="note") if study.legend_note else None,
                tag("div", cards, class_="grid"),
            )
            if cards
            else None,
            tag(
                "section",
                tag("h2", "Where it comes from"),
                tag("ul", [tag("li", note) for note in study.notes]),
                tag("p", tag("code", study.command)) if study.command else None,
            ),
        ),
    ]
    return page(study.title, content, figures)


def _figure(plot: Plot) -> dict[str, Any]:
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": line.name,
            "meta": {"run": line.color},
            "x": rounded([x for x, _ in line.points]),
            "y": rounded([y for _, y in line.points]),
            "line": {"color": run_color(line.color), "width": 2, "dash": line.dash},
            "marker": {"size": 6, "color": run_color(line.color)},
            "hovertemplate": f"{line.name}: %{{y:.4g}} at %{{x:.4g}}<extra></extra>",
        }
        for line in plot.lines
    ]
    axes = {
        f"{axis}axis": axis_of(title, **({"type": "log"} if axis in plot.log else {"rangemode": "tozero"}))
        for axis, title in (("x", plot.x), ("y", plot.y))
    }
    return {"data": data, "layout": axes, "height": 340}
