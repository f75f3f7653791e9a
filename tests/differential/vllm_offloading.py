"""vLLM 0.32's scheduler with its OffloadingConnectorScheduler; copies take steps. After `torch_stub` only."""

from __future__ import annotations

from types import SimpleNamespace as Namespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload.base import OffloadingKVEventsConfig
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.outputs import KVConnectorOutput

from tests.differential.vllm_connector import ConnectedVllmEngine, _StuckError
from tests.differential.vllm_engine import make_scheduler
from tests.engine.offloaded import Copies, Tier
from tests.engine.workload import Workload


class Offloading(KVConnectorBase_V1):
    """OffloadingConnector's scheduler side, with workers that are the test's."""

    engine: OffloadingVllmEngine

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        engine, tier = self.engine, self.engine.tier
        config = engine.workload.config
        block = config.block_tokens
        self.manager = CPUOffloadingManager(tier.capacity, tier.policy)
        spec = Namespace(
            config=Namespace(groups=[Namespace(group_id=0, tokens_per_block=block)]),
            blocks_per_chunk=tier.chunk_blocks,
            tokens_per_hash=block,
            tokens_per_block=(block,),
            offload_prompt_only=tier.prompt_only,
            kv_events_config=OffloadingKVEventsConfig(False, False),
            get_manager=lambda: self.manager,
        )
        known = Namespace(
            cache_config=Namespace(
                prefix_cache_retention_interval=None, enable_prefix_caching=config.enable_prefix_caching
            ),
            speculative_config=None,
            parallel_config=Namespace(world_size=1, decode_context_parallel_size=1),
        )
        attention = FullAttentionSpec(block_size=block, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
        cache = KVCacheConfig(10, [], [KVCacheGroupSpec(["layer"], attention)])
        self.side = OffloadingConnectorScheduler(spec, known, cache)
        self._begun: set[int] = set()
        self._ended: list[str] = []

    requires_kv_delivery = False

    def _begin(self) -> None:
        """Notes new jobs in their order."""
        for number, job in self.side._jobs.items():
            if number in self._begun:
                continue
            self._begun.add(number)
            keys = self.side._req_status[job.req_id].group_states[0].offload_keys
            used = self.manager._num_chunks - self.manager._get_num_free_chunks()
            places = sorted(keys.index(key) for key in job.keys)
            self.engine.jobs.append((job.is_store, job.req_id, places, used))
            self.engine.outside.begin(job.req_id, (number, job), self.engine.steps)

    def on_new_request(self, request: Any) -> None:
        self.side.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.side.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.side.update_state_after_alloc(request, blocks, num_external_tokens)
        self._begin()

    def build_connector_meta(self, scheduler_output: Any) -> None:
        """vLLM has the requests that ended as a set, in arbitrary order; here in the order of their ends."""
        as_set = scheduler_output.finished_req_ids
        scheduler_output.finished_req_ids = [name for name in self._ended if name in as_set]
        self._ended = []
        self.side.build_connector_meta(scheduler_output)
        scheduler_output.finished_req_ids = as_set
        self._begin()

    def update_connector_output(self, connector_output: Any) -> None:
        self.side.update_connector_output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        self._ended.append(request.request_id)
        return self.side.request_finished(request)

    def has_pending_push_work(self) -> bool:
        return self.side.has_pending_push_work()

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        """Worker's side."""

    wait_for_layer_load = save_kv_layer = wait_for_save = start_load_kv


class OffloadingVllmEngine(ConnectedVllmEngine):
    """EngineCore's loop with it."""

    def __init__(self, workload: Workload, tier: Tier) -> None:
        self.tier = tier
        self.jobs: list[tuple[Any, ...]] = []
        super().__init__(workload)

    def make_scheduler(self) -> Any:
        self.outside = Copies(self.workload, self.tier)
        made: list[Offloading] = []

        def create(config: Any, role: KVConnectorRole, kv_cache_config: Any) -> Offloading:
            Offloading.engine = self
            made.append(Offloading(config, role, kv_cache_config))
            return made[-1]

        KVConnectorFactory.create_connector = create
        transfer = Namespace(kv_load_failure_policy="fail", is_kv_consumer=True, is_kv_producer=True)
        scheduler = make_scheduler(self.workload.config, transfer)
        self.connector = made[0]
        return scheduler

    def deliver_next(self) -> None:
        self._settled = False
        kind, what, _ = self.outside.next(self.steps)
        if kind != "job":
            self.receive(kind, what)
            return
        number, job = what
        self._output.kv_connector_worker_meta.completed_jobs[number] = 1
        if not job.is_store:
            self._output.finished_recving.append(job.req_id)

    @staticmethod
    def _fresh_output() -> KVConnectorOutput:
        output = ConnectedVllmEngine._fresh_output()
        output.kv_connector_worker_meta = OffloadingWorkerMetadata()
        return output

    def on_result(self, empty: bool) -> None:
        under_way = any(output.total_num_scheduled_tokens for _, output, _ in self.batch_queue or ())
        if not empty or not self._settled or under_way:
            return
        if self.pending:
            self.deliver_next()
        elif self.scheduler.get_num_unfinished_requests():
            raise _StuckError
