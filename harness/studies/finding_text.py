"""A finding's result as data, as Markdown and as a page: published, ours, ratio, and why they differ."""

from __future__ import annotations

from typing import Any

from harness.results.compare import number
from harness.results.figure import facets_of_values
from harness.results.markup import Markup, tag
from harness.results.page_parts import comparison_table, plot_card
from harness.results.page_shell import page, page_header
from harness.studies.finding import Check, Figure, Scale, Summary, broken, judged, number_at, ours
from harness.studies.finding_run import FindingResult


def as_data(result: FindingResult, command: str) -> dict[str, Any]:
    """Small JSON: what was run, with which digests and versions, and every figure."""
    finding = result.finding
    return {
        "study": finding.name,
        "scale": result.scale,
        "command": command,
        "source": finding.source,
        "figures": [
            {
                "name": figure.name,
                "unit": figure.unit,
                "published": figure.published,
                "ours": ours(figure, result.arms),
                "because": figure.because,
            }
            for figure in finding.figures
        ],
        "arms": {
            arm: {title: number_at(summary, path) for title, path in finding.shown.items()}
            for arm, summary in result.arms.items()
        },
        "directions": [{"says": check.says, "holds": holds(check, result.arms)} for check in finding.checks],
        "runs": [
            {
                "arm": arm,
                "seed": run["seed"],
                "digest": run["digest"],
                "valid": run["validity"]["valid"],
                "reasons": run["validity"]["reasons"],
                "router": {k: run["router"][k] for k in ("release", "sha256", "config")},
                "cache": run["cache"],
                "calls": run["load"]["calls"],
                "sessions": run["load"]["sessions"],
                "virtual_s": run["virtual_s"],
                "wall_s": run["wall_s"],
                "cpu_s": run["cpu_s"],
                "peak_rss_bytes": run["peak_rss_bytes"],
            }
            for arm, runs in result.runs.items()
            for run in runs
        ],
    }


def markdown(result: FindingResult, command: str) -> str:
    """The study's table for a terminal and for docs/studies."""
    finding = result.finding
    lines = [f"## {finding.title}", "", finding.question, "", f"Published: {finding.source}", ""]
    if finding.figures:
        lines += ["| figure | published | ours | ratio | why |", "| --- | ---: | ---: | ---: | --- |"]
        for figure in finding.figures:
            cells = figure_cells(figure, ours(figure, result.arms), result.scale)
            lines.append(f"| {figure.name} | {' | '.join(cells)} | {figure.because} |")
        lines.append("")
    titles = list(finding.shown)
    lines += [f"| arm | {' | '.join(titles)} |", "| --- |" + " ---: |" * len(titles)]
    for arm, summary in result.arms.items():
        lines.append(f"| {arm} | {' | '.join(arm_cells(summary, list(finding.shown.values())))} |")
    lines += [""]
    for check in finding.checks:
        wrong = broken(check, result.arms)
        word = {True: "yes", False: f"NO ({wrong})", None: "its arms do not run at this scale"}
        lines.append(f"- {check.says}: {word[holds(check, result.arms)]}")
    lines += [f"- {note}" for note in (*finding.notes, *run_notes(result))]
    lines += ["", f"`{command}`, scale {result.scale}", ""]
    return "\n".join(lines)


def holds(check: Check, summaries: dict[str, Summary]) -> bool | None:
    """Whether a direction came out; None where it cannot be told at this scale."""
    return broken(check, summaries) is None if judged(check, summaries) else None


def figure_cells(figure: Figure, value: float | None, scale: Scale) -> list[str]:
    """Published, ours and their ratio; at small scale there is none, since the load is another."""
    unit = f" {figure.unit}" if figure.unit else ""
    published, ratio = "-", "-"
    if isinstance(figure.published, tuple):
        published = f"{figure.published[0]:g} to {figure.published[1]:g}{unit}"
    elif figure.published is not None:
        large = abs(figure.published) >= 1000
        published = f"{number(figure.published) if large else format(figure.published, 'g')}{unit}"
        if value is not None and figure.published and scale != "small":
            ratio = f"{value / figure.published:.2f}"
    return [published, "-" if value is None else f"{number(value)}{unit}", ratio]


def arm_cells(summary: dict[str, Any], paths: list[str]) -> list[str]:
    """An arm's numbers as text."""
    values = [number_at(summary, path) for path in paths]
    return ["-" if value is None else number(value) for value in values]


def run_notes(result: FindingResult) -> list[str]:
    """What the runs say of themselves, each once."""
    notes: dict[str, None] = {}
    if result.scale == "medium":
        sessions = f"{result.finding.scales['medium'].sessions} of {result.finding.trace.sessions} sessions"
        notes[f"{sessions}, arriving at the published rate: the cluster is busy for fewer hours than at full scale"] = (
            None
        )
    if result.scale == "small" and result.finding.figures:
        notes["a few sessions only: directions hold, figures do not compare with the published ones (--scale full)"] = (
            None
        )
    wanted = [*result.finding.shown.values(), *(figure.path for figure in result.finding.figures)]
    for path in wanted:
        if all(number_at(summary, path) is None for summary in result.arms.values()):
            notes[f"no arm has a number at {path}"] = None
    for arm, runs in result.runs.items():
        for run in runs:
            for reason in run["validity"]["reasons"]:
                notes[f"{arm} is not valid: {reason}"] = None
            for note in run["validity"]["notes"]:
                notes[note] = None
    return list(notes)


def render_page(result: FindingResult, command: str) -> str:
    """The whole page as HTML."""
    finding = result.finding
    arms = list(result.arms)
    figures: dict[str, Any] = {}
    cards = []
    for n, (title, path) in enumerate(finding.shown.items()):
        values = [number_at(result.arms[arm], path) for arm in arms]
        figure = facets_of_values(
            arms, [(title, values, max((v or 0.0 for v in values), default=1.0) * 1.3 or 1.0, "")]
        )
        if figure is None:
            continue
        key = f"shown{n}"
        figures[key] = figure
        cards.append(plot_card(key, figure))
    answers = []
    for check in finding.checks:
        wrong = broken(check, result.arms)
        if judged(check, result.arms):
            answers.append(check.says if wrong is None else f"NOT SO: {wrong}")
    body = [
        page_header(
            f"study {finding.name}, scale {result.scale}",
            finding.title,
            answers,
            tag("p", finding.question, class_="context"),
            tag("p", f"Published: {finding.source}", class_="context"),
        ),
        tag(
            "main",
            _figures(result),
            tag("section", tag("div", cards, class_="grid")),
            _arms(result),
            tag(
                "section",
                tag("h2", "What was run"),
                tag("p", tag("code", command)),
                tag("ul", [tag("li", note) for note in (*finding.notes, *run_notes(result))]),
            ),
        ),
    ]
    return page(finding.title, body, figures)


def _figures(result: FindingResult) -> Markup | None:
    rows = [
        tag(
            "tr",
            tag("th", figure.name, scope="row"),
            [tag("td", cell) for cell in figure_cells(figure, ours(figure, result.arms), result.scale)],
            tag("td", figure.because, style="text-align: left; white-space: normal; min-width: 24em"),
        )
        for figure in result.finding.figures
    ]
    if not rows:
        return None
    head = ["figure", "published", "ours", "ratio", "why they differ"]
    return _section("Published and ours", head, rows)


def _arms(result: FindingResult) -> Markup:
    shown = result.finding.shown
    rows = [
        tag("tr", tag("th", arm, scope="row"), [tag("td", cell) for cell in arm_cells(summary, list(shown.values()))])
        for arm, summary in result.arms.items()
    ]
    return _section("All arms", ["arm", *shown], rows)


def _section(title: str, head: list[str], rows: list[Markup]) -> Markup:
    table = comparison_table([tag("th", text, scope="col") for text in head], rows)
    return tag("section", tag("h2", title), table)
