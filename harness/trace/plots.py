"""The plots of a trace as plotly figures (see harness/results/figure.py for what a figure is)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike

from harness.results.figure import Figure, axis_of, guide, rounded, run_color
from harness.trace.shape import LEVELS, Shape, at_least
from harness.trace.stats import LONG_GAP_S

BINS_PER_DECADE: Final = 6
FIRST_DECADE: Final = -2
"""Idle gaps below 10 ms are drawn as such of 10 ms."""
TIMES: Final = (
    (0.01, "10 ms"), (0.1, "0.1 s"), (1, "1 s"), (10, "10 s"), (60, "1 min"), (300, "5 min"), (1800, "30 min"),
    (3600, "1 h"), (14400, "4 h"), (86400, "1 d"), (604800, "7 d"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TracePlot:
    """A plot; `lines` are what its colours mean, in their order."""

    key: str
    title: str
    caption: str
    lines: tuple[str, ...]
    make: Callable[[Shape], Figure | None]
    wide: bool = False


def _line(color: int, x: ArrayLike, y: ArrayLike, hover: str, **more: Any) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "meta": {"run": color},
        "x": rounded(x),
        "y": rounded(y),
        "line": {"color": run_color(color), "width": 2},
        "hovertemplate": hover + "<extra></extra>",
        **more,
    }


def _marked(texts: list[str]) -> dict[str, Any]:
    """Points with their values written beside them, instead of a line."""
    return {
        "mode": "markers+text",
        "marker": {"color": run_color(0), "size": 8},
        "text": texts,
        "textposition": "bottom right",
        "textfont": {"color": "@ink", "size": 12},
    }


def _label(text: str, x: float, y: float, **more: Any) -> dict[str, Any]:
    font = {"size": 12, "color": "@ink"}
    return {"text": text, "x": x, "y": y, "showarrow": False, "font": font, **more}


def _upright(x: float) -> dict[str, Any]:
    line = {"color": "@muted", "width": 1, "dash": "dot"}
    return {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": x, "x1": x, "line": line, "layer": "below"}


def _times(low: float, high: float, without: Sequence[str]) -> list[tuple[float, str]]:
    return [(seconds, name) for seconds, name in TIMES if low <= seconds <= high and name not in without]


def share_text(share: float) -> str:
    """A share in percent with three significant digits, without a needless exponent."""
    percent = share * 100
    return f"{percent:.0f} %" if percent >= 99.95 or percent == 0 else f"{percent:.{2 if percent < 1 else 3}g} %"


def gap_figure(shape: Shape) -> Figure | None:
    """Arrivals and idle time by the gap before the arrival: a bar for none, then bins of equal ratio."""
    idle = np.asarray(shape.idle_s)
    arrivals = len(idle) + shape.zero
    if not arrivals:
        return None
    logs = np.log10(np.maximum(idle, 10.0**FIRST_DECADE))
    last = int(np.ceil(max(logs.max() if len(logs) else 0.0, 1.0) * BINS_PER_DECADE + 1e-9))
    first = FIRST_DECADE * BINS_PER_DECADE
    edges = np.arange(first, last + 1) / BINS_PER_DECADE
    counts, _ = np.histogram(logs, edges)
    times, _ = np.histogram(logs, edges, weights=idle)
    total_s = float(idle.sum()) or 1.0
    busy_x = FIRST_DECADE - 0.6
    middles = [busy_x, *((edges[:-1] + edges[1:]) / 2).tolist()]
    names = ["session busy", *(f"{10**a:.2g} to {10**b:.2g} s" for a, b in pairwise(edges.tolist()))]
    width = 0.42 / BINS_PER_DECADE
    bars: list[dict[str, Any]] = []
    for color, values, what in (
        (0, [shape.zero / arrivals, *(counts / arrivals)], "of the arrivals"),
        (1, [0.0, *(times / total_s)], "of the idle time"),
    ):
        bars.append(
            {
                "type": "bar",
                "x": [round(x + (color - 0.5) * width, 4) for x in middles],
                "y": rounded(np.array(values) * 100),
                "width": width,
                "marker": {"color": run_color(color)},
                "customdata": names,
                "hovertemplate": f"%{{customdata}}: %{{y:.3g}} % {what}<extra></extra>",
            }
        )
    limit = float(np.log10(LONG_GAP_S))
    long = idle >= LONG_GAP_S
    short = len(idle) - int(long.sum())
    short_s = float(idle[~long].sum()) / total_s
    top = max(max(bar["y"]) for bar in bars)
    start, end = busy_x - 0.5, float(max(edges[-1], limit))
    modes = [(start + 0.1, f"<b>busy</b><br>{share_text(shape.zero / arrivals)}<br> ", "left")]
    between = f"<b>below 30 min</b><br>{share_text(short / arrivals)} of arrivals<br>{share_text(short_s)} of idle time"
    if long.any():
        share = float(idle[long].sum()) / total_s
        far = "<b>30 min or more</b><br>"
        far += f"{share_text(int(long.sum()) / arrivals)} of arrivals<br>{share_text(share)} of idle time"
        end = max(end, limit + 1.9)
        # Labels side by side at the width of a phone: some 1.2 decades for the first, 3.6 for the last.
        modes += [((start + 1.2 + end - 3.6) / 2, between, "center"), (end, far, "right")]
    else:
        modes.append(((FIRST_DECADE + limit) / 2, between, "center"))
    ticks = _times(10.0**FIRST_DECADE, 10.0**end, ("1 h",))
    return {
        "data": bars,
        "layout": {
            "barmode": "overlay",
            "xaxis": axis_of(
                "gap before the arrival (logarithmic)",
                tickvals=[busy_x, *(float(np.log10(s)) for s, _ in ticks)],
                ticktext=["none", *(name for _, name in ticks)],
                range=[start, end],
                zeroline=False,
            ),
            "yaxis": axis_of("share (%)", range=[0, top * 1.45]),
            "shapes": [_upright(FIRST_DECADE - 0.15), _upright(limit)],
            "annotations": [
                _label(
                    text, x, top * 1.43, yanchor="top", xanchor=anchor, align=anchor, font={"size": 11, "color": "@ink"}
                )
                for x, text, anchor in modes
            ],
        },
        "height": 380,
    }


def context_figure(shape: Shape) -> Figure | None:
    """Input tokens by the number of the call in the main conversation."""
    numbers, tokens = shape.context_curves() if shape.contexts else (np.arange(0), np.zeros((0, 3)))
    if not len(numbers):
        return None
    hover = "call %{x}: %{y:,.0f} tokens"
    longest = max(shape.contexts, key=len)
    step = max(1, len(longest) // 800)
    x = np.arange(1, len(longest) + 1)[::step]
    data = [_line(6, x, np.asarray(longest)[::step], hover, line={"color": run_color(6), "width": 1})]
    for column, dash in ((0, "dash"), (2, "dash"), (1, "solid")):
        line = {"color": run_color(0), "width": 2.5 if dash == "solid" else 1.5, "dash": dash}
        data.append(_line(0, numbers, tokens[:, column], hover, line=line))
    return {
        "data": data,
        "layout": {
            "xaxis": axis_of("call of the main conversation (logarithmic)", type="log", dtick=1),
            "yaxis": axis_of("input tokens", rangemode="tozero"),
        },
        "height": 340,
    }


def burst_figure(shape: Shape) -> Figure | None:
    """Share of the calls against the share of the minutes that hold them, fullest first."""
    if not shape.minutes:
        return None
    median, pooled = shape.burst_curves()
    levels = np.array(LEVELS)
    hover = "%{y:.3g} % of calls in %{x:.3g} % of minutes"
    data = [
        _line(1, pooled * 100, levels * 100, hover),
        _line(0, median * 100, levels * 100, hover),
    ]
    marks = [LEVELS.index(level) for level in (0.5, 0.9)]
    data.append(
        _line(0, median[marks] * 100, levels[marks] * 100, hover, **_marked([share_text(v) for v in median[marks]]))
    )
    low = max(1e-2, min(float(median.min()), float(pooled.min())) * 100)
    ticks = [t for t in (0.01, 0.1, 1, 2, 5, 10, 20, 50, 100) if t >= low / 2]
    return {
        "data": data,
        "layout": {
            "xaxis": axis_of(
                "share of the minutes (%, logarithmic)", type="log", tickvals=ticks, ticktext=[f"{t:g}" for t in ticks],
                range=[float(np.log10(low * 0.8)), 2.02],
            ),
            "yaxis": axis_of("share of the calls (%)", range=[0, 104], tickvals=[0, 25, 50, 75, 90, 100]),
            "shapes": [guide(50), guide(90)],
        },
        "height": 340,
    }  # fmt: skip


def flight_figure(shape: Shape) -> Figure | None:
    """How much happens with so many calls of a session in flight, or more."""
    top = max(shape.most, default=0)
    if top < 2:
        return None  # one after the other: three lines of a single point
    x = np.arange(1, top + 1)
    data = []
    for color, counts, what in (
        (0, shape.most, "of sessions reach %{x} in flight"),
        (1, shape.starts, "of calls start with %{x} or more in flight, themselves included"),
        (2, shape.busy_s, "of busy time has %{x} or more in flight"),
    ):
        y = at_least(counts, top) * 100
        data.append(_line(color, x, np.where(y > 0, y, np.nan), "%{y:.3g} % " + what, mode="lines+markers"))
    low = min(min(v for v in line["y"] if v) for line in data if any(line["y"]))
    ones = {"dtick": 1} if top < 8 else {}
    ticks = [t for t in (0.0001, 0.001, 0.01, 0.1, 1, 10, 100) if t >= low / 10]
    return {
        "data": data,
        "layout": {
            "xaxis": axis_of("calls of one session in flight, at least", range=[0.5, top + 0.5], **ones),
            "yaxis": axis_of(
                "share (%, logarithmic)", type="log", tickvals=ticks, ticktext=[f"{t:g}" for t in ticks],
                range=[float(np.log10(low * 0.7)), 2.12],
            ),
        },
        "height": 340,
    }  # fmt: skip


def window_figure(shape: Shape) -> Figure | None:
    """Share of the prompt blocks that a cache holds which keeps them for so long after each use."""
    if not shape.blocks:
        return None
    windows, hits = shape.hit_curve()
    hover = "%{y:.2f} % with %{x:.3g} s"
    data = [_line(0, windows, hits * 100, hover)]
    marks = [int(np.flatnonzero(windows == seconds)[0]) for seconds in (300.0, 3600.0)]
    data.append(
        _line(0, windows[marks], hits[marks] * 100, hover, **_marked([f"{v * 100:.1f} %" for v in hits[marks]]))
    )
    final = shape.hit_infinite() * 100
    ticks = _times(1, windows[-1], ("30 min", "4 h", "7 d"))
    return {
        "data": data,
        "layout": {
            "xaxis": axis_of(
                "kept after the last use (logarithmic)", type="log", tickvals=[s for s, _ in ticks],
                ticktext=[name for _, name in ticks], range=[0, float(np.log10(windows[-1])) + 0.02],
            ),
            "yaxis": axis_of("blocks held (%)", range=[0, 106], tickvals=[0, 20, 40, 60, 80, 100]),
            "shapes": [guide(final)],
            "annotations": [_label(f"kept for ever: {final:.1f} %", 0.06, final, xanchor="left", yanchor="bottom")],
        },
        "height": 340,
    }  # fmt: skip


TRACE_PLOTS: Final[Sequence[TracePlot]] = (
    TracePlot(
        "gaps",
        "Time between arrivals",
        "An arrival is every call but a session's first. It comes while an earlier call of its session runs (busy), or"
        " after an idle gap: a tool's seconds, a person's minutes, or hours away, which are few arrivals and most of"
        " the time.",
        ("share of the arrivals", "share of the idle time"),
        gap_figure,
        wide=True,
    ),
    TracePlot(
        "context",
        "Context growth",
        "Input tokens of the main conversation, call by call: median over the sessions that go on so long, 10th and"
        " 90th percentile (dashed), and the session with the longest conversation (thin). Drops are compactions.",
        (),
        context_figure,
    ),
    TracePlot(
        "window",
        "Hit rate by retention",
        "Share of the prompt blocks that a cache of the session alone holds if it keeps each block for so long after"
        " its last use, whatever its size. Every use restarts the window.",
        (),
        window_figure,
    ),
    TracePlot(
        "burst",
        "Burstiness",
        "Share of the calls in the fullest minutes, from a session's first start to its last end. Even traffic would"
        " reach 50 % of the calls at 50 % of the minutes.",
        ("median session", "minutes of all sessions together"),
        burst_figure,
    ),
    TracePlot(
        "flight",
        "Calls in flight",
        "How often so many calls of one session run at the same time, or more, with the durations that were recorded.",
        ("sessions, by their most", "calls, when they start", "busy time"),
        flight_figure,
    ),
)
