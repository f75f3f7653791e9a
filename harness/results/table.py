"""The comparison as text: coloured on a terminal, plain fixed width elsewhere, Markdown on request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from rich.console import Console
from rich.text import Text

from harness.results.compare import Comparison, compare, groups, setting


def _legend(comparison: Comparison) -> list[str]:
    """What the table's marks and columns mean, of those that it has."""
    shown = {column.key for column in comparison.columns}
    parts = (
        (any(row.best for row in comparison.rows), "* best of the valid runs."),
        (True, "Times and rates: completed calls of the measured window."),
        ("timed_out" in shown, "Late: past the client's time-out."),
        ("balance" in shown, "Busy: GPU-busy time of the busiest node over the mean."),
        ("gap" in shown, "Truth gap: |believed - held| prefix share."),
    )
    return wrap(" ".join(text for said, text in parts if said), 100, subsequent_indent="  ")


@dataclass(slots=True)
class _Layout:
    """Padded cells; joined by GAP they are the lines of the table."""

    groups: str
    titles: str
    rule: str
    rows: list[list[str]]


_GAP = "  "
_LABEL_WIDTH = 44


def shorten(label: str, width: int = _LABEL_WIDTH) -> str:
    """A label in one line of at most `width` characters; its end is kept, since that is where the marks
    stand.
    """
    line = " ".join(label.split())
    keep = (width - 3) // 2
    return line if len(line) <= width else f"{line[: width - 3 - keep]}...{line[-keep:]}"


def _layout(comparison: Comparison) -> _Layout:
    columns = comparison.columns
    body = [
        [shorten(row.marked_label), *(row.cell(c) + ("*" if c.key in row.best else " ") for c in columns)]
        for row in comparison.rows
    ]
    titles = [comparison.heading, *(c.title + " " for c in columns)]
    widths = [max(len(line[i]) for line in [titles, *body]) for i in range(len(titles))]
    above, at = " " * widths[0], 1
    for heading, span in groups(columns):
        inner = sum(widths[at : at + span]) + len(_GAP) * (span - 1)
        widths[at] += max(0, len(heading) + 1 - inner)
        above += _GAP + (heading + " ").rjust(max(inner, len(heading) + 1))
        at += span

    def padded(cells: Sequence[str]) -> list[str]:
        rest = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
        return [cells[0].ljust(widths[0]), *rest]

    rule = "-" * (sum(widths) + len(_GAP) * (len(widths) - 1))
    return _Layout(above, _GAP.join(padded(titles)), rule, [padded(line) for line in body])


def plain_table(comparison: Comparison) -> str:
    """Fixed width; best values end with an asterisk."""
    layout = _layout(comparison)
    body = [_GAP.join(cells) for cells in layout.rows]
    lines = [layout.groups, layout.titles, layout.rule, *body, layout.rule, *_legend(comparison)]
    lines += [*_settings(comparison), *_warnings(comparison)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def terminal_table(comparison: Comparison) -> Text:
    """The same for a terminal: best values in green, invalid runs dim, the rest of the furniture quiet."""
    layout = _layout(comparison)
    text = Text(no_wrap=True, overflow="ignore")
    text.append(f"{layout.groups}\n{layout.titles}\n", style="bold")
    text.append(f"{layout.rule}\n", style="dim")
    for row, cells in zip(comparison.rows, layout.rows, strict=True):
        text.append(cells[0], style="" if row.valid else "red")
        for column, cell in zip(comparison.columns, cells[1:], strict=True):
            style = "dim" if not row.valid else "bold green" if column.key in row.best else ""
            text.append(_GAP).append(cell, style=style)
        text.append("\n")
    text.append("\n".join([layout.rule, *_legend(comparison), *_settings(comparison)]), style="dim")
    for warning in _warnings(comparison):
        text.append(f"\n{warning}", style="red")
    return text


def markdown_table(comparison: Comparison) -> str:
    """For an issue or a document; best values in bold."""

    def escape(text: str) -> str:
        return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")

    units = (f"{c.group} {c.title}" + (f" ({c.unit})" if c.unit else "") for c in comparison.columns)
    headings = [comparison.heading, *units]
    lines = ["| " + " | ".join(headings) + " |", "|---|" + "---:|" * len(comparison.columns)]
    for row in comparison.rows:
        cells = [f"**{row.cell(c)}**" if c.key in row.best else row.cell(c) for c in comparison.columns]
        lines.append("| " + " | ".join([escape(row.marked_label), *cells]) + " |")
    settings = [f"- {escape(line)}" for line in _settings(comparison)]
    return "\n".join([*lines, "", *settings, *_warnings(comparison)]).rstrip() + "\n"


def _settings(comparison: Comparison) -> list[str]:
    """In what the runs differ, one line each."""
    if not comparison.varied:
        return []
    return [
        f"{row.label}: {', '.join(f'{name}={setting(value)}' for name, value in row.settings.items())}"
        for row in comparison.rows
    ]


def _warnings(comparison: Comparison) -> list[str]:
    lines = []
    if comparison.load_differs:
        lines.append("The runs did not get the same load: their numbers cannot be compared.")
    lines.extend(f"Note: {note}" for note in comparison.shared_notes)
    broken = [row.label for row in comparison.rows if not row.valid]
    if broken:
        lines.append(f"INVALID, not to be used: {', '.join(broken)} (reasons in summary.json and the report).")
    return lines


def print_table(summaries: Sequence[dict[str, Any]], console: Console | None = None) -> None:
    """The comparison on standard output, in the form that fits what stands there."""
    comparison = compare(summaries)
    console = console or Console()
    if console.is_terminal and len(_layout(comparison).rule) <= console.width:
        console.print(terminal_table(comparison), soft_wrap=True)
    else:
        console.file.write(plain_table(comparison))
