"""A page on a trace: plots beside the table of its statistics, in one file that needs no network.

Style, script and plotly are those of every page (harness/results/page_shell.py).
"""

from __future__ import annotations

from typing import Any

from harness.results.figure import Figure
from harness.results.markup import Markup, tag
from harness.results.page_parts import swatch
from harness.results.page_shell import page, page_header
from harness.trace.plots import TRACE_PLOTS
from harness.trace.shape import Shape
from harness.trace.table import flat_stats, percent, published, seconds, shown

_LEGEND = "display: flex; flex-wrap: wrap; gap: 0.2rem 1.4rem"
_ENTRY = "display: inline-flex; align-items: center"


def trace_figures(shape: Shape) -> dict[str, Figure]:
    """The figures that the trace has data for, by the key of their plot."""
    made = {plot.key: plot.make(shape) for plot in TRACE_PLOTS}
    return {key: figure for key, figure in made.items() if figure is not None}


def render_trace_page(name: str, found: dict[str, Any], shape: Shape) -> str:
    """The whole page. `name`: the trace's file name; `found`: its statistics."""
    made = trace_figures(shape)
    title = f"{_count(found['sessions'], 'session')}, {_count(found['calls'], 'call')}"
    body = [
        page_header(name, title, _answers(found)),
        tag("main", _plots(made), _published(found), _all(found), _conventions()),
    ]
    return page(f"{name}: {title}", body, made)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _answers(found: dict[str, Any]) -> list[str]:
    """What a reader should know about the trace, in a few sentences."""
    if not found["calls"]:
        return ["The trace has no calls."]
    inputs, gaps, flight, over = found["input_per_call"], found["gaps"], found["in_flight"], found["over_100k"]
    lines = [
        f"Half of the calls have more than {inputs['median']:,.0f} input tokens; {percent(over['call_share'])} have"
        f" more than 100,000 and hold {percent(over['input_share'])} of all input."
    ]
    if found["block_hit_infinite"] is not None:
        read = found["cumulative_to_unique"]["ratio_of_sums"]
        times = f"; each is in {read:.1f} prompts on average" if read is not None else ""
        lines.append(
            f"{percent(found['block_hit_infinite'])} of the prompt blocks were in an earlier call of their"
            f" session{times}."
        )
    if gaps["arrivals"]:
        lines.append(
            f"{percent(gaps['zero_share'])} of the arrivals find their session busy. The median idle gap is"
            f" {seconds(gaps['idle_median_s'])}; gaps of 30 min or more are"
            f" {percent(gaps['ge_1800s_arrival_share'])} of the arrivals and"
            f" {percent(gaps['ge_1800s_idle_share'])} of the idle time."
        )
    together = (
        f"{percent(flight['sessions_with_2_or_more'])} of the sessions have two calls or more in flight at some time,"
        f" at most {shown(flight['max'])}"
        if flight["max"] > 1
        else "No session has two calls in flight at any time"
    )
    half = percent(found["busiest_minutes"]["half_of_calls"]["median"])
    lines.append(f"{together}; half of the calls of a median session fall into {half} of its minutes.")
    if found["api_s"]["not_recorded"]:
        lines.append(
            f"{_count(found['api_s']['not_recorded'], 'call')} have no recorded duration: they end when they start, and"
            " nothing can be in flight beside them."
        )
    return lines


def _plots(made: dict[str, Figure]) -> Markup:
    cards = []
    drawn = [plot for plot in TRACE_PLOTS if plot.key in made]
    narrow = [plot for plot in drawn if not plot.wide]
    alone = narrow[-1:] if len(narrow) % 2 else []
    for plot in drawn:
        entries = [tag("span", swatch(i, False), line, style=_ENTRY) for i, line in enumerate(plot.lines)]
        legend = tag("div", entries, class_="about", style=_LEGEND) if entries else None
        cards.append(
            tag(
                "figure",
                tag("figcaption", tag("h3", plot.title), tag("p", plot.caption), legend),
                tag("div", id=f"plot-{plot.key}", class_="plot", style=f"height: {made[plot.key]['height']}px"),
                class_="card wide" if plot.wide or plot in alone else "card",
            )
        )
    absent = [plot.title for plot in TRACE_PLOTS if plot.key not in made]
    note = (
        tag("p", f"Not shown, since there is nothing to show: {'; '.join(absent)}.", class_="note") if absent else None
    )
    return tag("section", tag("div", cards, class_="grid"), note, id="plots")


def _published(found: dict[str, Any]) -> Markup:
    panels = [
        tag(
            "div",
            tag("h3", group),
            tag("dl", [(tag("dt", name), tag("dd", value)) for name, value in rows], class_="facts"),
            class_="panel",
        )
        for group, rows in published(found)
    ]
    return tag("section", tag("h2", "Statistics"), tag("div", panels, class_="panels"), id="statistics")


def _all(found: dict[str, Any]) -> Markup:
    rows = [
        tag("tr", tag("th", name, scope="row", class_="text"), tag("td", shown(value)))
        for name, value in flat_stats(found)
    ]
    table = tag("div", tag("table", tag("tbody", rows)), class_="scroll", tabindex="0", role="region")
    summary = tag(
        "summary", "Every statistic", tag("span", "named as in trace stats --json; times in seconds", class_="about")
    )
    return tag("section", tag("details", summary, table, class_="run"), id="all")


def _conventions() -> Markup:
    text = (
        "A call ends at its start plus its recorded duration. A gap is counted from the latest end of the session's"
        " earlier calls. Percentiles interpolate linearly. Hits are those of a cache inside the session, counted at the"
        " start of a call; what sessions share with one another (system prompt and tools) counts as new in each. Times"
        " are as recorded: a replay has its own."
    )
    return tag("section", tag("h2", "How it is counted"), tag("p", text, class_="note"), id="conventions")
