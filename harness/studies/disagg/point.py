"""`study pd-point`: one load at one rate, split over prefill and decode workers, and on workers that do both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from harness.experiment import Experiment
from harness.studies.disagg.arms import ArmResult, StudyArm
from harness.studies.disagg.loads import unique_prompts
from harness.studies.disagg.page import Study, number
from harness.studies.front_end import tokenise_us_per_token
from harness.studies.ladder import router_config

DATA = Path(__file__).parents[1] / "data" / "disagg"
PREFILL, DECODE = "gpt-oss-120b-mxfp4-tp1-h200", "gpt-oss-120b-mxfp4-tp4-h200"


KV_MOVED = {"bytes_per_token": 41_504, "descriptors_per_block": 36}
"""llm-d's P2P pages give 41.5 KB per token for this model: half of its 36 layers have a window of 128 tokens, of which
the connector sends the tail. Keys and values of the other 18 are a descriptor each.
"""


def read(name: str) -> dict[str, Any]:
    """A study's published figures and set-up."""
    document = yaml.safe_load((DATA / f"{name}.yaml").read_text(encoding="utf-8"))
    assert isinstance(document, dict)
    return document


def base(name: str, seed: int, block_size: int, front_end: bool, prompt_tokens: int) -> dict[str, Any]:
    """What all arms have in common, as an experiment's document."""
    document: dict[str, Any] = {
        "name": name,
        "seed": seed,
        "trace": {"path": "made by the study"},
        "load": {"arrivals": "recorded", "client_timeout_s": None},
        "cluster": {"gpus_per_node": 8, "engine": {"block_size": block_size}},
        "model": {"profile": PREFILL},
        "router": {"block_tokens": None},
        "fabric": {"topology": "rail-400g"},
        "output": {"report": False},
    }
    if front_end:
        document["front_end"] = {"parts": "measured", "tokenise_us_per_token": tokenise_us_per_token(prompt_tokens)}
    return document


def split_pools() -> list[dict[str, Any]]:
    """8 prefill workers of one GPU on one node, 2 decode workers of four on another."""
    return [
        {"role": "prefill", "replicas": 8, "profile": PREFILL},
        {"role": "decode", "replicas": 2, "profile": DECODE},
    ]


def merged(document: Mapping[str, Any], **sections: Mapping[str, Any]) -> dict[str, Any]:
    """A document with some fields of its sections changed."""
    return {**document, **{name: {**document.get(name, {}), **values} for name, values in sections.items()}}


def point_arms(scale: str, seed: int, front_end: bool) -> list[StudyArm]:
    """The two arms at the published rate; `small` sends the first seconds of it."""
    data = read("pd-point")
    work = data["workload"] | (data["small"] if scale == "small" else {})
    load = partial(unique_prompts, work["rate"], work["duration_s"], work["input_tokens"], work["output_tokens"], seed)
    key = f"{work['rate']} req/s of {work['input_tokens']}/{work['output_tokens']} for {work['duration_s']} s"
    common = base("pd-point", seed, data["block_size"], front_end, work["input_tokens"])
    config = str(router_config("pd-guide", "v0.10.0"))
    split = merged(
        common,
        cluster={"pools": split_pools()},
        router={"kind": "llm-d", "release": "v0.10.0", "config": config},
        kv_transfer=KV_MOVED,
    )
    aggregated = merged(common, cluster={"nodes": 2}, router={"kind": "random"})
    published = data["published"]
    return [
        StudyArm(
            "8P2D",
            Experiment.model_validate(split),
            load,
            key,
            {**published["multi-tier"]["split"]},
            "8P2D",
            work["rate"],
        ),
        StudyArm(
            "aggregated",
            Experiment.model_validate(aggregated),
            load,
            key,
            {**published["guide"]["aggregated"]},
            "aggregated",
            work["rate"],
        ),
    ]


def study(results: Sequence[ArmResult], scale: str) -> Study:
    """The study's frame and its answers."""
    data = read("pd-point")
    by_name = {result.name: result.figures for result in results}
    answers = []
    split, flat = by_name.get("8P2D", {}), by_name.get("aggregated", {})
    for figure, word in (("ttft_mean_s", "mean TTFT"), ("tpot_mean_s", "mean TPOT"), ("e2e_mean_s", "mean E2E")):
        one, other = split.get(figure), flat.get(figure)
        if one is not None and other is not None:
            answers.append(f"{word}: {number(figure, one)} ms split, {number(figure, other)} ms aggregated")
    if scale == "full":
        for source, arms in data["published"].items():
            for figure, word in (("ttft_mean_s", "TTFT"), ("tpot_mean_s", "TPOT"), ("e2e_mean_s", "E2E")):
                theirs, ours = arms["split"].get(figure), split.get(figure)
                if theirs is not None and ours is not None:
                    answers.append(f"split, mean {word} against {source}: {ours / theirs - 1:+.0%}")
    return Study(
        "pd-point",
        str(data["title"]),
        [str(source) for source in data["sources"].values()],
        [str(note) for note in data["notes"]],
        ("ttft_mean_s", "ttft_p95_s", "e2e_mean_s", "e2e_p95_s", "tpot_mean_s", "tpot_p99_s", "completed_per_s",
         "prefill_queue_mean_s", "prefill_mean_s", "transfer_mean_s", "decode_queue_mean_s", "first_step_mean_s",
         "interference_steps"),
        answers=answers,
    )  # fmt: skip
