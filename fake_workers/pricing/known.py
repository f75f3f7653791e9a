"""The profiles that the project builds and ships: which tables price which model in which layout.

Which backend's rows to trust differs (docs/fidelity.md, "Step times"): rows for block-wise FP8 GEMMs and for
sparse latent attention come from the sglang collection, because the vllm collection of those was taken with
eager launches and without long cached prefixes.
"""

from __future__ import annotations

from dataclasses import dataclass

from fake_workers.pricing.kv import GroupedHeads, KvCache, SparseLatent
from fake_workers.pricing.profile import Layout


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model as the kernel database knows it.

    source_model   the id whose dimensions and quantisation are priced
    backend        whose measured rows price the kernels (not the engine that is simulated)
    kv_dtype       "fp8" or None for the model's own
    max_model_len  longest context that the model's own configuration allows, in tokens
    block_tokens   KV block size that an engine uses for this attention kind
    """

    model: str
    source_model: str
    backend: str
    kv: KvCache
    kv_dtype: str | None
    max_model_len: int
    block_tokens: int = 16
    note: str = ""


@dataclass(frozen=True, slots=True)
class KnownProfile:
    """One profile to build: a model in a layout on a GPU; `system` is the database's name of the GPU."""

    name: str
    source: ModelSource
    layout: Layout
    gpu: str
    system: str


# The only block size of FlashMLA sparse: vLLM v1/attention/backends/mla/flashmla_sparse.py,
# get_supported_kernel_block_sizes().
SPARSE_BLOCK_TOKENS = 64
_SPARSE_NOTE = "Block size 64: the only one that vLLM's FlashMLA sparse backend supports."

LLAMA_70B_FP8 = ModelSource(
    "meta-llama/Llama-3.3-70B-Instruct",
    "nvidia/Llama-3.1-70B-Instruct-FP8",
    "vllm",
    GroupedHeads(layers=80, kv_heads=8, head_dim=128, element_bytes=1),
    "fp8",
    131_072,
    note="Llama-3.3-70B has the shapes of Llama-3.1-70B, whose rows are used.",
)
LLAMA_70B_BF16 = ModelSource(
    "meta-llama/Llama-3.1-70B-Instruct",
    "meta-llama/Meta-Llama-3.1-70B",
    "vllm",
    GroupedHeads(layers=80, kv_heads=8, head_dim=128, element_bytes=2),
    None,
    131_072,
)
QWEN3_32B = ModelSource(
    "Qwen/Qwen3-32B",
    "Qwen/Qwen3-32B",
    "vllm",
    GroupedHeads(layers=64, kv_heads=8, head_dim=128, element_bytes=2),
    None,
    40_960,
    note="131072 tokens with YaRN rope scaling; set max_model_len for that.",
)
GLM_52 = ModelSource(
    "zai-org/GLM-5.2",
    "zai-org/GLM-5.2-FP8",
    "sglang",
    SparseLatent(layers=78, index_layers=21),
    "fp8",
    1_048_576,
    SPARSE_BLOCK_TOKENS,
    _SPARSE_NOTE,
)
DEEPSEEK_V32 = ModelSource(
    "deepseek-ai/DeepSeek-V3.2",
    "deepseek-ai/DeepSeek-V3.2",
    "sglang",
    SparseLatent(layers=61, index_layers=61),
    "fp8",
    163_840,
    SPARSE_BLOCK_TOKENS,
    _SPARSE_NOTE,
)
MINIMAX_M27 = ModelSource(
    "MiniMaxAI/MiniMax-M2.7",
    "MiniMaxAI/MiniMax-M2.7",
    "sglang",
    GroupedHeads(layers=62, kv_heads=8, head_dim=128, element_bytes=1),
    "fp8",
    204_800,
)
GPT_OSS_120B = ModelSource(
    "openai/gpt-oss-120b",
    "openai/gpt-oss-120b",
    "vllm",
    GroupedHeads(layers=36, kv_heads=8, head_dim=64, element_bytes=2),
    None,
    131_072,
    note="Half of the layers see a window of 128 tokens only; KV bytes count all in full (an upper bound).",
)

_GPUS = {
    "h100": ("NVIDIA H100 SXM 80GB", "h100_sxm"),
    "h200": ("NVIDIA H200 SXM 141GB", "h200_sxm"),
    "b200": ("NVIDIA B200 SXM 180GB", "b200_sxm"),
}
_TP8, _TP4, _TP2 = Layout(tp=8), Layout(tp=4), Layout(tp=2)
_TP8_EP8, _DP8_EP8 = Layout(tp=8, ep=8), Layout(tp=1, dp=8, ep=8)

_TABLE: tuple[tuple[str, ModelSource, Layout, tuple[str, ...]], ...] = (
    ("llama-3.3-70b-fp8-tp8", LLAMA_70B_FP8, _TP8, ("h100", "h200", "b200")),
    ("llama-3.1-70b-bf16-tp4", LLAMA_70B_BF16, _TP4, ("h100",)),
    ("qwen3-32b-bf16-tp2", QWEN3_32B, _TP2, ("h100", "h200")),
    # The weights of GLM-5.2 with data-parallel attention leave no room for KV on eight H200.
    ("glm-5.2-fp8-dp8ep8", GLM_52, _DP8_EP8, ("b200",)),
    ("glm-5.2-fp8-tp8ep8", GLM_52, _TP8_EP8, ("h200", "b200")),
    ("deepseek-v3.2-fp8-dp8ep8", DEEPSEEK_V32, _DP8_EP8, ("h200", "b200")),
    ("minimax-m2.7-fp8-tp8ep8", MINIMAX_M27, _TP8_EP8, ("h200", "b200")),
    ("gpt-oss-120b-mxfp4-tp8", GPT_OSS_120B, _TP8, ("h100", "h200")),
)

KNOWN: tuple[KnownProfile, ...] = tuple(
    KnownProfile(f"{name}-{gpu}", source, layout, *_GPUS[gpu]) for name, source, layout, gpus in _TABLE for gpu in gpus
)


def known_profile(name: str) -> KnownProfile | None:
    """The entry of that name, or None."""
    return next((k for k in KNOWN if k.name == name), None)
