"""`study kv-dtype`: BF16 against FP8 KV, for prefill of long prompts, capacity, and the KV that has to move."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fake_workers.pricing.registry import load_profile
from fake_workers.pricing.steps import RankBatch, step_ns
from harness.experiment import Experiment
from harness.studies.disagg.arms import ArmResult, StudyArm
from harness.studies.disagg.loads import ladder
from harness.studies.disagg.page import Study
from harness.studies.ladder import Load, SharedPrefix
from harness.workload import Loaded

PROFILES = {"BF16": "llama-3.3-70b-fp8-kvbf16-tp8-h200", "FP8": "llama-3.3-70b-fp8-tp8-h200"}
PROMPTS = (8_192, 32_768, 131_072)
CHUNK = 8_192
_WORKLOAD = {"num_prompts_per_group": 4, "system_prompt_len": 32_000, "question_len": 500, "output_len": 100}


def cold_prefill_s(profile_name: str, prompt_tokens: int) -> float:
    """One prompt without cached prefix through an idle engine, in chunks of the step budget."""
    profile = load_profile(profile_name)
    steps = [RankBatch(((min(CHUNK, prompt_tokens - done), done),), 0, 0) for done in range(0, prompt_tokens, CHUNK)]
    return sum(step_ns(profile, [step]) for step in steps) / 1e9


def _load(groups: int, small: bool, seed: int) -> Loaded:
    workload = SharedPrefix.model_validate({"num_groups": groups, **_WORKLOAD})
    stages: list[tuple[float, float]] = [(2, 20), (4, 20)] if small else [(2, 60), (4, 60), (6, 60), (8, 60)]
    load = Load.model_validate({"type": "poisson", "interval_s": 5, "stages": stages, "small": stages})
    return ladder(workload, load, load.at("full"), seed, 16)[0]


def dtype_arms(scale: str, seed: int) -> list[StudyArm]:
    """Both dtypes, aggregated on two replicas and split 1P1D: shared documents that fill BF16's cache 1.3 times."""
    small = scale == "small"
    capacity = load_profile(PROFILES["BF16"]).kv_capacity_tokens
    # small: the cache itself is made smaller, so that a short run fills it
    blocks = {"BF16": 16_000, "FP8": 32_000} if small else {"BF16": None, "FP8": None}
    held = 2 * (16_000 * 16 if small else capacity)
    groups = max(2, round(1.3 * held / _WORKLOAD["system_prompt_len"]))
    load = partial(_load, groups, small, seed)
    key = f"{groups} documents of 32,000 tokens, {scale}, seed {seed}"
    arms = []
    for layout in ("aggregated", "1P1D"):
        for dtype, profile in PROFILES.items():
            cluster: dict[str, object] = {"gpus_per_node": 8, "engine": {"num_gpu_blocks": blocks[dtype]}}
            cluster |= {"nodes": 2} if layout == "aggregated" else {"disaggregation": "1P1D"}
            config = "precise" if layout == "aggregated" else "pd-prefix"
            document = {
                "name": f"kv-dtype-{layout}-{dtype}",
                "seed": seed,
                "trace": {"path": "made by the study"},
                "load": {"arrivals": "at_once", "client_timeout_s": None},
                "cluster": cluster,
                "model": {"profile": profile},
                "router": {"kind": "llm-d", "release": "v0.10.0", "config": config},
                "fabric": {"topology": "rail-400g"},
                "output": {"report": False},
            }
            experiment = Experiment.model_validate(document)
            arms.append(StudyArm(f"{layout} {dtype}", experiment, load, key, {}, dtype))
    return arms


def study(results: Sequence[ArmResult], scale: str) -> Study:
    """The study's frame and its answers."""
    answers = []
    bf16, fp8 = (load_profile(name) for name in PROFILES.values())
    answers.append(
        f"capacity of one replica: {bf16.kv_capacity_tokens:,} tokens with BF16, {fp8.kv_capacity_tokens:,} with FP8 "
        f"({fp8.kv_capacity_tokens / bf16.kv_capacity_tokens:.2f} times)"
    )
    for tokens in PROMPTS:
        slow, fast = (cold_prefill_s(name, tokens) for name in PROFILES.values())
        answers.append(f"cold prefill of {tokens:,} tokens: {slow:.3g} s with BF16, {fast:.3g} s with FP8")
    return Study(
        "kv-dtype",
        "BF16 against FP8 KV: Llama-3.3-70B (FP8 weights, TP8) on H200",
        ["no published figures; both step-time profiles come from the same kernel database"],
        [
            f"Prefill in chunks of {CHUNK:,} tokens on an idle engine; prompts beyond the tables' grid are "
            "extrapolated (`harness profile show`).",
            "The load shares documents of 32,000 tokens, 1.3 times what BF16's cache holds in both replicas together.",
            "Accuracy of the model is not a matter of time: nothing here says what FP8 KV costs in quality.",
        ],
        ("ttft_mean_s", "ttft_p99_s", "tpot_mean_s", "completed_per_s", "hit_share", "kv_moved_bytes",
         "transfer_mean_s"),
        answers=answers,
    )  # fmt: skip
