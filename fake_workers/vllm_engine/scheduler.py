"""vLLM 0.32's own scheduler on a CPU: unmodified classes, with the config objects that they read as plain namespaces.

Import only after `torch_stub.install()`, in an interpreter that has vLLM's Python files (install.py).
"""

from __future__ import annotations

import os
from types import SimpleNamespace as Namespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from fake_workers.engine.scheduler import SchedulerConfig

HASH = get_hash_fn_by_name("sha256")
init_none_hash(HASH)


def token(origin: int, pos: int, offset: int) -> int:
    """Token `offset` of block (origin, pos): content is a function of identity, so block hashes are one too."""
    return ((origin << 16) | pos) << 8 | offset


def make_scheduler(config: SchedulerConfig, kv_transfer_config: Any = None) -> Scheduler:
    """vLLM's scheduler with the options of `config`; V1 model runner form, so that resumed requests are told apart."""
    is_async = config.async_scheduling
    blocks, block = config.num_gpu_blocks, config.block_tokens
    scheduler_config = Namespace(
        max_num_seqs=config.max_num_seqs,
        max_num_active_seqs=None,
        max_num_scheduled_tokens=None,
        max_num_batched_tokens=config.max_num_batched_tokens,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        long_prefill_token_threshold_adaptive=False,
        policy=config.policy,
        watermark=config.watermark,
        prefill_schedule_interval=1,
        scheduler_reserve_full_isl=config.scheduler_reserve_full_isl,
        enable_chunked_prefill=True,
        async_scheduling=is_async,
    )
    vllm_config = Namespace(
        scheduler_config=scheduler_config,
        cache_config=Namespace(
            num_gpu_blocks=blocks,
            enable_prefix_caching=config.enable_prefix_caching,
            block_size=block,
            mamba_cache_mode="none",
            enable_mamba_shared_prefix_checkpoint=False,
            prefix_match_unit=None,
            prefix_cache_retention_interval=None,
        ),
        model_config=Namespace(
            uses_mrope=False,
            is_encoder_decoder=False,
            max_model_len=config.max_model_len,
            runner_type="generate",
            is_diffusion=False,
            supports_multimodal_inputs=False,
            return_sampling_mask=False,
        ),
        parallel_config=Namespace(
            data_parallel_size=1,
            data_parallel_index=0,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            pipeline_parallel_size=1,
        ),
        observability_config=Namespace(
            per_request_spec_decode_metrics="none",
            kv_cache_metrics=False,
            enable_mfu_metrics=False,
            enable_logging_iteration_details=False,
        ),
        kv_events_config=Namespace(enable_kv_cache_events=True, publisher="null"),
        ec_manager_config=Namespace(get_encoder_cache_manager_obj=lambda: None),
        aux_output_config=Namespace(enabled=False),
        lora_config=None,
        kv_transfer_config=kv_transfer_config,
        ec_transfer_config=None,
        speculative_config=None,
        is_mm_encoder_only=False,
        num_speculative_tokens=0,
        num_lookahead_tokens=0,
        num_prefill_lookahead_tokens=0,
        num_hash_lookahead_tokens=0,
        max_in_flight_tokens=config.max_num_batched_tokens * (2 if is_async else 1),
        max_concurrent_batches=2 if is_async else 1,
        use_v2_model_runner=False,
    )
    attention = FullAttentionSpec(block_size=block, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    kv_cache = KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)]
    )
    return (AsyncScheduler if is_async else Scheduler)(
        vllm_config=vllm_config,
        kv_cache_config=kv_cache,
        structured_output_manager=Namespace(accept_tokens=lambda request, tokens: True),
        block_size=block,
        hash_block_size=block,
        log_stats=False,
    )


def make_request(
    request_id: str, tokens: list[int], output_tokens: int, block_tokens: int, arrival_time: float, priority: int
) -> Request:
    """A request of vLLM's that generates `output_tokens` tokens whatever they are."""
    return Request(
        request_id=request_id,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=output_tokens, ignore_eos=True),
        pooling_params=None,
        arrival_time=arrival_time,
        priority=priority,
        block_hasher=get_request_block_hasher(block_tokens, HASH),
    )
