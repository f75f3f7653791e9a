"""The report's plots of cache tiers and links, declared as those in `plots`. Runs without tiers have no lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from harness.results.compare import lookup
from harness.results.figure import (
    Figure,
    Plot,
    axis_of,
    end_s,
    facets_of,
    guide,
    log_seconds,
    note,
    run_color,
    run_line,
    safe_text,
    time_unit,
)
from harness.results.store import Run
from harness.results.summary import window_of
from harness.results.tier_data import TierData
from harness.results.tier_series import nodes_of, rate_over_time, resident_over_time, restore_distribution
from harness.results.tier_words import (
    busiest_link,
    link_name,
    skipped_share,
    tier_name,
    tiers_of,
    unread_share,
    with_tiers,
)

GB: Final = 1e9
GIB: Final = 1 << 30
_DASHES: Final = ("solid", "dash", "dot", "dashdot")


def _tier_names(runs: Sequence[Run], kinds: Sequence[str] = ("node", "shared", "peer")) -> list[str]:
    """Tiers of all runs in the order of their first mention: a tier keeps its line style in every plot."""
    names = dict.fromkeys(tier["name"] for run in runs for tier in tiers_of(run.summary) if tier["kind"] in kinds)
    return list(names)


def _styled(run: Run, index: int, x: Any, y: Any, hover: str, style: int, **more: Any) -> dict[str, Any]:
    line = {"color": run_color(index), "width": 2, "dash": _DASHES[style % len(_DASHES)]}
    return run_line(run, index, x, y, hover, line=line, **more)


def _key(styles: Sequence[str]) -> list[dict[str, Any]]:
    """Which line style is which, above the plot; nothing where there is one."""
    words = {"solid": "solid", "dash": "dashed", "dot": "dotted", "dashdot": "dash-dotted"}
    if len(styles) < 2:
        return []
    text = " \u00b7 ".join(f"{words[_DASHES[i % len(_DASHES)]]}: {name}" for i, name in enumerate(styles))
    return [note(text, 0.0)]


def _framed(data: list[dict[str, Any]], layout: dict[str, Any], styles: Sequence[str], height: int = 320) -> Figure:
    keys = _key(styles)
    margin = {"margin": {"t": 30}} if keys else {}
    return {"data": data, "layout": {**layout, "annotations": keys, **margin}, "height": height}


def sources_figure(runs: Sequence[Run]) -> Figure | None:
    """Share of input tokens by where their KV came from."""
    titles = (
        ("gpu", "GPU cache"),
        ("dram", "node memory"),
        ("shared", "shared tiers"),
        ("peer", "other nodes"),
        ("computed", "computed"),
    )
    facets = []
    for key, title in titles:
        values: list[float | None] = []
        for run in runs:
            tokens = run.summary["tokens_by_source"]
            total = sum(tokens.values())
            values.append(100 * tokens[key] / total if total else None)
        if any(values):
            facets.append((title, values, 150.0, " %"))
    return facets_of(runs, facets, height=90)


def restore_figure(runs: Sequence[Run]) -> Figure | None:
    """Restore times by the lowest tier that they reached."""
    names = _tier_names(runs)
    hover = "%{y:.1f} % within %{x:.3g} s<extra>%{fullData.name}</extra>"
    data, low, high = [], np.inf, 0.0
    for i, run in enumerate(runs):
        for style, name in enumerate(names):
            if run.tiers is None:
                continue
            x, y = restore_distribution(run.tiers, name, window_of(run.info))
            if len(x):
                label = f"{run.info.title}, {tier_name(name)}"
                data.append(_styled(run, i, x, y * 100, hover.replace("%{fullData.name}", safe_text(label, 60)), style))
                low, high = min(low, float(np.interp(0.005, y, x))), max(high, float(x[-1]))
    if not data:
        return None
    layout = {
        "xaxis": log_seconds("restore time (s, logarithmic)", low, high * 1.05),
        "yaxis": axis_of("restores (%)", range=[0, 101], tickvals=[0, 25, 50, 75, 90, 100]),
        "shapes": [guide(y) for y in (50, 90)],
    }
    return _framed(data, layout, [tier_name(name) for name in names], 340)


def _over_time(
    runs: Sequence[Run],
    names: Sequence[str],
    points: Callable[[TierData, str], Any],
    scale: float,
    title: str,
    unit: str,
) -> Figure | None:
    """One line per run and name, styled by name."""
    time, size = time_unit(end_s(runs))
    data = []
    for i, run in enumerate(runs):
        for style, name in enumerate(names):
            if run.tiers is None:
                continue
            x, y = points(run.tiers, name)
            if len(x) and np.any(y):
                label = safe_text(f"{run.info.title}, {tier_name(name)}", 60)
                hover = f"%{{x:.3g}} {time}: %{{y:.3g}} {unit}<extra>{label}</extra>"
                data.append(_styled(run, i, x / size, y / scale, hover, style))
    if not data:
        return None
    layout = {
        "xaxis": axis_of(f"virtual time ({time})", range=[0, end_s(runs) / size]),
        "yaxis": axis_of(title, rangemode="tozero"),
    }
    return _framed(data, layout, [tier_name(name) for name in names])


def read_figure(runs: Sequence[Run]) -> Figure | None:
    return _over_time(runs, _tier_names(runs), lambda d, n: rate_over_time(d, "read", n), GB, "read (GB/s)", "GB/s")


def write_figure(runs: Sequence[Run]) -> Figure | None:
    return _over_time(runs, _tier_names(runs), lambda d, n: rate_over_time(d, "write", n), GB, "written (GB/s)", "GB/s")


def node_figure(runs: Sequence[Run]) -> Figure | None:
    """Mean of the nodes and the fullest one."""

    def points(data: TierData, which: str) -> Any:
        nodes = nodes_of(data, "dram")
        x, mean, high = resident_over_time(data, nodes)
        return x, mean if which == "all nodes, mean" else high

    return _over_time(runs, ("all nodes, mean", "fullest node"), points, GIB, "resident per node (GiB)", "GiB")


def shared_figure(runs: Sequence[Run]) -> Figure | None:
    names = _tier_names(runs, ("shared", "peer"))
    return _over_time(runs, names, lambda d, n: resident_over_time(d, [n])[:2], GIB, "resident (GiB)", "GiB")


def links_figure(runs: Sequence[Run]) -> Figure | None:
    """Of each kind of link the busiest one's use; the six kinds that are used most.

    None where all would be 0: a run whose transfers take less than 1 % of its seconds, which the table of links says.
    """
    use: dict[str, list[float | None]] = {}
    for i, run in enumerate(runs):
        for kind in (run.summary.get("tier") or {}).get("links") or []:
            p99 = kind["busiest"]["utilisation_p99"]
            use.setdefault(kind["kind"], [None] * len(runs))[i] = None if p99 is None else 100 * p99
    if not any(value for values in use.values() for value in values):
        return None
    kinds = sorted(use, key=lambda kind: -max([v for v in use[kind] if v is not None], default=0.0))[:6]
    shown = [kind for kind in use if kind in kinds]
    return facets_of(runs, [(link_name(kind), use[kind], 160.0, " %") for kind in shown], height=90)


def link_time_figure(runs: Sequence[Run]) -> Figure | None:
    """Use of the link that was full for longest, in each run."""
    time, size = time_unit(end_s(runs))
    data = []
    for i, run in enumerate(runs):
        link = busiest_link(run.summary)
        if run.tiers is None or link is None:
            continue
        x, y = rate_over_time(run.tiers, "link", link["link"])
        if len(x):
            label = safe_text(f"{run.info.title}, {link_name(link['link'])}", 60)
            hover = f"%{{x:.3g}} {time}: %{{y:.3g}} %<extra>{label}</extra>"
            data.append(run_line(run, i, x / size, 100 * y / link["capacity_bytes_per_s"], hover))
    if not data:
        return None
    layout = {
        "xaxis": axis_of(f"virtual time ({time})", range=[0, end_s(runs) / size]),
        "yaxis": axis_of("use of its capacity (%)", rangemode="tozero"),
    }
    return {"data": data, "layout": layout, "height": 320}


def lost_figure(runs: Sequence[Run]) -> Figure | None:
    """What was in vain or missing."""

    def worst(share: Callable[[dict[str, Any]], float | None], run: Run) -> float | None:
        found = [v for tier in tiers_of(run.summary) if (v := share(tier)) is not None]
        return 100 * max(found) if found else None

    def broken(run: Run) -> float | None:
        counts = (run.summary.get("tier") or {}).get("restores")
        total = sum(counts[name] for name in ("loaded", "failed", "cancelled")) if counts else 0
        return 100 * (1 - counts["loaded"] / total) if counts and total else None

    again = [lookup(run.summary, ("tier", "computed_again_share")) for run in runs]
    facets = (
        ("computed again", [None if v is None else 100 * v for v in again]),
        ("stores skipped", [worst(skipped_share, run) for run in runs]),
        ("dropped unread", [worst(unread_share, run) for run in runs]),
        ("restores broken off", [broken(run) for run in runs]),
    )
    panels = [
        (title, values, 1.7 * max(1.0, *(v for v in values if v is not None)), " %")
        for title, values in facets
        if any(v is not None for v in values)
    ]
    return facets_of(runs, panels, height=90)


TIER_PLOTS: Final = (
    Plot(
        "tier-sources",
        "Where input tokens came from",
        "Share of the input tokens of the measured window by the place that their KV was found in, or computed.",
        sources_figure,
        wide=True,
    ),
    Plot(
        "tier-restore",
        "Restore time",
        "Share of restores that had their KV on the GPU within the time, by the lowest tier that they reached:"
        " fetching to node memory and copying to the GPU, without waiting for the engine.",
        restore_figure,
    ),
    Plot(
        "tier-read",
        "Reads of the tiers",
        "Bytes that left each tier, all nodes together; means over the bins of the run. Peaks of single seconds"
        " are higher: see the 99th percentile in the table.",
        read_figure,
    ),
    Plot(
        "tier-write",
        "Writes to the tiers",
        "Bytes that entered each tier from above, all nodes together; means over the bins.",
        write_figure,
    ),
    Plot(
        "tier-node",
        "What node memory held",
        "KV that could be found there: all nodes, mean, and the highest of any node in each bin.",
        node_figure,
    ),
    Plot(
        "tier-shared",
        "What the shared tiers held",
        "KV that could be found there, bin means.",
        shared_figure,
    ),
    Plot(
        "tier-link-time",
        "The busiest link over the run",
        "In each run the link that was full for longest; share of its capacity, means over the bins.",
        link_time_figure,
    ),
    Plot(
        "tier-links",
        "Use of the links",
        "Of each kind of link the busiest one: share of its capacity that was used in all but 1 % of the run's"
        " seconds (99th percentile, idle seconds included). 100 % is a full link.",
        links_figure,
        wide=True,
    ),
    Plot(
        "tier-lost",
        "What was missing or in vain",
        "Computed again: share of input tokens that an earlier call had had computed. Of the worst tier: share of"
        " bytes to store that found no room, and of dropped bytes that nobody had read. Restores that failed or"
        " whose call went away.",
        lost_figure,
        wide=True,
    ),
)
"""Only on pages with a run that has tiers."""


def shows_tiers(runs: Sequence[Run]) -> bool:
    """Whether the page has a part on tiers."""
    return any(run.tiers is not None and with_tiers(run.summary) for run in runs)
