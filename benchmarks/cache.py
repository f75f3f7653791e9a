"""Cost of the cache tiers: microseconds of CPU per chunk for stores, lookups and loads, with the real LMCache.

    python -m benchmarks.cache [--chunks N] [--rounds N]

One node, chunks of 256 tokens, transfers that take no time. Each round stores a prompt, looks one up that nobody has,
loads it from node DRAM, and loads it on a node that has to fetch it from the shared tier first. A load is everything
between a call's lookup and its end. Columns: Python's garbage collector as it comes, and as a run sets it.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from harness.cache.base import CacheRequest, LoadResult
from harness.cache.build import GIB, CacheCluster
from harness.cache.config import CacheConfig, SharedTierConfig
from harness.clock import VirtualClock

BLOCK = 64
CHUNK = 256
TOKEN_BYTES = 47_616

ROWS = ("store", "lookup, nobody has it", "load from node DRAM", "load from the shared tier")


@dataclass
class _Bench:
    """One cluster of two nodes; `took` collects CPU seconds per chunk."""

    mode: Literal["mp", "inproc"]
    chunks: int
    resident: int
    serial: int = 0
    took: dict[str, list[float]] = field(default_factory=lambda: {row: [] for row in ROWS})

    def __post_init__(self) -> None:
        self.clock = VirtualClock()
        config = CacheConfig(
            mode=self.mode,
            chunk_size=CHUNK,
            l1_size_gb=3 * (self.resident + 4 * self.chunks) * CHUNK * TOKEN_BYTES / GIB,
            l2_adapters=[SharedTierConfig(name="store")],
        )
        self.cluster = CacheCluster(
            self.clock,
            config,
            nodes=2,
            ranks_per_node=1,
            block_tokens=BLOCK,
            kv_bytes_per_token=TOKEN_BYTES,
            model_name="model",
        )
        while self.serial * self.chunks < self.resident:
            self.store(self.serial)
            self.serial += 1

    def request(self, origin: int) -> CacheRequest:
        """A prompt of one origin, one token longer than its chunks."""
        runs = [(origin, 0, self.chunks * CHUNK // BLOCK)]
        self.serial += 1
        return CacheRequest(f"r{self.serial}", 0, runs, self.chunks * CHUNK + 1)

    def ask(self, node: Any, request: CacheRequest) -> int:
        """A lookup, waited for."""
        answer = node.lookup(request, 0)
        while answer is None:
            assert self.clock.step()
            answer = node.lookup(request, 0)
        return int(answer)

    def store(self, origin: int) -> None:
        """A prompt is computed and saved on the first node, and written through."""
        node = self.cluster.nodes[0]
        request = self.request(origin)
        node.start_load(request, 0, 0, _nothing) if self.ask(node, request) else None
        node.save(request, self.chunks * CHUNK)
        node.finish(request, lambda: None)
        self.settle()

    def miss(self, origin: int) -> None:
        """A call whose prompt nobody holds, and which saves nothing."""
        node = self.cluster.nodes[0]
        request = self.request(origin)
        assert self.ask(node, request) == 0
        node.finish(request, lambda: None)
        self.settle()

    def load(self, origin: int, place: int) -> None:
        """A call whose whole prompt is held, on a node."""
        node = self.cluster.nodes[place]
        request = self.request(origin)
        found = self.ask(node, request)
        assert found == self.chunks * CHUNK, found
        ended: list[LoadResult] = []
        node.start_load(request, 0, found, ended.append)
        while not ended:
            assert self.clock.step()
        node.finish(request, lambda: None)
        self.settle()

    def settle(self) -> None:
        """All that is under way ends."""
        while self.clock.step():
            pass

    def round(self) -> None:
        """One of each."""
        origin = self.serial
        cases: tuple[tuple[str, Callable[[], None]], ...] = (
            ("lookup, nobody has it", lambda: self.miss(origin)),
            ("store", lambda: self.store(origin)),
            ("load from node DRAM", lambda: self.load(origin, 0)),
            ("load from the shared tier", lambda: self.load(origin, 1)),
        )
        for row, case in cases:
            began = time.process_time()
            case()
            self.took[row].append((time.process_time() - began) / self.chunks)


def _nothing(result: LoadResult) -> None:
    """Nothing was asked for."""


def measure(
    mode: Literal["mp", "inproc"], chunks: int, rounds: int, collector: bool, resident: int
) -> dict[str, float]:
    """Median microseconds per chunk of each row."""
    bench = _Bench(mode, chunks, resident)
    gc.collect()
    if not collector:
        gc.freeze()
        gc.disable()
    try:
        for _ in range(rounds):
            bench.round()
    finally:
        gc.enable()
        gc.unfreeze()
        bench.cluster.close()
    return {row: statistics.fmean(seconds) * 1e6 for row, seconds in bench.took.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--chunks", type=int, default=855, help="chunks of a prompt")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--resident", type=int, default=20_000, help="chunks that the tiers hold before")
    options = parser.parse_args()
    modes: tuple[Literal["mp", "inproc"], ...] = ("mp", "inproc")
    columns = {
        f"{mode}, collector {'on' if on else 'off'}": measure(
            mode, options.chunks, options.rounds, on, options.resident
        )
        for mode in modes
        for on in (True, False)
    }
    print(f"{'microseconds of CPU per chunk':32}" + "".join(f"{name:>24}" for name in columns))
    for row in ROWS:
        print(f"{row:32}" + "".join(f"{column[row]:24.1f}" for column in columns.values()))


if __name__ == "__main__":
    main()
