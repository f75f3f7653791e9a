"""A small P/D cluster with made-up prices and a fabric, for tests of one thing at a time."""

from __future__ import annotations

from typing import Any

from fake_workers.engine.scheduler import SchedulerConfig
from harness.clock import VirtualClock
from harness.disagg.config import KvTransferConfig
from harness.disagg.handoff import KvExchange, Side
from harness.disagg.layout import KvShape
from harness.disagg.replay import Disaggregation
from harness.fabric.flows import Fabric
from harness.fabric.topology import Topology
from harness.router.base import Endpoint
from harness.router.baselines import BaselineRouter
from harness.simulation import GroupKind, Simulation, SimulationConfig
from harness.trace.model import Call, Session
from tests.harness.simple_price import SimplePrice

MS = 1_000_000
BYTES_PER_TOKEN = 1000
WIRE = 1_000_000_000
"""Bytes per second of each NIC: a token takes 1 us."""


def topology(nodes: int) -> Topology:
    """One GPU per node behind one switch."""
    made = Topology("bed", "")
    for node in range(nodes):
        for source, target in ((f"gpu[{node},0]", f"host[{node}]"), (f"host[{node}]", "switch")):
            made.add(source, target, WIRE, 0)
            made.add(target, source, WIRE, 0)
    return made


def call(index: int, tokens: int, outputs: int, **changes: Any) -> Call:
    """A call of so many tokens that shares nothing."""
    values: dict[str, Any] = {"ref": -1, "keep_blocks": 0, "new_blocks": tokens // 4, "deps": (), "gap_s": 0.0}
    values |= changes
    return Call(index, 0.0, None, "main", tokens, outputs, on_start=None, **values)


class Bed:
    """`prefill` and `decode` workers of one rank each."""

    def __init__(
        self,
        sessions: list[Session],
        prefill: int = 1,
        decode: int = 1,
        *,
        starts_ns: list[int] | None = None,
        kv: dict[str, Any] | None = None,
        router: Any = None,
        blocks: int = 400,
        decode_blocks: int | None = None,
        longest: int = 1000,
        decode_longest: int = 1000,
        wired: bool = True,
        caches: Any = None,
        clock: VirtualClock | None = None,
        layers: int = 1,
        **config: Any,
    ) -> None:
        roles = ["prefill"] * prefill + ["decode"] * decode
        self.endpoints = [
            Endpoint(i, f"w{i}", f"127.0.0.{i + 1}", 8000, i, {"llm-d.ai/role": role}) for i, role in enumerate(roles)
        ]
        self.clock = clock or VirtualClock()
        self.topology = topology(len(roles))
        self.fabric = Fabric(self.clock, self.topology.links)
        self.kv = KvExchange(
            self.clock,
            KvTransferConfig.model_validate({"cost": "wire", **(kv or {})}),
            KvShape(BYTES_PER_TOKEN, 1, 2 * layers),
            4,
            self.fabric if wired else None,
            self.topology if wired else None,
        )
        self.shared = Disaggregation(self.kv, self.clock, self.endpoints)

        def engine(count: int, longest: int) -> SchedulerConfig:
            return SchedulerConfig(
                num_gpu_blocks=count,
                block_tokens=4,
                max_num_batched_tokens=config.pop("budget", 64),
                max_num_seqs=4,
                max_model_len=longest,
                async_scheduling=config.get("is_async", True),
            )

        kinds = [GroupKind(SimplePrice(), engine(blocks, longest)) for _ in range(prefill)]
        kinds += [GroupKind(SimplePrice(), engine(decode_blocks or blocks, decode_longest)) for _ in range(decode)]
        config.pop("is_async", None)
        self.router = router or BaselineRouter("round_robin", self.endpoints, 1)
        self.simulation = Simulation(
            SimulationConfig(kinds[0].engine, "m", scrape_interval_ns=50 * MS, **config),
            SimplePrice(),
            [[endpoint] for endpoint in self.endpoints],
            self.router,
            sessions,
            starts_ns or [0] * len(sessions),
            clock=self.clock,
            caches=caches,
            kinds=kinds,
            disaggregation=self.shared,
            sides=[[Side((f"gpu[{g},0]",))] for g in range(len(roles))],
        )

    def run(self) -> Simulation:
        """To the end, with nothing left behind."""
        self.simulation.run()
        assert self.simulation.leftovers() == []
        return self.simulation
