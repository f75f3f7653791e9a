"""`study pd-evict`: the fleet of `pd-point` with more documents than its GPUs hold, with and without a CPU tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.experiment import Experiment
from harness.studies.disagg.arms import ArmResult, StudyArm
from harness.studies.disagg.loads import ladder
from harness.studies.disagg.page import Study
from harness.studies.disagg.point import KV_MOVED, base, merged, read, split_pools
from harness.studies.ladder import Load, SharedPrefix, router_config
from harness.workload import Loaded

ARMS = {
    "no CPU tier": ("pd-cpu-blind", False),
    "CPU-blind": ("pd-cpu-blind", True),
    "CPU-aware": ("pd-cpu-aware", True),
}
"""Router config, and whether prefill workers have the tier."""


def evict_arms(scale: str, seed: int) -> list[StudyArm]:
    """The three arms on the same ladder."""
    data = read("pd-evict")
    less = {} if scale == "full" else data[scale]
    workload = SharedPrefix.model_validate(data["workload"] | ({"num_groups": less["num_groups"]} if less else {}))
    load = Load.model_validate(less.get("load", data["load"]))
    if scale == "small":
        load = load.model_copy(update={"interval_s": 5.0})
    loaded, split = ladder(workload, load, load.at(scale), seed, data["block_size"])
    key = f"ladder {load.at(scale)} of {workload.num_groups} groups, seed {seed}"
    tokens = less.get("kv_tokens_per_prefiller", data["kv_tokens_per_prefiller"])
    arms = []
    for name, (config, tier) in ARMS.items():
        cpu_bytes = int(data["cpu_bytes_per_prefiller"] * less.get("cpu_share", 1.0)) if tier else None
        experiment = _experiment(config, tokens // data["block_size"], cpu_bytes, seed, data, less.get("fleet", 1.0))
        published = _published(data, name, less.get("fleet", 1.0)) if scale != "small" else {}
        arms.append(StudyArm(name, experiment, _given(loaded), key, published, name, split=split))
    return arms


def _given(loaded: Loaded) -> Any:
    return lambda: loaded


def _published(data: dict[str, Any], name: str, fleet: float) -> dict[str, float]:
    """By stage, under our rate: a part of the fleet at that part of the rate is compared with the whole one."""
    figures: dict[str, float] = dict(data["whole"][name])
    for rate, (completed, p90) in data["published"][name].items():
        figures[f"{rate * fleet:g}:completed_per_s"] = completed * fleet
        figures[f"{rate * fleet:g}:e2e_p90_s"] = p90
    return figures


def _experiment(
    config: str, blocks: int, cpu_bytes: int | None, seed: int, data: dict[str, Any], fleet: float
) -> Experiment:
    prefill, decode = ({**pool, "replicas": int(pool["replicas"] * fleet)} for pool in split_pools())
    pools = [
        {**prefill, "engine": {"block_size": data["block_size"], "num_gpu_blocks": blocks}},
        {**decode, "cache": False},
    ]
    common = base(f"pd-evict-{config}", seed, data["block_size"], False, 0)
    document = merged(
        common,
        load={"arrivals": "at_once"},
        cluster={"pools": pools},
        router={"kind": "llm-d", "release": "v0.10.0", "config": str(router_config(config, "v0.10.0"))},
        kv_transfer=KV_MOVED,
    )
    if cpu_bytes is not None:
        # kv_load_failure_policy as published
        section = {
            "cpu_bytes_to_use": cpu_bytes,
            "window_tokens": data["window_tokens"],
            "kv_load_failure_policy": "recompute",
        }
        document["cache"] = {"kind": "offloading", "offloading": section}
        document["kv_transfer"] = {**KV_MOVED, "load_failure_policy": "recompute"}
    return Experiment.model_validate(document)


def study(results: Sequence[ArmResult], scale: str) -> Study:
    """The study's frame and its answers."""
    data = read("pd-evict")
    answers = []
    for stage in results[0].parts:
        here = [(part["e2e_p90_s"], r.name) for r in results if (part := r.parts.get(stage)) and part.get("e2e_p90_s")]
        order = " < ".join(f"{name} {value:.2f} s" for value, name in sorted(here, key=lambda pair: pair[0] or 0.0))
        answers.append(f"{stage} req/s, p90 of request latency: {order}")
    return Study(
        "pd-evict",
        str(data["title"]),
        [str(source) for source in data["sources"].values()],
        [str(note) for note in data["notes"]],
        (
            "ttft_mean_s",
            "ttft_p90_s",
            "e2e_mean_s",
            "e2e_p90_s",
            "tpot_mean_s",
            "completed_per_s",
            "hit_share",
            "reused_share",
        ),
        answers=answers,
    )
