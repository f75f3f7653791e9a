"""Puts a node's cache tiers below its engines: ExternalCache as the engines' KV connector, on the virtual clock.

The tiers speak up in the middle of an engine's calls as well as between its steps. Everything they say goes over the
clock, at the same instant, so that an engine is never entered twice; before it is told, its node is brought up to now.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fake_workers.engine.connector import EngineSide
from fake_workers.engine.request import EngineRequest
from fake_workers.engine.scheduler import Batch
from harness.cache.base import CacheRequest, ExternalCache, LoadResult, SteppedCache
from harness.cache.ledger import CacheLedger
from harness.clock import VirtualClock


class CacheConnector:
    """The connector of one node. `attach` names the node, which cannot be built before its connector."""

    def __init__(
        self,
        cache: ExternalCache,
        clock: VirtualClock,
        bring: Callable[[], None],
        stirred: Callable[[], None],
        first_rank: int = 0,
        ledger: CacheLedger | None = None,
        machine: int = 0,
    ) -> None:
        """`bring` brings the node up to the clock's now; `stirred` is called when it has been told something.

        `first_rank`: number of the group's first rank among all engines of the machine that share the cache.
        `ledger` is told what loads brought; `machine` is the node's number there.
        """
        self.first_rank = first_rank
        self.cache = cache
        self.clock = clock
        self._bring = bring
        self._stirred = stirred
        self._node: EngineSide | None = None
        self._known: dict[EngineRequest, CacheRequest] = {}
        self._loading: dict[EngineRequest, object] = {}
        self._ledger = ledger
        self._machine = machine
        self._again: dict[EngineRequest, int] = {}
        """Tokens that a request computes although they have been computed before; only requests that looked up here."""
        self.load_bytes = 0
        """Bytes that ended loads brought to GPUs."""
        self.failed_loads = 0

    def attach(self, node: EngineSide) -> None:
        """The node whose engines call."""
        self._node = node

    # ------------------------------------------------------------------ called by the engines

    def lookup(self, rank: int, request: EngineRequest, local_hit_tokens: int) -> tuple[int, bool] | None:
        """See Connector: all loads hold their request."""
        self._again.setdefault(request, 0)
        found = self.cache.lookup(self._of(rank, request), local_hit_tokens)
        return None if found is None else (found, True)

    def start_load(self, rank: int, request: EngineRequest, local_hit_tokens: int, external_tokens: int) -> None:
        """See Connector."""
        token = object()
        if external_tokens:
            self._loading[request] = token
        if self._ledger is not None and request in self._again and not request.preemptions:
            known = min(self._ledger.computed.known_tokens(request.runs), request.prompt_tokens - 1)
            self._again[request] = max(0, known - local_hit_tokens - external_tokens)

        def done(result: LoadResult) -> None:
            self._say(self._ended, rank, request, token, result)

        self.cache.start_load(self._of(rank, request), local_hit_tokens, external_tokens, done)

    def save(self, rank: int, request: EngineRequest, computed_tokens: int) -> None:
        """See Connector."""
        if self._ledger is not None:
            self._ledger.computed.add(request.runs, computed_tokens)
        self.cache.save(self._of(rank, request), computed_tokens)

    def preempted(self, rank: int, request: EngineRequest) -> None:
        """See Connector."""
        self.cache.preempted(self._of(rank, request))

    def finish(self, rank: int, request: EngineRequest) -> bool:
        """See Connector. Where the tiers drop a load that nobody waits for any more, its blocks are free now."""
        known = self._known.pop(request, None)
        if self._ledger is not None:
            again = self._again.pop(request, 0)
            if request.first_token_ns is not None:
                self._ledger.computed_again_tokens += again
        if known is None:
            return False

        def freed() -> None:
            self._say(self._released, rank, request)

        wanted = self.cache.finish(known, freed)
        if request in self._loading and not self.cache.ends_loads:
            if self._ledger is not None:
                self._ledger.cancelled(request.request_id, self._machine, self.clock.now_ns)
            token = self._loading[request] = object()
            self._say(self._ended, rank, request, token, None)
            return False
        return wanted

    # ------------------------------------------------------------------ said by the tiers

    def _of(self, rank: int, request: EngineRequest) -> CacheRequest:
        known = self._known.get(request)
        if known is None:
            wake = self._wake
            known = CacheRequest(
                request.request_id,
                self.first_rank + rank,
                request.runs,
                request.prompt_tokens,
                request,
                lambda: self._say(wake),
            )
            self._known[request] = known
        return known

    def _say(self, what: Callable[..., None], *arguments: object) -> None:
        self.clock.call_at(self.clock.now_ns, self._tell, what, *arguments)

    def _tell(self, what: Callable[..., None], *arguments: object) -> None:
        self._bring()
        what(*arguments)
        self._stirred()

    def _wake(self) -> None:
        assert self._node is not None
        self._node.lookup_ready()

    def _ended(self, rank: int, request: EngineRequest, token: object, result: LoadResult | None) -> None:
        if self._loading.get(request) is not token:
            return  # the request went away between the end of its load and now
        del self._loading[request]
        assert self._node is not None
        if result is None:
            self._node.load_ended(rank, request, 0, failed=True)
            return
        if self._ledger is not None:
            self._ledger.ended(request.request_id, self._machine, result)
        request.restore_ns += result.answered_ns - result.asked_ns  # on its way to node DRAM it could not be admitted
        if result.failed:
            self.failed_loads += 1
            known = self._known.get(request)
            if known is not None:
                self.cache.preempted(known)  # what it found is no longer locked: it has to look again
            self._node.load_ended(rank, request, 0, failed=True)
            return
        self.load_bytes += result.bytes
        self._node.load_ended(rank, request, by_tier=result.by_tier)

    def _released(self, rank: int, request: EngineRequest) -> None:
        assert self._node is not None
        self._node.blocks_released(rank, request)


class SteppedConnector(CacheConnector):
    """The same for tiers that follow the engines' steps (vLLM's OffloadingConnector)."""

    def __init__(self, cache: SteppedCache, *given: Any, **more: Any) -> None:
        super().__init__(cache, *given, **more)
        self._stepped = cache

    def scheduled(self, rank: int, batch: Batch) -> None:
        """See FollowsSteps."""
        members = [(self._of(rank, item.request), item.request) for item in batch.items]
        self._stepped.scheduled(self.first_rank + rank, batch, members)

    def executed(self, rank: int, batch: Batch) -> None:
        """See FollowsSteps."""
        self._stepped.executed(self.first_rank + rank, batch)

    def unsettled(self, rank: int) -> bool:
        """See FollowsSteps."""
        return self._stepped.unsettled(self.first_rank + rank)


def make_connector(cache: ExternalCache, *given: Any, **more: Any) -> CacheConnector:
    """The connector that the tiers need."""
    if isinstance(cache, SteppedCache):
        return SteppedConnector(cache, *given, **more)
    return CacheConnector(cache, *given, **more)
