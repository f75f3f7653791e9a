"""Explicit block ids for formats that list them: every block of a trace gets a number."""

from __future__ import annotations

from collections.abc import Iterator

from harness.trace.model import Session
from harness.trace.runs import SessionRuns


class BlockNumbers:
    """Numbers blocks in order of first use; sessions that name a shared prefix by the same key share its numbers."""

    def __init__(self) -> None:
        self._used = 0
        self._shared: dict[tuple[str, int], list[int]] = {}

    def prompts(self, session: Session) -> Iterator[list[int]]:
        """The ids of each call's prompt, one more for a last, partial block (which nothing else has)."""
        runs = SessionRuns(session.calls)
        first: list[int] = []
        """Per call: what to add to the position of one of its new blocks to get the block's number."""
        heads: dict[int, list[int]] = {}
        """Calls that begin with a shared prefix: the numbers of that prefix."""
        for call in session.calls:
            if call.prefix >= 0:
                heads[call.index] = self._prefix(session, call.prefix)
            own = call.new_blocks - len(heads.get(call.index, ()))
            first.append(self._used - (call.blocks - own))
            self._used += own
            ids: list[int] = []
            for origin, start, end in runs.runs(call.index):
                head = heads.get(origin, [])
                ids += head[start:end]
                start = max(start, len(head))
                ids += range(first[origin] + start, first[origin] + end)
            if call.input_tokens > call.blocks * session.block_tokens:
                ids.append(self._used)
                self._used += 1
            yield ids

    def _prefix(self, session: Session, index: int) -> list[int]:
        shared = session.prefix[index]
        numbers = self._shared.setdefault((shared.key, session.block_tokens), [])
        missing = shared.blocks - len(numbers)
        if missing > 0:
            numbers.extend(range(self._used, self._used + missing))
            self._used += missing
        return numbers[: shared.blocks]
