"""vLLM 0.32's own scheduler and engine loop on a CPU: unmodified classes, duck-typed config, an executor that makes
tokens up. Import only after `torch_stub.install()`.

What is vLLM's own here: Scheduler / AsyncScheduler, KVCacheManager, BlockPool, block hashing, KV events, and
EngineCore's `step` and `step_with_batch_queue` with their abort queue. What is ours: the config objects (plain
namespaces with the attributes that these classes read), the executor, and the busy loop that feeds requests in.
"""

from __future__ import annotations

import queue
from collections import deque
from types import SimpleNamespace as Namespace
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from fake_workers.vllm_engine.scheduler import make_request, make_scheduler, token
from tests.engine.workload import Record, Spec, Workload, comparable, scheduled, updated


class _Result:
    """A batch on its way through the executor; time passes when somebody waits for it."""

    def __init__(self, engine: VllmEngine, output: Any) -> None:
        self.engine = engine
        self.ids = list(output.num_scheduled_tokens)
        requests = engine.scheduler.requests
        # as the real runner: a prefill chunk yields no token; to be read right after schedule()
        self.samples = {i for i in self.ids if not requests[i].is_prefill_chunk}

    def result(self) -> ModelRunnerOutput:
        """The executed batch."""
        engine = self.engine
        if self.ids:
            engine.steps += 1
            engine.deliver_until(engine.steps)
        engine.on_result(not self.ids)
        sampled = [[engine.next_token(i)] if i in self.samples else [] for i in self.ids]
        return ModelRunnerOutput(
            req_ids=self.ids,
            req_id_to_index={i: at for at, i in enumerate(self.ids)},
            sampled_token_ids=sampled,
            kv_connector_output=engine.connector_output(),
        )


class _Executor:
    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self.last: _Result | None = None

    def execute_model(self, scheduler_output: Any, non_block: bool) -> _Result:
        self.last = _Result(self.engine, scheduler_output)
        return self.last

    def sample_tokens(self, grammar_output: Any, non_block: bool = True) -> _Result | None:
        return self.last


class VllmEngine(EngineCore):
    """EngineCore without its constructor (processes, sockets, model): its step functions on a made-up executor."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.scheduler = self.make_scheduler()
        is_async = workload.config.async_scheduling
        self.vllm_config = self.scheduler.vllm_config
        self.model_executor = _Executor(self)
        self.batch_queue = deque(maxlen=2) if is_async else None
        self.batch_queue_size = 2 if is_async else 1
        self.step_fn = self.step_with_batch_queue if is_async else self.step
        self.aborts_queue = queue.Queue()
        self.async_scheduling = is_async
        self.log_stats = self.check_for_draft_tokens = False
        self.is_mm_encoder_only = self.is_pooling_model = False
        self._weight_version = None
        self.steps = 0
        self.log: list[Record] = []
        self._specs: dict[str, Spec] = {}
        self._events = workload.events()
        self._delivered = 0
        self._inbox: list[tuple[str, Spec]] = []
        self._identity: dict[Any, tuple[int, int]] = {}
        self._published: list[Record] = []
        self.scheduler.kv_event_publisher = Namespace(publish=self._publish)
        self._record_calls()

    def make_scheduler(self) -> Scheduler:
        """The scheduler under test."""
        return make_scheduler(self.workload.config)

    # ------------------------------------------------------------------ from outside

    @property
    def pending(self) -> bool:
        """Whether anything is still to come."""
        return self._delivered < len(self._events)

    def deliver_until(self, step: int) -> None:
        """What arrives while step number `step` runs."""
        while self.pending and self._events[self._delivered][0] <= step:
            self.deliver_next()

    def deliver_next(self) -> None:
        """The next arrival or abort."""
        _, kind, spec = self._events[self._delivered]
        self._delivered += 1
        self.receive(kind, spec)

    def on_result(self, empty: bool) -> None:
        """Somebody waits for a batch."""

    def connector_output(self) -> Any:
        """What the workers' KV connectors report with a batch."""
        return None

    def receive(self, kind: str, spec: Spec) -> None:
        """A message reaches the engine's input queues."""
        self._inbox.append((kind, spec))
        if kind == "abort":
            self.aborts_queue.put_nowait([spec.request_id])  # EngineCore: every abort goes into both queues

    def abort_requests(self, request_ids: list[str]) -> None:
        """One by one: vLLM takes several aborts as a set, whose order is arbitrary."""
        for request_id in request_ids:
            self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def run(self) -> list[Record]:
        """The busy loop (EngineCoreProc.run_busy_loop) until nothing is left to do."""
        while True:
            while True:
                for kind, spec in self._inbox:
                    if kind == "add":
                        self.scheduler.add_request(self._request(spec))
                    else:
                        self.abort_requests([spec.request_id])
                self._inbox.clear()
                if self.scheduler.has_requests() or self.batch_queue:
                    break
                if not self.pending:
                    return self.comparable(self.log)
                while not self.aborts_queue.empty():
                    self.aborts_queue.get_nowait()  # as _process_input_queue does when idle
                self.deliver_next()
            self.step_fn()

    # ------------------------------------------------------------------ content

    def _request(self, spec: Spec) -> Request:
        self._specs[spec.request_id] = spec
        block = self.workload.config.block_tokens
        return make_request(
            spec.request_id,
            [token(*spec.identity(i // block, block), i % block) for i in range(spec.prompt_tokens)],
            spec.output_tokens,
            block,
            float(spec.arrival),
            spec.priority,
        )

    def next_token(self, request_id: str) -> int:
        """The token that continues a request (any, if it is gone)."""
        request = self.scheduler.requests.get(request_id)
        if request is None:
            return 0
        block = self.workload.config.block_tokens
        at = request.num_tokens
        return token(*self._specs[request_id].identity(at // block, block), at % block)

    # ------------------------------------------------------------------ records

    def _publish(self, batch: Any) -> None:
        block = self.workload.config.block_tokens
        names = self._identity
        for event in batch.events:
            if isinstance(event, BlockStored):
                assert len(event.token_ids) == block * len(event.block_hashes) and event.block_size == block
                parent = None if event.parent_block_hash is None else names[event.parent_block_hash]
                for i, block_hash in enumerate(event.block_hashes):
                    first = event.token_ids[i * block] >> 8
                    name = first >> 16, first & 0xFFFF
                    assert event.token_ids[i * block : (i + 1) * block] == [token(*name, j) for j in range(block)]
                    assert names.setdefault(block_hash, name) == name, "one hash, two identities"
                    self._published.append(("+", *name, parent))
                    parent = name
            elif isinstance(event, BlockRemoved):
                self._published.extend(("-", *names[block_hash]) for block_hash in event.block_hashes)
            else:
                self._published.append(("cleared",))

    def line(self) -> list[str]:
        """The waiting line."""
        return [r.request_id for r in self.scheduler.waiting]

    def before_call(self) -> None:
        """A call into the scheduler begins."""

    def after_call(self, kind: str, empty: bool) -> None:
        """A schedule ("S") or update ("U") of an empty batch or not has ended."""

    def delivered(self, outputs: list[Any]) -> list[tuple[str, bool]]:
        """(id, finished) of each token that goes out."""
        return [(o.request_id, o.finish_reason is not None) for o in outputs]

    def comparable(self, log: list[Record]) -> list[Record]:
        """The record without what need not be equal."""
        return comparable(log)

    def _record_calls(self) -> None:
        scheduler = self.scheduler
        schedule, update = scheduler.schedule, scheduler.update_from_output
        pool = scheduler.kv_cache_manager.block_pool

        def recorded_schedule(*args: Any) -> Any:
            self.before_call()
            output = schedule(*args)
            computed = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
            cached = output.scheduled_cached_reqs
            computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            order = output.num_scheduled_tokens
            self.log.append(
                scheduled(
                    [(i, tokens, computed[i]) for i, tokens in order.items()],
                    [r.req_id for r in output.scheduled_new_reqs],
                    [i for i in order if i in cached.resumed_req_ids],
                    output.preempted_req_ids or (),
                    self.line(),
                    pool.get_num_free_blocks(),
                )
            )
            self.after_call("S", not order and not output.preempted_req_ids)
            return output

        def recorded_update(output: Any, result: Any) -> Any:
            self._published = []
            self.before_call()
            outputs = update(output, result)
            tokens = outputs[0].outputs if 0 in outputs else []
            self.log.append(
                updated(
                    self.delivered(tokens),
                    [r.request_id for r in scheduler.running],
                    self.line(),
                    pool.get_num_free_blocks(),
                    self._published,
                    not output.num_scheduled_tokens,
                )
            )
            self.after_call("U", not output.num_scheduled_tokens)
            return outputs

        scheduler.schedule, scheduler.update_from_output = recorded_schedule, recorded_update
