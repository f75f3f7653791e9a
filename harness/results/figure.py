"""Pieces of plotly figures that the plots share: lines per run, axes with units, panels of bars.

A figure is plotly JSON in which colours are names: "@run0".."@run7" (one per run, the same in every plot),
"@ink", "@muted", "@grid", "@heat" (a scale). The page replaces them by the values of its theme.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from harness.results.compare import number
from harness.results.store import Run

Figure = dict[str, Any]
PALETTE_SIZE: Final = 8
_DASHES: Final = ("solid", "dashdot", "longdash")


@dataclass(frozen=True, slots=True)
class Plot:
    """One plot of the page. `caption` says how to read it; `wide` ones take the whole width."""

    key: str
    title: str
    caption: str
    make: Callable[[Sequence[Run]], Figure | None]
    wide: bool = False


def safe_text(text: str, limit: int = 40) -> str:
    """A name as plotly may show it: plotly reads a little HTML in text, so the name's own is escaped; cut to
    `limit`.
    """
    short = text if len(text) <= limit else text[: limit - 1] + "\N{HORIZONTAL ELLIPSIS}"
    return html.escape(short, quote=False).replace("\n", " ")


def run_color(index: int) -> str:
    return f"@run{index % PALETTE_SIZE}"


def rounded(values: Any, digits: int = 4) -> list[float | None]:
    """To significant digits: a page needs no more and is much smaller."""
    return [None if not np.isfinite(v) else float(f"{v:.{digits}g}") for v in np.asarray(values, dtype=float)]


def run_line(run: Run, index: int, x: Any, y: Any, hover: str, **more: Any) -> dict[str, Any]:
    """A run's line; a point by itself is a dot, as a line of one point cannot be seen."""
    dash = "dot" if run.info.is_baseline else _DASHES[index // PALETTE_SIZE % len(_DASHES)]
    return {
        "type": "scatter",
        "mode": "lines" if len(x) > 1 else "markers",
        "name": safe_text(run.info.title),
        "meta": {"run": index},
        "x": rounded(x),
        "y": rounded(y),
        "line": {"color": run_color(index), "width": 2, "dash": dash},
        **({} if len(x) > 1 else {"marker": {"color": run_color(index), "size": 6}}),
        "hovertemplate": hover,
        **more,
    }


def axis_of(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}, **more}


def log_seconds(title: str, low: float, high: float) -> dict[str, Any]:
    """A logarithmic axis of seconds with plain numbers at its decades, and at 2 and 5 where there are few of
    them.
    """
    low, high = max(low, 1e-4), max(high, low * 2, 2e-4)
    decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    steps = (1, 2, 5) if len(decades) <= 3 else (1,)
    ticks = [float(f"{m}e{d}") for d in decades for m in steps]
    return axis_of(
        title,
        type="log",
        range=[float(np.log10(low)), float(np.log10(high))],
        tickvals=ticks,
        ticktext=[f"{t:g}" for t in ticks],
    )


def time_unit(end_s: float) -> tuple[str, float]:
    for unit, size, upto in (("s", 1.0, 600.0), ("min", 60.0, 3 * 3600.0), ("h", 3600.0, 96 * 3600.0)):
        if end_s < upto:
            return unit, size
    return "d", 86400.0


def end_s(runs: Sequence[Run]) -> float:
    return max(run.info.virtual_ns for run in runs) / 1e9


def guide(y: float) -> dict[str, Any]:
    line = {"color": "@muted", "width": 1, "dash": "dot"}
    return {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": y,
        "y1": y,
        "line": line,
        "layer": "below",
    }


def facets_of(
    runs: Sequence[Run],
    facets: Sequence[tuple[str, list[float | None], float, str]],
    base: float = 0.0,
    height: int = 60,
) -> Figure | None:
    """`facets_of_values` with one row per run."""
    return facets_of_values([run.info.title for run in runs], facets, base, height)


def facets_of_values(
    labels: Sequence[str],
    facets: Sequence[tuple[str, list[float | None], float, str]],
    base: float = 0.0,
    height: int = 60,
) -> Figure | None:
    """Horizontal bars, one row per label, one panel per (title, values, top of the axis, unit of the written
    value).
    """
    shown = [f for f in facets if any(v is not None for v in f[1])]
    if not shown:
        return None
    rows = list(range(len(labels)))
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {}
    gap = 0.06
    width = (1 - gap * (len(shown) - 1)) / len(shown)
    annotations = []
    for n, (title, values, top, unit) in enumerate(shown):
        axis = "" if n == 0 else str(n + 1)
        left = n * (width + gap)
        layout[f"xaxis{axis}"] = {
            "domain": [left, left + width],
            "range": [base, top],
            "showticklabels": False,
            "showgrid": False,
            "anchor": f"y{axis}",
            "zeroline": False,
        }
        layout[f"yaxis{axis}"] = {
            "autorange": "reversed",
            "tickvals": rows,
            "ticktext": [safe_text(label, 24) for label in labels],
            "showticklabels": n == 0,
            "showgrid": False,
            "zeroline": False,
            "automargin": True,
            "anchor": f"x{axis}",
        }
        annotations.append(note(title, left))
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "xaxis": f"x{axis}",
                "yaxis": f"y{axis}",
                "y": rows,
                "x": [None if v is None else v - base for v in values],
                "base": base,
                "width": 0.62,
                "marker": {"color": [run_color(i) for i in rows]},
                "text": ["n/a" if v is None else f"{number(v)}{unit}" for v in values],
                "textposition": "outside",
                "cliponaxis": False,
                "hoverinfo": "skip",
            }
        )
    layout |= {"annotations": annotations, "margin": {"t": 34, "b": 10}}
    return {
        "data": data,
        "layout": layout,
        "height": height + 34 * len(labels),
        "panel_height": 50 + 28 * len(labels),
    }


def note(text: str, x: float, y: float = 1.0) -> dict[str, Any]:
    """A panel's title at its upper left corner."""
    place = {"xref": "paper", "yref": "paper", "x": x, "y": y, "xanchor": "left", "yanchor": "bottom"}
    return {
        "text": text,
        "showarrow": False,
        "font": {"color": "@ink", "size": 12.5},
        "align": "left",
        **place,
    }
