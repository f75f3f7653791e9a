"""A small cluster of cache tiers for tests, and a seeded load on it that works like an engine."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from harness.cache.base import CacheRequest, LoadResult
from harness.cache.build import GIB, CacheCluster, build_fabric
from harness.cache.config import CacheConfig, FabricConfig, SharedTierConfig
from harness.clock import VirtualClock

BLOCK = 16
CHUNK = 64
BLOCKS_PER_CHUNK = CHUNK // BLOCK
TOKEN_BYTES = 100_000
CHUNK_BYTES = CHUNK * TOKEN_BYTES


def gib(chunks: float) -> float:
    """Capacity for so many chunks; the half keeps rounding away."""
    return (chunks + 0.5) * CHUNK_BYTES / GIB


class Bed:
    """A cluster on a clock. `fabric` None: transfers take no time."""

    def __init__(
        self,
        l1_chunks: int = 100,
        nodes: int = 1,
        ranks: int = 2,
        tiers: list[SharedTierConfig] | None = None,
        topology: str | None = "one-switch",
        make_stack: Callable[..., Any] | None = None,
        counts: dict[str, int] | None = None,
        **options: Any,
    ) -> None:
        self.clock = VirtualClock()
        self.fabric = self.topology = None
        if topology is not None:
            self.fabric, self.topology = build_fabric(
                self.clock, FabricConfig(topology=topology, counts=counts or {}), nodes, ranks
            )
        config = CacheConfig(l1_size_gb=gib(l1_chunks), chunk_size=CHUNK, l2_adapters=tiers or [], **options)
        self.cluster = CacheCluster(
            self.clock,
            config,
            nodes=nodes,
            ranks_per_node=ranks,
            block_tokens=BLOCK,
            kv_bytes_per_token=TOKEN_BYTES,
            model_name="model",
            fabric=self.fabric,
            topology=self.topology,
            make_stack=make_stack,
        )
        self.nodes = self.cluster.nodes
        self.tiers = self.cluster.tiers

    def run(self, until_ns: int | None = None) -> None:
        """Let everything happen that is on the clock (up to a time, which then is now)."""
        while self.clock.next_ns is not None and (until_ns is None or self.clock.next_ns <= until_ns):
            self.clock.step()
        if until_ns is not None:
            self.clock.now_ns = until_ns

    def wait(self, seconds: float) -> None:
        """Virtual time passes."""
        self.run(self.clock.now_ns + round(seconds * 1e9))

    def request(self, name: str, *runs: tuple[int, int, int], rank: int = 0) -> CacheRequest:
        """A request whose runs are given in chunks."""
        blocks = [(origin, start * BLOCKS_PER_CHUNK, end * BLOCKS_PER_CHUNK) for origin, start, end in runs]
        return CacheRequest(name, rank, blocks, (runs[-1][2] if runs else 0) * CHUNK + 1)

    def ask(self, node: int, request: CacheRequest, local: int = 0) -> int:
        """A lookup, waited for."""
        answer = self.nodes[node].lookup(request, local)
        while answer is None:
            assert self.clock.step(), "the lookup never ends"
            answer = self.nodes[node].lookup(request, local)
        return answer

    def store(self, node: int, origin: int, chunks: int, rank: int = 0) -> None:
        """Compute and save a prompt of its own, and let all transfers end."""
        request = self.request(f"store{origin}", (origin, 0, chunks), rank=rank)
        self.ask(node, request)
        self.nodes[node].start_load(request, 0, 0, _no_load)
        self.nodes[node].save(request, chunks * CHUNK)
        self.nodes[node].finish(request, lambda: None)
        self.settle()

    def settle(self) -> None:
        """All that is under way ends."""
        self.run()

    def load(self, node: int, request: CacheRequest, local: int = 0) -> LoadResult | None:
        """Ask, load, finish; None if there was nothing to load."""
        answer = self.ask(node, request, local)
        results: list[LoadResult] = []
        self.nodes[node].start_load(request, local, answer, results.append)
        while answer and not results:
            assert self.clock.step(), "the load never ends"
        self.nodes[node].finish(request, lambda: None)
        return results[0] if results else None

    def close(self) -> None:
        """Give everything back."""
        self.cluster.close()


def _no_load(result: LoadResult) -> None:
    raise AssertionError(f"a load that was not asked for ended: {result}")


class AgentLoad:
    """Seeded sessions with growing prompts on a bed: lookups, loads and saves overlap as they would in engines.

    `log` says, in order, what each request found, loaded and skipped.
    """

    def __init__(self, bed: Bed, requests: int, seed: int = 5, rate: float = 20.0, compute_s: float = 0.02) -> None:
        self.bed = bed
        self.log: list[tuple[Any, ...]] = []
        self.ended = 0
        rnd = random.Random(seed)
        sessions: list[int] = []
        t = 0.0
        for number in range(requests):
            t += rnd.expovariate(rate)
            if len(sessions) < 10 or rnd.random() < 0.05:
                sessions.append(rnd.randrange(2, 12))
                who = len(sessions) - 1
            else:
                who = max(0, len(sessions) - 1 - int(rnd.expovariate(0.15)))
                sessions[who] = min(sessions[who] + rnd.randrange(1, 4), 60)
            node = who % len(bed.nodes) if rnd.random() < 0.8 else rnd.randrange(len(bed.nodes))
            length = sessions[who]
            # the first two chunks are a system prompt that all sessions share
            runs = [(0, 0, 2), (1 + who, 2, length)] if length > 2 else [(0, 0, length)]
            request = bed.request(f"r{number}", *runs, rank=rnd.randrange(2))
            local = 0 if rnd.random() < 0.7 else rnd.randrange(0, length * CHUNK // 2)
            abort = rnd.random() < 0.05
            bed.clock.call_at(
                round(t * 1e9), self._arrive, number, node, request, local, length, rnd.random() * compute_s, abort
            )

    def _arrive(self, number, node, request, local, length, compute_s, abort) -> None:
        request.wake = lambda: self._admit(number, node, request, local, length, compute_s, abort)
        if abort:
            self.bed.clock.call_later(round(compute_s * 1e8), self._finish, number, node, request, "aborted")
        self._admit(number, node, request, local, length, compute_s, abort)

    def _admit(self, number, node, request, local, length, compute_s, abort) -> None:
        cache = self.bed.nodes[node]
        answer = cache.lookup(request, local)
        if answer is None:
            return
        self.log.append(("found", number, answer))

        def computed(result: LoadResult | None = None) -> None:
            if result is not None:
                self.log.append(("loaded", number, self.bed.clock.now_ns, sorted(result.by_tier.items())))
            steps = 3
            for step in range(1, steps + 1):
                delay = round(compute_s * 1e9 * step / steps)
                self.bed.clock.call_later(delay, self._save, node, request, length * CHUNK * step // steps)
            if not abort:
                self.bed.clock.call_later(round(compute_s * 1e9) + 1000, self._finish, number, node, request, "done")

        cache.start_load(request, local, answer, computed)
        if not answer:
            computed()

    def _save(self, node, request, tokens) -> None:
        if request.rank >= 0:
            self.bed.nodes[node].save(request, tokens)

    def _finish(self, number, node, request, how) -> None:
        if request.rank < 0:
            return
        cache = self.bed.nodes[node]
        cache.finish(request, lambda: self.log.append(("freed", number, self.bed.clock.now_ns)))
        request.rank = -1
        self.ended += 1
        self.log.append((how, number, self.bed.clock.now_ns, *_account(cache)))


def _account(cache: Any) -> tuple[int, int]:
    accounts = [cache.account] if hasattr(cache, "account") else [replica.account for replica in cache.replicas]
    return sum(account.resident for account in accounts), sum(account.evicted for account in accounts)
