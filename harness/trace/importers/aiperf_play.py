"""Conversations without recorded times, played into a session: calls by their dependencies and delays."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b

from harness.trace.importers.common import TIME_DIGITS, Ids
from harness.trace.importers.tokens import TokenStream
from harness.trace.model import Call, Session
from harness.trace.prefixes import PrefixIndex


@dataclass(frozen=True, slots=True)
class Turn:
    """What a turn adds to its conversation, the tokens it generates, the model it asks."""

    text: str
    output_tokens: int
    model: str | None


@dataclass(slots=True)
class _Draft:
    chain: str
    turn: Turn
    waits: tuple[int, ...]
    delay_s: float
    t_s: float
    input_tokens: int
    ids: Ids


@dataclass(slots=True)
class Play:
    """A session in the making. Calls take no time, since none is known: a call's t is the sum of delays before it."""

    name: str
    stream: TokenStream
    drafts: list[_Draft] = field(default_factory=list)

    def call(self, turn: Turn, chain: str, waits: tuple[int, ...], delay_s: float, context: bytes) -> tuple[bytes, int]:
        """Add a call that starts `delay_s` after the end of those in `waits`; returns the conversation's stream of
        tokens after its answer, and the call's number.
        """
        prompt = context + self.stream.encode(turn.text)
        number = len(self.drafts)
        t_s = max((self.drafts[w].t_s for w in waits), default=0.0) + delay_s
        ids = self.stream.ids(prompt)
        self.drafts.append(_Draft(chain, turn, waits, delay_s, t_s, self.stream.count(prompt), ids))
        return prompt + self._answer(number, turn.output_tokens), number

    def _answer(self, number: int, tokens: int) -> bytes:
        seed = blake2b(f"{self.name}/{number}".encode()).digest()
        size = tokens * self.stream.width
        return (seed * (size // len(seed) + 1))[:size]

    def session(self) -> Session:
        """The session, its calls in order of t."""
        order = sorted(range(len(self.drafts)), key=lambda number: self.drafts[number].t_s)
        place = {number: index for index, number in enumerate(order)}
        prefixes = PrefixIndex()
        calls = []
        for index, number in enumerate(order):
            draft = self.drafts[number]
            ref, keep = prefixes.add(draft.ids)
            calls.append(
                Call(
                    index=index,
                    t_s=round(draft.t_s, TIME_DIGITS),
                    api_s=None,
                    chain=draft.chain,
                    input_tokens=draft.input_tokens,
                    output_tokens=draft.turn.output_tokens,
                    ref=ref,
                    keep_blocks=keep,
                    new_blocks=len(draft.ids) - keep,
                    deps=tuple(sorted({place[w] for w in draft.waits})),
                    gap_s=round(draft.delay_s, TIME_DIGITS),
                    model=draft.turn.model,
                )
            )
        return Session(self.name, self.stream.block_tokens, calls)
