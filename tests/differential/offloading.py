"""Runs in the interpreter that has vLLM's sources: its OffloadingConnector's scheduler side and ours, call by call.

    python -m tests.differential.offloading FIRST_SEED WORKLOADS [wrong]

A random driver plays the engine: requests of a few families of prompts are looked up, loaded, computed in chunks,
decoded, preempted, aborted and ended, copies end in random order. Both sides get the same calls; compared are every
answer of a lookup, the keys and blocks of every load and store, evictions in their order, what ends up stored, and the
KV events on the wire; one KV-cache group, or one with full attention and one or two with a sliding window. With `wrong`
our side has the other eviction policy.
One JSON line per workload on stdout.
"""

from __future__ import annotations

import json
import random
import sys
import traceback
from dataclasses import dataclass, field
from types import SimpleNamespace as Namespace
from typing import Any

from fake_workers.vllm_engine import torch_stub

torch_stub.install()

import torch  # noqa: E402  (after the placeholders)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (  # noqa: E402
    OffloadingConnectorScheduler,
)
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import OffloadingKVEventsConfig, get_offload_group_idx  # noqa: E402
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager  # noqa: E402
from vllm.v1.request import RequestStatus  # noqa: E402

from harness.cache.offload_manager import OffloadManager, group_of, make_key, origin_and_place  # noqa: E402
from harness.cache.offload_scheduler import (  # noqa: E402
    Job,
    OffloadScheduler,
    OffloadState,
    Scheduled,
    WindowGroups,
)

BLOCK = 4


@dataclass
class Options:
    """Of one workload."""

    chunk_blocks: int
    capacity: int
    policy: str
    prompt_only: bool
    store_threshold: int
    tracker: int
    self_describing: bool
    prefix_caching: bool
    windows: WindowGroups | None

    @property
    def groups(self) -> int:
        """KV-cache groups."""
        return 1 if self.windows is None else 1 + self.windows.groups


@dataclass(eq=False)
class Driven:
    """One request: what vLLM's scheduler would keep of it, for both sides."""

    name: str
    prompt: int
    outputs: int
    names: list[int]
    """Of every block it will ever have: equal names, equal content up to there."""
    state: OffloadState
    tokens: int = 0
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    running: bool = False
    loading: Any = None
    admitted: bool = False
    admitted_tokens: int = 0
    """Computed when it was last admitted."""
    status: Any = RequestStatus.WAITING

    kv_transfer_params = None
    kv_hints = None
    lora_request = None
    skip_reading_prefix_cache = False
    shared_prefix_boundary = None

    @property
    def request_id(self) -> str:
        return self.name

    @property
    def num_tokens(self) -> int:
        return self.tokens

    @property
    def num_prompt_tokens(self) -> int:
        return self.prompt

    @property
    def num_computed_tokens(self) -> int:
        return self.computed

    @property
    def block_hashes(self) -> list[bytes]:
        return [hash_of(name) for name in self.names[: self.tokens // BLOCK]]

    @property
    def all_token_ids(self) -> list[int]:
        return [name * BLOCK + i for name in self.names for i in range(BLOCK)]

    def is_finished(self) -> bool:
        return RequestStatus.is_finished(self.status)


def hash_of(name: int) -> bytes:
    """The engine's hash of a block."""
    return name.to_bytes(8, "big")


def key_of(block_hash: bytes) -> int:
    """The name back."""
    return int.from_bytes(block_hash[:8], "big")


class Both:
    """Both sides, and the comparison."""

    def __init__(self, options: Options, wrong: bool) -> None:
        self.options = options
        self.counts = dict.fromkeys(
            (
                *("lookups", "hits", "late", "loads", "stores", "refused", "evicted", "events", "described"),
                *("undescribed", "window_hits", "window_loads", "window_evicted"),
            ),
            0,
        )
        manager = CPUOffloadingManager(
            options.capacity,
            options.policy,
            enable_events=True,
            store_threshold=options.store_threshold,
            max_tracker_size=options.tracker,
        )
        attention = FullAttentionSpec(block_size=BLOCK, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
        groups = [KVCacheGroupSpec(["layer"], attention)]
        if options.windows is not None:
            window = SlidingWindowSpec(
                block_size=BLOCK,
                num_kv_heads=8,
                head_size=128,
                dtype=torch.bfloat16,
                sliding_window=options.windows.tokens,
            )
            groups += [KVCacheGroupSpec([f"window{i}"], window) for i in range(options.windows.groups)]
        kv_cache = KVCacheConfig(10, [], groups)
        spec = Namespace(
            config=Namespace(groups=[Namespace(group_id=i, tokens_per_block=BLOCK) for i in range(options.groups)]),
            blocks_per_chunk=options.chunk_blocks,
            tokens_per_hash=BLOCK,
            tokens_per_block=(BLOCK,) * options.groups,
            offload_prompt_only=options.prompt_only,
            kv_events_config=OffloadingKVEventsConfig(True, options.self_describing),
            get_manager=lambda: manager,
        )
        vllm_config = Namespace(
            cache_config=Namespace(prefix_cache_retention_interval=None, enable_prefix_caching=options.prefix_caching),
            speculative_config=None,
            parallel_config=Namespace(world_size=1, decode_context_parallel_size=1),
        )
        self.vllm = OffloadingConnectorScheduler(spec, vllm_config, kv_cache)
        self.vllm_manager = manager
        policy = {"lru": "arc", "arc": "lru"}[options.policy] if wrong else options.policy
        self.manager = OffloadManager(options.capacity, policy, options.store_threshold, options.tracker)
        self.ours = OffloadScheduler(
            self.manager, BLOCK, options.chunk_blocks, options.prompt_only, options.prefix_caching, options.windows
        )
        self.jobs: list[tuple[int, Job]] = []
        self.names: dict[str, list[int]] = {}

    def refresh(self, request: Driven) -> None:
        size = self.options.chunk_blocks
        request.state.tokens = request.tokens
        full = request.tokens // (size * BLOCK)
        request.state.keys = [make_key(request.names[(i + 1) * size - 1], i) for i in range(full)]

    def lookup(self, request: Driven, local: int) -> int | None:
        self.refresh(request)
        theirs, load = self.vllm.get_num_new_matched_tokens(request, local)
        ours = self.ours.matched(request.state, local)
        assert ours == theirs and load == bool(theirs), ("lookup", request.name, local, ours, theirs)
        self.counts["lookups"] += 1
        self.counts["late"] += theirs is None
        self.counts["hits"] += bool(theirs)
        self.counts["window_hits"] += bool(theirs) and self.options.windows is not None
        return ours

    def allocated(self, request: Driven, local: int, external: int) -> Job | None:
        request.admitted_tokens = local + external
        blocks = tuple(
            [
                Namespace(block_id=b, is_null=b == 0, block_hash=1 if i * BLOCK < local else None)
                for i, b in enumerate(ids)
            ]
            for ids in self.block_ids(request, 0)
        )
        self.vllm.update_state_after_alloc(request, Namespace(blocks=blocks), external)
        job = self.ours.allocated(request.state, external)
        theirs = dict(self.vllm._current_batch_load_jobs)
        if not external:
            assert job is None
            return None
        assert job is not None
        (number,) = [n for n, entry in theirs.items() if entry.req_id == request.name]
        self._same(number, job, theirs[number].dst_spec)
        self.counts["loads"] += 1
        self.counts["window_loads"] += self.options.windows is not None
        return job

    def block_ids(self, request: Driven, start: int) -> tuple[list[int], ...]:
        """The request's blocks by group from place `start` on; 0 where a window group had none at its admission."""
        ids = request.blocks[start:]
        if self.options.windows is None:
            return (ids,)
        first = max(0, request.admitted_tokens - self.options.windows.tokens + 1) // BLOCK
        window = [b if start + i >= first else 0 for i, b in enumerate(ids)]
        # vLLM's groups draw from one pool: no block is in two of them
        return tuple([b and b * 16 + group for b in (window if group else ids)] for group in range(self.options.groups))

    def _same(self, number: int, job: Job, gpu: Any) -> None:
        size = self.options.chunk_blocks
        status = self.vllm._jobs[number]
        assert status.is_store == job.store
        names = self.names[job.request.request_id]
        ours = {(group_of(key), names[(origin_and_place(key)[1] + 1) * size - 1]) for key in job.keys}
        theirs = {(get_offload_group_idx(key), key_of(key)) for key in status.keys}
        assert theirs == ours, ("job", job, status)
        # a load's last block may hold fewer tokens than it has room for
        assert -(-job.tokens // BLOCK) <= sum(gpu.group_sizes) < job.tokens // BLOCK + self.options.groups + 1, job
        if job.store:
            assert sum(gpu.group_sizes) * BLOCK == job.tokens, ("blocks", job, gpu.group_sizes)
        self.jobs.append((number, job))

    def build(
        self,
        new: list[Driven],
        cached: list[tuple[Driven, list[int], bool]],
        scheduled: dict[Driven, int],
        finished: list[Driven],
        preempted: list[Driven],
    ) -> None:
        for request in scheduled:
            self.refresh(request)
        for request in finished:
            self.refresh(request)
        output = Namespace(
            scheduled_new_reqs=[Namespace(req_id=r.name, block_ids=self.block_ids(r, 0)) for r in new],
            scheduled_cached_reqs=Namespace(
                req_ids=[r.name for r, _, _ in cached],
                new_block_ids=[self.block_ids(r, len(r.blocks) - len(blocks)) for r, blocks, _ in cached],
                resumed_req_ids={r.name for r, _, resumed in cached if resumed},
            ),
            num_scheduled_tokens={r.name: n for r, n in scheduled.items()},
            finished_req_ids=[r.name for r in finished],
            preempted_req_ids=[r.name for r in preempted],
            kv_cache_block_copies=None,
            kv_connector_block_state=None,
        )
        before = dict(self.vllm._jobs)
        meta = self.vllm.build_connector_meta(output)
        items = [Scheduled(r.state, r.computed + n, len(r.blocks)) for r, n in scheduled.items()]
        ended = []
        for r in finished:
            aborted = r.status is RequestStatus.FINISHED_ABORTED
            ended.append(Scheduled(r.state, r.computed if aborted else max(r.prompt, r.tokens - 1), r.state.blocks))
        jobs = self.ours.build(items, ended)
        new_jobs = [n for n in self.vllm._jobs if n not in before]
        assert len(new_jobs) == len(jobs) == len(meta.store_jobs), ("stores", jobs, meta.store_jobs)
        for number, job in zip(new_jobs, jobs, strict=True):
            self._same(number, job, meta.store_jobs[number].src_spec)
        self.counts["stores"] += len(jobs)
        self.check()

    def complete(self, at: int) -> Job:
        number, job = self.jobs.pop(at)
        meta = OffloadingWorkerMetadata()
        meta.mark_completed(number)
        self.vllm.update_connector_output(Namespace(kv_connector_worker_meta=meta))
        self.ours.complete(job)
        self.check()
        return job

    def check(self) -> None:
        """Held chunks, room, and events."""
        theirs, ours = self.vllm_manager, self.manager
        used = theirs._num_chunks - theirs._get_num_free_chunks()
        assert used == ours.used, ("used", used, ours.used)
        assert theirs._num_evictable_cache_chunks == ours._evictable
        raw = list(theirs.events)
        events = [(not e.removed, [(get_offload_group_idx(key), key_of(key)) for key in e.keys]) for e in raw]
        size = self.options.chunk_blocks
        # our keys name the origin of a chunk's last block, which is that block's name here
        named = [(stored, [(group_of(key), origin_and_place(key)[0]) for key in keys]) for stored, keys in ours.events]
        assert len(events) == len(named), ("events", events, named)
        for (stored, theirs_keys), (ours_stored, ours_keys) in zip(events, named, strict=True):
            assert stored == ours_stored
            if stored:  # vLLM keeps a job's keys as a set
                assert sorted(theirs_keys) == sorted(ours_keys)
            else:
                assert theirs_keys == ours_keys, ("evicted", theirs_keys, ours_keys)
                self.counts["evicted"] += len(ours_keys)
                self.counts["window_evicted"] += sum(group > 0 for group, _ in ours_keys)
        self.counts["events"] += len(events)
        for wire in self.vllm.take_events():
            self._check_wire(wire, size)
        ours.events.clear()

    def _check_wire(self, event: Any, size: int) -> None:
        """Medium, group and what a hash stands for, as harness.router.kv_events and .tier_events assume them.

        A chunk that is evicted and stored again before vLLM takes its events loses its description: vLLM then sends a
        placeholder for it, and a removal of one hash. That is not followed, and counted here.
        """
        assert event.medium == "CPU" and event.group_idx in range(self.options.groups)
        if not hasattr(event, "token_ids"):
            return
        assert event.lora_id is None and event.lora_name is None and event.extra_keys is None
        if self.options.self_describing and event.token_ids:
            assert event.group_idx == 0 and len(event.block_hashes) == size and event.block_size == BLOCK
            assert len(event.token_ids) == size * BLOCK and event.kv_cache_spec_kind == "full_attention"
            first, last = event.token_ids[0] // BLOCK, event.token_ids[-1] // BLOCK
            assert maybe_convert_block_hash(hash_of(first)) == event.block_hashes[0]
            assert maybe_convert_block_hash(hash_of(last)) == event.block_hashes[-1]
            self.counts["described"] += 1
        else:
            assert (event.token_ids, event.block_size, event.parent_block_hash) == ([], 0, None)
            assert event.kv_cache_spec_kind is None and len(event.block_hashes) == 1
            self.counts["undescribed"] += self.options.self_describing and event.group_idx == 0


def play(seed: int, wrong: bool, steps: int = 150) -> dict[str, int]:
    """One workload."""
    rng = random.Random(seed)
    options = Options(
        chunk_blocks=rng.choice([1, 1, 2, 3, 4]),
        capacity=rng.choice([4, 8, 15, 40, 100]),
        policy=rng.choice(["lru", "arc"]),
        prompt_only=rng.random() < 0.6,
        store_threshold=rng.choice([0, 0, 0, 2, 3]),
        tracker=rng.choice([8, 64_000]),
        self_describing=rng.random() < 0.5,
        prefix_caching=rng.random() < 0.8,
        windows=rng.choice([None, WindowGroups(rng.choice([2, 4, 6, 8, 13, 30]), rng.choice([1, 1, 2]))]),
    )
    both = Both(options, wrong)
    families: list[list[int]] = []
    fresh = iter(range(1, 1 << 30))
    block_ids = iter(range(1, 1 << 30))
    waiting: list[Driven] = []
    running: list[Driven] = []
    held: list[Driven] = []
    finished: list[Driven] = []
    ready: list[Driven] = []
    number = 0

    def end(request: Driven, status: Any) -> None:
        request.status = status
        both.refresh(request)
        assert both.vllm.request_finished(request) == (False, None)
        finished.append(request)

    for _ in range(steps):
        for _ in range(rng.choice([0, 0, 1, 2])):
            base = rng.choice(families)[: rng.randrange(1, 30)] if families and rng.random() < 0.7 else []
            prompt = max(1, len(base) * BLOCK + rng.randrange(40))
            outputs = rng.randrange(1, 30)
            total = (prompt + outputs) // BLOCK + 1
            names = base + [next(fresh) for _ in range(total - len(base))]
            families.append(names)
            name = f"r{number}"
            number += 1
            request = Driven(name, prompt, outputs, names, OffloadState(name, prompt), tokens=prompt)
            both.names[name] = names
            both.vllm.on_new_request(request)
            waiting.append(request)
        new: list[Driven] = []
        cached: list[tuple[Driven, list[int], bool]] = []
        scheduled: dict[Driven, int] = {}
        preempted: list[Driven] = []
        if running and rng.random() < 0.1:
            victim = running.pop()
            victim.running, victim.computed, victim.blocks = False, 0, []
            preempted.append(victim)
            waiting.insert(0, victim)
        for request in running:
            n = min(rng.choice([1, 7, 16, 40]), request.tokens - request.computed)
            if n <= 0:
                continue
            more = -(-(request.computed + n) // BLOCK) - len(request.blocks)
            ids = [next(block_ids) for _ in range(more)]
            request.blocks += ids
            cached.append((request, ids, False))
            scheduled[request] = n
        for request in [*ready, *waiting][: rng.randrange(4)]:
            if request in preempted:
                continue
            if request in ready:
                ready.remove(request)
                if request.computed == request.tokens:
                    request.computed -= 1
            else:
                local = rng.choice([0, 0, rng.randrange(0, request.tokens)]) // BLOCK * BLOCK
                answer = both.lookup(request, local)
                if answer is None or rng.random() < 0.1:
                    continue  # late, or no blocks for it now
                waiting.remove(request)
                request.computed = local + answer
                request.blocks = [next(block_ids) for _ in range(-(-request.computed // BLOCK))]
                if answer:
                    request.loading = both.allocated(request, local, answer)
                    held.append(request)
                    continue
                both.allocated(request, local, 0)
            n = min(rng.choice([1, 7, 16, 40]), request.tokens - request.computed)
            request.blocks += [
                next(block_ids) for _ in range(-(-(request.computed + n) // BLOCK) - len(request.blocks))
            ]
            if request.admitted:
                cached.append((request, list(request.blocks), True))
            else:
                new.append(request)
            request.admitted = request.running = True
            running.append(request)
            scheduled[request] = n
        over, finished = finished, []
        both.build(new, cached, scheduled, over, preempted)
        while both.jobs and rng.random() < 0.5:
            job = both.complete(rng.randrange(len(both.jobs)))
            if not job.store:
                (request,) = [r for r in held if r.loading is job]
                held.remove(request)
                if not request.is_finished():
                    ready.append(request)
        for request, n in scheduled.items():
            request.computed += n
            if request.computed == request.tokens:
                request.tokens += 1
                request.outputs -= 1
                if request.outputs == 0:
                    running.remove(request)
                    end(request, RequestStatus.FINISHED_LENGTH_CAPPED)
        if rng.random() < 0.08:
            everyone = [*running, *waiting, *[r for r in held if not r.is_finished()]]
            if everyone:
                gone = rng.choice(everyone)
                for queue in (running, waiting):
                    if gone in queue:
                        queue.remove(gone)
                end(gone, RequestStatus.FINISHED_ABORTED)
    both.counts["refused"] = both.manager.counts.refused
    return both.counts | {"steps": steps}


def main() -> None:
    """Play what the command line asks for."""
    seed, workloads, wrong = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] == ["wrong"]
    for number in range(seed, seed + workloads):
        try:
            print(json.dumps({"seed": number, **play(number, wrong)}), flush=True)
        except AssertionError as error:
            print(
                json.dumps({"seed": number, "failed": str(error), "trace": traceback.format_exc()[-1500:]}), flush=True
            )


if __name__ == "__main__":
    main()
