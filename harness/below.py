"""What lies below the engines of a run: cache tiers, the exchange of KV between workers, both, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fake_workers.engine.connector import Connector, ConnectorOptions
from fake_workers.engine.node import Node
from harness.cache.base import ExternalCache
from harness.cache.connector import CacheConnector, make_connector
from harness.cache.ledger import CacheLedger
from harness.clock import VirtualClock
from harness.disagg.connector import PdConnector
from harness.disagg.handoff import Side
from harness.disagg.replay import Disaggregation
from harness.router.base import Endpoint


@dataclass(slots=True)
class Below:
    """All of it. `caches[k]`: the tiers of node k; `sides[g]`: GPUs of group g's ranks, for moving KV."""

    clock: VirtualClock
    endpoints: Sequence[Endpoint]
    ledger: CacheLedger
    caches: Sequence[ExternalCache] | None = None
    disaggregation: Disaggregation | None = None
    sides: Sequence[list[Side]] | None = None

    def options(self, given: ConnectorOptions | None) -> ConnectorOptions | None:
        """The engines' kv_transfer_config; `given`: that of the cache tiers."""
        if self.disaggregation is None:
            return given
        return ConnectorOptions(kv_load_failure_policy=self.disaggregation.kv.config.load_failure_policy)

    def connector(
        self,
        group: Sequence[Endpoint],
        number: int,
        cached: bool,
        bring: Callable[[], None],
        stirred: Callable[[], None],
    ) -> tuple[Connector | None, Callable[[Node], None]]:
        """The connector of group `number`, and what tells it the group's node.

        `cached`: whether the cache tiers lie below it. `bring` brings its node up to now, `stirred` is called when it
        has been told something.
        """
        tiers: CacheConnector | None = None
        if self.caches is not None and cached:
            machine = group[0].node
            first = min(endpoint.index for endpoint in self.endpoints if endpoint.node == machine)
            first_rank = group[0].index - first
            tiers = make_connector(self.caches[machine], self.clock, bring, stirred, first_rank, self.ledger, machine)
        shared = self.disaggregation
        if shared is None or self.sides is None:
            return tiers, (lambda node: None) if tiers is None else tiers.attach
        exchange = PdConnector(shared.kv, self.clock, bring, stirred, self.sides[number], tiers)
        for rank, endpoint in enumerate(group):
            shared.connectors[endpoint.index] = (exchange, rank)

        def attach(node: Node) -> None:
            exchange.attach(node)
            if tiers is not None:
                tiers.attach(exchange)

        return exchange, attach
