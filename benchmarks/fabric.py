"""How fast the fabric is: flows per second of CPU at so many flows under way at once.

    python -m benchmarks.fabric [--flows N]

A closed loop on `one-switch` with 8 nodes of 8 GPUs: whenever a flow ends, the next one starts on a random path.
`store`: between hosts and the shared store, so that all flows are connected. `gpu`: between hosts and their GPUs, where
only flows of one PCIe link touch. `mixed`: half and half. `capped`: as `store`, but each flow has a cap of its own, so
that no two are alike: the dearest case.
"""

from __future__ import annotations

import argparse
import random
import time

from harness.cache.build import build_fabric
from harness.cache.config import FabricConfig
from harness.clock import VirtualClock
from harness.fabric.flows import Fabric, Flow
from harness.fabric.share import Path

CONCURRENT = (10, 100, 1000)
KINDS = ("gpu", "mixed", "store", "capped")
NODES = GPUS = 8


def paths(kind: str) -> tuple[VirtualClock, Fabric, list[Path]]:
    """A fabric on a clock, and the paths to draw from."""
    clock = VirtualClock()
    fabric, topology = build_fabric(clock, FabricConfig(topology="one-switch"), NODES, GPUS)
    hosts, store = topology.vertices_of("host"), topology.vertices_of("store")[0]
    gpus = topology.vertices_of("gpu")
    to_store = [path for host in hosts for path in (topology.path(host, store), topology.path(store, host))]
    to_gpus = [
        path
        for number, gpu in enumerate(gpus)
        for path in (topology.path(hosts[number // GPUS], gpu), topology.path(gpu, hosts[number // GPUS]))
    ]
    if kind == "mixed":
        return clock, fabric, to_store * (len(to_gpus) // len(to_store)) + to_gpus
    return clock, fabric, to_gpus if kind == "gpu" else to_store


def measure(kind: str, concurrent: int, flows: int, seed: int = 1) -> tuple[float, float]:
    """(flows per second of CPU, mean flows per recomputation)."""
    rng = random.Random(seed)
    clock, fabric, choices = paths(kind)
    left = flows

    def start() -> None:
        nonlocal left
        left -= 1
        cap = rng.randrange(10**8, 10**11) if kind == "capped" else None
        fabric.start(rng.choice(choices), rng.randrange(1 << 20, 1 << 32), ended, cap_bytes_per_s=cap)

    def ended(flow: Flow) -> None:
        if left > 0:
            start()

    began = time.process_time()
    for _ in range(concurrent):
        start()
    while clock.step():
        pass
    totals = fabric.totals
    return totals.finished / (time.process_time() - began), totals.flows_recomputed / max(1, totals.recomputations)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--flows", type=int, default=3000, help="flows per cell, at the least twice those at once")
    options = parser.parse_args()
    print(f"{'flows per second of CPU':26}" + "".join(f"{number:>10} at once" for number in CONCURRENT))
    for kind in KINDS:
        cells = [measure(kind, number, max(options.flows, 2 * number)) for number in CONCURRENT]
        print(f"{kind:26}" + "".join(f"{rate:18,.0f}" for rate, _ in cells))
        print(f"{'  flows per recomputation':26}" + "".join(f"{touched:18,.1f}" for _, touched in cells))


if __name__ == "__main__":
    main()
