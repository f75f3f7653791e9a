"""Pages and tables of a sweep and of a capacity search: one self-contained file each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from harness.experiment import Load
from harness.results.compare import COLUMNS, VERDICT, Column, lookup, merged_notes, number
from harness.results.figure import axis_of, log_seconds, rounded, run_color, safe_text
from harness.results.markup import Markup, tag
from harness.results.page_parts import comparison_table, legend, plot_card
from harness.results.page_shell import page, page_header
from harness.sweep.capacity import Capacity, CapacitySource, Probe
from harness.sweep.points import Axis, Point

PLOTTED: Final = ("ttft_p90", "e2e_p90", "rate_p50", "hit_token", "balance", "gap")
"""Columns of the comparison that a sweep's page draws, those that have values."""

_MOST_NAMED: Final = 3
"""Points that a note names."""

Summaries = dict[str, dict[str, Any]]
Series = tuple[str, list[Any], list[float | None]]


def columns_with_values(summaries: Summaries) -> list[Column]:
    """The comparison's columns that any point has a value for."""
    return [c for c in COLUMNS if any(lookup(s, c.path) is not None for s in summaries.values())]


def full_title(column: Column) -> str:
    """A column's name on its own, with its unit."""
    words = [column.group, column.title] if column.group else [column.title]
    return " ".join(word for word in words if word) + (f" ({column.unit})" if column.unit else "")


def to_know(summaries: Summaries) -> list[str]:
    """What a reader has to know of the points' numbers, each note once, with the points that it is of if not of all.

    Verdicts on a service level are a point's own and stand on its page.
    """
    names = list(summaries)
    notes = [[note for note in s["validity"]["notes"] if not note.startswith(VERDICT)] for s in summaries.values()]
    lines = []
    for note, of in merged_notes(notes):
        some = [names[i] for i in of[:_MOST_NAMED]]
        more = f" and {len(of) - len(some)} more" if len(of) > len(some) else ""
        lines.append(note if len(of) == len(names) else f"{note} ({'; '.join(some)}{more})")
    return lines


# ---------------------------------------------------------------------- a sweep


def sweep_page(name: str, axes: Sequence[Axis], points: Sequence[Point], summaries: Summaries, command: str) -> str:
    """Lines over the axis with the most numbers, one per combination of the others; the table of all points."""
    shown = columns_with_values(summaries)
    over = _main_axis(axes)
    lines = _lines(over, [axis for axis in axes if axis is not over], points)
    figures = {
        column.key: _figure(
            [(label, xs, [_value(summaries, p, column) for p in some]) for label, xs, some in lines],
            over.field,
            column,
        )
        for column in shown
        if column.key in PLOTTED
    }
    cards = [plot_card(key, figure, full_title(_column(key))) for key, figure in figures.items()]
    head = [tag("th", axis.field, scope="col") for axis in axes] + [
        tag("th", full_title(c), scope="col") for c in shown
    ]
    rows = []
    for point in points:
        cells = [
            tag("th", _link(point.name, v) if i == 0 else v, scope="row") for i, v in enumerate(point.values.values())
        ]
        if point.name not in summaries:
            rows.append(tag("tr", cells, tag("td", "no result", colspan=str(len(shown)))))
            continue
        values = [_value(summaries, point, column) for column in shown]
        texts = ["-" if v is None else c.form(v) for c, v in zip(shown, values, strict=True)]
        rows.append(tag("tr", cells, [tag("td", text) for text in texts]))
    missing = [point.name for point in points if point.name not in summaries]
    answers = [f"{len(points) - len(missing)} of {len(points)} points have results."]
    invalid = [n for n, s in summaries.items() if not s["validity"]["valid"]]
    answers += [f"{n} is not valid: {'; '.join(summaries[n]['validity']['reasons'])}" for n in invalid]
    body = [
        _header("sweep", name, answers, command),
        tag(
            "main",
            _section([label for label, _, _ in lines], cards),
            _table("All points", head, rows),
            _notes(to_know(summaries)),
        ),
    ]
    return page(f"{name}: sweep", body, figures)


def _main_axis(axes: Sequence[Axis]) -> Axis:
    """What lines are drawn over: the axis with the most values among those of numbers, else the first."""
    numbers = [axis for axis in axes if all(isinstance(_number(value), float) for value in axis.values)]
    return max(numbers, key=lambda axis: len(axis.values), default=axes[0])


def _lines(over: Axis, others: Sequence[Axis], points: Sequence[Point]) -> list[tuple[str, list[Any], list[Point]]]:
    """Per combination of the other axes: its name, the values of `over` and the points."""
    found: dict[str, list[Point]] = {}
    for point in points:
        label = ", ".join(f"{axis.short} {point.values[axis.field]}" for axis in others) or over.short
        found.setdefault(label, []).append(point)
    return [(label, [_number(p.values[over.field]) for p in some], some) for label, some in found.items()]


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _column(key: str) -> Column:
    return next(c for c in COLUMNS if c.key == key)


def _value(summaries: Summaries, point: Point, column: Column) -> float | None:
    return lookup(summaries[point.name], column.path) if point.name in summaries else None


def _figure(series: Sequence[Series], x_title: str, column: Column) -> dict[str, Any]:
    data = []
    factor = 100.0 if column.unit == "%" else 1.0
    seen: list[float] = []
    for i, (label, xs, ys) in enumerate(series):
        values = [None if y is None else y * factor for y in ys]
        seen += [v for v in values if v is not None]
        data.append(_line(i, label, xs, values, f"{safe_text(label)}: %{{y:.4g}} at %{{x}}<extra></extra>"))
    if column.unit == "s":
        y_axis = log_seconds("s, logarithmic", min(seen, default=0.1) / 1.3, max(seen, default=1.0) * 1.3)
    else:
        y_axis = axis_of(column.unit or column.title, rangemode="tozero")
    x_axis = axis_of(x_title)
    if any(isinstance(x, str) for _, xs, _ in series for x in xs):
        x_axis["type"] = "category"
    return {"data": data, "layout": {"xaxis": x_axis, "yaxis": y_axis}, "height": 320}


def _line(index: int, label: str, xs: Sequence[Any], ys: Sequence[float | None], hover: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": safe_text(label),
        "meta": {"run": index},
        "x": list(xs),
        "y": rounded([float("nan") if y is None else y for y in ys]),
        "line": {"color": run_color(index), "width": 2},
        "marker": {"size": 7, "color": run_color(index)},
        "hovertemplate": hover,
    }


# ---------------------------------------------------------------------- a capacity search


def capacity_page(name: str, source: CapacitySource, command: str) -> str:
    """The answer per arm, the frontier of user speed against output per GPU, the service level over the rate."""
    answers = [answer(one) for one in source.capacities()]
    arms = list(source.arms)
    figures = {"frontier": _frontier(arms, source.probes)}
    cards = [
        plot_card(
            "frontier",
            figures["frontier"],
            "Output per GPU against a user's speed",
            "One point per rate and seed: right is faster for the user, up is more for the money. "
            "Full points meet the service level.",
        )
    ]
    for slo in source.slos:
        key = slo.name
        figures[key] = _over_rate(arms, source.probes, key, slo.limit)
        cards.append(plot_card(key, figures[key], key, "Over the rate; the dotted line is the limit."))
    head = ["arm", "seed", "sessions/h/node", "met", *(s.name for s in source.slos), "output tok/s of a call, p50"]
    head += ["output tok/s per GPU", "calls", "calls in the system"]
    rows = [_probe_row(probe) for probe in _sorted(source.probes)]
    body = [
        _header("capacity", name, answers, command),
        tag(
            "main",
            _section(arms, cards),
            _table("All points", [tag("th", text, scope="col") for text in head], rows),
            tag(
                "section",
                tag("h2", "How it was searched"),
                tag("ul", [tag("li", line) for line in method(source)]),
            ),
        ),
    ]
    return page(f"{name}: capacity", body, figures)


def answer(found: Capacity) -> str:
    """One line: the arm's capacity, its interval, what to mind."""
    text = f"{found.arm}: "
    if found.value is None:
        text += "no answer"
    else:
        text += f"{number(found.value)} sessions per hour and node"
        if found.interval is not None:
            low, high = found.interval
            text += f" (95 % interval over {len(found.per_seed)} seeds: {number(low)} to {number(high)})"
    return f"{text}; {found.note}" if found.note else text


def method(source: CapacitySource) -> list[str]:
    """What a reader must know to judge the answer."""
    load = next(iter(source.arms.values())).load  # all arms have one load
    bars = ", ".join(f"{s.name} {'<=' if s.at_most else '>='} {s.limit:g}" for s in source.slos)
    return [
        f"service level: {bars}; calls that time out or fail, and open ones that are late already, count as missed",
        f"rates on a ladder in steps of {source.ladder.tolerance:.0%}, bisection for each arm and seed; the capacity "
        "is the highest rate that met the service level, so it is up to one step too low",
        _common(load),
        _stretch(load, source.warmup_share),
        "stationary: no rise of the number of calls in the system by more than half over the window (t test on 20 "
        "batch means)",
    ]


def _common(load: Load) -> str:
    """What points share."""
    if load.history_s:
        return "the same random numbers for every arm; at each rate another part of the trace's sessions is measured"
    return "the same sessions and the same random numbers at every rate and for every arm (common random numbers)"


def _stretch(load: Load, warmup_share: float) -> str:
    """What is measured of every run."""
    if load.until_s:
        return f"measured from {load.warmup_s:g} s to {load.until_s:g} s at every rate; the run ends there"
    return f"measured from {warmup_share:.0%} of the arrivals' span to the last arrival; the run ends there"


def _probe_row(probe: Probe) -> Markup:
    drift = f"{number(probe.drift.first)} to {number(probe.drift.last)}"
    cells = [
        probe.seed,
        f"{probe.rate:g}",
        _verdict(probe),
        *(("-" if not probe.calls else "lost too many") if r.value is None else number(r.value) for r in probe.reached),
        "-" if probe.user_speed_tok_s is None else number(probe.user_speed_tok_s),
        number(probe.output_tok_s_per_gpu),
        f"{probe.calls:,}",
        drift if probe.drift.stationary else f"{drift}, growing",
    ]
    return tag("tr", tag("th", _link(probe.folder, probe.arm), scope="row"), [tag("td", c) for c in cells])


def _verdict(probe: Probe) -> str:
    if not probe.valid:
        return "invalid"
    if not probe.enough:
        return "cannot say"
    return "yes" if probe.met else "no"


def _sorted(probes: Sequence[Probe]) -> list[Probe]:
    return sorted(probes, key=lambda p: (p.arm, p.rate, p.seed))


def _frontier(arms: Sequence[str], probes: Sequence[Probe]) -> dict[str, Any]:
    data = []
    for i, arm in enumerate(arms):
        some = [p for p in _sorted(probes) if p.arm == arm and p.user_speed_tok_s is not None]
        hover = f"{safe_text(arm)}: %{{y:.4g}} tok/s per GPU at %{{x:.4g}} tok/s, %{{text}}<extra></extra>"
        line = _line(i, arm, rounded([p.user_speed_tok_s for p in some]), [p.output_tok_s_per_gpu for p in some], hover)
        line["text"] = [f"{p.rate:g} sessions/h/node, seed {p.seed}" for p in some]
        line["mode"] = "markers"
        line["marker"]["symbol"] = ["circle" if p.met and p.enough else "circle-open" for p in some]
        data.append(line)
    layout = {
        "xaxis": axis_of("output rate of a call, p50 (tok/s)", rangemode="tozero"),
        "yaxis": axis_of("output tokens/s per GPU", rangemode="tozero"),
    }
    return {"data": data, "layout": layout, "height": 360}


def _over_rate(arms: Sequence[str], probes: Sequence[Probe], slo: str, limit: float) -> dict[str, Any]:
    data, seen = [], [limit]
    for i, arm in enumerate(arms):
        some = [p for p in _sorted(probes) if p.arm == arm]
        values = [next(r.value for r in p.reached if r.slo.name == slo) for p in some]
        seen += [v for v in values if v]
        hover = f"{safe_text(arm)}: %{{y:.4g}} at %{{x:g}} sessions/h/node<extra></extra>"
        line = _line(i, arm, [p.rate for p in some], values, hover)
        line["mode"] = "markers"
        data.append(line)
    unit = "s" if slo.endswith("_s") and not slo.endswith("tok_s") else "tok/s"
    layout = {
        "xaxis": axis_of("sessions per hour and node", type="log"),
        "yaxis": log_seconds(f"{unit}, logarithmic", min(seen) / 1.3, max(seen) * 1.3),
        "shapes": [
            {
                "type": "line",
                "xref": "paper",
                "x0": 0,
                "x1": 1,
                "y0": limit,
                "y1": limit,
                "line": {"color": "@ink", "width": 1, "dash": "dot"},
            }
        ],
    }
    return {"data": data, "layout": layout, "height": 320}


# ---------------------------------------------------------------------- shared pieces


def _header(kind: str, name: str, answers: Sequence[str], command: str) -> Markup:
    return page_header(kind, name, answers, tag("p", tag("code", command), class_="context"))


def _section(labels: Sequence[str], cards: Sequence[Markup]) -> Markup:
    return tag("section", legend(labels, "Lines shown in the plots"), tag("div", list(cards), class_="grid"))


def _table(title: str, head: Sequence[Markup], rows: Sequence[Markup]) -> Markup:
    return tag("section", tag("h2", title), comparison_table(head, rows))


def _notes(lines: Sequence[str]) -> Markup | None:
    if not lines:
        return None
    return tag(
        "section", tag("h2", "To know when reading"), tag("ul", [tag("li", line) for line in lines]), class_="box"
    )


def _link(folder: str, text: Any) -> Markup:
    """To the run's own page."""
    return tag("a", text, href=f"{folder}/report.html")
