"""The report's section on disaggregation: parts of the time to first token, KV moved, pools; runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.results.markup import Markup, tag
from harness.results.page_parts import scrolled
from harness.results.split import TTFT_PARTS
from harness.results.store import Run


def split_section(runs: Sequence[Run]) -> Markup | None:
    """None where no run has prefill workers."""
    split = [run for run in runs if run.summary.get("disaggregation")]
    if not split:
        return None
    head = ["Run", *(name.replace("_", " ") for name in TTFT_PARTS), "KV moved", "at", "pools busy", "mixed steps"]
    body = []
    for run in runs:
        found = run.summary.get("disaggregation")
        mixed = (run.summary.get("interference") or {}).get("steps")
        cells = [_ms(found["ttft_parts_s"][name]) if found else "\u2013" for name in TTFT_PARTS]
        cells += [_gb(found["bytes"]), _rate(found["transfer_bytes_per_s"]["mean"])] if found else ["\u2013", "\u2013"]
        cells.append(", ".join(f"{p['role']} {p['busy'] or 0:.0%}" for p in run.summary.get("pools") or []))
        cells.append("\u2013" if mixed is None else f"{mixed:.1%}")
        name = tag("th", run.info.title, scope="row", class_="name")
        body.append(tag("tr", name, [tag("td", cell) for cell in cells]))
    table = tag(
        "table",
        tag("thead", tag("tr", [tag("th", title, scope="col") for title in head])),
        tag("tbody", body),
        class_="comparison",
    )
    note = (
        "Time to first token of calls whose prompt was computed on another worker, mean / p90 in ms, in the order in "
        "which the parts pass; then KV that moved and the mean rate of one transfer. Mixed steps: steps in which "
        "requests got tokens that computed prompts of others too."
    )
    return tag(
        "section",
        tag("h2", "Prefill and decode on different workers"),
        scrolled(table, "Disaggregation"),
        tag("p", note, class_="note"),
        id="disaggregation",
    )


def _ms(values: dict[str, Any]) -> str:
    if values["mean"] is None:
        return "\u2013"
    return f"{values['mean'] * 1e3:,.3g} / {values['p90'] * 1e3:,.3g}"


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.3g} GB"


def _rate(value: float | None) -> str:
    return "\u2013" if value is None else f"{value / 1e9:,.3g} GB/s"
