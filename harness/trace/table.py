"""Statistics of a trace for people: numbers as text, the full list, and the published ones by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def flat_stats(found: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Statistics as (dotted name, value) in order."""
    for name, value in found.items():
        if isinstance(value, dict):
            yield from flat_stats(value, f"{before}{name}.")
        elif isinstance(value, list):
            for row in value:
                window = "infinite" if row["window_s"] is None else f"{row['window_s']:.0f} s"
                yield f"{before}{name} ({window})", row["hit"]
        else:
            yield before + name, value


def shown(value: float | int | None) -> str:
    """A number for people: with separators from a thousand on, else four significant digits."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.4g}"


def percent(value: float | None) -> str:
    """A share in percent, one digit after the point, two below one percent."""
    if value is None:
        return "-"
    return f"{value * 100:.2f} %" if 0 < value < 0.01 else f"{value * 100:.1f} %"


def seconds(value: float | None) -> str:
    """A duration in the unit that suits it."""
    if value is None:
        return "-"
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if value >= 2 * size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.3g} s"


def published(found: dict[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """What the published analyses of agentic traces state, in groups: (group, [(statistic, value)])."""
    calls, inputs, outputs = found["calls_per_session"], found["input_per_call"], found["output_per_call"]
    gaps, groups, minutes = found["gaps"], found["sub_agents"], found["busiest_minutes"]
    reuse, over, flight = found["cumulative_to_unique"], found["over_100k"], found["in_flight"]
    half, most = minutes["half_of_calls"], minutes["90_percent_of_calls"]
    windows = {row["window_s"]: row["hit"] for row in found["token_hit_by_window"]}
    return [
        (
            "Size",
            [
                ("Sessions", shown(found["sessions"])),
                ("Calls", shown(found["calls"])),
                ("Input tokens", shown(found["input_tokens"])),
                ("Output tokens", shown(found["output_tokens"])),
                ("Input to output", _ratio(found["input_to_output"])),
                ("Calls per session", _three(calls["mean"], calls["median"], calls["p99"])),
                ("Input per session, mean", shown(found["input_per_session"]["mean"])),
                ("Session span, median", seconds(found["life_s"]["median"])),
            ],
        ),
        (
            "Calls",
            [
                ("Input per call", _three(inputs["mean"], inputs["median"], inputs["p99"])),
                ("Output per call", _three(outputs["mean"], outputs["median"], outputs["p99"])),
                ("Calls over 100k tokens", percent(over["call_share"])),
                ("Their share of the input", percent(over["input_share"])),
                ("Peak context, median", shown(found["peak_context"]["median"])),
                ("Call duration, median", seconds(found["api_s"]["median"])),
            ],
        ),
        (
            "Reuse inside the session",
            [
                ("Block hit, kept for ever", percent(found["block_hit_infinite"])),
                *(
                    (f"Token hit, kept {name}", percent(windows[window]))
                    for window, name in ((300.0, "5 min"), (3600.0, "1 h"), (None, "for ever"))
                ),
                ("New tokens per call", _three(*(found["new_tokens_per_call"][k] for k in ("mean", "median", "p99")))),
                ("Unique tokens per session, mean", shown(found["unique_tokens"]["mean"])),
                ("Cumulative to unique, mean of sessions", _ratio(reuse["mean"])),
                ("Cumulative to unique, ratio of sums", _ratio(reuse["ratio_of_sums"])),
            ],
        ),
        (
            "Time",
            [
                ("Arrivals while the session is busy", percent(gaps["zero_share"])),
                ("Idle gap, median", seconds(gaps["idle_median_s"])),
                ("Gaps of 30 min or more, of arrivals", percent(gaps["ge_1800s_arrival_share"])),
                ("Gaps of 30 min or more, of idle time", percent(gaps["ge_1800s_idle_share"])),
                ("Minutes with half of the calls, median", percent(half["median"])),
                ("Minutes with half of the calls, mean", percent(half["mean"])),
                ("Minutes with 90 % of the calls, median", percent(most["median"])),
                ("Minutes with 90 % of the calls, mean", percent(most["mean"])),
            ],
        ),
        (
            "Fan-out",
            [
                ("Sessions with sub-agents", percent(groups["session_share"])),
                ("Sub-agent groups", shown(groups["groups"])),
                ("Calls per group, mean", shown(groups["calls_per_group"]["mean"])),
                ("Groups per such session, median", shown(groups["groups_per_session"]["median"])),
                ("Unlabelled side chains", shown(found["chains"]["flat"])),
                ("Sessions with 2 or more in flight", percent(flight["sessions_with_2_or_more"])),
                ("In flight in one session, at most", shown(flight["max"])),
            ],
        ),
    ]


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} : 1"


def _three(mean: float | None, median: float | None, p99: float | None) -> str:
    return f"mean {_whole(mean)}, median {_whole(median)}, p99 {_whole(p99)}"


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
