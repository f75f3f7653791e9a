"""Which chunks of which request are loaded and stored when: vLLM 0.32's OffloadingConnectorScheduler for one engine.

vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py for one full-attention group and, where a model has
layers with a sliding window, their groups (one window, the same block size), without speculative decoding and context
parallelism; tests/differential holds the two equal call by call. Knows neither time nor bytes: jobs are returned, and
`complete` says that one has ended.

Every group has chunks of its own. A store takes all that the step computes, of window groups too; a load takes of a
window group only the chunks that the window still needs, and a hit must have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.cache.offload_manager import Access, OffloadManager, group_of, in_group, origin_and_place
from harness.cache.offload_policies import Key


@dataclass(slots=True, eq=False)
class Job:
    """A copy between GPU and tier."""

    request: OffloadState
    keys: list[Key]
    store: bool
    tokens: int
    """That are copied, summed over the groups."""


@dataclass(slots=True, eq=False)
class OffloadState:
    """One request, as the connector tracks it."""

    request_id: str
    prompt_tokens: int
    keys: list[Key] = field(default_factory=list)
    """Of every whole chunk of prompt and outputs so far, of the first group."""
    tokens: int = 0
    """Known: prompt and outputs."""
    blocks: int = 0
    """Allocated when it was last scheduled."""
    next_stored: int = 0
    local_tokens: int = 0
    first_window_block: int = 0
    """Window groups have no blocks before this one: they lay outside the window when the request was admitted."""
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


@dataclass(frozen=True, slots=True)
class WindowGroups:
    """KV-cache groups of layers with a sliding window, beside the group with full attention."""

    tokens: int
    """The window."""
    groups: int = 1
    """vLLM makes groups of as many layers as the full-attention group has."""


class OffloadScheduler:
    """The scheduler's side of one engine's connector. `chunk_blocks`: GPU blocks per chunk (blocks_per_chunk)."""

    def __init__(
        self,
        manager: OffloadManager,
        block_tokens: int,
        chunk_blocks: int,
        offload_prompt_only: bool = True,
        prefix_caching: bool = True,
        windows: WindowGroups | None = None,
    ) -> None:
        self.manager = manager
        self.block_tokens = block_tokens
        self.chunk_blocks = chunk_blocks
        self.chunk_tokens = block_tokens * chunk_blocks
        self._prompt_only = offload_prompt_only
        self._window = 0 if windows is None else windows.tokens
        self._window_groups = range(1, 1 if windows is None else windows.groups + 1)
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
        """_lookup_complete_chunks: groups tighten the hit in turn, until none of them does any more."""
        size, count = self.chunk_tokens, len(state.keys)
        # the last token is computed in any case, and where there are windows it must find a hit in front of it
        most = min(state.tokens - bool(self._window_groups), count * size)
        start, hit, late = local // size, 0, False
        every = (0, *self._window_groups)
        groups: Sequence[int] = every
        while groups:
            turn, groups, after_window = groups, (), False
            for group in turn:
                if most - local < size:
                    return 0
                wanted = state.keys[start : -(-most // size)]
                found = self._window_hits(wanted, group, most) if group else self._prefix_hits(wanted)
                if found == 0:
                    return 0
                if found is None:
                    late = True
                else:
                    most = min(most, (start + found) * size)
                if most - local < size:
                    return 0
                if most - local < hit:
                    if late:
                        late, groups = False, every
                    elif after_window and not groups:
                        groups = self._window_groups
                after_window |= group > 0
                hit = most - local
        if late or self._is_loading(state, start, most):
            return None
        return hit

    def _prefix_hits(self, keys: Sequence[Key]) -> int | None:
        """Leading chunks that are held; None: one of them is being written."""
        hits, pending = 0, False
        lookup = self.manager.lookup
        for key in keys:
            found = lookup(key)
            if found is False:
                break
            hits += 1
            pending |= found is None
        return None if pending else hits

    def _window_hits(self, keys: Sequence[Key], group: int, end_tokens: int) -> int | None:
        """Chunks up to the end of the last window that is held as a whole; None: one of them is being written."""
        wanted, held, pending = self._window_chunks(end_tokens), 0, False
        lookup = self.manager.lookup
        for at in range(len(keys) - 1, -1, -1):
            found = lookup(in_group(keys[at], group))
            if found is False:
                # only the window at the very end can reach beyond a chunk's boundary
                wanted, held, pending = self._window_chunks(0), 0, False
            else:
                held += 1
                pending |= found is None
            if held == wanted:
                return None if pending else at + wanted
        return None if pending else held

    def _window_chunks(self, end_tokens: int) -> int:
        """Chunks that hold the window which ends after so many tokens (load_window_size_in_chunks)."""
        size = self.chunk_tokens
        return max(-(-self._window // size), -(-(self._window - 1 + -end_tokens % size) // size))

    def _is_loading(self, state: OffloadState, start: int, end_tokens: int) -> bool:
        """Whether a chunk of the hit is on its way to the GPU for another request."""
        if not self._loading:
            return False
        keys = state.keys[start : -(-end_tokens // self.chunk_tokens)]
        if not self._loading.isdisjoint(keys):
            return True
        tail = keys[-self._window_chunks(end_tokens) :] if self._window_groups else ()
        return any(in_group(key, group) in self._loading for group in self._window_groups for key in tail)

    def allocated(self, state: OffloadState, external_tokens: int) -> Job | None:
        """update_state_after_alloc: the load that fills the request's blocks."""
        local, end_tokens = state.local_tokens, state.local_tokens + external_tokens
        if self._window_groups:
            state.first_window_block = max(0, end_tokens - self._window + 1) // self.block_tokens
        if not external_tokens:
            return None
        block = -(-local // self.block_tokens)
        end = -(-end_tokens // self.chunk_tokens)
        keys = state.keys[block // self.chunk_blocks : end]
        tokens = external_tokens
        if self._window_groups:
            block = max(block, state.first_window_block)
            tail = state.keys[block // self.chunk_blocks : end]
            keys += [in_group(key, group) for group in self._window_groups for key in tail]
            tokens += (end_tokens - block * self.block_tokens) * len(self._window_groups)
        state.next_stored = end
        self.manager.prepare_load(keys, state.access)
        job = Job(state, keys, store=False, tokens=tokens)
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
        keys = state.keys[start:end]
        if self._window_groups:
            # a chunk is stored if its last block is there
            first = max(start, state.first_window_block // self.chunk_blocks)
            keys += [in_group(key, group) for group in self._window_groups for key in state.keys[first:end]]
        prepared = self.manager.prepare_store(keys, state.access)
        if prepared is None:
            return None  # offered again with the next step
        state.next_stored = end
        if not prepared.keys:
            return None
        job = Job(state, prepared.keys, store=True, tokens=self._stored_tokens(state, prepared.keys))
        state.jobs.add(job)
        return job

    def _stored_tokens(self, state: OffloadState, keys: Sequence[Key]) -> int:
        """Tokens that the chunks hold; a window group's first chunk may lack blocks that lay outside the window."""
        tokens = len(keys) * self.chunk_tokens
        first, lacking = divmod(state.first_window_block, self.chunk_blocks)
        if lacking:
            cut = sum(group_of(key) > 0 and origin_and_place(key)[1] == first for key in keys)
            tokens -= cut * lacking * self.block_tokens
        return tokens

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
