"""Published against ours: rows per stage, errors per arm, where each saturates; as data, as text and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from harness.studies.ladder import METRICS, Ladder
from harness.studies.llmd import ArmResult
from harness.studies.stages import SATURATED_P90_S, mean_over_seeds, saturation_rate

TITLES = {
    "output_tok_s": "output tok/s",
    "ttft_mean_s": "TTFT mean s",
    "ttft_p90_s": "TTFT p90 s",
    "itl_mean_s": "ITL mean ms",
    "total_tok_s": "total tok/s",
    "e2e_mean_s": "E2E mean s",
    "e2e_p90_s": "E2E p90 s",
}


@dataclass(slots=True)
class Errors:
    """Relative errors of one metric over stages."""

    mean_absolute: float
    bias: float
    stages: int


@dataclass(slots=True)
class ArmTable:
    """One arm beside its published figures."""

    name: str
    rows: list[dict[str, float]]
    """Ours: mean over seeds, by stage."""
    published: dict[float, dict[str, float]]
    errors: dict[str, Errors] = field(default_factory=dict)
    off_knee: dict[str, Errors] = field(default_factory=dict)
    """The same without the two stages around the published saturation rate."""
    ttft_offset_s: float | None = None
    """Median of published minus our mean TTFT over stages where neither is saturated."""
    saturates_at: float | None = None
    published_saturates_at: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "arm": self.name,
            "stages": [{"ours": row, "published": self.published.get(row["rate"], {})} for row in self.rows],
            "errors": {metric: asdict(error) for metric, error in self.errors.items()},
            "errors_away_from_the_knee": {metric: asdict(error) for metric, error in self.off_knee.items()},
            "ttft_offset_s": self.ttft_offset_s,
            "saturates_at": self.saturates_at,
            "published_saturates_at": self.published_saturates_at,
        }


def arm_table(ladder: Ladder, result: ArmResult, scale: str) -> ArmTable:
    """One arm's table. The stages of scale small are not the published ones: nothing is compared there."""
    rows = mean_over_seeds(result.runs)
    published = ladder.published(result.name) if scale == "full" else {}
    table = ArmTable(result.name, rows, published)
    table.saturates_at = saturation_rate([(row["rate"], row["ttft_p90_s"]) for row in rows])
    points = [(rate, values["ttft_p90_s"]) for rate, values in sorted(published.items()) if "ttft_p90_s" in values]
    table.published_saturates_at = saturation_rate(points)
    knee = _knee(points, table.published_saturates_at)
    for metric in ladder.metrics:
        pairs = [(r["rate"], r[metric], published.get(r["rate"], {}).get(metric)) for r in rows]
        ratios = [(rate, ours / theirs - 1) for rate, ours, theirs in pairs if theirs]
        if ratios:
            table.errors[metric] = _errors([e for _, e in ratios])
        away = [e for rate, e in ratios if rate not in knee]
        if away:
            table.off_knee[metric] = _errors(away)
    table.ttft_offset_s = _offset(rows, published)
    return table


def _errors(values: Sequence[float]) -> Errors:
    return Errors(sum(map(abs, values)) / len(values), sum(values) / len(values), len(values))


def _knee(points: Sequence[tuple[float, float]], at: float | None) -> set[float]:
    if at is None:
        return set()
    below = [rate for rate, _ in points if rate <= at]
    above = [rate for rate, _ in points if rate > at]
    return {*below[-1:], *above[:1]}


def _offset(rows: Sequence[dict[str, float]], published: dict[float, dict[str, float]]) -> float | None:
    gaps = []
    for row in rows:
        theirs = published.get(row["rate"], {})
        known = {"ttft_mean_s", "ttft_p90_s"} <= theirs.keys()
        if known and max(theirs["ttft_p90_s"], row["ttft_p90_s"]) < SATURATED_P90_S:
            gaps.append(theirs["ttft_mean_s"] - row["ttft_mean_s"])
    return sorted(gaps)[len(gaps) // 2] if gaps else None


def markdown(ladder: Ladder, tables: Sequence[ArmTable], results: Sequence[ArmResult]) -> str:
    """The whole study as Markdown: published / ours / ratio per stage, then errors per arm."""
    lines = [f"## {ladder.title}", ""]
    for table, result in zip(tables, results, strict=True):
        seeds = f"mean of {len(result.seeds)} seeds" if len(result.seeds) > 1 else "one seed"
        lines += [f"### {table.name} ({seeds})", "", *_stage_lines(table, ladder.metrics), ""]
    why = not_compared(ladder, tables)
    if why is None:
        lines += ["### Errors", "", *_error_lines(tables, ladder.metrics), ""]
    else:
        lines += [why, "", *(f"- {table.name}: saturation {rate_text(table.saturates_at)}" for table in tables), ""]
    return "\n".join(lines)


def not_compared(ladder: Ladder, tables: Sequence[ArmTable]) -> str | None:
    """Why nothing stands beside published figures, in a sentence; None where something does."""
    if any(table.published for table in tables):
        return None
    if any(ladder.published(table.name) for table in tables):
        return "Ours alone: the stages of scale small do not match the published ones (--scale full has those)."
    return "Ours alone: the ladder has no published figures."


def metrics_of(table: ArmTable) -> list[str]:
    """Metrics that are published for any stage; all where nothing is."""
    found = [m for m in TITLES if any(m in values for values in table.published.values())]
    return found or list(METRICS)


def _stage_lines(table: ArmTable, metrics: Sequence[str]) -> list[str]:
    known = set(metrics_of(table)) if table.published else set()
    head = " | ".join(f"{TITLES[m]}{': published / ours / ratio' if m in known else ': ours'}" for m in metrics)
    lines = [f"| rate | {head} |", "| ---: |" + " ---: |" * len(metrics)]
    for row in table.rows:
        theirs = table.published.get(row["rate"], {})
        cells = [cell(m, row[m], theirs.get(m)) for m in metrics]
        lines.append(f"| {row['rate']:g} | " + " | ".join(cells) + " |")
    return lines


def cell(metric: str, ours: float, theirs: float | None) -> str:
    """`published / ours / ratio`, or ours alone."""
    mine = number(metric, ours)
    return mine if theirs is None else f"{number(metric, theirs)} / {mine} / {ours / theirs:.2f}"


def number(metric: str, value: float) -> str:
    """A figure with the digits that are worth reading."""
    if math.isnan(value):
        return "-"
    if metric in ("output_tok_s", "total_tok_s"):
        return f"{value:,.0f}"
    if metric == "itl_mean_s":
        return f"{value * 1e3:.1f}"
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _error_lines(tables: Sequence[ArmTable], metrics: Sequence[str]) -> list[str]:
    head = "| arm | " + " | ".join(f"{TITLES[m]}: error (bias), away from the knee" for m in metrics)
    lines = [head + " | TTFT lower by | saturation: published / ours |", "| :--- |" + " ---: |" * (len(metrics) + 2)]
    for table in tables:
        cells = [error_text(table, m) for m in metrics]
        cells.append("-" if table.ttft_offset_s is None else f"{table.ttft_offset_s:.3f} s")
        theirs = "-" if not table.published else rate_text(table.published_saturates_at)
        cells.append(f"{theirs} / {rate_text(table.saturates_at)}")
        lines.append(f"| {table.name} | " + " | ".join(cells) + " |")
    return lines


def error_text(table: ArmTable, metric: str) -> str:
    """Mean absolute error with bias, and the error away from the knee."""
    error = table.errors.get(metric)
    if error is None:
        return "-"
    away = table.off_knee.get(metric)
    text = f"{error.mean_absolute:.1%} ({error.bias:+.1%})"
    return text if away is None else f"{text}, {away.mean_absolute:.1%}"


def rate_text(rate: float | None) -> str:
    """A saturation rate in words."""
    return "not reached" if rate is None else f"at {rate:.1f} req/s"
