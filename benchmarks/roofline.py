"""How far the roofline lies from measured kernel tables: the same models and layouts, GPU by GPU.

    python benchmarks/roofline.py

Whole steps at points of serving: prefill chunks of 512 to 8,192 tokens on 0 to 8,192 cached ones, decode batches of 1
to 256 at 1,024 to 65,536 tokens. Collectives of the roofline are the measured NCCL tables.
"""

from __future__ import annotations

from fake_workers.pricing.registry import load_profile
from fake_workers.pricing.roofline import Efficiency, Experts, Gpu, Model, Ranks, Spec, build_roofline
from fake_workers.pricing.steps import RankBatch, step_ns

GPUS = {
    "h200": ("H200", 989e12, 4.8e12, 151.4e9),
    "h100": ("H100", 989e12, 3.35e12, 85.9e9),
    "b200": ("B200", 2250e12, 8.0e12, 193e9),
}
LLAMA8 = Model(name="llama-3.1-8b", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14_336,
               vocab=128_256, weight_bytes=2, max_model_len=131_072)  # fmt: skip
LLAMA70 = Model(name="llama-70b", layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, ffn=28_672, vocab=128_256,
                weight_bytes=2, max_model_len=131_072)  # fmt: skip
QWEN32 = Model(name="qwen3-32b", layers=64, hidden=5120, heads=64, kv_heads=8, head_dim=128, ffn=25_600, vocab=151_936,
               weight_bytes=2, max_model_len=40_960)  # fmt: skip
M27 = Model(name="minimax-m2.7", layers=62, hidden=3072, heads=48, kv_heads=8, head_dim=128, vocab=200_064,
            weight_bytes=1, kv_bytes=1, experts=Experts(count=256, top_k=8, ffn=1536),
            max_model_len=204_800)  # fmt: skip
FP8 = Efficiency(gemm_compute=0.52, gemm_memory=0.74, gemm_launch_us=7)
CASES = (
    ("llama-3.1-8b-bf16-tp1", LLAMA8, Ranks(), 1, Efficiency()),
    ("llama-3.1-70b-bf16-tp4", LLAMA70, Ranks(tp=4), 1, Efficiency()),
    ("llama-3.3-70b-fp8-tp8", LLAMA70.model_copy(update={"weight_bytes": 1, "kv_bytes": 1}), Ranks(tp=8), 2, FP8),
    ("qwen3-32b-bf16-tp2", QWEN32, Ranks(tp=2), 1, Efficiency()),
    ("minimax-m2.7-fp8-tp8ep8", M27, Ranks(tp=8, ep=8), 2, FP8),
)


def main() -> None:
    """Print the table."""
    print("| profile | prefill steps: mean absolute error (bias) | decode steps: mean absolute error (bias) |")
    print("|---|---|---|")
    for name, model, layout, speed, efficiency in CASES:
        for gpu, (title, peak, bandwidth, memory) in GPUS.items():
            sheet = Gpu(name=title, peak_flops=peak * speed, attention_peak_flops=peak, memory_bytes_per_s=bandwidth,
                        memory_bytes=memory)  # fmt: skip
            guess = build_roofline(
                Spec(name="r", gpu=sheet, model=model, layout=layout, collectives=gpu, efficiency=efficiency)
            )
            table = load_profile(f"{name}-{gpu}")
            prefill = [RankBatch(((n, c),)) for n in (512, 1024, 2048, 4096, 8192) for c in (0, 2048, 8192)]
            decode = [RankBatch((), b, b * c) for b in (1, 4, 16, 64, 256) for c in (1024, 8192, 65_536)]
            cells = []
            for batches in (prefill, decode):
                errors = [step_ns(guess, [b]) / step_ns(table, [b]) - 1 for b in batches]
                cells.append(f"{sum(map(abs, errors)) / len(errors):.0%} ({sum(errors) / len(errors):+.0%})")
            print(f"| {name}-{gpu} | {cells[0]} | {cells[1]} |")


if __name__ == "__main__":
    main()
