"""The study's page: plots of published against ours, the tables, what was run. One self-contained file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.results.figure import axis_of, log_seconds, rounded, run_color
from harness.results.markup import Markup, tag
from harness.results.page_parts import comparison_table, legend, plot_card
from harness.results.page_shell import page, page_header
from harness.studies.ladder import Ladder
from harness.studies.llmd import ArmResult
from harness.studies.sidebyside import TITLES, ArmTable, cell, error_text, not_compared, rate_text

_CAPTIONS = {
    "output_tok_s": "Output tokens per second of the whole fleet, per stage.",
    "ttft_mean_s": "Mean time to first token. Logarithmic.",
    "ttft_p90_s": "90th percentile of time to first token. Logarithmic.",
    "itl_mean_s": "Mean time between tokens, milliseconds.",
    "total_tok_s": "Prompt and output tokens per second of the whole fleet, per stage.",
    "e2e_mean_s": "Mean time from send to last token.",
    "e2e_p90_s": "90th percentile of the time from send to last token.",
}


def render_page(ladder: Ladder, tables: Sequence[ArmTable], results: Sequence[ArmResult], command: str) -> str:
    """The whole page as HTML."""
    figures = {metric: _figure(metric, tables) for metric in ladder.metrics}
    plots = [plot_card(metric, figure, TITLES[metric], _CAPTIONS[metric]) for metric, figure in figures.items()]
    body = [
        page_header(
            f"study {ladder.name}",
            ladder.title,
            _answers(tables, results),
            tag("p", f"Published: {ladder.source}", class_="context"),
        ),
        tag(
            "main",
            tag(
                "section",
                legend([table.name for table in tables], "Arms shown in the plots"),
                tag("p", not_compared(ladder, tables) or "Solid with points: ours. Dotted: published.", class_="note"),
                tag("div", plots, class_="grid"),
            ),
            [_table(table, ladder.metrics) for table in tables],
            _errors(tables, ladder.metrics),
            _conditions(ladder, results, command),
        ),
    ]
    return page(ladder.title, body, figures)


def _figure(metric: str, tables: Sequence[ArmTable]) -> dict[str, Any]:
    factor = 1e3 if metric == "itl_mean_s" else 1.0
    data: list[dict[str, Any]] = []
    seen: list[float] = []
    for i, table in enumerate(tables):
        theirs = [(rate, values[metric]) for rate, values in sorted(table.published.items()) if metric in values]
        ours = [(row["rate"], row[metric]) for row in table.rows]
        seen += [value for _, value in (*theirs, *ours)]
        lines = ((theirs, "published", "dot", "lines"), (ours, "ours", "solid", "lines+markers"))
        for points, who, dash, mode in lines:
            if points:
                data.append(
                    {
                        "type": "scatter",
                        "mode": mode,
                        "name": f"{table.name}, {who}",
                        "meta": {"run": i},
                        "x": [rate for rate, _ in points],
                        "y": rounded([value * factor for _, value in points]),
                        "line": {"color": run_color(i), "width": 2, "dash": dash},
                        "marker": {"size": 6, "color": run_color(i)},
                        "hovertemplate": f"{table.name}, {who}: %{{y:.4g}} at %{{x:g}} req/s<extra></extra>",
                    }
                )
    title = TITLES[metric]
    if metric.startswith("ttft"):
        y = log_seconds("s", min(seen, default=0.1) / 1.3, max(seen, default=1.0) * 1.3)
    else:
        y = axis_of("ms" if metric == "itl_mean_s" else title, rangemode="tozero")
    return {"data": data, "layout": {"xaxis": axis_of("requests per second offered"), "yaxis": y}, "height": 320}


def _answers(tables: Sequence[ArmTable], results: Sequence[ArmResult]) -> list[str]:
    lines = []
    for table in tables:
        text = f"{table.name}: saturation {rate_text(table.saturates_at)}"
        if table.published:
            text += f" (published: {rate_text(table.published_saturates_at)})"
        if {"output_tok_s", "ttft_p90_s"} <= table.errors.keys():
            output, p90 = table.errors["output_tok_s"], table.errors["ttft_p90_s"]
            text += f"; mean absolute error of output {output.mean_absolute:.1%}, of TTFT p90 {p90.mean_absolute:.1%}"
        lines.append(text)
    lines += [f"{result.name} is not valid: {reason}" for result in results for reason in result.invalid]
    return lines


def _table(table: ArmTable, metrics: Sequence[str]) -> Markup:
    head = [tag("th", "rate req/s", scope="col")] + [tag("th", TITLES[m], scope="col") for m in metrics]
    body = []
    for row in table.rows:
        theirs = table.published.get(row["rate"], {})
        cells = [tag("td", cell(m, row[m], theirs.get(m))) for m in metrics]
        body.append(tag("tr", tag("th", f"{row['rate']:g}", scope="row"), cells))
    what = "published / ours / ratio" if table.published else "ours"
    return tag(
        "section",
        tag("h2", table.name),
        tag("p", f"{what}; mean over seeds", class_="note"),
        comparison_table(head, body),
    )


def _errors(tables: Sequence[ArmTable], metrics: Sequence[str]) -> Markup:
    head = [tag("th", "arm", scope="col")] + [tag("th", TITLES[m], scope="col") for m in metrics]
    body = [
        tag("tr", tag("th", t.name, scope="row"), [tag("td", error_text(t, m)) for m in metrics])
        for t in tables
        if t.errors
    ]
    if not body:
        return Markup("")
    note = "Mean absolute error over stages (bias), then without the two stages around the published saturation rate."
    return tag(
        "section",
        tag("h2", "Errors"),
        tag("p", note, class_="note"),
        comparison_table(head, body),
    )


def _conditions(ladder: Ladder, results: Sequence[ArmResult], command: str) -> Markup:
    lines = [tag("li", note) for note in ladder.notes]
    lines += [tag("li", f"{name}: {arm.note}") for name, arm in ladder.arms.items() if arm.note]
    for result in results:
        router = result.router
        who = f"{router.get('kind')} {router.get('release') or ''} {router.get('config') or ''}".strip()
        more = f"sha256 {router['sha256']}, " if router.get("sha256") else ""
        lines.append(tag("li", f"{result.name}: {who}, {more}seeds {result.seeds}, {result.wall_s:.0f} s of wall time"))
    return tag("section", tag("h2", "What was run"), tag("p", tag("code", command)), tag("ul", lines))
