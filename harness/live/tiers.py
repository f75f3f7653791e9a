"""Cache tiers below the workers of one process, on the workers' paced clock: what a replay has below its engines.

The engines of a node share its tier, so they live in one process; a tier that nodes share brings all of them into one.
"""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from fake_workers.api.block_names import BlockNames
from fake_workers.api.live_engine import LiveEngine
from fake_workers.api.paced_clock import PacedClock
from fake_workers.engine.connector import Connector
from fake_workers.engine.events import KvEvent
from fake_workers.engine.node import Node
from harness.below import Below
from harness.cache.build import build_fabric
from harness.cache.feed import TierFeed
from harness.cache.ledger import CacheLedger
from harness.cache.offload_build import connector_options
from harness.errors import InputError
from harness.experiment import Experiment
from harness.folders import write_whole
from harness.live.tier_metrics import TierMetrics
from harness.placement import PoolPlan, plan_pools, with_nodes
from harness.results.tier_data import FILES, TierData
from harness.tier_facts import tier_facts
from harness.tiers import build_tiers, check_tiers

_MOST_RESTORES = 10_000
_MOST_NAMES = 2_000_000
"""Blocks of tiers whose names are remembered, some 300 bytes each."""


def nodes_apart(experiment: Experiment) -> bool:
    """Whether each node's tiers can do without the other nodes', so that nodes may be in different processes."""
    lmcache = experiment.cache.lmcache
    return lmcache is None or not lmcache.l2_adapters


def check(experiment: Experiment, pools: list[PoolPlan]) -> None:
    """InputError for what cannot run below live workers."""
    if experiment.cache.kind == "none":
        return
    if experiment.cluster.pools or experiment.cluster.disaggregation:
        raise InputError(
            "cache.kind",
            "cache tiers below pools of prefill and decode workers run in replays only",
            "leave out the pools, or the cache tiers",
        )
    if not nodes_apart(experiment) and experiment.live is not None and (experiment.live.processes or 1) > 1:
        raise InputError(
            "live.processes",
            f"{experiment.live.processes}, but nodes that share a tier (cache.lmcache.l2_adapters) live in one process",
            "set it to 1 or leave it out",
        )
    _, topology = build_fabric(PacedClock(), experiment.fabric, experiment.cluster.nodes, pools[0].gpus_per_node)
    check_tiers(experiment, pools, topology)


class LiveTiers:
    """Implements fake_workers.api.tiers.Tiers. `groups`: numbers of the cluster's groups that this process serves."""

    def __init__(
        self,
        clock: PacedClock,
        experiment: Experiment,
        groups: Sequence[int],
        model: str,
        results: Path | None = None,
    ) -> None:
        """`results`: a folder that gets the tiers' account at the end."""
        pools = plan_pools(experiment)
        experiment = with_nodes(experiment, pools)
        every = [group for pool in pools for group in pool.groups]
        endpoints = [endpoint for group in every for endpoint in group]
        wires = build_fabric(clock, experiment.fabric, experiment.cluster.nodes, pools[0].gpus_per_node)
        cluster = build_tiers(experiment, clock, pools, model, wires)
        assert cluster is not None
        self._clock, self._cluster, self._results = clock, cluster, results
        self._process = uuid.uuid4().hex
        self._groups = [every[number] for number in groups]
        self._numbers = list(groups)
        self._nodes = sorted({group[0].node for group in self._groups})
        self._ledger = CacheLedger(pools[0].engine.block_tokens, _MOST_RESTORES)
        self._below = Below(clock, endpoints, self._ledger, cluster.nodes)
        self._feed = TierFeed(cluster.nodes, every) if experiment.cache.publishes_events else None
        self._attach: Callable[[Node], None]
        offloading = experiment.cache.offloading
        self.options = connector_options(offloading) if offloading else None
        self.hit_source = "host" if offloading else "external_unspecified"
        self.engines: list[LiveEngine] = []
        self.names = self._block_names(pools[0])
        self._metrics = TierMetrics(cluster, self._nodes)

    def connector(self, group: int) -> Connector:
        """See Tiers."""

        def bring() -> None:
            self.engines[group].bring()

        def stirred() -> None:
            self.engines[group].arm()

        made, self._attach = self._below.connector(self._groups[group], self._numbers[group], True, bring, stirred)
        assert made is not None
        return made

    def attach(self, engine: LiveEngine) -> None:
        """See Tiers."""
        self.engines.append(engine)
        self._attach(engine.node)

    def said(self, group: int, rank: int, events: list[KvEvent]) -> list[KvEvent]:
        """See Tiers. Events of the tiers leave with a step, or at once while requests of the node wait for loads."""
        if self._feed is None:
            return events
        engine = self.engines[group]
        until_ns = None if engine.node.held else engine.node.published_ns[rank] + engine.paused_ns
        self._feed.collect()
        return self._feed.merge(self._groups[group][rank].index, events, until_ns)

    def metrics(self) -> bytes:
        """See Tiers."""
        self._clock.pump()
        return self._metrics.render()

    def account(self) -> dict[str, Any]:
        """See Tiers: what a replay's summary has of its tiers, and its tables by column."""
        self._clock.pump()
        facts, data = self._facts()
        tables = {name: getattr(data, name).to_dict(as_series=False) for name in FILES}
        return {"process": self._process, "facts": facts, "tables": tables}

    def close(self) -> None:
        """See Tiers: writes the account, gives memory and descriptors back."""
        self._clock.pump()
        if self._results is not None:
            self._write(self._results)
        self._cluster.close()

    def _facts(self) -> tuple[dict[str, Any], TierData]:
        facts, data = tier_facts(self._cluster, self._ledger)
        facts |= {"identity": self._cluster.nodes[0].identity(), "nodes": self._nodes, "ns": self._clock.now_ns}
        return facts, data

    def _write(self, folder: Path) -> None:
        facts, data = self._facts()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            data.write(folder)
            write_whole(folder / "tiers.json", json.dumps(facts, indent=1))
        except (OSError, pl.exceptions.PolarsError) as error:
            print(f"warning: the tiers' account is not written ({error})", file=sys.stderr, flush=True)

    def _block_names(self, pool: PoolPlan) -> BlockNames:
        """One set of names for all engines, large enough for what GPUs and tiers hold."""
        ranks = sum(len(group) for group in self._groups)
        gpu = ranks * (2 * pool.engine.num_gpu_blocks + 65536)
        block_bytes = self._cluster.kv_bytes_per_token * pool.engine.block_tokens
        tiers = 0
        for node in self._nodes:
            own, *shared = self._cluster.nodes[node].stats()
            counted = [own, *shared] if node == self._nodes[0] else [own]
            tiers += sum((tier.capacity_bytes or _MOST_NAMES * block_bytes) // block_bytes for tier in counted)
        return BlockNames(
            pool.engine.block_tokens,
            gpu + min(2 * tiers, _MOST_NAMES),
            lambda origin: any(rank.pool.holds(origin) for engine in self.engines for rank in engine.node.ranks),
            self._forget,
        )

    def _forget(self, origin: int) -> None:
        self._ledger.computed.forget(origin)
        for node in self._nodes:
            self._cluster.nodes[node].forget(origin)
