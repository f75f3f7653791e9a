"""The profiles that the project builds and ships: which tables price which model in which layout.

Which backend's rows to trust differs (docs/fidelity.md, "Step times"): rows for block-wise FP8 GEMMs and for
sparse latent attention come from the sglang collection, because the vllm collection of those was taken with
eager launches and without long cached prefixes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

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
    quant          the database's own precision options where they differ from the model's (kernels only: the memory
                   account keeps the model's)
    """

    model: str
    source_model: str
    backend: str
    kv: KvCache
    kv_dtype: str | None
    max_model_len: int
    block_tokens: int = 16
    note: str = ""
    quant: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class StatedCapacity:
    """KV tokens of one endpoint as somebody who ran the layout states them; `source` says who, where, with what."""

    tokens: int
    source: str


@dataclass(frozen=True, slots=True)
class KnownProfile:
    """One profile to build: a model in a layout on a GPU; `system` is the database's name of the GPU.

    `stated` takes the place of a computed KV capacity, for layouts that were run although the memory account finds no
    room in them.
    """

    name: str
    source: ModelSource
    layout: Layout
    gpu: str
    system: str
    stated: StatedCapacity | None = None


# The only block size of FlashMLA sparse: vLLM v1/attention/backends/mla/flashmla_sparse.py,
# get_supported_kernel_block_sizes().
SPARSE_BLOCK_TOKENS = 64
_SPARSE_NOTE = "Block size 64: the only one that vLLM's FlashMLA sparse backend supports."
# A page is one sparse block: vLLM models/minimax_m3/common/sparse_attention.py, get_supported_kernel_block_sizes().
M3_BLOCK_TOKENS = 128
_YARN_NOTE = "131072 tokens with YaRN rope scaling; set max_model_len for that."

LLAMA_70B_FP8 = ModelSource(
    "meta-llama/Llama-3.3-70B-Instruct",
    "nvidia/Llama-3.1-70B-Instruct-FP8",
    "vllm",
    GroupedHeads(layers=80, kv_heads=8, head_dim=128, element_bytes=1),
    "fp8",
    131_072,
    note="Llama-3.3-70B has the shapes of Llama-3.1-70B, whose rows are used.",
)
# On H200 the vllm rows of the large FP8 GEMMs at TP 2 fall by 8 % with the batch: refused by the build.
_LLAMA_70B_FP8_SGLANG = replace(
    LLAMA_70B_FP8, backend="sglang", note=f"{LLAMA_70B_FP8.note} Rows of sglang: vllm's fall with the batch here."
)
LLAMA_70B_BF16 = ModelSource(
    "meta-llama/Llama-3.1-70B-Instruct",
    "meta-llama/Meta-Llama-3.1-70B",
    "vllm",
    GroupedHeads(layers=80, kv_heads=8, head_dim=128, element_bytes=2),
    None,
    131_072,
)
LLAMA_8B_BF16 = ModelSource(
    "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/Meta-Llama-3.1-8B",
    "vllm",
    GroupedHeads(layers=32, kv_heads=8, head_dim=128, element_bytes=2),
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
    note=_YARN_NOTE,
)
QWEN3_32B_FP8 = ModelSource(
    "Qwen/Qwen3-32B-FP8",
    "Qwen/Qwen3-32B-FP8",
    "sglang",
    GroupedHeads(layers=64, kv_heads=8, head_dim=128, element_bytes=2),
    None,
    40_960,
    note=_YARN_NOTE,
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
GLM_52_NVFP4 = replace(GLM_52, source_model="nvidia/GLM-5.2-NVFP4")
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
MINIMAX_M27_NVFP4 = replace(MINIMAX_M27, source_model="nvidia/MiniMax-M2.7-NVFP4")
MINIMAX_M3_BF16 = ModelSource(
    "MiniMaxAI/MiniMax-M3",
    "MiniMaxAI/MiniMax-M3",
    "vllm",
    GroupedHeads(layers=60, kv_heads=4, head_dim=128, element_bytes=1),
    "fp8",
    1_048_576,
    M3_BLOCK_TOKENS,
    note="KV bytes do not count the index keys of the sparse layers, as published. Prefixes are extrapolated.",
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


def with_kv(source: ModelSource, dtype: str) -> ModelSource:
    """The same model with its grouped-query KV cache kept as `bfloat16` or `fp8`."""
    assert isinstance(source.kv, GroupedHeads)
    return replace(source, kv=replace(source.kv, element_bytes={"bfloat16": 2, "fp8": 1}[dtype]), kv_dtype=dtype)


_GPUS = {
    "h100": ("NVIDIA H100 SXM 80GB", "h100_sxm"),
    "h200": ("NVIDIA H200 SXM 141GB", "h200_sxm"),
    "b200": ("NVIDIA B200 SXM 180GB", "b200_sxm"),
}
_LAYOUTS = {
    "tp1": Layout(tp=1),
    "tp2": Layout(tp=2),
    "tp4": Layout(tp=4),
    "tp8": Layout(tp=8),
    "tp4ep4": Layout(tp=4, ep=4),
    "tp8ep8": Layout(tp=8, ep=8),
    "dp8ep8": Layout(tp=1, dp=8, ep=8),
    "dp16ep16": Layout(tp=1, dp=16, ep=16),
}
_ALL, _BIG = ("h100", "h200", "b200"), ("h200", "b200")

# Layouts whose weights leave no room for KV on a GPU are left out (docs/fidelity.md, "Not available").
_TABLE: tuple[tuple[str, ModelSource, dict[str, tuple[str, ...]]], ...] = (
    ("llama-3.1-8b-bf16", LLAMA_8B_BF16, {"tp1": _ALL}),
    ("llama-3.1-8b-bf16-kvfp8", with_kv(LLAMA_8B_BF16, "fp8"), {"tp1": _ALL}),
    ("llama-3.3-70b-fp8", LLAMA_70B_FP8, {"tp1": ("b200",), "tp2": ("h100", "b200"), "tp4": _ALL, "tp8": _ALL}),
    ("llama-3.3-70b-fp8", _LLAMA_70B_FP8_SGLANG, {"tp2": ("h200",)}),
    ("llama-3.3-70b-fp8-kvbf16", with_kv(LLAMA_70B_FP8, "bfloat16"), {"tp4": _ALL, "tp8": _ALL}),
    ("llama-3.1-70b-bf16", LLAMA_70B_BF16, {"tp1": ("b200",), "tp2": _ALL, "tp4": _ALL, "tp8": _ALL}),
    ("qwen3-32b-bf16", QWEN3_32B, {"tp1": _ALL, "tp2": _ALL, "tp4": _ALL, "tp8": _ALL}),
    ("qwen3-32b-bf16-kvfp8", with_kv(QWEN3_32B, "fp8"), {"tp2": _ALL}),
    ("qwen3-32b-fp8", QWEN3_32B_FP8, {"tp1": _ALL, "tp2": _ALL, "tp4": _ALL, "tp8": _ALL}),
    ("glm-5.2-fp8", GLM_52, {"tp8ep8": _BIG, "dp8ep8": _BIG, "dp16ep16": _BIG}),
    ("glm-5.2-nvfp4", GLM_52_NVFP4, {"tp8ep8": ("b200",), "dp8ep8": ("b200",), "dp16ep16": ("b200",)}),
    ("deepseek-v3.2-fp8", DEEPSEEK_V32, {"tp8ep8": _BIG, "dp8ep8": _BIG, "dp16ep16": _ALL}),
    ("minimax-m2.7-fp8", MINIMAX_M27, {"tp4ep4": _ALL, "tp8ep8": _ALL, "dp8ep8": _ALL, "dp16ep16": _ALL}),
    ("minimax-m2.7-nvfp4", MINIMAX_M27_NVFP4, {"tp4ep4": ("b200",), "tp8ep8": ("b200",)}),
    ("minimax-m3-bf16", MINIMAX_M3_BF16, {"tp8ep8": _BIG, "dp8ep8": _BIG, "dp16ep16": _BIG}),
    ("gpt-oss-120b-mxfp4", GPT_OSS_120B, {"tp1": _ALL, "tp2": _ALL, "tp4": _ALL, "tp8": _ALL, "dp8ep8": _ALL}),
    ("gpt-oss-120b-mxfp4-kvfp8", with_kv(GPT_OSS_120B, "fp8"), {"tp1": _ALL}),
)

_STATED = {
    "glm-5.2-fp8-dp8ep8-h200": StatedCapacity(
        182_000,
        "llm-d blog 2026-07-22@26398d1: about 182K tokens on a DEP8 prefill rank, with the layer that drafts and a "
        "memory fraction of 0.935",
    )
}
"""Layouts that were run although the memory account finds no room in them (docs/fidelity.md, "KV capacity")."""

KNOWN: tuple[KnownProfile, ...] = tuple(
    KnownProfile(profile := f"{name}-{layout}-{gpu}", source, _LAYOUTS[layout], *_GPUS[gpu], _STATED.get(profile))
    for name, source, layouts in _TABLE
    for layout, gpus in layouts.items()
    for gpu in gpus
)


def known_kv(model: str) -> KvCache | None:
    """The KV cache of a model that a known profile serves."""
    return next((entry.source.kv for entry in KNOWN if entry.source.model == model), None)


def known_profile(name: str) -> KnownProfile | None:
    """The entry of that name, or None."""
    return next((k for k in KNOWN if k.name == name), None)


_NO_ROOM = "the weights leave no room for KV cache in that layout"
_NO_FP4 = "the GPU has no NVFP4 units"
_NO_CONFIG = "the kernel database has no configuration of the model with that quantisation"
UNAVAILABLE: tuple[tuple[str, str], ...] = (
    ("*-nvfp4-*-h100", _NO_FP4),
    ("*-nvfp4-*-h200", _NO_FP4),
    ("llama-3.3-70b-fp8-tp1-h100", _NO_ROOM),
    ("llama-3.1-70b-bf16-tp1-h[12]00", _NO_ROOM),
    ("glm-5.2-fp8-tp8ep8-h100", _NO_ROOM),
    ("glm-5.2-fp8-dp8ep8-h100", _NO_ROOM),
    ("glm-5.2-fp8-dp16ep16-h100", _NO_ROOM),
    ("deepseek-v3.2-fp8-*p8ep8-h100", _NO_ROOM),
    ("minimax-m3-bf16-*-h100", _NO_ROOM),
    ("llama-3.3-70b-fp8-tp1-h200", "its measured rows fall by 8 % (sglang) and 14 % (vllm) with the batch: refused"),
    ("minimax-m3-nvfp4-*", "its measured expert rows fall by 13 % with the batch: refused"),
    ("minimax-m3-fp8-*", "no FP8 rows of its experts were measured; minimax-m3-bf16 is the nearest"),
    ("deepseek-v3.2-nvfp4-*", "no rows of its sparse attention module with NVFP4 projections were measured"),
    ("llama-3.[13]-70b-nvfp4-*", _NO_CONFIG),
    ("qwen3-32b-nvfp4-*", _NO_CONFIG),
)
"""Profiles that a user may look for and cannot have from the kernel database: name pattern, reason."""


def why_unavailable(name: str) -> str | None:
    """Why there is no such profile, where that is known."""
    return next((reason for pattern, reason in UNAVAILABLE if fnmatchcase(name, pattern)), None)


def nearest(name: str, names: Sequence[str]) -> str:
    """The names closest to a wrong one, for a message of one line."""
    close = get_close_matches(name, names, n=4, cutoff=0.4)
    return f"nearest: {', '.join(close)}; all: harness profile list" if close else "all: harness profile list"
