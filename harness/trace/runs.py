"""Prompts as runs of blocks: what calls of one session have in common, without ever listing blocks one by
one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from harness.trace.model import Call, Session


def common_blocks(calls: Sequence[Call], a: int, b: int, floor: int = 0) -> int:
    """Length in blocks of the longest common prefix of calls `a` and `b`; 0 as soon as it cannot exceed
    `floor`.

    The later call's own blocks are new, so what it has in common with an earlier call it has by its `ref`:
    walk up.
    """
    limit: int | None = None
    while a != b:
        if a < b:
            a, b = b, a
        call = calls[a]
        limit = call.keep_blocks if limit is None else min(limit, call.keep_blocks)
        if call.ref < 0 or limit <= floor:
            return 0
        a = call.ref
    own = calls[a].blocks
    return own if limit is None else min(limit, own)


class SessionRuns:
    """The prompt of every call of a session as runs (origin call, start, end) of consecutive positions, end
    exclusive.

    Kept as two parallel lists per call (origins, ends); run k starts where run k - 1 ends.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self.origins: list[list[int]] = []
        self.ends: list[list[int]] = []
        for call in calls:
            self.add(call)

    def add(self, call: Call) -> None:
        """Append the next call of the session (its index must be the number of calls so far)."""
        index = len(self.origins)
        origins: list[int] = []
        ends: list[int] = []
        if call.ref >= 0 and call.keep_blocks:
            cut = bisect_left(self.ends[call.ref], call.keep_blocks)
            origins = self.origins[call.ref][: cut + 1]
            ends = self.ends[call.ref][: cut + 1]
            ends[-1] = call.keep_blocks
        if call.new_blocks:
            origins.append(index)
            ends.append(call.keep_blocks + call.new_blocks)
        self.origins.append(origins)
        self.ends.append(ends)

    def runs(self, index: int) -> list[tuple[int, int, int]]:
        """(origin, start, end) of call `index`, covering blocks 0..blocks in order."""
        ends = self.ends[index]
        return list(zip(self.origins[index], [0, *ends[:-1]], ends, strict=True)) if ends else []


def repair_blocks(session: Session) -> None:
    """Make each call's blocks fit its input tokens, for a source whose block ids are broken.

    Too many blocks are cut at the tail, missing ones are added as new ones; times and tokens stay as
    recorded.
    """
    for call in session.calls:
        wanted = call.input_tokens // session.block_tokens
        kept = min(call.keep_blocks, wanted)
        if call.ref >= 0:
            kept = min(kept, session.calls[call.ref].blocks)
        call.keep_blocks, call.new_blocks = kept, wanted - kept
        if kept == 0:
            call.ref = -1
