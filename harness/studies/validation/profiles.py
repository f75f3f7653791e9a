"""Builds the profiles that only this study uses: models, precisions and layouts of the measured points.

    python -m harness.studies.validation.profiles [NAME...]          (needs the extra [profile])

`-sg` in a name: rows of the sglang collection for points of vLLM, where the vllm collection's rows of block-wise FP8 or
NVFP4 GEMMs are disturbed (docs/fidelity.md), or the reverse.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fake_workers.pricing.build import build_profile
from fake_workers.pricing.known import GLM_52, LLAMA_70B_FP8, MINIMAX_M27, QWEN3_32B, KnownProfile, ModelSource, with_kv
from fake_workers.pricing.kv import GroupedHeads, SparseLatent
from fake_workers.pricing.profile import Layout, save_profile
from harness.errors import InputError
from harness.studies.validation.points import DATA, PROFILES

GPUS = {
    "h100": ("NVIDIA H100 SXM 80GB", "h100_sxm"),
    "h200": ("NVIDIA H200 SXM 141GB", "h200_sxm"),
    "b200": ("NVIDIA B200 SXM 180GB", "b200_sxm"),
    "b300": ("NVIDIA B300 SXM 288GB", "b300_sxm"),
}
_M25 = replace(MINIMAX_M27, model="MiniMaxAI/MiniMax-M2.5", source_model="MiniMaxAI/MiniMax-M2.5")
_M25_NVFP4 = replace(_M25, source_model="nvidia/MiniMax-M2.5-NVFP4")
_GLM_5 = replace(
    GLM_52, model="zai-org/GLM-5", source_model="zai-org/GLM-5-FP8", kv=SparseLatent(78, 78), max_model_len=202_752
)
_QWEN_235B = ModelSource(
    "Qwen/Qwen3-235B-A22B-FP8", "Qwen/Qwen3-235B-A22B-FP8", "sglang", GroupedHeads(94, 4, 128, 2), None, 40_960
)
# one layer in four has full attention, the others a recurrent state of fixed size
_QWEN_397B = ModelSource(
    "Qwen/Qwen3.5-397B-A17B", "Qwen/Qwen3.5-397B-A17B", "sglang", GroupedHeads(15, 2, 256, 2), None, 262_144
)
_FP8_BLOCK = (("gemm_quant_mode", "fp8_block"), ("moe_quant_mode", "fp8_block"))

_TABLE: tuple[tuple[str, ModelSource, tuple[str, ...]], ...] = (
    ("llama-3.3-70b-fp8-kvbf16", with_kv(LLAMA_70B_FP8, "bfloat16"), ("tp2-h100",)),
    (
        "llama-3.3-70b-nvfp4",
        replace(LLAMA_70B_FP8, quant=(("gemm_quant_mode", "nvfp4"),)),
        ("tp1-b200", "tp2-b200", "tp4-b200", "tp8-b200"),
    ),
    ("qwen3-32b-bf16-sg", replace(QWEN3_32B, backend="sglang"), ("tp2-h100", "tp4-h100", "tp8-h100")),
    ("minimax-m2.5-fp8-kvbf16", with_kv(replace(_M25, backend="vllm"), "bfloat16"), ("tp4ep4-h100", "tp4-h200")),
    ("minimax-m2.5-fp8-sg", _M25, ("tp2-b200", "tp4-b200", "tp2ep2-b200", "tp4ep4-b200", "tp2-b300", "tp4-b300")),
    (
        "minimax-m2.5-nvfp4-sg",
        _M25_NVFP4,
        ("tp1-b200", "tp2-b200", "tp4-b200", "tp1-b300", "tp2-b300", "tp4-b300"),
    ),
    (
        "glm-5.2-nvfp4",
        replace(GLM_52, source_model="nvidia/GLM-5.2-NVFP4"),
        ("tp2-b300", "tp2ep2-b300", "dp2ep2-b300", "dp4ep4-b300"),
    ),
    ("glm-5-fp8", _GLM_5, ("tp8-h200", "tp8-b200", "tp8-b300")),
    ("qwen3-235b-fp8", _QWEN_235B, ("tp2-h200", "tp4-h200", "tp2ep2-h200")),
    ("qwen3.5-397b-bf16", _QWEN_397B, ("tp8-b200", "tp4-b300", "tp8-b300")),
    (
        "qwen3.5-397b-fp8",
        replace(_QWEN_397B, quant=_FP8_BLOCK),
        ("tp4-b200", "tp4ep4-b200", "tp8-b200", "tp4-b300", "tp8ep8-h200"),
    ),
)


def _layout(name: str) -> Layout:
    """tp4, tp4ep4 or dp4ep4."""
    ranks, _, ep = name[2:].partition("ep")
    tp, dp = (1, int(ranks)) if name.startswith("dp") else (int(ranks), 1)
    return Layout(tp, dp, int(ep or 1))


def study_profiles() -> list[KnownProfile]:
    """All of them."""
    found = []
    for name, source, places in _TABLE:
        for place in places:
            layout, _, gpu = place.rpartition("-")
            found.append(KnownProfile(f"{name}-{place}", source, _layout(layout), *GPUS[gpu]))
    return found


def main(names: Sequence[str]) -> None:
    """Build the named ones, or all."""
    known = {profile.name: profile for profile in study_profiles()}
    for name in names or known:
        if name not in known:
            raise InputError(name, "not a profile of this study", f"known: {', '.join(known)}")
        path = Path(DATA / PROFILES / f"{name}.npz")
        save_profile(build_profile(known[name], print), path)
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
