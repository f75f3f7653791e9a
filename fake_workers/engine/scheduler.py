"""vLLM 0.32's v1 scheduler for one engine (one DP rank), on runs of blocks.

Rule numbers refer to docs/engine.md, which lists them with their place in vLLM's source. Scope: one full-attention KV
group, no LoRA, no multimodal input. Speculative decoding: drafts.py. An engine with a KV connector: connector.py.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from fake_workers.engine.blocks import BlockPool, PromptRuns
from fake_workers.engine.drafts import accepted, chances
from fake_workers.engine.events import KvEvent, Removed, Stored
from fake_workers.engine.request import EngineRequest


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """vLLM's own knobs, under vLLM's names where they have one. `num_gpu_blocks` includes vLLM's null block."""

    num_gpu_blocks: int
    block_tokens: int
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    max_model_len: int = 131072
    async_scheduling: bool = True
    enable_prefix_caching: bool = True
    scheduler_reserve_full_isl: bool = True
    watermark: float = 0.0
    long_prefill_token_threshold: int = 0
    policy: str = "fcfs"
    num_speculative_tokens: int = 0
    draft_acceptance_share: float = 0.0
    """Of all drafted tokens, the share that is accepted."""


@dataclass(slots=True)
class Scheduled:
    """One request's share of a batch: `tokens` to compute on top of `cached`; `samples` if it yields a token."""

    request: EngineRequest
    tokens: int
    cached: int
    samples: bool
    drafts: int = 0
    """Of `tokens`: drafts that the step verifies."""


@dataclass(slots=True)
class Batch:
    """What one schedule() call put together, in vLLM's order (running first, then admitted)."""

    items: list[Scheduled] = field(default_factory=list)
    preempted: list[EngineRequest] = field(default_factory=list)


class RankScheduler:
    """State and rules of one engine; knows nothing of time except to stamp events."""

    def __init__(self, config: SchedulerConfig, keep_events: bool) -> None:
        self.config = config
        self.pool = BlockPool(config.num_gpu_blocks - 1)
        self.running: list[EngineRequest] = []
        self.waiting: deque[EngineRequest] = deque()
        self.keep_events = keep_events
        self.events: list[KvEvent] = []
        """Events since the last publication; the node stamps them with the end of the step that publishes them."""
        drafts = config.num_speculative_tokens
        self._chances = chances(drafts, config.draft_acceptance_share) if drafts else ()
        self._watermark_blocks = int(config.watermark * config.num_gpu_blocks)

    @property
    def unfinished(self) -> bool:
        """Whether any request is running or waiting."""
        return bool(self.running or self.waiting)

    @property
    def waiting_count(self) -> int:
        """vllm:num_requests_waiting."""
        return len(self.waiting)

    # ------------------------------------------------------------------ requests in and out

    def add(self, request: EngineRequest) -> None:
        """A new request joins the waiting queue (rule 17: sorted by priority under that policy)."""
        self._enqueue(request)

    def abort(self, request: EngineRequest) -> None:
        """The client went away: out of the queues, blocks free at once (rule 18)."""
        if request.finished:
            return
        request.finished = True
        if request.running:
            self.running.remove(request)
            request.running = False
        elif request in self.waiting:
            self.waiting.remove(request)
        self._free(request)

    def _enqueue(self, request: EngineRequest) -> None:
        if self.config.policy != "priority":
            self.waiting.append(request)
            return
        key = priority_key(request)
        at = next((i for i, r in enumerate(self.waiting) if priority_key(r) > key), len(self.waiting))
        self.waiting.insert(at, request)

    # ------------------------------------------------------------------ schedule (rules 2-11)

    def schedule(self) -> Batch:
        """Put the next batch together: running requests in order, then, if none was preempted, waiting ones."""
        config = self.config
        batch = Batch()
        budget = config.max_num_batched_tokens
        threshold = self._long_prefill_threshold()
        budget = self._schedule_running(batch, budget, threshold)
        if not batch.preempted:
            self._schedule_waiting(batch, budget, threshold)
        is_async = config.async_scheduling
        for item in batch.items:
            request = item.request
            request.computed += item.tokens
            request.in_flight += item.tokens
            item.samples = request.computed >= request.tokens + request.placeholders
            if item.samples and is_async:
                request.placeholders += 1 + item.drafts
        return batch

    def _long_prefill_threshold(self) -> int:
        threshold = self.config.long_prefill_token_threshold
        return threshold if len(self.running) + len(self.waiting) > 1 else 0

    def _schedule_running(self, batch: Batch, budget: int, threshold: int) -> int:
        config = self.config
        drafting = config.num_speculative_tokens
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            computed = request.computed
            if (
                request.placeholders > 0
                and computed + 2 - request.placeholders >= request.prompt_tokens + request.output_tokens
            ):
                index += 1  # rule 16: the step in flight already yields the last token
                continue
            tokens = request.tokens + request.placeholders - computed
            if 0 < threshold < tokens:
                tokens = threshold
            tokens = min(tokens, budget, config.max_model_len - computed - 1)
            if tokens <= 0:
                index += 1
                continue
            drafts = 0
            if drafting and tokens == 1 and computed >= request.prompt_tokens:
                drafts = max(0, min(drafting, budget - 1, config.max_model_len - computed - 2))
                tokens += drafts
            allocated = True
            while not self.allocate(request, computed + tokens, drafting):
                victim = self._victim()
                if not self._can_free(victim):
                    allocated = False
                    break
                at = self.running.index(victim) if config.policy == "priority" else len(self.running) - 1
                del self.running[at]
                if at < index:
                    index -= 1
                    budget += self._unschedule(batch, victim)
                self._preempt(victim)
                batch.preempted.append(victim)
                if victim is request:
                    allocated = False
                    break
            if not allocated:
                break
            batch.items.append(Scheduled(request, tokens, computed, False, drafts))
            budget -= tokens
            index += 1
        return budget

    def _schedule_waiting(self, batch: Batch, budget: int, threshold: int) -> None:
        config = self.config
        skipped: list[EngineRequest] = []
        while budget > 0 and self.waiting and len(self.running) < config.max_num_seqs:
            request = self.waiting[0]
            if request.stale:
                skipped.append(self.waiting.popleft())  # rule 16: tokens from before its preemption are under way
                continue
            hits, hit_blocks, idle = self._lookup(request)
            computed = hit_blocks * config.block_tokens
            tokens = request.tokens - computed
            if 0 < threshold < tokens:
                tokens = threshold
            tokens = min(tokens, budget)
            watermark = self._watermark_blocks if self.running else 0
            need_tokens = request.tokens if config.scheduler_reserve_full_isl else computed + tokens
            if self._blocks_for(need_tokens) - hit_blocks + idle + watermark > self.pool.free:
                break  # rule 5: head of the line waits, nobody overtakes
            self.waiting.popleft()
            request.held = self.pool.acquire(hits)
            request.blocks = request.cached_blocks = hit_blocks
            allocated = self.allocate(request, computed + tokens)
            assert allocated, "the admission gate counted fewer blocks than the allocation needs"
            request.computed = computed
            request.running = True
            if request.hit_tokens is None:
                request.hit_tokens = computed
            self.running.append(request)
            batch.items.append(Scheduled(request, tokens, computed, False))
            budget -= tokens
        self.waiting.extendleft(reversed(skipped))

    def _lookup(self, request: EngineRequest) -> tuple[list, int, int]:  # type: ignore[type-arg]
        if not self.config.enable_prefix_caching:
            return [], 0, 0
        block = self.config.block_tokens
        # rule 6: at least one token is computed, so a full hit recomputes its last block
        return self.pool.match(request.known_runs(block), (request.tokens - 1) // block)

    def _blocks_for(self, tokens: int) -> int:
        return -(-min(tokens, self.config.max_model_len) // self.config.block_tokens)

    def allocate(self, request: EngineRequest, tokens: int, lookahead: int = 0) -> bool:
        """Blocks for the first `tokens` tokens and `lookahead` drafts to come, identities for those that become full
        (rules 9-11, 15).
        """
        new = self._blocks_for(tokens + lookahead) - request.blocks
        if new > 0:
            if new > self.pool.free:
                return False
            evicted = self.pool.take(new)
            request.blocks += new
            if evicted and self.keep_events:
                self.events.extend(Removed(0, o, a, b - a) for o, a, b in evicted)
        self.cache_blocks(request, min(tokens, request.tokens))
        return True

    def cache_blocks(self, request: EngineRequest, tokens: int) -> None:
        """Full blocks among the first `tokens` tokens get their identity, if they have none yet."""
        full = tokens // self.config.block_tokens
        start = request.cached_blocks
        if full <= start or not self.config.enable_prefix_caching:
            return
        held = request.held
        for origin, a, b in _slice(request.known_runs(self.config.block_tokens), start, full):
            last = held[-1] if held else None
            if last is None or last.origin != origin or last.end != a or not self.pool.extend(last, b):
                held.extend(self.pool.insert(origin, a, b))
            if self.keep_events:
                self.events.append(Stored(0, origin, a, b - a, _block_before(request, a, self.config.block_tokens)))
        request.cached_blocks = full

    # ------------------------------------------------------------------ preemption (rule 4)

    def _victim(self) -> EngineRequest:
        if self.config.policy == "priority":
            return max(self.running, key=lambda r: (r.priority, r.arrival_ns))
        return self.running[-1]

    def _can_free(self, victim: EngineRequest) -> bool:
        """Whether preemption would bring blocks at once; only a connector can be in the way."""
        return True

    def _unschedule(self, batch: Batch, victim: EngineRequest) -> int:
        for i, item in enumerate(batch.items):
            if item.request is victim:
                del batch.items[i]
                return item.tokens
        return 0

    def _preempt(self, request: EngineRequest) -> None:
        self._free(request)
        request.running = False
        request.computed = 0
        request.placeholders = 0
        request.stale = request.in_flight
        request.preemptions += 1
        if self.config.policy == "priority":
            self._enqueue(request)
        else:
            self.waiting.appendleft(request)

    def _free(self, request: EngineRequest) -> None:
        self.pool.release(request.held, request.blocks - request.cached_blocks)
        request.held = []
        request.blocks = request.cached_blocks = 0

    # ------------------------------------------------------------------ update (rules 13, 14, 16)

    def update(self, batch: Batch) -> tuple[list[EngineRequest], list[EngineRequest]]:
        """The batch has been executed. Returns (requests that got their first token, requests that finished)."""
        first: list[EngineRequest] = []
        done: list[EngineRequest] = []
        is_async = self.config.async_scheduling
        for item in batch.items:
            request = item.request
            request.in_flight -= item.tokens
            stale = request.stale > 0
            if stale:
                request.stale -= item.tokens
            if request.finished:
                continue
            if not item.samples:
                continue
            gained = 1
            if item.drafts:
                gained += accepted(request.origin, request.outputs, item.drafts, self._chances)
                if not stale:
                    request.computed -= item.drafts + 1 - gained
                gained = min(gained, request.output_tokens - request.outputs)
            request.outputs += gained
            if request.outputs == 1:
                first.append(request)
            stopped = request.outputs >= request.output_tokens or request.tokens >= self.config.max_model_len
            if is_async:
                if not stale:
                    request.placeholders -= 1 + item.drafts
                if request.running:
                    # accepted drafts beyond what was asked for are thrown away
                    self.cache_blocks(request, min(request.computed - request.placeholders, request.tokens))
            if stopped:
                request.finished = True
                self._free(request)
                done.append(request)
        if done:
            self.running = [r for r in self.running if not r.finished]
            for request in done:
                if not request.running:
                    self.waiting.remove(request)
                request.running = False
        return first, done

    # ------------------------------------------------------------------ views

    def truly_held(self, prompt: PromptRuns) -> int:
        """Blocks of the prompt's prefix that this engine would find in its cache now."""
        return self.pool.cached_prefix(prompt)


def priority_key(request: EngineRequest) -> tuple[int, int, str]:
    """Place in the line under the priority policy (rule 17)."""
    return request.priority, request.arrival_ns, request.request_id


def _slice(runs: PromptRuns, start: int, end: int) -> PromptRuns:
    """The part of `runs` at positions start..end-1."""
    out: PromptRuns = []
    for run in reversed(runs):
        if run[2] <= start:
            break
        if run[1] < end:
            out.append((run[0], max(run[1], start), min(run[2], end)))
    out.reverse()
    return out


def _block_before(request: EngineRequest, pos: int, block_tokens: int) -> tuple[int, int] | None:
    if pos == 0:
        return None
    for origin, start, end in reversed(request.known_runs(block_tokens)):
        if start <= pos - 1 < end:
            return origin, pos - 1
    raise AssertionError("a stored block has no predecessor")
