"""The restore study as a table: published, ours, ratio; what misses first, with its cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from harness.studies.restore import CLOSE, Result
from harness.studies.tables import Line, Plot, TableStudy

_RECOMPUTE, _LOAD = 4, 7
"""Columns of the ratios."""
_FIGURES = (("recompute", "recompute_ms"), ("load", "load_ms"))


def restore_study(results: Sequence[Result], command: str) -> TableStudy:
    """All cases in one table."""
    rows: list[list[str]] = []
    marked: set[tuple[int, int]] = set()
    for result in results:
        for row in result.rows:
            if row in result.missed("recompute"):
                marked.add((len(rows), _RECOMPUTE))
            if row in result.missed("load"):
                marked.add((len(rows), _LOAD))
            rows.append(
                [
                    result.case.name,
                    f"{row.tokens:,}",
                    *_cells(row.published_recompute_ms, row.recompute_ms),
                    *_cells(row.published_load_ms, row.load_ms, given=result.case.given == "load"),
                ]
            )
    headings = ["case", "tokens", "recompute, ms: published", "ours", "ratio", "load, ms: published", "ours", "ratio"]
    return TableStudy(
        name="restore",
        title="Restoring a prefix against computing it again",
        answers=[*_misses(results), *_met(results), *_crossovers(results), *_invalid(results)],
        headings=headings,
        rows=rows,
        plots=[_plot(result) for result in results],
        notes=[f"{result.case.name}: {result.case.title}. {result.case.source.strip()}" for result in results],
        legend=["load", "recompute"],
        legend_note="Solid with points: ours. Dotted: published. In the table, bold is off by more than a fifth.",
        command=command,
        marked=marked,
    )


def document(results: Sequence[Result], command: str, scale: str) -> dict[str, Any]:
    """The study as data."""
    return {
        "study": "restore",
        "scale": scale,
        "command": command,
        "cases": [
            {
                "name": result.case.name,
                "source": result.case.source.strip(),
                "digest": result.digest,
                "invalid": result.invalid,
                "rows": [
                    {**asdict(row), "recompute_ratio": row.recompute_ratio, "load_ratio": row.load_ratio}
                    for row in result.rows
                ],
            }
            for result in results
        ],
    }


def _cells(published: float, ours: float, given: bool = False) -> list[str]:
    return [f"{published:,.1f}", f"{ours:,.1f}", "given" if given else f"{ours / published:.2f}"]


def _misses(results: Sequence[Result]) -> list[str]:
    """First what is off by more than CLOSE, largest first, with the cause."""
    lines: list[tuple[float, str]] = []
    for result in results:
        for figure, key in _FIGURES:
            missed = result.missed(figure)  # type: ignore[arg-type]
            if not missed:
                continue
            ratios = [getattr(row, f"{figure}_ratio") for row in missed]
            reach = f"{min(ratios):.2f}" + (f" to {max(ratios):.2f}" if len(ratios) > 1 else "")
            why = " ".join(result.case.why.get(key, "Cause not found.").split())  # type: ignore[call-overload]
            text = f"Off, {result.case.name}, {figure}: {reach} of the published times. {why}"
            lines.append((max(abs(ratio - 1) for ratio in ratios), text))
    return [text for _, text in sorted(lines, key=lambda line: -line[0])]


def _met(results: Sequence[Result]) -> list[str]:
    lines = []
    for result in results:
        for figure, _ in _FIGURES:
            if figure == result.case.given or result.missed(figure):  # type: ignore[arg-type]
                continue
            ratios = [getattr(row, f"{figure}_ratio") for row in result.rows]
            reach = f"{min(ratios):.2f} to {max(ratios):.2f} of the published times"
            lines.append(f"Within {CLOSE:.0%}, {result.case.name}, {figure}: {reach}.")
    return lines


def _crossovers(results: Sequence[Result]) -> list[str]:
    lines = []
    for result in results:
        theirs, ours = result.crossover_tokens(published=True), result.crossover_tokens(published=False)
        if result.case.given == "load" and theirs and ours:
            losers = sum(row.load_ms > row.recompute_ms for row in result.rows)
            lines.append(
                f"A slow tier loses to recompute, {result.case.name}: at {losers} of {len(result.rows)} lengths; "
                f"loading begins to pay at {ours:,.0f} tokens, published {theirs:,.0f} (linear between lengths). With "
                "load times equal, the difference is the recompute times'."
            )
    return lines


def _invalid(results: Sequence[Result]) -> list[str]:
    return [f"{result.case.name} is not valid: {reason}" for result in results for reason in result.invalid]


def _plot(result: Result) -> Plot:
    rows = result.rows

    def line(name: str, key: str, color: int, dash: str) -> Line:
        return Line(name, [(row.tokens, getattr(row, key)) for row in rows], color, dash)

    return Plot(
        title=result.case.title,
        caption="Time to first token by length of the prefix. Dotted: published. Logarithmic.",
        x="tokens",
        y="ms",
        lines=[
            line("recompute, published", "published_recompute_ms", 1, "dot"),
            line("recompute, ours", "recompute_ms", 1, "solid"),
            line("load, published", "published_load_ms", 0, "dot"),
            line("load, ours", "load_ms", 0, "solid"),
        ],
        log="xy",
    )
