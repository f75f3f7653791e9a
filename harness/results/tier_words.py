"""What the cache tiers did, in sentences: what each served, whether it held what was needed, what was in the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from harness.results.compare import lookup, number, percent, points

Summary = dict[str, Any]

ENOUGH: Final = 0.01
"""Share of the input tokens below which computing again what was there before is not held against the tiers."""
HELD_UP: Final = 0.1
"""Share of the mean TTFT from which restores are said to hold calls up."""
OFTEN_FULL: Final = 0.5
"""Share of a link's busy time for which it is full from which it is said to be in the way. Of its busy time and not of
the run: a lightly loaded run is idle most of the time, and what a call waits for is as slow as it is.
"""


def tier_name(name: str) -> str:
    """As a reader would call it; shared tiers have the names that the experiment gave."""
    return "node memory" if name == "dram" else name


def link_name(name: str) -> str:
    """`store>switch` with an arrow."""
    return name.replace(">", " \u2192 ")


def tiers_of(summary: Summary) -> list[dict[str, Any]]:
    """The tiers of a run, those of its summary; empty without tiers."""
    return list((summary.get("tier") or {}).get("tiers") or [])


def with_tiers(summary: Summary) -> bool:
    """Whether the run had cache tiers and this summary has their results."""
    return lookup(summary, ("tier", "token_share")) is not None


def busiest_link(summary: Summary) -> dict[str, Any] | None:
    """The link that was full for longest; among equals the one with the highest use."""
    kinds = (summary.get("tier") or {}).get("links") or []
    links: list[dict[str, Any]] = [kind["busiest"] for kind in kinds]
    if not links:
        return None
    return max(links, key=lambda k: (k["full_share"], k["utilisation_p99"] or 0.0, k["utilisation_mean"]))


def full_of_busy(link: dict[str, Any]) -> float:
    """Share of the time in which the link carried anything for which it was full."""
    return float(link["full_share"] / link["busy_share"]) if link["busy_share"] else 0.0


def restore_share(summary: Summary) -> float:
    """Mean time of restores / mean TTFT, completed calls of the measured window."""
    restore, ttft = lookup(summary, ("restore_s", "mean")), lookup(summary, ("ttft_s", "mean"))
    return restore / ttft if restore and ttft else 0.0


def in_the_way(summary: Summary, link: dict[str, Any]) -> bool:
    """Whether calls waited for restores, and restores for this link."""
    return restore_share(summary) >= HELD_UP and full_of_busy(link) >= OFTEN_FULL


def of_one(summary: Summary) -> list[str]:
    """For the page of one run."""
    if not with_tiers(summary):
        return []
    return [_served(summary), *_held(summary), *_restores(summary), *_links(summary), *_lost(summary)]


def of_several(runs: Sequence[tuple[str, Summary]]) -> list[str]:
    """For a comparison: what the tiers of each run served, and what stood in the way in which."""
    some = [(label, summary) for label, summary in runs if with_tiers(summary)]
    if not some:
        return []
    served = [f"{label} {percent(lookup(s, ('tier', 'token_share')) or 0.0)} %" for label, s in some]
    sentences = [f"Input tokens from the tiers below the GPU: {_listed(served)}."]
    again = [
        f"{label} {points(share)} %"
        for label, s in some
        if (share := lookup(s, ("tier", "computed_again_share")) or 0.0) >= ENOUGH
    ]
    sentences.append(
        f"Input tokens computed again although an earlier call had computed them: {_listed(again)}"
        + (f"; every other less than {100 * ENOUGH:g} %." if len(again) < len(some) else ".")
        if again
        else f"The tiers held what was needed: every run computed less than {100 * ENOUGH:g} % of its input again."
    )
    links = [(label, s, link) for label, s in some if (link := busiest_link(s))]
    held_up = [
        f"{label} {link_name(link['link'])} {points(full_of_busy(link))} % "
        f"(restores {points(restore_share(s))} % of mean TTFT)"
        for label, s, link in links
        if in_the_way(s, link)
    ]
    if held_up:
        sentences.append(f"Links that held restores up, full for this share of their busy time: {_listed(held_up)}.")
    elif links:
        most = max(restore_share(s) for _, s, _ in links)
        label, _, link = max(links, key=lambda k: full_of_busy(k[2]))
        sentences.append(
            f"No link was a bottleneck: restores were at most {points(most)} % of a run's mean TTFT; the fullest, "
            f"{link_name(link['link'])} of {label}, was full for {points(full_of_busy(link))} % of its busy time."
        )
    return sentences


def _listed(parts: Sequence[str], most: int = 6) -> str:
    more = len(parts) - most
    return ", ".join(parts[:most]) + (f" and {more} more" if more > 0 else "")


def _served(summary: Summary) -> str:
    """Where input tokens came from, in the order of the tiers; by source, so that the parts add up."""
    tokens = summary["tokens_by_source"]
    total = sum(tokens.values()) or 1
    names = {"gpu": "the GPU's own cache", "dram": "node memory", "shared": "shared tiers", "peer": "other nodes"}
    for kind in ("shared", "peer"):
        own = [tier["name"] for tier in tiers_of(summary) if tier["kind"] == kind]
        if own:
            names[kind] = " and ".join(own)
    parts = [f"{names[key]} {percent(tokens[key] / total)} %" for key in names if tokens[key]]
    rest = f"{percent(tokens['computed'] / total)} % were computed"
    return f"Input tokens came from {_listed(parts)}; {rest}." if parts else f"No input token was reused: {rest}."


def _held(summary: Summary) -> list[str]:
    again = lookup(summary, ("tier", "computed_again_share"))
    if again is None:
        return []
    if again < ENOUGH:
        return [f"The tiers held what was needed: {points(again)} % of input tokens were computed again."]
    return [f"{percent(again)} % of input tokens were computed again: no longer, or not, where they were needed."]


def _restores(summary: Summary) -> list[str]:
    p90 = lookup(summary, ("tier", "restores", "s", "p90"))
    return [] if p90 is None else [f"Nine restores in ten brought their KV to the GPU within {number(p90)} s."]


def _links(summary: Summary) -> list[str]:
    link = busiest_link(summary)
    if link is None:
        return []
    name, full, restores = link_name(link["link"]), full_of_busy(link), restore_share(summary)
    use = f"was full for {points(full)} % of its busy time"
    if in_the_way(summary, link):
        return [f"A link held restores up: they were {points(restores)} % of the mean TTFT, and {name} {use}."]
    share = f"restores were {points(restores)} % of the mean TTFT"
    return [f"No link was a bottleneck: {share}; the busiest, {name}, {use}."]


def _lost(summary: Summary) -> list[str]:
    sentences = []
    for tier in tiers_of(summary):
        name = tier_name(tier["name"])
        if (skipped := skipped_share(tier)) is not None and skipped >= ENOUGH:
            sentences.append(f"{percent(skipped)} % of what was to be stored in {name} found no room.")
        if (unread := unread_share(tier)) is not None and unread >= 0.5:
            sentences.append(f"Of what {name} dropped, {percent(unread)} % had never been read.")
    return sentences


def skipped_share(tier: dict[str, Any]) -> float | None:
    """Bytes that found no room / bytes that were to be stored."""
    offered = tier["written_bytes"] + tier["skipped_bytes"]
    return tier["skipped_bytes"] / offered if offered else None


def unread_share(tier: dict[str, Any]) -> float | None:
    """Bytes dropped without having been read / bytes dropped, by eviction or retention."""
    dropped = tier["evicted_bytes"] + tier["expired_bytes"]
    return tier["evicted_unread_bytes"] / dropped if dropped else None
