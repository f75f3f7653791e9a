"""vLLM's own CPU tier below engines, on the clock and the fabric. Its decisions are compared in tests/differential."""

from __future__ import annotations

import random
from typing import Any

import pytest

from fake_workers.engine.scheduler import SchedulerConfig
from harness.cache.build import build_fabric
from harness.cache.config import FabricConfig, OffloadingConfig
from harness.cache.offload_build import EngineFacts, OffloadCluster, connector_options
from harness.clock import VirtualClock
from harness.errors import InputError
from harness.results.records import COMPLETED, FAILED, TIMED_OUT, digest
from harness.router.base import Endpoint
from harness.router.baselines import BaselineRouter
from harness.simulation import Simulation, SimulationConfig
from harness.trace.model import Call, Session
from tests.harness.simple_price import SimplePrice

BLOCK, TOKEN_BYTES, MS = 4, 1_000_000, 1_000_000
PCIE_BYTES_PER_S = 63e9
"""one-switch.yaml: host to GPU and back."""


def sessions(seed: int, count: int = 20) -> list[Session]:
    """Growing prompts with pauses in which others push them off the GPU."""
    rng = random.Random(seed)
    made = []
    for s in range(count):
        calls: list[Call] = []
        for i in range(rng.randrange(2, 6)):
            keep = rng.choice([calls[-1].blocks, rng.randrange(1, calls[-1].blocks + 1)]) if calls else 0
            new = rng.randrange(2, 24)
            tokens = (keep + new) * BLOCK + rng.randrange(BLOCK)
            deps, ref = ((i - 1,), i - 1) if i else ((), -1)
            gap_s = rng.choice([0.01, 0.05, 0.2])
            calls.append(Call(i, 0.0, None, "main", tokens, rng.randrange(1, 40), ref, keep, new, deps, None, gap_s))
        made.append(Session(f"s{s}", BLOCK, calls))
    return made


class Bed:
    """A run of two engines on one node with their tiers."""

    def __init__(
        self,
        load: list[Session],
        *,
        topology: str | None = "one-switch",
        tp: int = 1,
        token_bytes_rank: int = TOKEN_BYTES,
        leaping: bool = True,
        is_async: bool = True,
        client_timeout_ns: int | None = None,
        blocks: int = 150,
        seed: int = 1,
        **options: Any,
    ) -> None:
        clock = VirtualClock()
        fabric = vertices = None
        if topology is not None:
            fabric, vertices = build_fabric(clock, FabricConfig(topology=topology), 1, 2 * tp)
        chunk_bytes = -(-TOKEN_BYTES * BLOCK // 4096) * 4096
        config = OffloadingConfig(**({"cpu_bytes_to_use": 300 * chunk_bytes} | options))
        self.cluster = OffloadCluster(
            clock,
            config,
            [EngineFacts(2, tp, token_bytes_rank)],
            block_tokens=BLOCK,
            kv_bytes_per_token=TOKEN_BYTES,
            fabric=fabric,
            topology=vertices,
            seed=seed,
        )
        engine = SchedulerConfig(
            num_gpu_blocks=blocks,
            block_tokens=BLOCK,
            max_num_batched_tokens=64,
            max_num_seqs=4,
            max_model_len=(blocks - 1) * BLOCK,
            async_scheduling=is_async,
        )
        endpoints = [Endpoint(i, f"w{i}", f"127.0.0.{i + 1}", 8000, 0) for i in range(2)]
        self.simulation = Simulation(
            SimulationConfig(
                engine,
                "m",
                50 * MS,
                client_timeout_ns=client_timeout_ns,
                leaping=leaping,
                connector=connector_options(config),
            ),
            SimplePrice(),
            [[endpoint] for endpoint in endpoints],
            BaselineRouter("session_sticky", endpoints, 1),
            load,
            [i * 2 * MS for i in range(len(load))],
            clock=clock,
            caches=self.cluster.nodes,
        )
        self.cluster.nodes[0].keep_events = True
        self.simulation.run()
        assert not self.simulation.leftovers()
        for rank in self.cluster.nodes[0].ranks:
            manager = rank.scheduler.manager
            assert not (rank.copies[True] or rank.copies[False] or rank.later or rank.finished or rank.waiting)
            assert manager.used == manager._evictable <= manager.capacity, "everything in the tier may go again"
        assert not self.cluster.nodes[0]._states

    @property
    def records(self) -> list[Any]:
        return self.simulation.records

    @property
    def stats(self) -> Any:
        return self.cluster.nodes[0].stats()[0]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize(("prompt_only", "window"), [(True, None), (False, None), (True, 10), (False, 10)])
def test_leaping_is_stepping(is_async: bool, policy: str, prompt_only: bool, window: int | None) -> None:
    runs = [
        Bed(
            sessions(3),
            leaping=leaping,
            is_async=is_async,
            eviction_policy=policy,
            offload_prompt_only=prompt_only,
            blocks_per_chunk=2,
            window_tokens=window,
        )
        for leaping in (False, True)
    ]
    assert digest(runs[0].records) == digest(runs[1].records)
    assert runs[0].stats == runs[1].stats
    stepped, leapt = (run.cluster.nodes[0].take_events() for run in runs)
    assert stepped == leapt and {event.stored for event in stepped} == {True, False}
    assert sum(r.dram_tokens for r in runs[0].records) > 0 and runs[0].stats.evicted_bytes > 0
    assert all(r.outcome == COMPLETED for r in runs[0].records)


def test_generated_tokens_are_stored_only_when_wanted() -> None:
    prompt, everything = (
        Bed(sessions(3), offload_prompt_only=only, cpu_bytes_to_use=1 << 40) for only in (True, False)
    )
    assert prompt.stats.written_bytes < everything.stats.written_bytes
    assert prompt.stats.evicted_bytes == everything.stats.evicted_bytes == 0


def one(*lengths: int) -> list[Session]:
    """One session whose calls have these prompts (blocks), each a continuation; others fill the GPU in between."""
    calls = []
    for i, length in enumerate(lengths):
        keep = lengths[i - 1] if i else 0
        deps, ref = ((i - 1,), i - 1) if i else ((), -1)
        calls.append(
            Call(i, 0.0, None, "main", length * BLOCK, 1, ref, keep, length - keep, deps, None, 1.0 if i else 0.0)
        )
    return [Session("a", BLOCK, calls)]


def squeezed(first: int = 100, then: int | None = None, **options: Any) -> tuple[Bed, Any]:
    """Session a comes back when others have pushed it off its engine's GPU; returns its second call."""
    filler = [
        Session(f"f{i}", BLOCK, [Call(0, 0.0, None, "main", 140 * BLOCK, 1, -1, 0, 140, (), None, 0.0)])
        for i in range(4)
    ]
    bed = Bed([*one(first, first + 20 if then is None else then), *filler], cpu_bytes_to_use=1 << 40, **options)
    (second,) = [r for r in bed.records if r.call_id == "a/1"]
    return bed, second


@pytest.mark.parametrize(
    ("tp", "rank_bytes", "gpus"), [(1, TOKEN_BYTES, 1), (4, TOKEN_BYTES // 4, 4), (4, TOKEN_BYTES, 1)]
)
def test_a_load_takes_the_time_of_its_bytes_on_pcie(tp: int, rank_bytes: int, gpus: int) -> None:
    """Heads split over 4 GPUs: each moves a quarter. MLA: each moves everything, and one wrote it."""
    bed, second = squeezed(tp=tp, token_bytes_rank=rank_bytes)
    assert (second.gpu_tokens, second.dram_tokens, second.computed_tokens) == (0, 400, 80)
    assert second.restore_ns == pytest.approx(400 * TOKEN_BYTES / gpus / PCIE_BYTES_PER_S * 1e9, rel=0.01)
    assert bed.stats.written_bytes >= 520 * TOKEN_BYTES and bed.stats.read_bytes == 400 * TOKEN_BYTES


def test_a_load_of_window_layers_moves_what_the_window_needs() -> None:
    """Half of the layers have a window of 9 tokens: 8 before the next one, in 2 blocks of 4. All is stored."""
    bed, second = squeezed(window_tokens=9)
    assert (second.gpu_tokens, second.dram_tokens, second.computed_tokens) == (0, 400, 80)
    moved = (400 + 8) * TOKEN_BYTES // 2
    assert second.restore_ns == pytest.approx(moved / PCIE_BYTES_PER_S * 1e9, rel=0.01)
    assert bed.stats.read_bytes == moved and bed.stats.written_bytes >= 520 * TOKEN_BYTES
    assert bed.stats.hit_tokens == 400


def test_window_layers_leave_a_token_of_a_prompt_that_is_held_whole() -> None:
    """The last token is computed, and its window must be found before it: one token less than without windows."""
    lengths = (100, 100)
    for window, held, blocks in ((None, 399, 100), (9, 399, 100 + 3)):
        bed, second = squeezed(*lengths, window_tokens=window)
        assert (second.dram_tokens, second.computed_tokens) == (held, 1), window
        tokens = blocks * BLOCK - (0 if window is None else 2)
        assert bed.stats.read_bytes == tokens * TOKEN_BYTES // (1 if window is None else 2)


def test_blocks_that_no_window_needs_leave_the_tier_first() -> None:
    """Prompts of 100 blocks that grow by 2 a call, five on the first engine, whose tier holds 505: without windows one
    loses its end when another grows; with windows only chunks go that nobody has read since they were stored.
    """
    chunk = -(-TOKEN_BYTES * BLOCK // 4096) * 4096
    grown = [Session(name, BLOCK, one(*range(100, 112, 2))[0].calls) for name in "abcdefgh"]
    again = {}
    for window in (None, 9):
        bed = Bed(grown, cpu_bytes_to_use=505 * chunk, window_tokens=window)
        counts = bed.cluster.nodes[0].ranks[0].scheduler.manager.counts
        assert counts.evicted > 50 and (counts.evicted == counts.evicted_unread) == (window is not None)
        again[window] = sum(r.computed_tokens for r in bed.records if not r.call_id.endswith("/0"))
    assert again[9] == 8 * 5 * 2 * BLOCK, "no more than what was new"
    assert again[None] > 3 * again[9]


def test_without_a_fabric_copies_take_no_time() -> None:
    _, second = squeezed(topology=None)
    assert second.dram_tokens == 400 and second.restore_ns == 0


def test_copies_of_one_direction_wait_for_each_other() -> None:
    """Sessions that come back at once: with a wire that they would share, the first is there in half the time."""
    back = [Session(name, BLOCK, one(60, 70)[0].calls) for name in "abcd"]
    filler = [
        Session(f"f{i}", BLOCK, [Call(0, 0.0, None, "main", 140 * BLOCK, 1, -1, 0, 140, (), None, 0.1)])
        for i in range(6)
    ]
    bed = Bed([*back, *filler], cpu_bytes_to_use=1 << 40)
    alone = 240 * TOKEN_BYTES / PCIE_BYTES_PER_S * 1e9
    for endpoint in (0, 1):
        waits = sorted(r.restore_ns for r in bed.records if r.dram_tokens == 240 and r.endpoint == endpoint)
        assert len(waits) == 2
        assert waits[0] == pytest.approx(alone, rel=0.02)
        assert alone < waits[1] < 2.02 * alone


def test_a_failed_load_ends_its_request() -> None:
    bed, second = squeezed(load_failure_share=1.0)
    assert second.outcome == FAILED and "KV load failed" in second.message
    assert bed.stats.read_bytes == 400 * TOKEN_BYTES


def test_a_failed_load_is_tried_again_with_recompute() -> None:
    """The tier still has it: it is looked up anew and loaded again."""
    bed, second = squeezed(60, seed=4, load_failure_share=0.5, kv_load_failure_policy="recompute")
    assert second.outcome == COMPLETED and second.dram_tokens == 240
    tries = bed.stats.read_bytes // (240 * TOKEN_BYTES)
    assert tries == 3
    assert second.restore_ns == pytest.approx(tries * 240 * TOKEN_BYTES / PCIE_BYTES_PER_S * 1e9, rel=0.02)


def test_a_client_that_leaves_during_its_load() -> None:
    """The load goes on to its end, and then its blocks are free (Bed looks)."""
    bed, second = squeezed(client_timeout_ns=4 * MS)
    assert second.outcome == TIMED_OUT and second.first_token_ns is None
    assert bed.stats.read_bytes == 400 * TOKEN_BYTES


def test_settings_that_vllm_refuses() -> None:
    for options, what in (
        ({"block_size": 6}, "block_size"),
        ({"block_size": 8, "blocks_per_chunk": 2}, "both"),
        ({"window_groups": 2}, "window_groups: has no window_tokens"),
        ({"cpu_bytes_to_use": 1000}, "one chunk"),
        ({"window_tokens": 8, "window_groups": 6}, "window_groups: a token's 1,000,000 bytes"),
    ):
        with pytest.raises(InputError, match=what):
            Bed(one(4), **options)
    assert OffloadingConfig(cpu_bytes_to_use=1, block_size=64).chunk_blocks(16) == 4
