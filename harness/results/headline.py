"""The answer in words, made of the numbers and nothing else.

Runs are ranked by the 90th percentile of TTFT with every failed call counted as never answered, so that a
config cannot win by losing calls. Differences below LEVEL are not called: one seed does not carry them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from harness.results import tier_words
from harness.results.compare import Comparison, lookup, number, percent

Summary = dict[str, Any]
LEVEL: Final = 0.05
"""Relative difference below which two results count as level."""
FEW: Final = 0.002
"""Share of lost calls below which no config is named for it."""

_RANK: Final = ("ttft_with_failures_s", "p90")


@dataclass(slots=True)
class Headline:
    """A title that answers the question and the sentences that stand behind it."""

    title: str
    sentences: list[str]


def ratio(more: float, less: float) -> str:
    """How many times: 2.4, 12."""
    value = more / less if less else float("inf")
    return f"{value:.1f}" if value < 9.95 else f"{value:.0f}"


def headline(comparison: Comparison, summaries: Sequence[Summary]) -> Headline:
    """The headline of a report on one or several runs; `summaries` in the order of the comparison's rows."""
    if len(summaries) == 1:
        return _single(comparison, summaries[0])
    if comparison.load_differs:
        return Headline(
            "These runs cannot be compared",
            ["They did not get the same load; the page only shows them together."],
        )
    valid = [(row.label, s) for row, s in zip(comparison.rows, summaries, strict=True) if row.valid]
    if len(valid) < 2:
        return Headline("Nothing to compare", [f"{len(valid)} of {len(summaries)} runs are valid; see below for why."])
    ranked = sorted(
        ((float(v), label, s) for label, s in valid if (v := lookup(s, _RANK)) is not None),
        key=lambda r: r[0],
    )
    if not ranked:
        return Headline(
            "Every config lost more than one call in ten",
            [
                "The 90th percentile of the time to first token is not defined for any of them.",
                *_failures(valid),
                *tier_words.of_several(valid),
            ],
        )
    best, name, winner = ranked[0]
    sentences = _failures(valid)
    if any(number(value) != number(lookup(s, ("ttft_s", "p90")) or 0.0) for value, _, s in ranked):
        sentences.append("The percentiles here count lost calls as never answered; those of the table leave them out.")
    lost = [label for label, s in valid if lookup(s, _RANK) is None]
    if lost:
        sentences.append(f"No 90th percentile for {_names(lost)}: more than one call in ten failed.")
    if len(ranked) == 1:
        title = f"Only {name} keeps nine calls in ten: p90 TTFT {number(best)} s"
        return Headline(title, [*sentences, *tier_words.of_several(valid)])
    level = [label for value, label, _ in ranked if value <= best * (1 + LEVEL)]
    if len(level) > 1:
        slowest = max(value for value, label, _ in ranked if label in level)
        title = f"{_names(level)} are level: p90 TTFT {number(best)} s" + (
            f" to {number(slowest)} s" if number(slowest) != number(best) else ""
        )
        sentences.insert(0, f"Differences below {100 * LEVEL:g} % are not called on one seed.")
    else:
        second, runner_up, _ = ranked[1]
        title = f"{name}: p90 TTFT {number(best)} s, {ratio(second, best)}× lower than {runner_up}"
    worst, last, _ = ranked[-1]
    rivals = [(label, s) for _, label, s in ranked]
    if last not in level and len(ranked) > 2 and not lost:
        sentences.insert(0, f"The slowest, {last}, takes {number(worst)} s, {ratio(worst, best)}× as long.")
    words = [*_why(name, winner, rivals), *_price(name, winner, rivals), *tier_words.of_several(valid)]
    return Headline(title, [*sentences, *words])


def _single(comparison: Comparison, summary: Summary) -> Headline:
    label = comparison.rows[0].label
    if not comparison.rows[0].valid:
        return Headline(f"{label}: not to be used", [*summary["validity"]["reasons"], "What there is stands below."])
    p90, hits = lookup(summary, ("ttft_s", "p90")), lookup(summary, ("hit_rate", "token"))
    if p90 is None:
        return Headline(f"{label}: no call completed in the measured window", _failures([(label, summary)]))
    title = f"{label}: p90 TTFT {number(p90)} s" + (
        f" with {percent(hits)} % of input tokens reused" if hits is not None else ""
    )
    sentences = _failures([(label, summary)])
    rate = lookup(summary, ("output_rate_tok_s", "p10"))
    if rate is not None:
        sentences.append(f"Nine calls in ten stream at {number(rate)} tok/s or more.")
    balance = lookup(summary, ("load_balance", "busiest_over_mean"))
    if balance is not None:
        sentences.append(f"The busiest node works {balance:.2f}× the mean.")
    return Headline(title, [*sentences, *tier_words.of_one(summary)])


def _names(labels: Sequence[str]) -> str:
    return labels[0] if len(labels) == 1 else ", ".join(labels[:-1]) + " and " + labels[-1]


def _failures(valid: Sequence[tuple[str, Summary]]) -> list[str]:
    """How many calls were lost, by config where it is worth it."""
    shares = []
    for label, summary in valid:
        calls = lookup(summary, ("measured", "calls")) or 0.0
        lost = (lookup(summary, ("measured", "timed_out")) or 0.0) + (lookup(summary, ("measured", "failed")) or 0.0)
        if calls:
            shares.append((lost / calls, label))
    worst = max((share for share, _ in shares), default=0.0)
    if not shares:
        return ["No call ended in the measured window."]
    if worst == 0:
        return ["No call timed out or failed."]
    if worst < FEW and len(shares) > 1:
        return [f"Every config lost less than {100 * FEW:g} % of its calls to time-outs or failures."]
    if len(valid) == 1:
        return [f"{100 * worst:.2g} % of calls were lost to time-outs or failures."]
    named = [f"{label} {100 * share:.2g} %" for share, label in sorted(shares, reverse=True) if share >= FEW]
    rest = f"; every other less than {100 * FEW:g} %" if len(named) < len(shares) else ""
    return [f"Calls lost to time-outs or failures: {', '.join(named)}{rest}."]


def _why(name: str, winner: Summary, valid: Sequence[tuple[str, Summary]]) -> list[str]:
    """Reuse of the winner against the one that reuses least."""
    hits = lookup(winner, ("hit_rate", "token"))
    others = [
        (v, label) for label, s in valid if s is not winner and (v := lookup(s, ("hit_rate", "token"))) is not None
    ]
    if hits is None or not others:
        return []
    (low, lowest), (high, highest) = min(others), max(others)
    text = f"{name} reuses {percent(hits)} % of input tokens ({lowest}: {percent(low)} %)"
    return [text + (f"; {highest} reuses more, {percent(high)} %." if high > hits + 0.005 else ".")]


def _price(name: str, winner: Summary, valid: Sequence[tuple[str, Summary]]) -> list[str]:
    """What others do better than the winner by more than LEVEL."""
    sentences = []
    for path, low_is_better, text in (
        (
            ("load_balance", "busiest_over_mean"),
            True,
            "{other} spreads the work more evenly: busiest node {a}× the mean, {name} {b}×.",
        ),
        (
            ("output_rate_tok_s", "p10"),
            False,
            "{other} streams faster for the slowest tenth of calls: {a} tok/s, {name} {b} tok/s.",
        ),
        (("e2e_s", "p90"), True, "{other} ends calls sooner: p90 end-to-end {a} s, {name} {b} s."),
    ):
        mine = lookup(winner, path)
        rivals = [(v, label) for label, s in valid if s is not winner and (v := lookup(s, path)) is not None]
        if mine is None or not rivals:
            continue
        value, other = min(rivals) if low_is_better else max(rivals)
        if (value < mine * (1 - LEVEL)) if low_is_better else (value > mine * (1 + LEVEL)):
            sentences.append(text.format(other=other, name=name, a=number(value), b=number(mine)))
    return sentences
