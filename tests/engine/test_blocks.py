"""BlockPool (runs) against a pool of single blocks: hits, evictions in order, duplicates, queue order, counts."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fake_workers.engine.blocks import BlockPool, PromptRuns, Run, whole_runs
from tests.engine.reference import Block, Name, ReferencePool
from tests.engine.workload import cut_runs

MOST_BLOCKS = 12


def names_of(prompt: PromptRuns) -> list[Name]:
    return [(origin, pos) for origin, start, end in prompt for pos in range(start, end)]


@dataclass(eq=False)
class Holder:
    """A request in both pools: `named` of its blocks have an identity, the rest are blank."""

    prompt: PromptRuns
    runs: list[Run] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    named: int = 0

    @property
    def prompt_names(self) -> list[Name]:
        return names_of(self.prompt)


class PoolMachine(RuleBasedStateMachine):
    """Requests come, grow, get identities, go; both pools must agree after every move."""

    def __init__(self) -> None:
        super().__init__()
        self.holders: list[Holder] = []
        self.prompts: list[PromptRuns] = []

    @initialize(size=st.integers(1, 30))
    def start(self, size: int) -> None:
        self.pool, self.model = BlockPool(size), ReferencePool(size)

    def take(self, holder: Holder, count: int) -> None:
        count = min(count, len(holder.prompt_names) - len(holder.blocks), self.pool.free)
        evicted = self.pool.take(count)
        holder.blocks += self.model.get_new_blocks(count)
        flat = [("-", origin, pos) for origin, start, end in evicted for pos in reversed(range(start, end))]
        assert flat == self.model.events
        self.model.events.clear()

    @rule(
        parent=st.integers(0, 50),
        keep=st.integers(0, MOST_BLOCKS),
        new=st.integers(0, 6),
        limit=st.integers(0, MOST_BLOCKS),
        take=st.integers(0, 6),
        name=st.integers(0, 6),
    )
    def admit(self, parent: int, keep: int, new: int, limit: int, take: int, name: int) -> None:
        """A request of shared and new blocks takes its hit, then allocates. A small limit makes duplicates."""
        prompt = cut_runs(self.prompts[parent % len(self.prompts)], keep) if self.prompts else []
        keep = len(names_of(prompt))
        if new or not prompt:
            prompt.append((len(self.prompts), keep, keep + max(1, new)))
        self.prompts.append(prompt)
        holder = Holder(prompt)
        hits, found, idle = self.pool.match(prompt, limit)
        expected = self.model.lookup(names_of(prompt)[:limit])
        assert (found, idle) == (len(expected), sum(block.refs == 0 for block in expected))
        holder.runs = self.pool.acquire(hits)
        self.model.touch(expected)
        holder.blocks, holder.named = list(expected), found
        self.holders.append(holder)
        self.take(holder, take)
        self.name(holder, name)

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 50), take=st.integers(1, 6), name=st.integers(0, 6))
    def grow(self, which: int, take: int, name: int) -> None:
        holder = self.holders[which % len(self.holders)]
        self.take(holder, take)
        self.name(holder, name)

    def name(self, holder: Holder, count: int) -> None:
        """The next `count` blank blocks get their identity, as RankScheduler.cache_blocks does it."""
        names = holder.prompt_names
        until = min(holder.named + count, len(holder.blocks))
        for pos in range(holder.named, until):
            self.model.cache_block(holder.blocks[pos], names[pos], names[pos - 1] if pos else None)
        self.model.events.clear()
        for origin, start, end in holder.prompt:
            start, end = max(start, holder.named), min(end, until)
            if start >= end:
                continue
            last = holder.runs[-1] if holder.runs else None
            if last is None or last.origin != origin or last.end != start or not self.pool.extend(last, end):
                holder.runs.extend(self.pool.insert(origin, start, end))
        holder.named = until

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 50))
    def release(self, which: int) -> None:
        holder = self.holders.pop(which % len(self.holders))
        self.pool.release(holder.runs, len(holder.blocks) - holder.named)
        self.model.free_blocks(holder.blocks[::-1])

    @precondition(lambda self: len(self.prompts) > 12)
    @rule()
    def clear(self) -> None:
        free = not any(holder.blocks for holder in self.holders)
        assert self.pool.clear() == free
        if free:
            self.model = ReferencePool(self.model.blocks)

    @invariant()
    def same_state(self) -> None:
        pool, model = self.pool, self.model
        assert pool.free == model.free
        assert pool.blank == sum(block.name is None for block in model.queue)
        assert pool.usage == 1 - model.free / model.blocks
        queue = [(origin, pos) for origin, start, end in pool.queue() for pos in reversed(range(start, end))]
        assert queue == [block.name for block in model.queue if block.name is not None]
        resident = names_of(pool.resident())
        assert len(resident) == len(set(resident))
        assert set(resident) == {name for name, blocks in model.table.items() if blocks}
        for prompt in self.prompts:
            expected = model.lookup(names_of(prompt))
            assert pool.match(prompt, MOST_BLOCKS * 9)[1:] == (
                len(expected),
                sum(block.refs == 0 for block in expected),
            )
            assert pool.cached_prefix(prompt) == len(expected)
        for holder in self.holders:
            held = names_of([(run.origin, run.start, run.end) for run in whole_runs(holder.runs)])
            assert held == holder.prompt_names[: holder.named]


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)


def test_the_first_inserted_duplicate_is_found_until_it_is_evicted() -> None:
    pool = BlockPool(4)
    pool.take(2)
    first = pool.insert(0, 0, 2)
    pool.take(2)
    second = pool.insert(0, 0, 2)
    assert [run.primary for run in (*first, *second)] == [True, False]
    pool.release(second, 0)
    assert pool.match([(0, 0, 2)], 2)[1:] == (2, 0), "found: the copy that is held"
    pool.release(first, 0)
    assert pool.take(2) == [(0, 0, 2)], "the shadow was freed first, so it goes first"
    assert pool.match([(0, 0, 2)], 2)[1:] == (2, 2)
    assert pool.take(1) == [(0, 1, 2)]
    assert pool.match([(0, 0, 2)], 2)[1:] == (1, 1)


def test_a_shadow_takes_over_where_its_primary_was_evicted() -> None:
    pool = BlockPool(6)
    pool.take(3)
    first = pool.insert(0, 0, 3)
    pool.take(3)
    second = pool.insert(0, 0, 3)
    pool.release(first, 0)
    assert pool.take(2) == [(0, 1, 3)]
    assert pool.match([(0, 0, 3)], 3)[1:] == (3, 1), "block 0 is the freed one, 1 and 2 are the held copy's"
    pool.release(second, 2)
    assert pool.cached_prefix([(0, 0, 3)]) == 3


def test_allocation_beyond_the_free_blocks_is_an_error() -> None:
    pool = BlockPool(2)
    pool.take(2)
    with pytest.raises(AssertionError):
        pool.take(1)


def test_a_run_shared_by_two_requests_does_not_grow_in_place() -> None:
    pool = BlockPool(8)
    pool.take(2)
    (run,) = pool.insert(0, 0, 2)
    (same,) = pool.acquire(pool.match([(0, 0, 2)], 2)[0])
    assert same is run and not pool.extend(run, 3)
    pool.release([same], 0)
    pool.take(1)
    assert pool.extend(run, 3)
    assert pool.resident() == [(0, 0, 3)]
