"""The silicon part as Markdown: what misses first, with what is known of the cause, then every group."""

from __future__ import annotations

from collections.abc import Sequence

from harness.studies.validation.silicon import GOAL_TPOT, GOAL_TTFT, LEAST_POINTS, Result, Score

_COLUMNS = (
    "group",
    "points (held out)",
    "TPOT raw: bias / error",
    "TPOT held out",
    "TTFT raw: bias / error",
    "TTFT held out",
)


def percent(value: float, sign: bool = False) -> str:
    """12.3 %; a dash for what does not exist."""
    return "-" if value != value else f"{100 * value:+.1f} %" if sign else f"{100 * value:.1f} %"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, numbers to the right."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def score_table(scores: Sequence[Score]) -> str:
    """One row per group."""
    rows = []
    for s in scores:
        doubt = f", {s.doubtful} set aside" if s.doubtful else ""
        rows.append(
            [
                s.group,
                f"{s.points} ({s.held}{doubt})",
                f"{percent(s.raw_tpot_bias, True)} / {percent(s.raw_tpot)}",
                f"**{percent(s.tpot)}**" if s.tpot > GOAL_TPOT else percent(s.tpot),
                f"{percent(s.raw_ttft_bias, True)} / {percent(s.raw_ttft)}",
                f"**{percent(s.ttft)}**" if s.ttft > GOAL_TTFT else percent(s.ttft),
            ]
        )
    return table(_COLUMNS, rows)


def summary(scores: Sequence[Score]) -> str:
    """How many groups meet the goals."""
    judged = [s for s in scores if s.judged]
    tpot = sum(s.tpot <= GOAL_TPOT for s in judged)
    ttft = sum(s.ttft <= GOAL_TTFT for s in judged)
    return (
        f"{len(judged)} groups with {LEAST_POINTS} points or more. On concurrencies that no fit has seen, TPOT is "
        f"within {percent(GOAL_TPOT)} (mean absolute) in {tpot} of them, TTFT within {percent(GOAL_TTFT)} in {ttft}."
    )


def markdown(scores: Sequence[Score], notes: dict[str, str], results: Sequence[Result], points: bool) -> str:
    """The whole part."""
    missed = sorted(
        (s for s in scores if s.judged and not s.met), key=lambda s: -max(s.tpot / GOAL_TPOT, s.ttft / GOAL_TTFT)
    )
    met = [s for s in scores if s.judged and s.met]
    few = [s for s in scores if not s.judged]
    parts = ["## Measured serving points", summary(scores)]
    if missed:
        parts += ["### Missed", score_table(missed)]
        parts += [f"- {s.group}: {notes.get(s.group, 'cause not found.')}" for s in missed]
    if met:
        parts += ["### Met", score_table(met)]
        parts += [f"- {s.group}: {notes[s.group]}" for s in met if s.group in notes]
    if few:
        parts += [f"### Too few points to judge (below {LEAST_POINTS}, or none held out)", score_table(few)]
    if points:
        parts += ["### Points", point_table(results)]
    return "\n\n".join(_joined(parts)) + "\n"


def _joined(parts: Sequence[str]) -> list[str]:
    """Neighbouring list items form one list."""
    out: list[str] = []
    for part in parts:
        if out and part.startswith("- ") and out[-1].startswith("- "):
            out[-1] += "\n" + part
        else:
            out.append(part)
    return out


def point_table(results: Sequence[Result]) -> str:
    """Every point: measured, raw, corrected."""
    head = ("point", "clients", "TTFT ms: measured / raw / corrected", "TPOT ms: measured / raw / corrected", "")
    rows = [
        [
            f"{r.group} {r.layout} {r.prompt_tokens}/{r.output_tokens}",
            str(r.concurrency),
            f"{r.ttft_ms:,.0f} / {r.raw_ttft_ms:,.0f} / {r.ttft_corrected_ms:,.0f}",
            f"{r.tpot_ms:.2f} / {r.raw_tpot_ms:.2f} / {r.tpot_corrected_ms:.2f}",
            "fitted" if r.fitted else "set aside" if r.doubtful else "",
        ]
        for r in results
    ]
    return table(head, rows)
