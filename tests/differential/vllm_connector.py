"""vLLM 0.32's scheduler with a connector that follows tests.engine.connected's script. After `torch_stub` only."""

from __future__ import annotations

from types import SimpleNamespace as Namespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from fake_workers.engine.connector import ConnectorOptions
from fake_workers.vllm_engine.scheduler import make_scheduler
from tests.differential.vllm_engine import VllmEngine
from tests.engine.connected import STUCK, Outside, comparable_connected, line
from tests.engine.workload import Record, Workload


class _StuckError(Exception):
    """vLLM would poll for ever."""


class Scripted(KVConnectorBase_V1):
    """A connector of one's own, as kv_connector_module_path would load it; the script answers."""

    engine: ConnectedVllmEngine

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.blocks: dict[str, list[int]] = {}
        self.external: dict[str, int] = {}

    @property
    def requires_kv_delivery(self) -> bool:
        """vLLM's own rule, or what the workload says."""
        wanted = self.engine.options.requires_kv_delivery
        return super().requires_kv_delivery if wanted is None else wanted

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        answer = self.engine.outside.lookup(self.engine.spec(request.request_id), num_computed_tokens)
        return (None, False) if answer is None else answer

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.blocks[request.request_id] = list(blocks.get_block_ids()[0])
            self.external[request.request_id] = num_external_tokens
        self.engine.outside.started(self.engine.spec(request.request_id), num_external_tokens, self.engine.steps)

    def build_connector_meta(self, scheduler_output: Any) -> None:
        return None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return self.engine.outside.finished(self.engine.spec(request.request_id), self.engine.steps), None

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        """Worker's side."""

    wait_for_layer_load = save_kv_layer = wait_for_save = start_load_kv


class ConnectedVllmEngine(VllmEngine):
    """EngineCore's loop with a connector; where everything waits for it, the next thing from outside happens."""

    def __init__(self, workload: Workload) -> None:
        assert workload.connector is not None
        self.options: ConnectorOptions = workload.connector
        self.outside = Outside(workload)
        self._by_id = {spec.request_id: spec for spec in workload.requests}
        self._output = self._fresh_output()
        self._settled = False
        super().__init__(workload)

    def make_scheduler(self) -> Any:
        """As without a connector, plus kv_transfer_config; the factory is vLLM's place to plug one in."""
        made: list[Scripted] = []

        def create(config: Any, role: KVConnectorRole, kv_cache_config: Any) -> Scripted:
            Scripted.engine = self
            made.append(Scripted(config, role, kv_cache_config))
            return made[-1]

        KVConnectorFactory.create_connector = create
        role = self.options.kv_role
        transfer = Namespace(
            kv_load_failure_policy=self.options.kv_load_failure_policy,
            is_kv_consumer=role in ("kv_consumer", "kv_both"),
            is_kv_producer=role in ("kv_producer", "kv_both"),
        )
        scheduler = make_scheduler(self.workload.config, transfer)
        self.connector = made[0]
        return scheduler

    def spec(self, request_id: str) -> Any:
        """The request's specification."""
        return self._by_id[request_id]

    # ------------------------------------------------------------------ from outside

    @property
    def pending(self) -> bool:
        """Whether anything is still to come."""
        return self.outside.pending

    def deliver_until(self, step: int) -> None:
        """What happens while step number `step` runs."""
        while self.outside.due(step):
            self.deliver_next()

    def deliver_next(self) -> None:
        """One thing from outside."""
        self._settled = False
        kind, spec, load = self.outside.next(self.steps)
        if kind in ("add", "abort"):
            self.receive(kind, spec)
        elif kind == "saved":
            self._output.finished_sending.append(spec.request_id)
        elif kind == "loaded":
            assert load is not None
            self._output.finished_recving.append(spec.request_id)
            request = self.scheduler.requests[spec.request_id]
            if load.valid is not None and request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                self._fail(request, load.valid)

    def _fail(self, request: Any, valid: int) -> None:
        if valid < 0:
            self._output.failed_recving.append(request.request_id)
            return
        local = request.num_computed_tokens - self.connector.external[request.request_id]
        first = (local + valid) // self.workload.config.block_tokens
        self._output.invalid_block_ids.update(self.connector.blocks[request.request_id][first:])

    @staticmethod
    def _fresh_output() -> KVConnectorOutput:
        # lists, where the order in which blocks return must not depend on string hashes
        return KVConnectorOutput(finished_sending=[], finished_recving=[], failed_recving=[], invalid_block_ids=set())

    def on_result(self, empty: bool) -> None:
        """An empty batch with nothing else to do waits for whatever comes next."""
        under_way = any(output.total_num_scheduled_tokens for _, output, _ in self.batch_queue or ())
        if not empty or not self._settled or under_way:
            return
        scheduler = self.scheduler
        unfinished, arrived = scheduler.get_num_unfinished_requests(), scheduler.finished_recving_kv_req_ids
        owed = len(scheduler.requests) > unfinished or any(
            self.outside.unknown(r.request_id)
            or (r.status == RequestStatus.WAITING_FOR_REMOTE_KVS and r.request_id not in arrived)
            for r in scheduler.deferred_waiting
        )
        if unfinished and not owed:
            raise _StuckError
        if self.pending:
            self.deliver_next()

    def connector_output(self) -> KVConnectorOutput:
        """What the workers' connectors report with a batch."""
        output, self._output = self._output, self._fresh_output()
        return output

    def run(self) -> list[Record]:
        """As without a connector; an engine that would never get on ends with STUCK."""
        try:
            return super().run()
        except _StuckError:
            return [*comparable_connected(self.log), STUCK]

    # ------------------------------------------------------------------ records

    def line(self) -> list[str]:
        """The waiting requests, as tests.engine.connected writes them."""
        scheduler = self.scheduler
        queues = (scheduler.kv_holding_waiting, scheduler.waiting)
        deferred = [r.request_id for r in scheduler.deferred_waiting]
        holding, waiting = ([r.request_id for r in queue] for queue in queues)
        return line(holding, waiting, deferred)

    def _state(self) -> tuple[Any, ...]:
        scheduler = self.scheduler
        loading = sum(r.status == RequestStatus.WAITING_FOR_REMOTE_KVS for r in scheduler.kv_holding_waiting)
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return [r.request_id for r in scheduler.running], self.line(), loading, free

    def before_call(self) -> None:
        """A call into the scheduler begins."""
        self._before = self._state()

    def after_call(self, kind: str, empty: bool) -> None:
        """It has ended; settled is an engine whose last schedule() had nothing to do and changed nothing."""
        same = self._before == self._state()
        if kind == "S":
            self._settled = same and empty
        elif not same:
            self._settled = False

    def delivered(self, outputs: list[Any]) -> list[tuple[str, bool]]:
        """Tokens in order, then errors by name (vLLM has them as a set)."""
        tokens = [(o.request_id, o.finish_reason is not None) for o in outputs if o.new_token_ids]
        return tokens + sorted((o.request_id, True) for o in outputs if not o.new_token_ids)

    def comparable(self, log: list[Record]) -> list[Record]:
        """See comparable_connected."""
        return comparable_connected(log)
