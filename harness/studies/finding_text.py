"""A finding's result as data, as Markdown and as a page: published, ours, ratio, and why they differ."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from harness.results.compare import number
from harness.results.figure import PALETTE_SIZE, axis_of, facets_of_values, run_color
from harness.results.markup import Markup, tag
from harness.results.page_parts import comparison_table, legend, plot_card
from harness.results.page_shell import page, page_header
from harness.studies.finding import Check, Figure, Rungs, Scale, Summary, broken, judged, label, number_at, ours
from harness.studies.finding_run import FindingResult


def as_data(result: FindingResult, command: str) -> dict[str, Any]:
    """Small JSON, as docs/studies keeps it: what was run, when, with which digests and versions, and every figure."""
    finding = result.finding
    ladder = finding.ladder
    return {
        "study": finding.name,
        "scale": result.scale,
        "date": datetime.now(UTC).date().isoformat(),
        "command": command,
        "versions": result.versions,
        "source": finding.source,
        "figures": [
            {
                "name": figure.name,
                "unit": figure.unit,
                "published": figure.published,
                "ours": _rounded(ours(figure, result.arms)),
                "because": why(figure, result.scale),
            }
            for figure in finding.figures
        ],
        "ladder": None if ladder is None else {"field": ladder.field, "values": result.rungs},
        "arms": {
            arm: {title: _rounded(number_at(summary, path)) for title, path in finding.shown.items()}
            for arm, summary in result.arms.items()
        },
        "directions": [
            {"says": check.says, "holds": holds(check, result.arms, result.rungs)} for check in finding.checks
        ],
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
            lines.append(f"| {figure.name} | {' | '.join(cells)} | {why(figure, result.scale)} |")
        lines.append("")
    titles = list(finding.shown)
    lines += [f"| arm | {' | '.join(titles)} |", "| --- |" + " ---: |" * len(titles)]
    for arm, summary in result.arms.items():
        lines.append(f"| {arm} | {' | '.join(arm_cells(summary, list(finding.shown.values())))} |")
    lines += [""]
    for check in finding.checks:
        wrong = broken(check, result.arms, result.rungs)
        word = {True: "yes", False: f"NO ({wrong})", None: "its arms are not among those that ran"}
        lines.append(f"- {check.says}: {word[holds(check, result.arms, result.rungs)]}")
    lines += [f"- {note}" for note in (*finding.notes, *run_notes(result))]
    lines += ["", f"`{command}`, scale {result.scale}", ""]
    return "\n".join(lines)


def holds(check: Check, summaries: dict[str, Summary], rungs: Rungs = (None,)) -> bool | None:
    """Whether a direction came out; None where it cannot be told at this scale."""
    return broken(check, summaries, rungs) is None if judged(check, summaries, rungs) else None


def why(figure: Figure, scale: Scale) -> str:
    """Why ours differs: said of the published size only, as other sizes have other figures."""
    return figure.because if scale == "full" else ""


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
        notes[f"{sessions}, arriving at the same rate: the cluster is busy for fewer hours than at full scale"] = None
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
    figures = _plots(result)
    cards = [plot_card(key, figure, *titles) for key, (figure, titles) in figures.items()]
    answers = []
    for check in finding.checks:
        wrong = broken(check, result.arms, result.rungs)
        if judged(check, result.arms, result.rungs):
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
            tag(
                "section",
                legend(result.arms_run, "Arms shown in the plots") if _climbs(result) else None,
                tag("div", cards, class_="grid"),
            ),
            _arms(result),
            tag(
                "section",
                tag("h2", "What was run"),
                tag("p", tag("code", command)),
                tag("ul", [tag("li", note) for note in (*finding.notes, *run_notes(result))]),
            ),
        ),
    ]
    return page(finding.title, body, {key: figure for key, (figure, _) in figures.items()})


def _plots(result: FindingResult) -> dict[str, tuple[dict[str, Any], list[str]]]:
    """Figure and words of each plot: bars of the arms, or lines over the ladder where it has more than one rung."""
    arms, ladder = list(result.arms), result.finding.ladder if _climbs(result) else None
    plots: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for n, (title, path) in enumerate(result.finding.shown.items()):
        if ladder is not None:
            plots[f"shown{n}"] = _lines(result, title, path, ladder.title), [title]
            continue
        values = [number_at(result.arms[arm], path) for arm in arms]
        top = max((v or 0.0 for v in values), default=1.0) * 1.3 or 1.0
        figure = facets_of_values(arms, [(title, values, top, "")])
        if figure is not None:
            plots[f"shown{n}"] = figure, []
    return plots


def _climbs(result: FindingResult) -> bool:
    """Whether there are several values of a ladder to draw a line over."""
    return result.finding.ladder is not None and len(result.rungs) > 1


def _lines(result: FindingResult, title: str, path: str, over: str) -> dict[str, Any]:
    data = []
    for i, arm in enumerate(result.arms_run):
        there = [(rung, result.arms[label(arm, rung)]) for rung in result.rungs if label(arm, rung) in result.arms]
        dash = "solid" if i < PALETTE_SIZE else "dash"
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": arm,
                "meta": {"run": i},
                "x": [rung for rung, _ in there],
                "y": [_rounded(number_at(summary, path)) for _, summary in there],
                "line": {"color": run_color(i), "width": 2, "dash": dash},
                "marker": {"size": 6, "color": run_color(i)},
                "hovertemplate": f"{arm}: %{{y:.4g}} at %{{x:g}}<extra></extra>",
            }
        )
    return {
        "data": data,
        "layout": {"xaxis": axis_of(over), "yaxis": axis_of(title, rangemode="tozero")},
        "height": 320,
    }


def _rounded(value: float | None) -> float | None:
    """To the digits that say something."""
    return None if value is None else float(f"{value:.6g}")


def _figures(result: FindingResult) -> Markup | None:
    rows = [
        tag(
            "tr",
            tag("th", figure.name, scope="row"),
            [tag("td", cell) for cell in figure_cells(figure, ours(figure, result.arms), result.scale)],
            tag("td", why(figure, result.scale), style="text-align: left; white-space: normal; min-width: 24em"),
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
        tag("tr", _arm(result, arm), [tag("td", cell) for cell in arm_cells(summary, list(shown.values()))])
        for arm, summary in result.arms.items()
    ]
    return _section("All arms", ["arm", *shown], rows)


def _arm(result: FindingResult, arm: str) -> Markup:
    """The arm's name, which leads to its run's page; of several runs each has its link."""
    runs, pages = result.runs[arm], result.pages.get(arm, [])
    if len(runs) == 1 and any(pages):
        return tag("th", _link(pages[0], arm), scope="row")
    links = [
        (_link(page, f"seed\N{NO-BREAK SPACE}{run['seed']}"), " ")
        for run, page in zip(runs, pages, strict=False)
        if page
    ]
    return tag("th", arm, tag("div", links, class_="about") if links else None, scope="row")


def _link(page: str, text: str) -> Markup:
    return tag("a", text, href=quote(page))


def _section(title: str, head: list[str], rows: list[Markup]) -> Markup:
    table = comparison_table([tag("th", text, scope="col") for text in head], rows)
    return tag("section", tag("h2", title), table)
