"""The readable engine: vLLM 0.32's scheduler block by block and step by step, for one full-attention KV group.

No runs, no leaps, no arithmetic shortcuts: every block is an object, the free queue is a deque, the cache is a dict of
lists. It follows the rules of docs/engine.md in the order of vLLM's own functions, whose names it keeps. Tests compare
fake_workers.engine with it; tests/differential compares both kinds with vLLM itself.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from fake_workers.engine.request import EngineRequest
from fake_workers.engine.scheduler import Batch, Scheduled, SchedulerConfig
from tests.engine.workload import Record, scheduled, updated

Name = tuple[int, int]
"""Identity of a full block: (origin, pos). It stands for vLLM's block hash."""


@dataclass(eq=False)
class Block:
    """One physical KV block."""

    refs: int = 0
    name: Name | None = None


class ReferencePool:
    """block_pool.BlockPool: free queue, hash table, events."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.queue: deque[Block] = deque(Block() for _ in range(blocks))
        self.table: dict[Name, list[Block]] = {}
        self.events: list[Record] = []

    @property
    def free(self) -> int:
        """get_num_free_blocks."""
        return len(self.queue)

    def lookup(self, names: list[Name]) -> list[Block]:
        """find_longest_cache_hit: the first-inserted block of each name, up to the first miss."""
        found = []
        for name in names:
            if not self.table.get(name):
                break
            found.append(self.table[name][0])
        return found

    def touch(self, blocks: list[Block]) -> None:
        """Reference cached blocks; free ones leave the queue."""
        for block in blocks:
            if block.refs == 0:
                self.queue.remove(block)
            block.refs += 1

    def get_new_blocks(self, count: int) -> list[Block]:
        """Blocks from the front of the queue, losing what they cached."""
        taken = [self.queue.popleft() for _ in range(count)]
        for block in taken:
            if block.name is not None:
                self.table[block.name].remove(block)
                self.events.append(("-", *block.name))
                block.name = None
            block.refs = 1
        return taken

    def cache_block(self, block: Block, name: Name, parent: Name | None) -> None:
        """A full block gets its name."""
        assert block.name is None
        block.name = name
        self.table.setdefault(name, []).append(block)
        self.events.append(("+", *name, parent))

    def free_blocks(self, blocks: list[Block]) -> None:
        """Blocks in eviction order: unnamed ones to the front of the queue, named ones to its back (rule 12)."""
        for block in blocks:
            block.refs -= 1
        idle = [block for block in blocks if block.refs == 0]
        self.queue.extendleft(reversed([block for block in idle if block.name is None]))
        self.queue.extend(block for block in idle if block.name is not None)


@dataclass(eq=False)
class State:
    """vllm.v1.request.Request as far as scheduling needs it."""

    public: EngineRequest
    blocks: list[Block] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_output_placeholders: int = 0
    num_in_flight_tokens: int = 0
    num_stale_output_tokens: int = 0
    num_preemptions: int = 0
    running: bool = False

    @property
    def num_tokens(self) -> int:
        """Prompt and outputs known so far."""
        return self.public.prompt_tokens + self.num_output_tokens

    def names(self, block_tokens: int) -> list[Name]:
        """block_hashes: names of all full blocks."""
        out = [(origin, pos) for origin, start, end in self.public.runs for pos in range(start, end)]
        out += [(self.public.origin, pos) for pos in range(len(out), self.num_tokens // block_tokens)]
        return out

    def key(self) -> tuple[int, int, str]:
        """Order under the priority policy."""
        return self.public.priority, self.public.arrival_ns, self.public.request_id


class ReferenceRank:
    """scheduler.Scheduler and AsyncScheduler; fits into a Node in place of a RankScheduler and writes a record."""

    def __init__(self, config: SchedulerConfig, log: list[Record]) -> None:
        self.config = config
        self.pool = ReferencePool(config.num_gpu_blocks - 1)
        self.running: list[State] = []
        self.waiting: list[State] = []
        self.requests: dict[str, State] = {}
        self.log = log
        self.events: list[object] = []  # what a Node would stamp; the record has them instead

    @property
    def waiting_count(self) -> int:
        """vllm:num_requests_waiting."""
        return len(self.waiting)

    @property
    def unfinished(self) -> bool:
        """has_unfinished_requests."""
        return bool(self.running or self.waiting)

    def add(self, request: EngineRequest) -> None:
        """add_request."""
        self.requests[request.request_id] = State(request)
        self._enqueue(self.requests[request.request_id], front=False)

    def abort(self, request: EngineRequest) -> None:
        """finish_requests."""
        state = self.requests.pop(request.request_id, None)
        request.finished = True
        if state is not None:
            (self.running if state.running else self.waiting).remove(state)
            self._free(state)

    def schedule(self) -> Batch:
        """schedule: running requests first, then waiting ones unless somebody was preempted."""
        config = self.config
        budget = config.max_num_batched_tokens
        eligible = len(self.running) + len(self.waiting)
        threshold = config.long_prefill_token_threshold if eligible > 1 else 0
        tokens: dict[State, int] = {}
        new: list[State] = []
        resumed: list[State] = []
        preempted: list[State] = []
        index = 0
        while index < len(self.running) and budget > 0:
            state = self.running[index]
            total = state.public.prompt_tokens + state.public.output_tokens
            if (
                state.num_output_placeholders > 0
                and state.num_computed_tokens + 2 - state.num_output_placeholders >= total
            ):
                index += 1
                continue
            count = state.num_tokens + state.num_output_placeholders - state.num_computed_tokens
            if 0 < threshold < count:
                count = threshold
            count = min(count, budget, config.max_model_len - state.num_computed_tokens - 1)
            if count <= 0:
                index += 1
                continue
            while not self._allocate_slots(state, count, [], 0, False):
                if config.policy == "priority":
                    victim = max(self.running, key=lambda s: (s.public.priority, s.public.arrival_ns))
                else:
                    victim = self.running[-1]
                at = self.running.index(victim)
                del self.running[at]
                if at < index:
                    index -= 1
                budget += tokens.pop(victim, 0)
                self._preempt(victim)
                preempted.append(victim)
                if victim is state:
                    break
            if state in preempted:
                break
            tokens[state] = count
            budget -= count
            index += 1
        before = dict(tokens)
        skipped: list[State] = []
        while not preempted and self.waiting and budget > 0 and len(self.running) < config.max_num_seqs:
            state = self.waiting[0]
            if state.num_stale_output_tokens:
                skipped.append(self.waiting.pop(0))
                continue
            hit: list[Block] = []
            if config.enable_prefix_caching:
                longest = (state.num_tokens - 1) // config.block_tokens
                hit = self.pool.lookup(state.names(config.block_tokens)[:longest])
            computed = len(hit) * config.block_tokens
            count = state.num_tokens - computed
            if 0 < threshold < count:
                count = threshold
            count = min(count, budget)
            watermark = int(config.watermark * config.num_gpu_blocks) if self.running else 0
            if not self._allocate_slots(state, count, hit, watermark, config.scheduler_reserve_full_isl):
                break
            self.waiting.pop(0)
            state.num_computed_tokens = computed
            state.running = True
            self.running.append(state)
            (resumed if state.num_preemptions else new).append(state)
            tokens[state] = count
            budget -= count
        self.waiting[:0] = skipped
        batch = Batch([], [state.public for state in preempted])
        for state, count in tokens.items():
            item = Scheduled(state.public, count, state.num_computed_tokens, False)
            state.num_computed_tokens += count
            state.num_in_flight_tokens += count
            item.samples = state.num_computed_tokens >= state.num_tokens + state.num_output_placeholders
            if item.samples and config.async_scheduling:
                state.num_output_placeholders += 1
            batch.items.append(item)
        assert list(before) == [i for i in tokens if i not in new and i not in resumed]
        self.log.append(
            scheduled(
                [(i.request.request_id, i.tokens, i.cached) for i in batch.items],
                [s.public.request_id for s in new],
                [s.public.request_id for s in resumed],
                [s.public.request_id for s in preempted],
                [s.public.request_id for s in self.waiting],
                self.pool.free,
            )
        )
        return batch

    def update(self, batch: Batch) -> tuple[list[EngineRequest], list[EngineRequest]]:
        """update_from_output, with one token for every request whose chunk was its last."""
        done: list[EngineRequest] = []
        outputs: list[tuple[str, bool]] = []
        for item in batch.items:
            state = self.requests.get(item.request.request_id)
            if state is None:
                continue
            state.num_in_flight_tokens -= item.tokens
            stale = state.num_stale_output_tokens > 0
            if stale:
                state.num_stale_output_tokens -= item.tokens
            if not item.samples:
                continue
            state.num_output_tokens += 1
            stopped = (
                state.num_output_tokens >= state.public.output_tokens or state.num_tokens >= self.config.max_model_len
            )
            if self.config.async_scheduling:
                if not stale:
                    state.num_output_placeholders -= 1
                if state.running:
                    self._cache_blocks(state, state.num_computed_tokens - state.num_output_placeholders)
            if stopped:
                (self.running if state.running else self.waiting).remove(state)
                del self.requests[state.public.request_id]
                state.public.finished = True
                self._free(state)
                done.append(state.public)
            outputs.append((state.public.request_id, stopped))
        events, self.pool.events = self.pool.events, []
        self.log.append(
            updated(
                outputs,
                [s.public.request_id for s in self.running],
                [s.public.request_id for s in self.waiting],
                self.pool.free,
                events,
                not batch.items,
            )
        )
        return [], done

    def _allocate_slots(
        self, state: State, count: int, hit: list[Block], watermark: int, full_sequence_must_fit: bool
    ) -> bool:
        """kv_cache_manager.allocate_slots."""
        limit, size = self.config.max_model_len, self.config.block_tokens
        computed = state.num_computed_tokens + len(hit) * size
        idle = sum(block.refs == 0 for block in hit)

        def missing(tokens: int) -> int:
            return max(0, -(-min(tokens, limit) // size) - len(state.blocks) - len(hit))

        if full_sequence_must_fit and missing(state.num_tokens) + idle + watermark > self.pool.free:
            return False
        if missing(computed + count) + idle + watermark > self.pool.free:
            return False
        needed = missing(computed + count)
        self.pool.touch(hit)
        state.blocks += hit
        state.blocks += self.pool.get_new_blocks(needed)
        self._cache_blocks(state, min(computed + count, state.num_tokens))
        return True

    def _cache_blocks(self, state: State, tokens: int) -> None:
        if self.config.enable_prefix_caching:
            names = state.names(self.config.block_tokens)
            for pos in range(tokens // self.config.block_tokens):
                if state.blocks[pos].name is None:
                    self.pool.cache_block(state.blocks[pos], names[pos], names[pos - 1] if pos else None)

    def _free(self, state: State) -> None:
        self.pool.free_blocks(state.blocks[::-1])
        state.blocks = []

    def _preempt(self, state: State) -> None:
        self._free(state)
        state.running = False
        state.num_computed_tokens = state.num_output_placeholders = 0
        state.num_stale_output_tokens = state.num_in_flight_tokens
        state.num_preemptions += 1
        self._enqueue(state, front=True)

    def _enqueue(self, state: State, front: bool) -> None:
        if self.config.policy == "priority":
            self.waiting.append(state)
            self.waiting.sort(key=State.key)
        else:
            self.waiting.insert(0 if front else len(self.waiting), state)
