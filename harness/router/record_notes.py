"""Sentences for the run's record: what clients do that the trace does not say, and where a belief comes from."""

from __future__ import annotations

from harness.router.belief import ScoreModel
from harness.router.config import Adapted

SESSION_ID = "x-session-id"


def client_additions(adapted: Adapted, release: str) -> list[str]:
    """Headers that the harness sends in the clients' name."""
    added = [f"clients send {SESSION_ID} with the session's id"]
    header = adapted.session_header
    if header:
        added.append(f"clients echo {header} as a browser echoes a cookie")
        if release == "v0.7.1":
            added.append(
                f"{header} is made by the harness: this release sets it after the response headers have gone out, "
                "so that no client ever receives it"
            )
    return added


def belief_notes(adapted: Adapted, release: str, scores: ScoreModel) -> list[str]:
    """Where the prefix share comes from that a decision reports."""
    if adapted.prefix is None:
        return []
    if release == "v0.7.1":
        if adapted.prefix == "precise":
            return ["believed prefix share: from the KV events that the router has acknowledged, it reports none"]
        return ["believed prefix share: from the router's hit ratio histogram"]
    if scores.usable:
        return ["believed prefix share: the router's total score less the other scorers' known parts"]
    if adapted.prefix == "precise":
        return ["believed prefix share: a model of the router's index after the KV events that it has acknowledged"]
    if adapted.one_approximate:
        return ["believed prefix share: from the router's hit ratio histogram"]
    unknown = ", ".join(scores.unknown)
    return [f"believed prefix share: unknown, as the scores of {unknown} are not modelled"]
