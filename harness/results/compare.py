"""Several runs side by side: the rows of the comparison table and which of them is best at what."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

Summary = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of the comparison: where it stands in summary.json and how it is written."""

    key: str
    title: str
    unit: str
    path: tuple[str, ...]
    form: Callable[[float], str]
    better: str = ""
    """"low", "high", or empty where neither is better."""
    group: str = ""


def number(value: float, digits: int = 3) -> str:
    """About `digits` significant digits, no exponent: 0.0123, 1.23, 12.3, 1234."""
    if value == 0:
        return "0"
    magnitude = abs(value)
    decimals = 0
    while magnitude < 10 ** (digits - 1) and decimals < digits + 2:
        magnitude *= 10
        decimals += 1
    return f"{value:,.{decimals}f}"


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def points(value: float) -> str:
    return number(100 * value, 2)


def count(value: float) -> str:
    return f"{value:,.0f}"


def factor(value: float) -> str:
    return f"{value:.2f}"


def setting(value: Any) -> str:
    """A setting's value in one line, as it would stand in the experiment file."""
    return str(yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)).split("\n")[0]


COLUMNS: Final = (
    Column("ttft_p50", "p50", "s", ("ttft_s", "p50"), number, "low", "TTFT"),
    Column("ttft_p90", "p90", "s", ("ttft_s", "p90"), number, "low", "TTFT"),
    Column("ttft_p99", "p99", "s", ("ttft_s", "p99"), number, "low", "TTFT"),
    Column("e2e_p90", "p90", "s", ("e2e_s", "p90"), number, "low", "E2E"),
    Column("rate_p10", "p10", "tok/s", ("output_rate_tok_s", "p10"), number, "high", "Output"),
    Column("rate_p50", "p50", "tok/s", ("output_rate_tok_s", "p50"), number, "high", "Output"),
    Column("hit_token", "tokens", "%", ("hit_rate", "token"), percent, "high", "Hit rate"),
    Column("hit_request", "calls", "%", ("hit_rate", "request"), percent, "high", "Hit rate"),
    Column("tiers", "tokens", "%", ("tier", "token_share"), percent, "", "Tiers"),
    Column("restore_p90", "p90", "s", ("tier", "restores", "s", "p90"), number, "", "Restore"),
    Column("balance", "max/mean", "", ("load_balance", "busiest_over_mean"), factor, "low", "Busy"),
    Column("batch", "mean", "", ("batch_mean",), number, "", "Batch"),
    Column("gap", "mean", "%", ("router_truth_gap", "mean"), points, "low", "Truth gap"),
    Column("timed_out", "late", "", ("measured", "timed_out"), count, "", "Not done"),
    Column("failed", "failed", "", ("measured", "failed"), count, "", "Not done"),
)
"""Neighbours of one group share its heading and unit."""


def groups(columns: Sequence[Column]) -> list[tuple[str, int]]:
    """Headings over neighbouring columns, with the unit, and how many columns each spans."""
    spans: list[tuple[str, int]] = []
    for column in columns:
        heading = f"{column.group}, {column.unit}" if column.unit else column.group
        if spans and spans[-1][0] == heading:
            spans[-1] = (heading, spans[-1][1] + 1)
        else:
            spans.append((heading, 1))
    return spans


def lookup(summary: Summary, path: Sequence[str]) -> float | None:
    """A number of the summary by its path; None where it does not apply."""
    value: Any = summary
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return None if value is None else float(value)


@dataclass(slots=True)
class Row:
    """One run in the table."""

    label: str
    values: dict[str, float | None]
    valid: bool
    baseline: bool
    best: set[str] = field(default_factory=set)
    """Keys of the columns in which no valid run is better."""
    settings: dict[str, Any] = field(default_factory=dict)
    """In what it differs from the others, where that is not the router config alone: field of the experiment, value."""

    @property
    def marked_label(self) -> str:
        """The label with its marks: "(ours)" for a baseline of the harness, "INVALID" where the numbers must
        not be used.
        """
        return self.label + (" (ours)" if self.baseline else "") + ("" if self.valid else " INVALID")

    def cell(self, column: Column) -> str:
        value = self.values[column.key]
        return "-" if value is None else column.form(value)


@dataclass(slots=True)
class Comparison:
    """Rows in the given order; `columns` leaves out what no run has a value for."""

    rows: list[Row]
    columns: tuple[Column, ...]
    load_differs: bool
    """The runs did not get the same load, so they cannot be compared."""
    shared_notes: tuple[str, ...] = ()
    """What a reader has to know of every run."""

    @property
    def varied(self) -> list[str]:
        """Fields of the experiment in which the runs differ; empty where only the router config does."""
        return list(dict.fromkeys(name for row in self.rows for name in row.settings))

    @property
    def heading(self) -> str:
        """What a row of the table is."""
        return "Arm" if self.varied else "Router config"


def compare(summaries: Sequence[Summary]) -> Comparison:
    """Rows and best values. Equal as written counts as equal; a value that most valid runs share is nobody's
    best.
    """
    rows = [
        Row(
            label=str(s.get("label") or s["router"].get("config") or s["experiment"]),
            values={c.key: lookup(s, c.path) for c in COLUMNS},
            valid=bool(s["validity"]["valid"]),
            baseline=s["router"].get("kind") == "baseline",
            settings=dict(s.get("settings") or {}),
        )
        for s in summaries
    ]
    for column in COLUMNS:
        rivals = [r for r in rows if r.valid and r.values[column.key] is not None]
        if not column.better or len(rivals) < 2:
            continue
        values = [float(r.values[column.key] or 0.0) for r in rivals]
        target = column.form(min(values) if column.better == "low" else max(values))
        winners = [r for r in rivals if r.cell(column) == target]
        if 2 * len(winners) <= len(rivals):
            for winner in winners:
                winner.best.add(column.key)
    columns = tuple(c for c in COLUMNS if any(r.values[c.key] is not None for r in rows))
    loads = [(s["load"]["sessions"], s["load"]["calls"], s["load"]["input_tokens"]) for s in summaries]
    notes = merged_notes([s["validity"].get("notes", []) for s in summaries])
    shared = tuple(note for note, runs in notes if len(runs) == len(summaries))
    return Comparison(rows, columns, len(set(loads)) > 1, shared)


_NUMBER: Final = re.compile(r"(?<![\w./-])\d+(?:,\d{3})*(?:\.\d+)?(?![\w-]|\.\d)")
"""A number that stands alone: none in a name (llama-3.1-8b) or a release (v0.7.1)."""
VERDICT: Final = "service level"
"""How notes begin that judge one run: each keeps its own number."""


def merged_notes(notes: Sequence[Sequence[str]]) -> list[tuple[str, list[int]]]:
    """Notes of all runs, each once, with the runs (by position) that it is of.

    Notes that differ in numbers alone become one, with the range: "GPUs were busy 2.1 to 3.4% of the time".
    """
    alike: dict[str, list[tuple[int, str]]] = {}
    for run, texts in enumerate(notes):
        for text in dict.fromkeys(texts):
            key = text if text.startswith(VERDICT) else _NUMBER.sub("#", text)
            alike.setdefault(key, []).append((run, text))
    return [
        (_ranges([text for _, text in same]), list(dict.fromkeys(run for run, _ in same))) for same in alike.values()
    ]


def _ranges(texts: Sequence[str]) -> str:
    """One text for several that differ in numbers alone."""
    columns = iter(zip(*(_NUMBER.findall(text) for text in texts), strict=True))

    def both(_: re.Match[str]) -> str:
        ranked = sorted(next(columns), key=lambda number: float(number.replace(",", "")))
        return ranked[0] if ranked[0] == ranked[-1] else f"{ranked[0]} to {ranked[-1]}"

    return _NUMBER.sub(both, texts[0])
