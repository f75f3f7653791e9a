"""What the tiers gave each call, and what had to be computed although it had been computed before."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from harness.cache.base import LoadResult, Run

LOADED, LOAD_FAILED, LOAD_CANCELLED = "loaded", "failed", "cancelled"


class Restore(msgspec.Struct, gc=False, kw_only=True):
    """One load of KV into the GPU's blocks of one call. Times are virtual ns; None: not reached."""

    call_id: str
    node: int
    outcome: str
    tokens: dict[str, int]
    """Tokens by the tier they were found in; of a cancelled load nothing is known."""
    bytes: int
    """Brought to the GPU."""
    asked_ns: int | None
    answered_ns: int | None
    """From here on the KV was in node DRAM."""
    started_ns: int | None
    """The GPU's blocks were there and the copy began."""
    ended_ns: int


class Computed:
    """How far, per origin, some engine of the cluster has computed prompts."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._ends: dict[int, int] = {}

    def known_tokens(self, runs: Sequence[Run]) -> int:
        """Leading tokens of a prompt whose KV was computed for an earlier prompt."""
        known = 0
        for origin, start, end in runs:
            upto = min(end, self._ends.get(origin, 0))
            if upto > start:
                known = upto
            if upto < end:
                break
        return known * self._block_tokens

    def forget(self, origin: int) -> None:
        """No prompt will name this origin again."""
        self._ends.pop(origin, None)

    def add(self, runs: Sequence[Run], tokens: int) -> None:
        """The first so many tokens of a prompt have KV."""
        blocks = tokens // self._block_tokens
        ends = self._ends
        for origin, start, end in runs:
            if start >= blocks:
                break
            upto = min(end, blocks)
            if upto > ends.get(origin, 0):
                ends[origin] = upto


class CacheLedger:
    """Of all nodes of a run."""

    def __init__(self, block_tokens: int, most_restores: int | None = None) -> None:
        """`most_restores`: only the last so many are kept (None: all)."""
        self.computed = Computed(block_tokens)
        self.restores: deque[Restore] = deque(maxlen=most_restores)
        self.computed_again_tokens = 0
        """Input tokens that were computed although an earlier call's prompt had had them computed, somewhere."""

    def ended(self, call_id: str, node: int, result: LoadResult) -> None:
        """A load has ended, well or not."""
        self.restores.append(
            Restore(
                call_id=call_id,
                node=node,
                outcome=LOAD_FAILED if result.failed else LOADED,
                tokens=result.by_tier,
                bytes=0 if result.failed else result.bytes,
                asked_ns=result.asked_ns,
                answered_ns=result.answered_ns,
                started_ns=result.started_ns,
                ended_ns=result.ended_ns,
            )
        )

    def cancelled(self, call_id: str, node: int, now_ns: int) -> None:
        """The call went away while its load was under way."""
        self.restores.append(
            Restore(
                call_id=call_id,
                node=node,
                outcome=LOAD_CANCELLED,
                tokens={},
                bytes=0,
                asked_ns=None,
                answered_ns=None,
                started_ns=None,
                ended_ns=now_ns,
            )
        )
