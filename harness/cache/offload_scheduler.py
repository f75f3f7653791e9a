"""Which chunks of which request are loaded and stored when: vLLM 0.32's OffloadingConnectorScheduler for one engine.

vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py for one full-attention group, without speculative
decoding and context parallelism; tests/differential holds the two equal call by call. Knows neither time nor bytes:
jobs are returned, and `complete` says that one has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.cache.offload_manager import Access, OffloadManager
from harness.cache.offload_policies import Key


@dataclass(slots=True, eq=False)
class Job:
    """A copy between GPU and tier."""

    request: OffloadState
    keys: list[Key]
    store: bool


@dataclass(slots=True, eq=False)
class OffloadState:
    """One request, as the connector tracks it."""

    request_id: str
    prompt_tokens: int
    keys: list[Key] = field(default_factory=list)
    """Of every whole chunk of prompt and outputs so far."""
    tokens: int = 0
    """Known: prompt and outputs."""
    blocks: int = 0
    """Allocated when it was last scheduled."""
    next_stored: int = 0
    local_tokens: int = 0
    jobs: set[Job] = field(default_factory=set)
    access: Access = field(default_factory=Access)
    asked: bool = False
    over: bool = False
    """Its end has been told to the manager."""


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A request in a batch: its tokens that are computed when the batch has been executed, and its blocks."""

    state: OffloadState
    tokens_after: int
    blocks: int


class OffloadScheduler:
    """The scheduler's side of one engine's connector. `chunk_blocks`: GPU blocks per chunk (blocks_per_chunk)."""

    def __init__(
        self,
        manager: OffloadManager,
        block_tokens: int,
        chunk_blocks: int,
        offload_prompt_only: bool = True,
        prefix_caching: bool = True,
    ) -> None:
        self.manager = manager
        self.block_tokens = block_tokens
        self.chunk_blocks = chunk_blocks
        self.chunk_tokens = block_tokens * chunk_blocks
        self._prompt_only = offload_prompt_only
        self._loading: set[Key] | None = set() if prefix_caching else None
        """Chunks on their way to the GPU: who wants one of them waits, and then finds it there."""

    # ------------------------------------------------------------------ admission

    def matched(self, state: OffloadState, local_tokens: int) -> int | None:
        """get_num_new_matched_tokens: tokens beyond the local hit that can be loaded; None: ask again later.

        `state.keys` and `state.tokens` are up to date.
        """
        state.blocks = 0
        if state.jobs:
            return None
        state.local_tokens = local_tokens
        return self._lookup(state, local_tokens)

    def _lookup(self, state: OffloadState, local: int) -> int | None:
        size = self.chunk_tokens
        most = min(state.tokens, len(state.keys) * size)
        if most - local < size:
            return 0
        start = local // size
        wanted = state.keys[start : -(-most // size)]
        hits, pending = 0, False
        lookup = self.manager.lookup
        for key in wanted:
            found = lookup(key)
            if found is False:
                break
            hits += 1
            pending |= found is None
        if hits == 0:
            return 0
        if pending:
            return None
        more = min(most, (start + hits) * size) - local
        if more < size:
            return 0
        if self._loading and not self._loading.isdisjoint(state.keys[start : -(-(local + more) // size)]):
            return None
        return more

    def allocated(self, state: OffloadState, external_tokens: int) -> Job | None:
        """update_state_after_alloc: the load that fills the request's blocks."""
        if not external_tokens:
            return None
        local = state.local_tokens
        first = -(-local // self.block_tokens) // self.chunk_blocks
        end = -(-(local + external_tokens) // self.chunk_tokens)
        keys = state.keys[first:end]
        state.next_stored = end
        self.manager.prepare_load(keys, state.access)
        job = Job(state, keys, store=False)
        assert not state.jobs, "a load is only begun when nothing else of the request is under way"
        state.jobs.add(job)
        if self._loading is not None:
            self._loading.update(keys)
        return job

    # ------------------------------------------------------------------ the end of a schedule

    def build(self, batch: Sequence[Scheduled], finished: Sequence[Scheduled]) -> list[Job]:
        """build_connector_meta: stores of what the batch computes, in its order, then of requests that ended.

        `finished`: tokens_after is what has been computed of them, blocks what they held when last scheduled.
        """
        for item in batch:
            item.state.blocks = item.blocks
        jobs = []
        for item in (*batch, *finished):
            job = self._store(item.state, item.tokens_after)
            if job is not None:
                jobs.append(job)
        for item in finished:
            item.state.over = True
            self.manager.request_over(item.state.access)
        return jobs

    def unstored(self, state: OffloadState, tokens: int) -> bool:
        """Whether chunks among the first `tokens` tokens were refused and will be offered again."""
        return self._storable(state, tokens) > state.next_stored

    def _storable(self, state: OffloadState, tokens: int) -> int:
        tokens = min(tokens, state.tokens)
        if self._prompt_only:
            tokens = min(tokens, state.prompt_tokens)
        return min(tokens // self.chunk_tokens, state.blocks // self.chunk_blocks, len(state.keys))

    def _store(self, state: OffloadState, tokens_after: int) -> Job | None:
        end, start = self._storable(state, tokens_after), state.next_stored
        if end <= start:
            return None
        prepared = self.manager.prepare_store(state.keys[start:end], state.access)
        if prepared is None:
            return None  # offered again with the next step
        state.next_stored = end
        if not prepared.keys:
            return None
        job = Job(state, prepared.keys, store=True)
        state.jobs.add(job)
        return job

    # ------------------------------------------------------------------ the end of a copy

    def complete(self, job: Job) -> None:
        """update_connector_output: a copy has ended."""
        if job.store:
            self.manager.complete_store(job.keys)
        else:
            self.manager.complete_load(job.keys)
            if self._loading is not None:
                self._loading.difference_update(job.keys)
        job.request.jobs.remove(job)
