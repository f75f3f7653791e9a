"""report.html: one self-contained page on one or several runs. No network, works from file://, light, dark
and on paper.

Scripts are named by their hashes in the page's content security policy, so nothing that a trace or a config
carries can run, even if it slipped through the escaping.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.results.compare import Comparison, compare, groups, setting
from harness.results.conditions import conditions, costs, glossary, repeat, validity
from harness.results.figure import Plot
from harness.results.headline import headline
from harness.results.markup import Markup, tag
from harness.results.page_parts import legend, scrolled, swatch
from harness.results.page_shell import page, page_header
from harness.results.plots import PLOTS, figures
from harness.results.split_page import split_section
from harness.results.store import Run
from harness.results.tier_plots import TIER_PLOTS, shows_tiers
from harness.results.tier_table import links_table, tiers_table


def _context(runs: Sequence[Run]) -> Markup:
    """What was run, in one line under the headline."""
    info = runs[0].info
    load = info.load
    starts = {run.summary["measured"]["start_s"] for run in runs}
    ends = {run.summary["measured"]["end_s"] for run in runs}
    since = f"{min(starts):,.0f} s" if len(starts) == 1 else "each run's own start"
    until = f"{max(ends):,.0f} s" if len(ends) == 1 else "the end of each run"
    parts = [
        f"{load.sessions:,} sessions, {load.calls:,} calls, {_big(load.input_tokens)} input tokens",
        f"{len(info.endpoint_nodes):,} endpoints on {info.nodes:,} nodes",
        f"measured from {since} to {until}, virtual time",
    ]
    if len(runs) > 1:
        parts.append(f"{len(runs)} {'arms' if any(run.info.settings for run in runs) else 'router configs'}")
    return tag("p", " \u00b7 ".join(parts), class_="context")


def _big(value: int) -> str:
    for name, size in (("billion", 1e9), ("million", 1e6)):
        if value >= size:
            return f"{value / size:.3g} {name}"
    return f"{value:,}"


def _table(comparison: Comparison) -> Markup:
    columns = comparison.columns
    first = tag("th", comparison.heading, rowspan=2, scope="col", class_="name")
    spans = [tag("th", text, colspan=n, scope="colgroup") for text, n in groups(columns)]
    starts, at = set(), 0
    for _, span in groups(columns):
        starts.add(at)
        at += span
    titles = [tag("th", c.title, scope="col", class_="start" if i in starts else None) for i, c in enumerate(columns)]
    body = []
    for i, row in enumerate(comparison.rows):
        marks = [
            tag("span", "ours", class_="mark", title="a baseline of the harness, no real router")
            if row.baseline
            else None
        ]
        marks.append(None if row.valid else tag("span", "invalid", class_="mark bad"))
        cells = [
            tag(
                "th",
                swatch(i, row.baseline),
                tag("span", row.label, class_="label"),
                marks,
                scope="row",
                class_="name",
            )
        ]
        for n, column in enumerate(columns):
            classes = [*(["start"] if n in starts else []), *(["best"] if column.key in row.best else [])]
            cells.append(tag("td", row.cell(column), class_=" ".join(classes) or None))
        body.append(tag("tr", cells, class_=None if row.valid else "invalid"))
    table = tag(
        "table",
        tag("thead", tag("tr", first, spans), tag("tr", titles)),
        tag("tbody", body),
        class_="comparison",
    )
    note = "Times and rates are over calls that completed in the measured window; failed calls have no latency. "
    bold = "Bold: best of the valid runs. " if any(row.best for row in comparison.rows) else ""
    return tag(
        "section",
        scrolled(table, "Comparison table"),
        tag("p", bold + note, class_="note"),
        id="comparison",
    )


def _differences(runs: Sequence[Run], comparison: Comparison) -> Markup | None:
    """In what the runs differ: a row per field of the experiment, a column per run."""
    if not comparison.varied:
        return None
    labels = [
        tag("th", swatch(i, row.baseline), tag("span", row.label, class_="label"), scope="col", class_="text")
        for i, row in enumerate(comparison.rows)
    ]
    body = [
        tag(
            "tr",
            tag("th", tag("code", name), scope="row", class_="name"),
            [
                tag("td", tag("code", setting(row.settings[name])) if name in row.settings else "\u2013", class_="text")
                for row in comparison.rows
            ],
        )
        for name in comparison.varied
    ]
    head = tag("tr", tag("th", "Field", scope="col", class_="name"), labels)
    table = tag("table", tag("thead", head), tag("tbody", body), class_="settings")
    return tag(
        "section",
        tag("h2", "In what the arms differ"),
        scrolled(table, "Settings of the arms"),
        tag("p", "All else is equal, the load included. A dash: the arm has no such field.", class_="note"),
        id="arms",
    )


def _cards(plots: Sequence[Plot], made: dict[str, Any]) -> Markup:
    """The plots that there is data for, in the order given; two side by side."""
    shown = [plot for plot in plots if plot.key in made]
    cards, open_row = [], False
    for n, plot in enumerate(shown):
        last = n + 1 == len(shown) or shown[n + 1].wide
        wide = plot.wide or (last and not open_row)
        open_row = not wide and not open_row
        cards.append(
            tag(
                "figure",
                tag("figcaption", tag("h3", plot.title), tag("p", plot.caption)),
                tag("div", id=f"plot-{plot.key}", class_="plot", style=f"height: {made[plot.key]['height']}px"),
                class_="card wide" if wide else "card",
            )
        )
    return tag("div", cards, class_="grid")


def _tiers(runs: Sequence[Run], made: dict[str, Any], swatches: Sequence[Markup]) -> list[Markup | None]:
    """The part on cache tiers; nothing where no run has any."""
    if not shows_tiers(runs):
        return []
    heading = tag("h2", "Cache tiers below the GPU", id="tiers", class_="part")
    return [heading, tiers_table(runs, swatches), _cards(TIER_PLOTS, made), links_table(runs, swatches)]


def _plots(runs: Sequence[Run], made: dict[str, Any], swatches: Sequence[Markup]) -> Markup:
    shown = legend([r.info.title for r in runs], "Runs shown in the plots", [r.info.is_baseline for r in runs])
    absent = [plot.title for plot in PLOTS if plot.key not in made]
    note = tag("p", f"Not shown, for want of data: {'; '.join(absent)}.", class_="note") if absent else None
    parts = [_cards(PLOTS, made), note, *_tiers(runs, made, swatches)]
    return tag("section", shown if len(runs) > 1 else None, parts, id="plots")


def render_html(runs: Sequence[Run], missing: Sequence[str] = ()) -> str:
    """The whole page. `missing`: arms that did not come to run, so that the page is partial."""
    comparison = compare([run.summary for run in runs])
    head = headline(comparison, [run.summary for run in runs])
    if missing:
        head.sentences.insert(0, f"Partial: the comparison ended before {', '.join(missing)} could run.")
    made = figures(runs)
    if shows_tiers(runs):
        made |= figures(runs, TIER_PLOTS)
    swatches = [swatch(i, run.info.is_baseline) for i, run in enumerate(runs)]
    name = runs[0].info.name or "experiment"
    body = [
        page_header(name, head.title, head.sentences, _context(runs)),
        tag(
            "main",
            validity(runs, comparison, bad=True),
            _table(comparison),
            _differences(runs, comparison),
            split_section(runs),
            validity(runs, comparison, bad=False),
            _plots(runs, made, swatches),
            conditions(runs, swatches),
            costs(runs, swatches),
            repeat(runs, swatches),
            glossary(shows_tiers(runs), any(column.key == "gap" for column in comparison.columns)),
        ),
    ]
    return page(f"{name}: {head.title}", body, made)
