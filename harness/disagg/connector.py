"""The KV connector of prefill and decode workers: vLLM's NIXL connector, alone or before the cache tiers.

With cache tiers it is vLLM's MultiConnector of the two: the first that has tokens for a request loads them, both may
keep a finished request's blocks. Everything that is said goes over the clock at the same instant, so that an engine is
never entered twice; before it is told, its node is brought up to now.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fake_workers.engine.connector import Connector, FollowsSteps
from fake_workers.engine.node import Node
from fake_workers.engine.request import EngineRequest
from fake_workers.engine.scheduler import Batch
from harness.clock import VirtualClock
from harness.disagg.handoff import Handoff, KvExchange, Side


@dataclass(slots=True)
class _Pull:
    """A decode request and the KV that it is to read."""

    handoff: Handoff
    done: bool = False
    """Its one transfer has been started; after a preemption the prompt is computed here."""


class PdConnector:
    """The connector of one lock-step group. `attach` names the node, which cannot be built before its connector."""

    def __init__(
        self,
        exchange: KvExchange,
        clock: VirtualClock,
        bring: Callable[[], None],
        stirred: Callable[[], None],
        sides: list[Side],
        inner: Connector | None = None,
    ) -> None:
        """`sides[r]`: the GPUs of rank r. `inner`: the cache tiers' connector; it is attached to what `beneath` is."""
        self.sides = sides
        self.exchange = exchange
        self.clock = clock
        self.inner = inner
        self._follower = inner if isinstance(inner, FollowsSteps) else None
        self._bring = bring
        self._stirred = stirred
        self._node: Node | None = None
        self._prefills: dict[EngineRequest, Handoff] = {}
        self._pulls: dict[EngineRequest, _Pull] = {}
        self._loads: set[EngineRequest] = set()
        """Requests whose load under way is ours."""
        self._chosen: dict[EngineRequest, bool] = {}
        """Who answered the last lookup: True, this connector."""
        self._keepers: dict[EngineRequest, int] = {}
        """How many connectors still keep the blocks of a finished request."""

    def attach(self, node: Node) -> None:
        """The node whose engines call."""
        self._node = node

    def keeps(self, request: EngineRequest, handoff: Handoff) -> None:
        """This request's KV shall be kept for a decode worker (do_remote_decode)."""
        self._prefills[request] = handoff

    def reads(self, rank: int, request: EngineRequest, handoff: Handoff) -> None:
        """This request reads its prompt's KV from a prefill worker (do_remote_prefill)."""
        self._pulls[request] = _Pull(handoff)
        self.exchange.expect(handoff, self.sides[rank])

    def abandon(self, request: EngineRequest) -> None:
        """The request's client went away; the engine may never have seen the request."""
        handoff = self._prefills.pop(request, None)
        if handoff is not None:
            self.exchange.come_to_nothing(handoff)
        pull = self._pulls.pop(request, None)
        if pull is not None and not pull.done:
            self.exchange.drop(pull.handoff)

    # ------------------------------------------------------------------ called by the engines

    def lookup(self, rank: int, request: EngineRequest, local_hit_tokens: int) -> tuple[int, bool] | None:
        """See Connector: all of the prompt that the local cache does not hold."""
        # every connector is asked, whichever will load (get_num_new_matched_tokens of vLLM's MultiConnector)
        below = (0, False) if self.inner is None else self.inner.lookup(rank, request, local_hit_tokens)
        if below is None:
            return None
        pull = self._pulls.get(request)
        if pull is not None and not pull.done:
            self._chosen[request] = True
            return request.prompt_tokens - local_hit_tokens, True
        self._chosen[request] = False
        return below

    def start_load(self, rank: int, request: EngineRequest, local_hit_tokens: int, external_tokens: int) -> None:
        """See Connector."""
        ours = self._chosen.get(request, False)
        pull = self._pulls.get(request)
        if pull is not None and not pull.done:
            pull.done = True
            if external_tokens:
                self._load(rank, request, pull.handoff, local_hit_tokens, external_tokens)
            else:
                self.exchange.drop(pull.handoff)
        if self.inner is not None:
            self.inner.start_load(rank, request, local_hit_tokens, 0 if ours else external_tokens)

    def step_begins(self, rank: int, request: EngineRequest, computed_tokens: int, duration_ns: int) -> None:
        """A step begins after which the first `computed_tokens` of a prompt will be computed."""
        handoff = self._prefills.get(request)
        if handoff is not None and self.exchange.config.mode == "layerwise":
            last = computed_tokens >= request.prompt_tokens
            block = self.exchange.block_tokens
            upto = -(-request.prompt_tokens // block) if last else computed_tokens // block
            self.exchange.computing(handoff, upto, duration_ns)

    def save(self, rank: int, request: EngineRequest, computed_tokens: int) -> None:
        """See Connector."""
        if self.inner is not None:
            self.inner.save(rank, request, computed_tokens)

    def preempted(self, rank: int, request: EngineRequest) -> None:
        """See Connector."""
        if self.inner is not None:
            self.inner.preempted(rank, request)

    def finish(self, rank: int, request: EngineRequest) -> bool:
        """See Connector. A prefill request that came to its end keeps its blocks until they have been read."""
        keepers = 0
        handoff = self._prefills.pop(request, None)
        if handoff is not None:
            if request.outputs >= request.output_tokens and not request.failed:
                keepers = 1
                self.exchange.offer(handoff, lambda: self._say(self._freed, rank, request))
            else:
                self.exchange.come_to_nothing(handoff)
        pull = self._pulls.pop(request, None)
        if pull is not None and not pull.done:
            self.exchange.drop(pull.handoff)
        self._chosen.pop(request, None)
        if self.inner is not None:
            keepers += self.inner.finish(rank, request)
        if keepers:
            self._keepers[request] = keepers
        return keepers > 0

    # ------------------------------------------------------------------ the engine's steps, for tiers that follow them

    def scheduled(self, rank: int, batch: Batch) -> None:
        """See FollowsSteps."""
        if self._follower is not None:
            self._follower.scheduled(rank, batch)

    def executed(self, rank: int, batch: Batch) -> None:
        """See FollowsSteps."""
        if self._follower is not None:
            self._follower.executed(rank, batch)

    def unsettled(self, rank: int) -> bool:
        """See FollowsSteps."""
        return self._follower is not None and self._follower.unsettled(rank)

    # ------------------------------------------------------------------ said by the exchange and the tiers

    def _load(self, rank: int, request: EngineRequest, handoff: Handoff, local: int, external: int) -> None:
        block = self.exchange.block_tokens
        blocks = -(-(local + external) // block) - local // block
        self._loads.add(request)

        def arrived(good: bool) -> None:
            self._say(self._ended, rank, request, good)

        self.exchange.pull(handoff, blocks, external, arrived, local // block)

    def _say(self, what: Callable[..., None], *arguments: object) -> None:
        self.clock.call_at(self.clock.now_ns, self._tell, what, *arguments)

    def _tell(self, what: Callable[..., None], *arguments: object) -> None:
        self._bring()
        what(*arguments)
        self._stirred()

    def _ended(self, rank: int, request: EngineRequest, good: bool) -> None:
        self._loads.discard(request)
        assert self._node is not None
        if good:
            self._node.load_ended(rank, request)
        else:
            self._node.load_ended(rank, request, 0, failed=True)

    def _freed(self, rank: int, request: EngineRequest) -> None:
        self.blocks_released(rank, request)

    # ------------------------------------------------------------------ what the inner connector takes for its node

    def load_ended(
        self,
        rank: int,
        request: EngineRequest,
        tokens: int | None = None,
        failed: bool = False,
        by_tier: dict[str, int] | None = None,
    ) -> None:
        """See Node."""
        assert self._node is not None
        self._node.load_ended(rank, request, tokens, failed, by_tier)

    def lookup_ready(self) -> None:
        """See Node."""
        assert self._node is not None
        self._node.lookup_ready()

    def blocks_released(self, rank: int, request: EngineRequest) -> None:
        """One connector less keeps the blocks; the last one frees them."""
        self._keepers[request] -= 1
        if not self._keepers[request]:
            del self._keepers[request]
            assert self._node is not None
            self._node.blocks_released(rank, request)
