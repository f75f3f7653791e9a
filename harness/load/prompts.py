"""Prompts in engine blocks with identities that hold across all sessions of a run."""

from __future__ import annotations

from collections.abc import Sequence

from harness.trace.model import Session
from harness.trace.runs import SessionRuns

Run = tuple[int, int, int]


class Origins:
    """Hands out global origin numbers: one per call, one per shared prefix key."""

    def __init__(self) -> None:
        self._next = 0
        self._shared: dict[str, int] = {}

    def reserve(self, count: int) -> int:
        """`count` consecutive numbers; returns the first."""
        first = self._next
        self._next += count
        return first

    def shared(self, key: str) -> int:
        """The number of a shared prefix; equal keys have equal content."""
        origin = self._shared.get(key)
        if origin is None:
            origin = self._shared[key] = self.reserve(1)
        return origin


def engine_runs(runs: Sequence[Run], trace_block: int, own: int, input_tokens: int, engine_block: int) -> list[Run]:
    """Runs in trace blocks -> runs in engine blocks, full blocks of the prompt only.

    A block is named after the origin of its last token: whatever else it holds lies before it in the same chained
    prefix. Tokens past the last trace block (a partial tail) belong to the call itself, `own`.
    """
    covered = runs[-1][2] * trace_block if runs else 0
    if trace_block == engine_block and input_tokens - covered < engine_block:
        return list(runs)
    out: list[Run] = []
    spans = [(origin, start * trace_block, end * trace_block) for origin, start, end in runs]
    if input_tokens > covered:
        spans.append((own, covered, input_tokens))
    for origin, start, end in spans:
        first, last = start // engine_block, min(end, input_tokens) // engine_block
        if last > first:
            if out and out[-1][0] == origin and out[-1][2] == first:
                out[-1] = (origin, out[-1][1], last)
            else:
                out.append((origin, first, last))
    return out


class SessionPrompts:
    """Prompts of one session's calls as engine runs, made when asked for."""

    def __init__(self, session: Session, engine_block: int, origins: Origins) -> None:
        self._session = session
        self._engine_block = engine_block
        self._runs = SessionRuns(session.calls)
        self._first = origins.reserve(len(session.calls))
        self._shared = [(origins.shared(p.key), p.blocks) for p in session.prefix]

    def origin(self, index: int) -> int:
        """Global origin of call `index`."""
        return self._first + index

    def runs(self, index: int) -> list[Run]:
        """The prompt of call `index`: (origin, start, end) in engine blocks."""
        calls = self._session.calls
        named: list[Run] = []
        for local, start, end in self._runs.runs(index):
            own = self._first + local
            prefix = calls[local].prefix
            if prefix >= 0 and calls[local].ref < 0:
                # the first blocks of a call that starts from nothing may be a shared prefix
                shared, blocks = self._shared[prefix]
                cut = min(end, blocks)
                if start < cut:
                    named.append((shared, start, cut))
                if cut < end:
                    named.append((own, max(start, cut), end))
            else:
                named.append((own, start, end))
        call = calls[index]
        return engine_runs(
            named, self._session.block_tokens, self._first + index, call.input_tokens, self._engine_block
        )
