"""Tables and page of a disaggregation study: published next to ours, figures over the study's axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.results.figure import axis_of, log_seconds, rounded, run_color
from harness.results.markup import Markup, tag
from harness.results.page_parts import comparison_table, legend, plot_card
from harness.results.page_shell import page, page_header
from harness.studies.disagg.arms import ArmResult

TITLES = {
    "ttft_mean_s": ("TTFT mean", "ms"),
    "ttft_p50_s": ("TTFT p50", "ms"),
    "ttft_p90_s": ("TTFT p90", "ms"),
    "ttft_p95_s": ("TTFT p95", "ms"),
    "ttft_p99_s": ("TTFT p99", "ms"),
    "e2e_mean_s": ("E2E mean", "ms"),
    "e2e_p95_s": ("E2E p95", "ms"),
    "e2e_p99_s": ("E2E p99", "ms"),
    "e2e_p90_s": ("E2E p90", "ms"),
    "tpot_mean_s": ("TPOT mean", "ms"),
    "tpot_p50_s": ("TPOT p50", "ms"),
    "tpot_p90_s": ("TPOT p90", "ms"),
    "tpot_p95_s": ("TPOT p95", "ms"),
    "tpot_p99_s": ("TPOT p99", "ms"),
    "itl_p50_s": ("ITL p50", "ms"),
    "itl_p99_s": ("ITL p99", "ms"),
    "completed_per_s": ("completed", "req/s"),
    "output_tok_s": ("output", "tok/s"),
    "hit_share": ("prefix hits", "%"),
    "reused_share": ("prefix reused", "%"),
    "interference_steps": ("mixed steps", "%"),
    "kv_moved_bytes": ("KV moved", "GB"),
    "transfer_bytes_per_s": ("transfer rate", "GB/s"),
    "prefill_queue_mean_s": ("prefill queue", "ms"),
    "prefill_mean_s": ("prefill", "ms"),
    "transfer_mean_s": ("transfer", "ms"),
    "decode_queue_mean_s": ("decode queue", "ms"),
    "first_step_mean_s": ("first step", "ms"),
    "busy_prefill": ("prefill busy", "%"),
    "busy_decode": ("decode busy", "%"),
    "busy_both": ("busy", "%"),
}
_SCALES = {"ms": 1e3, "%": 100.0, "GB": 1e-9, "GB/s": 1e-9}


@dataclass(slots=True)
class Study:
    """What a study is, beside its arms. `plots`: figures drawn over `axis`, if the arms have an x."""

    name: str
    title: str
    sources: Sequence[str]
    notes: Sequence[str]
    columns: Sequence[str]
    axis: str = ""
    plots: Sequence[str] = ()
    answers: list[str] = field(default_factory=list)
    """What comes out, in sentences."""


def number(name: str, value: float | None) -> str:
    """A figure with its unit's scale."""
    if value is None:
        return "-"
    shown = value * _SCALES.get(TITLES[name][1], 1.0)
    return f"{shown:,.0f}" if abs(shown) >= 1000 else f"{shown:,.3g}"


def cell(name: str, ours: float | None, published: float | None) -> str:
    """`published / ours / ratio`, or ours alone."""
    if published is None:
        return number(name, ours)
    ratio = "-" if ours is None else f"{ours / published:.2f}"
    return f"{number(name, published)} / {number(name, ours)} / {ratio}"


def distinct(results: Sequence[ArmResult]) -> list[ArmResult]:
    """Each arm once; one that is drawn as a level line is in the results for both of its ends."""
    return list({result.name: result for result in results}.values())


def heading(name: str) -> str:
    """Title and unit of a column."""
    title, unit = TITLES[name]
    return f"{title} {unit}"


def markdown(study: Study, results: Sequence[ArmResult]) -> str:
    """The study as Markdown."""
    lines = [f"## {study.title}", "", *[f"- {answer}" for answer in study.answers], ""]
    lines += ["| arm | " + " | ".join(map(heading, study.columns)) + " |"]
    lines += ["| :--- |" + " ---: |" * len(study.columns)]
    for result in distinct(results):
        cells = [cell(c, result.figures.get(c), result.published.get(c)) for c in study.columns]
        lines.append(f"| {result.name} | " + " | ".join(cells) + " |")
    for result in results:
        if result.parts:
            lines += ["", f"### {result.name}, stage by stage", ""]
            names = [c for c in study.columns if any(c in part for part in result.parts.values())]
            lines += ["| stage | " + " | ".join(map(heading, names)) + " |", "| ---: |" + " ---: |" * len(names)]
            for stage, part in result.parts.items():
                theirs = [result.published.get(f"{stage}:{c}") for c in names]
                cells = [cell(c, part.get(c), p) for c, p in zip(names, theirs, strict=True)]
                lines.append(f"| {stage} | " + " | ".join(cells) + " |")
    lines += ["", "Cells: published / ours / ratio where a figure was published, else ours.", ""]
    lines += [f"- {note}" for note in study.notes]
    lines += [f"- {result.name} is not valid: {reason}" for result in results for reason in result.invalid]
    return "\n".join(lines) + "\n"


def render(study: Study, results: Sequence[ArmResult], command: str) -> str:
    """The study's page as HTML."""
    series = list(dict.fromkeys(result.series for result in results))
    figures = {name: _figure(name, study, results, series) for name in study.plots} if study.axis else {}
    plots = [plot_card(name, figure, TITLES[name][0]) for name, figure in figures.items()]
    body = [
        page_header(
            f"study {study.name}",
            study.title,
            study.answers,
            tag("p", "Published: " + "; ".join(study.sources), class_="context"),
        ),
        tag(
            "main",
            tag(
                "section",
                legend(series, "Series shown in the plots"),
                tag("p", "Solid with points: ours. Dotted: published.", class_="note"),
                tag("div", plots, class_="grid"),
            )
            if plots
            else None,
            _table(study, [(r.name, r.figures, r.published) for r in distinct(results)], "Arms"),
            [
                _table(
                    study,
                    [(stage, part, _of_stage(r.published, stage)) for stage, part in r.parts.items()],
                    f"{r.name}, stage by stage",
                )
                for r in results
                if r.parts
            ],
            _conditions(study, results, command),
        ),
    ]
    return page(study.title, body, figures)


def _of_stage(published: Mapping[str, float], stage: str) -> dict[str, float]:
    head = f"{stage}:"
    return {name.removeprefix(head): value for name, value in published.items() if name.startswith(head)}


def _figure(name: str, study: Study, results: Sequence[ArmResult], series: Sequence[str]) -> dict[str, Any]:
    unit = TITLES[name][1]
    scale = _SCALES.get(unit, 1.0)
    data: list[dict[str, Any]] = []
    seen: list[float] = []
    for i, one in enumerate(series):
        points = [(r.x, r.figures.get(name), r.published.get(name)) for r in results if r.series == one]
        ours = [(x, y) for x, y, _ in points if x is not None and y is not None]
        theirs = [(x, y) for x, _, y in points if x is not None and y is not None]
        for found, who, dash in ((theirs, "published", "dot"), (ours, "ours", "solid")):
            if not found:
                continue
            symbol = "circle" if who == "ours" else "circle-open"
            seen += [y for _, y in found]
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": f"{one}, {who}",
                    "meta": {"run": i},
                    "x": [x for x, _ in found],
                    "y": rounded([y * (1 if unit == "ms" else scale) for _, y in found]),
                    "line": {"color": run_color(i), "width": 2, "dash": dash},
                    "marker": {"size": 6, "color": run_color(i), "symbol": symbol},
                    "hovertemplate": f"{one}, {who}: %{{y:.4g}} at %{{x:g}}<extra></extra>",
                }
            )
    xs = [r.x for r in results if r.x is not None]
    wide = bool(xs) and min(xs) > 0 and max(xs) / min(xs) > 8
    x = axis_of(study.axis, **({"type": "log"} if wide else {}))
    if unit == "ms":
        y = log_seconds("s", min(seen, default=0.1) / 1.3, max(seen, default=1.0) * 1.3)
    else:
        y = axis_of(unit, rangemode="tozero")
    return {"data": data, "layout": {"xaxis": x, "yaxis": y}, "height": 320}


def _table(study: Study, rows: Sequence[tuple[str, Mapping[str, Any], Mapping[str, float]]], title: str) -> Markup:
    names = [c for c in study.columns if any(figures.get(c) is not None for _, figures, _ in rows)]
    head = [tag("th", "", scope="col")] + [tag("th", heading(c), scope="col") for c in names]
    body = [
        tag(
            "tr",
            tag("th", name, scope="row", class_="name"),
            [tag("td", cell(c, figures.get(c), published.get(c))) for c in names],
        )
        for name, figures, published in rows
    ]
    return tag(
        "section",
        tag("h2", title),
        tag("p", "Published / ours / ratio where a figure was published, else ours.", class_="note"),
        comparison_table(head, body, title),
    )


def _conditions(study: Study, results: Sequence[ArmResult], command: str) -> Markup:
    lines = [tag("li", note) for note in study.notes]
    for result in distinct(results):
        router = result.router
        who = f"{router.get('kind')} {router.get('release') or ''} {router.get('config') or ''}".strip()
        more = f"sha256 {router['sha256']}, " if router.get("sha256") else ""
        lines.append(tag("li", f"{result.name}: {who}, {more}digest {result.digest[:12]}, {result.wall_s:.0f} s"))
        lines += [tag("li", f"{result.name} is not valid: {reason}") for reason in result.invalid]
    return tag("section", tag("h2", "What was run"), tag("p", tag("code", command)), tag("ul", lines))
