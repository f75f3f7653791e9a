"""One session on the clock: a call is released when what it depends on has happened and its gap has passed."""

from __future__ import annotations

from collections.abc import Callable

from harness.clock import VirtualClock, to_ns
from harness.load.prompts import Origins, SessionPrompts
from harness.trace.model import Call, Session

Release = Callable[["SessionRun", int], None]


class SessionRun:
    """Releases the calls of one session through `release(session_run, call index)`.

    Dependencies are on ends (`deps`) and on one start (`on_start`); the recorded gap counts from the latest of them.
    A call that fails or times out counts as ended: the client goes on (an agent would retry or give up; neither is
    in the trace).
    """

    def __init__(
        self,
        session: Session,
        clock: VirtualClock,
        release: Release,
        gap_cap_s: float | None,
        engine_block: int,
        origins: Origins,
        longest_tokens: int | None = None,
    ) -> None:
        """`longest_tokens`: calls with more prompt plus output are left out. Where a call that is sent waits for such a
        call, that happens in no time when its turn comes; else its gap does not make the run longer.
        """
        self.session = session
        self.prompts = SessionPrompts(session, engine_block, origins)
        self.open = len(session.calls)
        """Calls that have not ended yet."""
        self._clock = clock
        self._release = release
        self._gap_cap_s = gap_cap_s
        self._longest_tokens = longest_tokens
        self._missing: list[int] = []
        self._after_end: dict[int, list[int]] = {}
        self._after_start: dict[int, list[int]] = {}
        self._needed = _needed(session, longest_tokens)
        for call in session.calls:
            self._missing.append(len(call.deps) + (call.on_start is not None))
            for dep in call.deps:
                self._after_end.setdefault(dep, []).append(call.index)
            if call.on_start is not None:
                self._after_start.setdefault(call.on_start, []).append(call.index)

    def start(self) -> None:
        """The session arrives now: calls that depend on nothing are released after their gap."""
        for index, missing in enumerate(self._missing):
            if missing == 0:
                self._schedule(index)

    def call_started(self, index: int) -> None:
        """Call `index` has been sent."""
        self._resolve(self._after_start.pop(index, ()))

    def call_ended(self, index: int) -> None:
        """Call `index` has its last token, or was given up."""
        self.open -= 1
        self._resolve(self._after_end.pop(index, ()))

    def _resolve(self, dependents: list[int] | tuple[()]) -> None:
        for index in dependents:
            self._missing[index] -= 1
            if self._missing[index] == 0:
                self._schedule(index)

    def _schedule(self, index: int) -> None:
        if not self._needed[index]:
            return
        gap_s = self.session.calls[index].gap_s
        if self._gap_cap_s is not None and gap_s > self._gap_cap_s:
            gap_s = self._gap_cap_s
        self._clock.call_later(to_ns(gap_s), self._due, index)

    def _due(self, index: int) -> None:
        if _sent(self.session.calls[index], self._longest_tokens):
            self._release(self, index)
        else:
            self.call_started(index)
            self.call_ended(index)


def _sent(call: Call, longest_tokens: int | None) -> bool:
    return longest_tokens is None or call.sequence_tokens <= longest_tokens


def _needed(session: Session, longest_tokens: int | None) -> list[bool]:
    """For each call whether it is sent itself or a call that is sent waits for it; a call waits for earlier ones."""
    needed = [_sent(call, longest_tokens) for call in session.calls]
    for call in reversed(session.calls):
        if needed[call.index]:
            for earlier in (*call.deps, *(() if call.on_start is None else (call.on_start,))):
                needed[earlier] = True
    return needed
