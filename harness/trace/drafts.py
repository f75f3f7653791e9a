"""Calls of a session while it is generated: chains grow side by side, and are put in order of time at the
end.

Times are whole milliseconds, sizes whole blocks and tokens, so that sums are exact on every platform.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from harness.trace.model import Call, Session, SharedPrefix


@dataclass(slots=True)
class Draft:
    """A call; `ref`, `deps` and `on` are draft numbers (-1: no ref), times in ms from the session's start."""

    chain: str
    model: str
    t_ms: int
    api_ms: int
    gap_ms: int
    blocks: int
    tail_tokens: int
    output_tokens: int
    ref: int
    keep: int
    deps: tuple[int, ...]
    on: int | None
    prefix: int
    stop: str = "tool_use"

    @property
    def end_ms(self) -> int:
        """End of the call on the recorded service."""
        return self.t_ms + self.api_ms


@dataclass(slots=True)
class Drafts:
    """The drafts of one session. A draft is added after all that it waits for and builds on."""

    block_tokens: int
    items: list[Draft] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> Draft:
        return self.items[number]

    def released_ms(self, deps: tuple[int, ...], on: int | None) -> int:
        """The latest of the ends of `deps` and the start of `on`."""
        base = max((self.items[dep].end_ms for dep in deps), default=0)
        return base if on is None else max(base, self.items[on].t_ms)

    def add(self, draft: Draft) -> int:
        """Append a draft; returns its number."""
        self.items.append(draft)
        return len(self.items) - 1

    def session(self, session_id: str, prefixes: tuple[SharedPrefix, ...]) -> Session:
        """The session with its calls in order of time; `prefixes`: those that drafts name."""
        order = sorted(range(len(self.items)), key=lambda number: self.items[number].t_ms)
        place = {number: index for index, number in enumerate(order)}
        place[-1] = -1
        calls = [self._call(index, self.items[number], place) for index, number in enumerate(order)]
        used = max((call.prefix for call in calls), default=-1) + 1 if prefixes else 0
        for call in calls:
            call.prefix = call.prefix if call.prefix < used else -1
        return Session(session_id, self.block_tokens, calls, prefix=prefixes[:used])

    def _call(self, index: int, draft: Draft, place: dict[int, int]) -> Call:
        return Call(
            index=index,
            t_s=draft.t_ms / 1000,
            api_s=draft.api_ms / 1000,
            chain=draft.chain,
            input_tokens=draft.blocks * self.block_tokens + draft.tail_tokens,
            output_tokens=draft.output_tokens,
            ref=place[draft.ref],
            keep_blocks=draft.keep,
            new_blocks=draft.blocks - draft.keep,
            deps=tuple(sorted({place[dep] for dep in draft.deps})),
            on_start=None if draft.on is None else place[draft.on],
            gap_s=draft.gap_ms / 1000,
            model=draft.model,
            stop=draft.stop,
            prefix=draft.prefix,
        )
