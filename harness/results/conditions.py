"""The report's lower half: what was run, what to beware of, what it cost, how to repeat it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from harness.results.compare import Comparison, merged_notes, number
from harness.results.markup import Markup, tag
from harness.results.page_parts import scrolled
from harness.results.store import Run


def written(value: Any) -> Markup | str:
    """A fact's value for reading."""
    if value is None or value == "":
        return "\u2013"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return number(value, 4)
    if isinstance(value, (list, tuple)) and all(isinstance(v, (str, int)) for v in value):
        return ", ".join(map(str, value)) or "\u2013"
    if isinstance(value, (dict, list, tuple)):
        return tag("code", json.dumps(value, ensure_ascii=False, default=str))
    return str(value)


def _list(pairs: Sequence[tuple[str, Any]]) -> Markup:
    return tag("dl", [(tag("dt", key), tag("dd", value)) for key, value in pairs], class_="facts")


def _common(title: str, runs: Sequence[Run], facts: Sequence[dict[str, Any]]) -> Markup | None:
    """Facts of all runs under one title: one value where they agree, one per run where they do not."""
    keys = list(dict.fromkeys(key for fact in facts for key in fact))
    if not keys:
        return None
    rows: list[tuple[str, Any]] = []
    for key in keys:
        values = [fact.get(key) for fact in facts]
        if all(value == values[0] for value in values):
            rows.append((key, written(values[0])))
        else:
            pairs = zip(runs, values, strict=True)
            rows.append((key, [tag("div", run.info.title, ": ", written(v)) for run, v in pairs]))
    return tag("div", tag("h3", title), _list(rows), class_="panel")


def _load_facts(run: Run) -> dict[str, Any]:
    load = run.info.load
    return {
        "experiment": run.info.name,
        "seed": str(run.info.seed) if run.info.seed is not None else None,
        "sessions": load.sessions,
        "calls": load.calls,
        "input tokens": load.input_tokens,
        "output tokens": load.output_tokens,
        "sessions per hour and node": load.sessions_per_hour_per_node,
        **run.info.workload,
    }


def _cache_facts(run: Run) -> dict[str, Any]:
    cache = {f"cache {k}": v for k, v in run.info.cache.items() if v is not None}
    return {"endpoints": len(run.info.endpoint_nodes), "nodes": run.info.nodes, **run.info.cluster, **cache}


def _router_pairs(run: Run) -> list[tuple[str, Any]]:
    router = run.info.router
    named = ("config_text", "added")
    rest = [(key.replace("_", " "), router[key]) for key in router if key not in named]
    rest.append(("added by the harness", router.get("added")))
    rest.extend((f"measured: {key.replace('_', ' ')}", value) for key, value in run.info.router_stats.items())
    return [(key, written(value)) for key, value in rest]


def _text_block(title: str, text: str, open_: bool) -> Markup:
    return tag("details", tag("summary", title), tag("pre", tag("code", text)), open=open_)


def conditions(runs: Sequence[Run], swatches: Sequence[Markup]) -> Markup:
    """Workload, cluster, step times and versions, common to the runs; then each run's router."""
    panels = [
        _common("Workload", runs, [_load_facts(run) for run in runs]),
        _common("Cluster", runs, [_cache_facts(run) for run in runs]),
        _common("Step times", runs, [run.info.profile for run in runs]),
        _common("Front end", runs, [run.info.front_end for run in runs]),
        _common("Versions", runs, [run.info.versions for run in runs]),
    ]
    routers = []
    for run, mark in zip(runs, swatches, strict=True):
        text = run.info.router.get("config_text")
        inner = [_list(_router_pairs(run))]
        if text:
            inner.append(_text_block("Router config, exactly as given", str(text), open_=True))
        inner.append(_text_block("Resolved experiment", run.info.experiment_yaml, open_=False))
        kind = "baseline of the harness" if run.info.is_baseline else "real router"
        release = run.info.router.get("release")
        about = tag("span", f"{kind}{f' {release}' if release else ''}", class_="about")
        summary = tag("summary", mark, run.info.title, about)
        routers.append(tag("details", summary, inner, class_="run", open=len(runs) == 1))
    grid = tag("div", panels, class_="panels")
    return tag("section", tag("h2", "Run conditions"), grid, tag("h3", "Routers"), routers, id="conditions")


def validity(runs: Sequence[Run], comparison: Comparison, bad: bool) -> Markup | None:
    """With `bad`: why numbers must not be used, if so. Without: what to know to use them, or that nothing was
    recorded.
    """
    if bad:
        items: list[tuple[Any, ...]] = [
            (tag("strong", run.info.title), ": ", reason)
            for run in runs
            for reason in run.summary["validity"]["reasons"]
        ]
        if comparison.load_differs:
            items.append(("The runs did not get the same load, so their numbers cannot be compared.",))
        if not items:
            return None
        heading = tag("h2", "Not to be used")
        return tag("section", heading, tag("ul", [tag("li", item) for item in items]), class_="box bad", id="invalid")
    titles = [run.info.title for run in runs]
    items = [
        (
            note,
            tag("span", f" ({', '.join(titles[i] for i in of)})", class_="about") if len(of) < len(runs) else None,
        )
        for note, of in merged_notes([run.info.notes for run in runs])
    ]
    baselines = [run.info.title for run in runs if run.info.is_baseline]
    if baselines:
        items.append((f"{', '.join(baselines)}: a baseline written for this harness, no real router decided.",))
    if not items:
        text = tag("p", "No fall-back, cap or extrapolation was recorded.")
        return tag("section", tag("h2", "To know when reading"), text, class_="box", id="notes")
    body = tag("ul", [tag("li", item) for item in items])
    return tag("section", tag("h2", "To know when reading"), body, class_="box", id="notes")


def costs(runs: Sequence[Run], swatches: Sequence[Markup]) -> Markup:
    """What the simulation itself took."""
    heads: tuple[str, ...] = ("Run", "virtual, s", "wall, s", "virtual / wall", "CPU, s", "peak memory, MiB")
    heads += ("decisions", "events", "steps")
    body = []
    for run, mark in zip(runs, swatches, strict=True):
        info, virtual = run.info, run.info.virtual_ns / 1e9
        values = (
            virtual,
            info.wall_s,
            virtual / info.wall_s if info.wall_s else None,
            info.cpu_s,
            None if info.peak_rss_bytes is None else info.peak_rss_bytes / 2**20,
            info.decisions,
            info.events,
            info.steps,
        )
        cells = [tag("td", "\u2013" if v is None else f"{v:,.0f}" if v >= 100 else number(v)) for v in values]
        body.append(tag("tr", tag("th", mark, info.title, scope="row", class_="name"), cells))
    head = tag("tr", [tag("th", h, scope="col", class_="name" if h == "Run" else None) for h in heads])
    table = tag("table", tag("thead", head), tag("tbody", body))
    region = scrolled(table, "Costs of the simulation")
    return tag("section", tag("h2", "What the simulation took"), region, id="costs")


def repeat(runs: Sequence[Run], swatches: Sequence[Markup]) -> Markup:
    """The exact commands, and the digests that a repetition must give."""
    commands = list(dict.fromkeys(run.info.command for run in runs if run.info.command))
    body = [
        tag(
            "tr",
            tag("th", mark, run.info.title, scope="row", class_="name"),
            tag("td", tag("code", run.summary["digest"], class_="hash")),
        )
        for run, mark in zip(runs, swatches, strict=True)
    ]
    head = tag(
        "tr",
        tag("th", "Run", scope="col", class_="name"),
        tag("th", "Digest of all call records", scope="col", class_="text"),
    )
    table = tag("table", tag("thead", head), tag("tbody", body), class_="digests")
    return tag(
        "section",
        tag("h2", "How to repeat"),
        tag("pre", tag("code", "\n".join(commands))) if commands else None,
        tag("p", "The same versions give the same digests.", class_="note"),
        scrolled(table, "Digests"),
        id="repeat",
    )


_TERMS = (
    ("TTFT", "Time to first token: from the call's arrival at the router to its first output token."),
    ("E2E", "End to end: from arrival to last token."),
    (
        "Output rate",
        "Of one call: output tokens over the time from first to last token. Calls of one token have none.",
    ),
    (
        "Hit rate",
        "Tokens: reused input tokens over input tokens. Calls: share of calls that reused anything.",
    ),
    ("Busy, max/mean", "GPU-busy time of the busiest node over the mean of all nodes, whole run. 1 is even."),
    ("Batch", "Running requests of an endpoint, mean over its GPU-busy time."),
    (
        "Truth gap",
        "Difference between the prefix share that the router scored for the chosen endpoint and the share"
        " that the endpoint held, in points of the prompt, at each decision.",
    ),
    (
        "Late, failed",
        "Calls that ended in the measured window by the client's time-out, or by a failure or refusal. They"
        " have no latency.",
    ),
)


_TIER_TERMS = (
    (
        "Tiers",
        "Places below the GPU that hold KV: the node's memory, then shared ones; their share of the input.",
    ),
    ("Restore", "Bringing KV from the tiers to the GPU: fetching it to node memory, copying it; without other waits."),
)


def glossary(tiers: bool = False, gap: bool = True) -> Markup:
    """The words of the table, short; docs/metrics.md has the full definitions. With `tiers` those of cache tiers, with
    `gap` the truth gap.
    """
    words = [word for word in _TERMS if gap or word[0] != "Truth gap"] + list(_TIER_TERMS if tiers else ())
    terms = [(tag("dt", term), tag("dd", text)) for term, text in words]
    return tag("section", tag("h2", "Words"), tag("dl", terms, class_="facts words"), id="words")
