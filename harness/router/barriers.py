"""How the harness knows that the router has taken something in that it takes in asynchronously. Nothing is
guessed.

KV events: the index counts the blocks that it admits, in the order of the one queue. A last message stores
one block that no prompt can contain; once the count has risen by all blocks sent plus this one, everything
before it is in. The count is read from the router's metrics page, which costs it 4 ms with 64 endpoints, so a decision
waits only for events about what its prompt is made of: it looks no other block up.

Tokens in flight: a prompt's tokens are given back at its first token in a queue of the request's own. The
router exports how many it counts; what a decision added is read after it, so it is known what must be left.

Approximate prefix index: the router updates it in a goroutine after the decision. Its profiler lists all
goroutines, started or not: as long as one of them comes from there, an update is under way.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

from fake_workers.api import kv_events as wire
from harness.errors import ComponentError
from harness.router.http_get import HttpGet, sample, samples
from harness.router.kv_events import KvEventPublisher
from harness.router.process import GIVE_UP_S

_ADMITTED = b"kvcache_index_admissions_total"
_IN_FLIGHT = b"llm_d_epp_inflight_tokens"
_MOST_ON_THEIR_WAY = 256
"""Batches of events that may be unread at most, so that the router never lags far behind."""
_SENTINEL_HASH = 3 << 62
_SENTINEL_TOKEN = 1 << 31
"""Sentinels count up from here; tokens of prompts are 31 bits wide, so no prompt meets one."""
_INDEX_UPDATE = re.compile(
    # The goroutine's own frame; in v0.10.0 it is started through a wait group, and that is all there is
    # before it runs.
    rb"\.PreRequest\.(?:\(\*\w+\)\.)?func|^\d+ @ [^\n]*\n#\t0x[0-9a-f]+\tsync\.\(\*WaitGroup\)\.Go\.func1",
    re.MULTILINE,
)


class KvEventBarrier:
    """Waits until all published KV events are in the router's index."""

    def __init__(self, publisher: KvEventPublisher, pages: HttpGet, tokens_per_block: int) -> None:
        self._publisher, self._pages = publisher, pages
        self._tokens_per_block = tokens_per_block
        self._number = 0
        self._begun = 0
        self._about: set[int] | None = set()
        """Origins of the blocks that events on their way are about; None: they may be about any."""
        self.polls = 0
        # Before anything is published: afterwards the count may already hold a part of it.
        self._admitted = self._expected = self._read()

    def pass_(self, stored_blocks: int) -> None:
        """`stored_blocks`: blocks in BlockStored events since the last call."""
        self.begin(stored_blocks)
        self.wait()

    def begin(self, stored_blocks: int, about: set[int] | None = None) -> None:
        """Sends the message that comes after all others; `stored_blocks` as for `pass_`. `about`: the origins of all
        blocks that the events name; None: they may name any.
        """
        self._begun += 1
        self._about = None if about is None or self._about is None else self._about | about
        number = self._number = self._number + 1
        events: list[wire.WireEvent] = []
        if number > 1:
            events.append(wire.removed([_SENTINEL_HASH + number - 1]))
        token = _SENTINEL_TOKEN + number % _SENTINEL_TOKEN
        events.append(
            wire.stored([_SENTINEL_HASH + number], None, [token] * self._tokens_per_block, self._tokens_per_block)
        )
        self._publisher.send(0, events)
        self._expected += stored_blocks + 1

    def wait(self, asked: Iterable[int] | None = None) -> None:
        """Until everything before the last `begin` is in; at once if nothing is on its way. `asked`: only if events
        on their way are about blocks of these origins.
        """
        expected = self._expected
        if self._admitted == expected:
            return
        spared = asked is not None and self._about is not None and self._about.isdisjoint(asked)
        if spared and self._begun <= _MOST_ON_THEIR_WAY:
            return
        deadline = time.monotonic() + GIVE_UP_S
        while (seen := self._read()) < expected:
            if time.monotonic() > deadline:
                raise ComponentError(
                    "router",
                    f"took in {seen - self._admitted:.0f} of {expected - self._admitted:.0f} KV blocks "
                    f"within {GIVE_UP_S:g} s",
                )
        if seen > expected:
            raise ComponentError("router", f"took in {seen - expected:.0f} KV blocks that were not published")
        self._admitted, self._begun, self._about = seen, 0, set()

    def _read(self) -> float:
        self.polls += 1
        value = sample(self._pages.read("/metrics"), _ADMITTED)
        if value is None:
            raise ComponentError("router", f"does not export {_ADMITTED.decode()}")
        return value


class IndexUpdateBarrier:
    """Waits until no update of the approximate prefix index is under way."""

    def __init__(self, pages: HttpGet) -> None:
        self._pages = pages
        self.polls = 0

    def pass_(self) -> None:
        """Returns at once if nothing is pending."""
        deadline = time.monotonic() + GIVE_UP_S
        while True:
            self.polls += 1
            if _INDEX_UPDATE.search(self._pages.read("/debug/pprof/goroutine?debug=1")) is None:
                return
            if time.monotonic() > deadline:
                raise ComponentError("router", f"is still updating its prefix index after {GIVE_UP_S:g} s")


class InFlightBarrier:
    """Waits until the tokens of prompts that have their first token are out of the router's count."""

    def __init__(self, pages: HttpGet, active: bool) -> None:
        """`active`: whether a plugin reads the count at all; else there is nothing to wait for."""
        self._pages, self._active = pages, active
        self._tokens: dict[str, float] = {}
        """Of each request in flight, what the router counts for it."""
        self._due = False

    def decided(self, request_id: str) -> None:
        """A request was placed, after `wait`: what the count has grown by is its own."""
        if self._active:
            self._tokens[request_id] = self._read() - sum(self._tokens.values())

    def first_token(self, request_id: str) -> None:
        """Its tokens are to be given back."""
        if self._tokens.get(request_id):
            self._tokens[request_id] = 0.0
            self._due = True

    def ended(self, request_id: str) -> None:
        """The router has let go of the request, which it does before it says so."""
        self._tokens.pop(request_id, None)

    def wait(self) -> None:
        """Until nothing is left that must be gone; at once if nothing was given back since the last time."""
        if not self._due:
            return
        expected = sum(self._tokens.values())
        deadline = time.monotonic() + GIVE_UP_S
        while (seen := self._read()) != expected:
            if time.monotonic() > deadline:
                raise ComponentError(
                    "router", f"counts {seen:.0f} tokens in flight instead of {expected:.0f} after {GIVE_UP_S:g} s"
                )
        self._due = False

    def _read(self) -> float:
        return sum(samples(self._pages.read("/metrics"), _IN_FLIGHT).values())
