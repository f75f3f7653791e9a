"""The page's tables on cache tiers: what each tier served, moved, held and lost; and the links."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from harness.results.compare import number, percent, points
from harness.results.markup import Markup, tag
from harness.results.page_parts import scrolled
from harness.results.store import Run
from harness.results.tier_words import link_name, skipped_share, tier_name, tiers_of, unread_share

GB: Final = 1e9
GIB: Final = 1 << 30

_GROUPS: Final = (
    ("Served", ("tokens, %", "loads")),
    ("Restore, s", ("p50", "p90")),
    ("Per restore, GB", ("mean", "p90")),
    ("Read, GB/s", ("mean", "p99")),
    ("Written, GB/s", ("mean", "p99")),
    ("Holds, GiB", ("mean", "most", "room")),
    ("In vain, %", ("unread", "skipped")),
)


def _scaled(value: float | None, unit: float) -> str:
    return "\u2013" if value is None else number(value / unit)


def _share(value: float | None) -> str:
    return "\u2013" if value is None else percent(value)


def _cells(tier: dict[str, Any], input_tokens: int) -> list[str]:
    restores = tier["restores"]
    room = tier["capacity_bytes"]
    return [
        _share(tier["served_tokens"] / input_tokens if input_tokens else None),
        f"{restores['loaded']:,}",
        _scaled(restores["s"]["p50"], 1),
        _scaled(restores["s"]["p90"], 1),
        _scaled(restores["bytes"]["mean"], GB),
        _scaled(restores["bytes"]["p90"], GB),
        *(_scaled(tier[f"{way}_bytes_per_s_{what}"], GB) for way in ("read", "write") for what in ("mean", "p99")),
        _scaled(tier["resident_bytes_mean"], GIB),
        _scaled(tier["peak_bytes"], GIB),
        "any" if room is None else number(room / GIB),
        _share(unread_share(tier)),
        _share(skipped_share(tier)),
    ]


def tiers_table(runs: Sequence[Run], swatches: Sequence[Markup]) -> Markup:
    """One row per run and tier."""
    columns = [name for _, names in _GROUPS for name in names]
    starts, at = set(), 0
    for _, names in _GROUPS:
        starts.add(at)
        at += len(names)
    heads = tag(
        "tr",
        tag("th", "Tier", rowspan=2, scope="col", class_="name"),
        [tag("th", group, colspan=len(names), scope="colgroup") for group, names in _GROUPS],
    )
    titles = tag(
        "tr", [tag("th", c, scope="col", class_="start" if i in starts else None) for i, c in enumerate(columns)]
    )
    body = []
    for run, mark in zip(runs, swatches, strict=True):
        tokens = sum(run.summary["tokens_by_source"].values())
        for tier in tiers_of(run.summary):
            if "restores" not in tier:
                continue
            who = (f"{run.info.title}: " if len(runs) > 1 else "") + tier_name(tier["name"])
            name = tag("th", mark, tag("span", who, class_="label"), scope="row", class_="name")
            cells = [
                tag("td", cell, class_="start" if i in starts else None) for i, cell in enumerate(_cells(tier, tokens))
            ]
            body.append(tag("tr", name, cells))
    note = (
        "Served tokens, loads into GPUs: measured window; restore times of those that reached down to the tier and no"
        " further. The rest: whole run, p99 over its seconds. Read and written: all nodes together. Holds: node memory"
        " per node, most of any node. Unread: share of dropped bytes that were never"
        " read. Skipped: share of bytes to store that found no room."
    )
    table = tag("table", tag("thead", heads, titles), tag("tbody", body), class_="comparison tiers")
    return tag("div", scrolled(table, "Cache tiers"), tag("p", note, class_="note"))


def links_table(runs: Sequence[Run], swatches: Sequence[Markup]) -> Markup | None:
    """Of each kind of link the busiest one; one row per run and kind."""
    body = []
    for run, mark in zip(runs, swatches, strict=True):
        for kind in (run.summary.get("tier") or {}).get("links") or []:
            link = kind["busiest"]
            who = (f"{run.info.title}: " if len(runs) > 1 else "") + link_name(link["link"])
            values = (
                f"{kind['links']:,}",
                number(link["capacity_bytes_per_s"] / GB),
                number(kind["bytes"] / GB),
                *(
                    "\u2013" if link[key] is None else points(link[key])
                    for key in ("utilisation_mean", "utilisation_p99", "busy_share", "full_share")
                ),
            )
            name = tag("th", mark, tag("span", who, class_="label"), scope="row", class_="name")
            body.append(tag("tr", name, [tag("td", value) for value in values]))
    if not body:
        return None
    titles = ("links of its kind", "GB/s", "GB, all of the kind", "used, mean %", "used, p99 %", "in use, %", "full, %")
    head = tag(
        "tr",
        tag("th", "Busiest link of each kind", scope="col", class_="name"),
        [tag("th", title, scope="col") for title in titles],
    )
    table = tag("table", tag("thead", head), tag("tbody", body), class_="links")
    note = "Share of its capacity over the whole run (p99: over its seconds), and shares of the time. Full: 99 %."
    return tag("div", tag("h3", "Links", class_="part"), scrolled(table, "Links"), tag("p", note, class_="note"))
