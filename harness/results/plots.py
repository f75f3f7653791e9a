"""The report's plots, declared: what each shows, and how its figure is made from the runs.

To add a plot, write a function from runs to a Figure (or None where there is nothing to show) and an entry in
PLOTS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from harness.results import series
from harness.results.compare import lookup, number
from harness.results.figure import (
    Figure,
    Plot,
    axis_of,
    end_s,
    facets_of,
    guide,
    log_seconds,
    note,
    rounded,
    run_color,
    run_line,
    safe_text,
    time_unit,
)
from harness.results.store import Run

_HEAT_ROW_PX: Final = 2.2


def _ecdf(runs: Sequence[Run], what: Callable[[Any, Any], series.Points], title: str) -> Figure | None:
    curves = [what(run.calls, run.info) for run in runs]
    if not any(len(x) for x, _ in curves):
        return None
    hover = "%{y:.1f} % of calls within %{x:.3g} s<extra>%{fullData.name}</extra>"
    data = [run_line(run, i, x, y * 100, hover) for i, (run, (x, y)) in enumerate(zip(runs, curves, strict=True))]
    low = min(float(np.interp(0.005, y, x)) for x, y in curves if len(x))
    high = max(float(x[-1]) for x, _ in curves if len(x))
    layout = {
        "xaxis": log_seconds(f"{title} (s, logarithmic)", low, high * 1.05),
        "yaxis": axis_of("calls (%)", range=[0, 101], tickvals=[0, 25, 50, 75, 90, 100]),
        "shapes": [guide(y) for y in (50, 90)],
    }
    return {"data": data, "layout": layout, "height": 340}


def ttft_figure(runs: Sequence[Run]) -> Figure | None:
    return _ecdf(runs, series.ttft_distribution, "time to first token")


def e2e_figure(runs: Sequence[Run]) -> Figure | None:
    return _ecdf(runs, series.e2e_distribution, "end-to-end time")


def parts_figure(runs: Sequence[Run]) -> Figure | None:
    """Mean TTFT split into its parts, stacked: waiting (full colour), restore, prefill (lighter)."""
    parts = (("waiting", "queue_s", 1.0), ("KV restore", "restore_s", 0.6), ("prefill", "prefill_s", 0.32))
    rows = list(range(len(runs)))
    data = []
    for title, key, opacity in parts:
        values = [lookup(run.summary, (key, "mean")) for run in runs]
        if any(values):
            data.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "y": rows,
                    "x": rounded([v or 0.0 for v in values]),
                    "width": 0.62,
                    "name": title,
                    "marker": {"color": [run_color(i) for i in rows], "opacity": opacity},
                    "hovertemplate": f"{title}: %{{x:.3g}} s<extra></extra>",
                }
            )
    if not data:
        return None
    totals = [sum(lookup(run.summary, (key, "mean")) or 0.0 for _, key, _ in parts) for run in runs]
    layout = {
        "barmode": "stack",
        "xaxis": axis_of("mean time (s)", range=[0, max(totals) * 1.25 or 1.0]),
        "yaxis": {
            "autorange": "reversed",
            "tickvals": rows,
            "ticktext": [safe_text(run.info.title, 24) for run in runs],
            "showgrid": False,
            "zeroline": False,
            "automargin": True,
        },
        "annotations": [
            {"x": t, "y": i, "text": f"{number(t)} s", "showarrow": False, "xanchor": "left", "xshift": 4}
            for i, t in enumerate(totals)
        ],
    }
    return {"data": data, "layout": layout, "height": 90 + 34 * len(runs)}


def hits_figure(runs: Sequence[Run]) -> Figure | None:
    def rates(key: str) -> list[float | None]:
        values = [lookup(run.summary, ("hit_rate", key)) for run in runs]
        return [None if v is None else 100 * v for v in values]

    tokens, calls = rates("token"), rates("request")
    facets = (("input tokens reused", tokens, 128, " %"), ("calls that reused any", calls, 128, " %"))
    return facets_of(runs, facets, height=90)


def balance_figure(runs: Sequence[Run]) -> Figure | None:
    keys = (
        ("GPU-busy time", "busiest_over_mean"),
        ("calls", "busiest_over_mean_calls"),
        ("tokens computed", "busiest_over_mean_computed_tokens"),
    )
    facets = [(title, [lookup(run.summary, ("load_balance", key)) for run in runs]) for title, key in keys]
    top = max([v for _, values in facets for v in values if v is not None], default=1.0)
    panels = [(title, values, 1 + (top - 1) * 1.45 + 0.02, "") for title, values in facets]
    return facets_of(runs, panels, base=1.0, height=170)


def time_figure(runs: Sequence[Run]) -> Figure | None:
    curves = [series.percentile_over_time(run.calls, 90) for run in runs]
    found = [y for _, y in curves if len(y)]
    if not any(len(y) > 1 for y in found):  # one point is no course: too few calls (series.MIN_CALLS)
        return None
    unit, size = time_unit(end_s(runs))
    hover = f"%{{x:.3g}} {unit}: p90 %{{y:.3g}} s<extra>%{{fullData.name}}</extra>"
    data = [run_line(run, i, x / size, y, hover) for i, (run, (x, y)) in enumerate(zip(runs, curves, strict=True))]
    low, high = min(y.min() for y in found), max(y.max() for y in found)
    layout = {
        "xaxis": axis_of(f"arrival, virtual time ({unit})", range=[0, end_s(runs) / size]),
        "yaxis": log_seconds("p90 time to first token (s)", low / 1.3, high * 1.3),
        "shapes": _warm_up(runs, size),
    }
    return {"data": data, "layout": layout, "height": 320}


def _warm_up(runs: Sequence[Run], size: float) -> list[dict[str, Any]]:
    """The end of the warm-up, where all runs have the same."""
    starts = {run.info.window_ns[0] for run in runs}
    if len(starts) != 1 or starts == {0}:
        return []
    x = starts.pop() / 1e9 / size
    line = {"color": "@muted", "width": 1, "dash": "dot"}
    return [{"type": "line", "yref": "paper", "x0": x, "x1": x, "y0": 0, "y1": 1, "line": line, "layer": "below"}]


def cluster_figure(runs: Sequence[Run]) -> Figure | None:
    unit, size = time_unit(end_s(runs))
    data = []
    for i, run in enumerate(runs):
        if run.timeline is not None:
            x, running, waiting = series.cluster_load(run.timeline)
            hover = f"%{{x:.3g}} {unit}: %{{y:.3g}} requests<extra>%{{fullData.name}}</extra>"
            data.append(run_line(run, i, x / size, running + waiting, hover))
    if not any(len(line["x"]) > 1 for line in data):  # a run within one bin has no course
        return None
    layout = {
        "xaxis": axis_of(f"virtual time ({unit})", range=[0, end_s(runs) / size]),
        "yaxis": axis_of("requests in the cluster", rangemode="tozero"),
        "shapes": _warm_up(runs, size),
    }
    return {"data": data, "layout": layout, "height": 320}


def rate_figure(runs: Sequence[Run]) -> Figure | None:
    data = []
    for i, run in enumerate(runs):
        group = series.rate_by_batch(run.calls, run.info)
        if len(group.batch):
            custom = [[float(f"{p:.3g}"), int(n)] for p, n in zip(group.p10, group.calls, strict=True)]
            hover = "batch %{x:.3g}: median %{y:.3g} tok/s, p10 %{customdata[0]}, %{customdata[1]} calls"
            more = {
                "mode": "lines+markers",
                "marker": {"size": 6, "color": run_color(i)},
                "customdata": custom,
            }
            hover += "<extra>%{fullData.name}</extra>"
            data.append(run_line(run, i, group.batch, group.p50, hover, **more))
    if not data:
        return None
    layout = {
        "xaxis": axis_of("mean batch while decoding (requests)", rangemode="tozero"),
        "yaxis": axis_of("output rate, median (tok/s)", rangemode="tozero"),
    }
    return {"data": data, "layout": layout, "height": 340}


def gap_figure(runs: Sequence[Run]) -> Figure | None:
    curves = [series.gap_distribution(run.calls, run.info) for run in runs]
    if not any(len(x) for x, _ in curves):
        return None
    hover = "%{y:.3g} % of decisions off by more than %{x:.3g} points<extra>%{fullData.name}</extra>"
    data = [
        run_line(run, i, x, np.where(y > 0, y * 100, np.nan), hover)
        for i, (run, (x, y)) in enumerate(zip(runs, curves, strict=True))
        if len(x)
    ]
    larger = np.concatenate([y[y > 0] for _, y in curves] + [np.array([1.0])])
    floor = float(larger.min()) * 100
    ticks = [1e-3, 1e-2, 0.1, 1, 10, 100]
    layout = {
        "xaxis": axis_of("|believed − held| share of the prompt (points)", range=[0, 100]),
        "yaxis": axis_of(
            "decisions with a larger gap (%)",
            type="log",
            range=[float(np.log10(max(floor * 0.8, 1e-3))), 2.05],
            tickvals=ticks,
            ticktext=[f"{t:g}" for t in ticks],
        ),
    }
    return {"data": data, "layout": layout, "height": 340}


def heat_figure(runs: Sequence[Run]) -> Figure | None:
    """One map per run over a common time axis and colour scale."""
    maps = [(i, run, series.load_map(run.timeline)) for i, run in enumerate(runs) if run.timeline is not None]
    if not maps:
        return None
    unit, size = time_unit(end_s(runs))
    top = max(float(np.quantile(m.requests, 0.998)) for _, _, m in maps) or 1.0
    heights = [max(56.0, _HEAT_ROW_PX * len(m.row_names)) for _, _, m in maps]
    gap, margin = 34.0, 84
    total = sum(heights) + gap * (len(maps) - 1)
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {}
    annotations, y1 = [], 1.0
    for n, ((index, run, load), height) in enumerate(zip(maps, heights, strict=True)):
        axis = "" if n == 0 else str(n + 1)
        y0 = max(0.0, y1 - height / total)
        digits = 3 if top >= 1 else 2
        data.append(
            {
                "type": "heatmap",
                "x": rounded(load.edges_s / size, 6),
                "z": [rounded(row, digits) for row in load.requests],
                "coloraxis": "coloraxis",
                "yaxis": f"y{axis}",
                "name": safe_text(run.info.title),
                "meta": {"run": index},
                "y": load.row_names,
                "hovertemplate": f"%{{y}}<br>%{{x:.3g}} {unit}: %{{z:.3g}} requests<extra></extra>",
            }
        )
        layout[f"yaxis{axis}"] = {
            "domain": [y0, y1],
            "autorange": "reversed",
            "showticklabels": False,
            "ticks": "",
            "showgrid": False,
            "zeroline": False,
            "fixedrange": True,
        }
        annotations.append(note(safe_text(run.info.title), 0.0, y1))
        y1 = y0 - gap / total
    layout |= {
        "xaxis": axis_of(f"virtual time ({unit})", anchor="free", position=0),
        "coloraxis": {
            "colorscale": "@heat",
            "cmin": 0,
            "cmax": float(f"{top:.3g}"),
            "colorbar": {
                "title": {"text": "requests", "side": "top"},
                "thickness": 12,
                "len": min(1.0, 200 / total),
                "y": 1,
                "yanchor": "top",
                "outlinewidth": 0,
            },
        },
        "annotations": annotations,
        "margin": {"t": 28, "l": 12},
    }
    return {"data": data, "layout": layout, "height": round(total) + margin}


PLOTS: Final = (
    Plot(
        "ttft",
        "Time to first token",
        "Share of calls whose first token came within the time. Further left is better; a curve that stays"
        " below 100 % lost calls to time-outs or failures.",
        ttft_figure,
    ),
    Plot(
        "e2e",
        "End-to-end time",
        "Share of calls that ended within the time, from arrival to last token.",
        e2e_figure,
    ),
    Plot(
        "parts",
        "Where the wait for the first token goes",
        "Means over completed calls. Full colour: waiting, in the endpoint's queue and, with front_end, in what stands"
        " before it (gateway, router, tokenising). Lighter: bringing KV back from cache tiers. Lightest: computing the"
        " prompt.",
        parts_figure,
    ),
    Plot(
        "hits",
        "Reuse of cached prefixes",
        "Share of input tokens that need not be computed again, and share of calls that reused anything.",
        hits_figure,
    ),
    Plot(
        "time",
        "Time to first token over the run",
        "90th percentile by arrival time; the dotted line ends the warm-up. A curve that keeps climbing means"
        " overload.",
        time_figure,
    ),
    Plot(
        "cluster",
        "Requests in the cluster",
        "Running and waiting requests of all endpoints together.",
        cluster_figure,
    ),
    Plot(
        "rate",
        "Output rate against load",
        "Calls in groups of equal size by the mean number of requests that ran on their endpoint while they"
        " decoded; median of each group.",
        rate_figure,
    ),
    Plot(
        "balance",
        "How evenly the nodes work",
        "Busiest node over the mean of all nodes; 1 is even.",
        balance_figure,
    ),
    Plot(
        "gap",
        "What the router believed against what was there",
        "At each decision: cached share of the prompt that the router scored for the chosen endpoint, against"
        " what the endpoint held. Lower is truer. Configs that score no prefix have no curve.",
        gap_figure,
    ),
    Plot(
        "heat",
        "Load per endpoint over time",
        "Requests, running and waiting; a row is an endpoint, in order of the nodes (a node where there are"
        " more than 128 endpoints). Horizontal streaks are hot spots; one colour"
        " scale for all runs.",
        heat_figure,
        wide=True,
    ),
)


def figures(runs: Sequence[Run], plots: Sequence[Plot] = PLOTS) -> dict[str, Figure]:
    """The figures that the runs have data for, by key."""
    made = {plot.key: plot.make(runs) for plot in plots}
    return {key: figure for key, figure in made.items() if figure is not None}
