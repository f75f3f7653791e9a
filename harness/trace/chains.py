"""Which calls of a session follow one another: parallel chains found by the prefix that calls have in common.

A recording lists calls by time and knows sub-agents only where the client labelled them. Claude Code also
runs unlabelled agents beside the main conversation (in cc-traces-weka-062126 half of the top-level calls), so
a session's calls are split: a call goes on with the chain whose last call has ended and whose prompt it
extends; with none, it goes on with the chain that ended last if everything stands still (a compaction,
another branch), else it begins a chain of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.trace.model import Call
from harness.trace.runs import common_blocks

MAIN = "main"


def end_s(call: Call) -> float:
    """Recorded end of a call, seconds from the session's start; its start where no duration was recorded."""
    return call.t_s + (call.api_s or 0.0)


@dataclass(slots=True)
class _Chain:
    name: str
    tail: int
    end_s: float


def split_chains(calls: Sequence[Call], labels: Sequence[str]) -> None:
    """Set `chain` of every call. `labels`: `main`, or the sub-agent group (`s3`) that the recording puts the
    call in.

    Names: main and f1, f2, .. for labels main; s3.0, s3.1, .. for label s3.
    """
    scopes: dict[str, list[_Chain]] = {}
    for index, (call, label) in enumerate(zip(calls, labels, strict=True)):
        chains = scopes.setdefault(label, [])
        chain = _continued(calls, index, chains)
        if chain is None:
            chain = _Chain(_name(label, len(chains)), index, 0.0)
            chains.append(chain)
        chain.tail = index
        chain.end_s = max(chain.end_s, end_s(call))
        call.chain = chain.name


def _continued(calls: Sequence[Call], index: int, chains: list[_Chain]) -> _Chain | None:
    call = calls[index]
    ended = [chain for chain in chains if chain.end_s <= call.t_s]
    best, best_key = None, (0, 0.0)
    for chain in ended:
        shared = common_blocks(calls, index, chain.tail, best_key[0] - 1)
        # At least half of the last prompt: less is the tool and system prefix that every agent of a client
        # has.
        if shared and 2 * shared >= calls[chain.tail].blocks and (shared, chain.end_s) > best_key:
            best, best_key = chain, (shared, chain.end_s)
    if best is None and ended and len(ended) == len(chains):
        return max(ended, key=lambda chain: chain.end_s)
    return best


def _name(label: str, number: int) -> str:
    if label == MAIN:
        return MAIN if number == 0 else f"f{number}"
    return f"{label}.{number}"
