"""`study pd-ratio`: how many of a fleet's workers should prefill; GLM-5.2 on H200, agentic traffic, users at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from random import Random
from typing import Any

from harness.experiment import Experiment
from harness.studies.disagg.arms import ArmResult, StudyArm
from harness.studies.disagg.loads import lanes
from harness.studies.disagg.page import Study
from harness.studies.disagg.point import read
from harness.studies.ladder import router_config
from harness.trace.generate import generate_sessions
from harness.trace.model import Session
from harness.trace.profile import load_profile
from harness.workload import Loaded

ONE_NODE = "1P1D-DP8"
"""The guide's p1w1d1w1: as 1P1D, with replicas of one node (eight data-parallel ranks, experts over those eight)."""
SPLITS = {
    "aggregated": None,
    "3P1D": (3, 1),
    "2P2D": (2, 2),
    "1P3D": (1, 3),
    "1P1D": (1, 1),
    "2P1D": (2, 1),
    ONE_NODE: (1, 1),
}
"""Prefill and decode replicas, of 16 GPUs but for `ONE_NODE` (two nodes, data-parallel attention, experts over all).
The first four have 64 GPUs each; 1P1D, 2P1D and 3P1D are the guide's p1w2d1w2, p2w2d1w2 and p3w2d1w2.
"""
TP8 = "aggregated TP8"
"""Aggregated on eight replicas of one node each, tensor parallel."""
EXTRAS = ("MTP", "CPU", "MTP+CPU")
"""What a split may have beside its pools: decode workers that draft three tokens per step, a CPU tier below prefill."""
_MTP_ENGINE = {"num_speculative_tokens": 3, "draft_acceptance_share": 0.65}
"""2.95 tokens per step at an acceptance of 64 to 70.5 %, as llm-d's blog has it."""
_BLOCK_TOKENS = 64


SAME_SIZE = ("aggregated", "3P1D", "2P2D", "1P3D")
"""Compared with each other; TP8 replicas hold so little KV that they are listed beside them."""


def known_arms() -> list[str]:
    """Names that `--split` takes."""
    split = [name for name, shape in SPLITS.items() if shape is not None]
    return [*SPLITS, TP8, *[f"{name} {extra}" for name in split for extra in EXTRAS]]


@cache
def sessions(count: int, seed: int) -> tuple[Session, ...]:
    """Synthetic agentic sessions with the public corpus' statistics."""
    return tuple(generate_sessions(load_profile("claude-code"), seed, count))


def users(count: int, of: int, seed: int, longest_tokens: int, between: tuple[float, float]) -> Loaded:
    """`count` users who work through `of` sessions, each from a point of its first one: an even draw between two shares
    of the calls that are no longer than `longest_tokens`.
    """
    rng = Random(f"{seed} where users begin")

    def first(session: Session) -> int:
        sent = [call.index for call in session.calls if call.sequence_tokens <= longest_tokens]
        return sent[int(len(sent) * rng.uniform(*between))] if sent else 0

    return lanes(sessions(of, seed), count, first)


def ratio_arms(scale: str, seed: int, splits: Sequence[str] = (), users_at_once: Sequence[int] = ()) -> list[StudyArm]:
    """The scale's arms at their concurrencies, or those that are named."""
    data = read("pd-ratio")
    small = scale == "small"
    size = data["small"] if small else data["full"]
    low, high = data["start"]
    arms = []
    for name in splits or size["arms"]:
        for concurrency in users_at_once or size["arms"].get(name, (16, 64)):
            count = concurrency * size["sessions_per_user"]
            load = partial(users, concurrency, count, seed, data["max_call_tokens"], (low, high))
            key = (
                f"{concurrency} users, {count} sessions of claude-code from {low:.0%} to {high:.0%} on, seed {seed}, "
                f"{size['warmup_s']} to {size['until_s']} s"
            )
            published = data["published"].get(name, {}).get(concurrency, {})
            arms.append(
                StudyArm(
                    f"{name} c{concurrency}",
                    _experiment(name, size, seed, data),
                    load,
                    key,
                    {} if small else published,
                    name,
                    float(concurrency),
                )
            )
    return arms


def _experiment(name: str, size: dict[str, float], seed: int, data: dict[str, Any]) -> Experiment:
    base, _, extra = name.partition(" ")
    kv = data["kv_tokens"]
    document: dict[str, Any] = {}
    if name == TP8:
        pools = [_pool("both", 8, kv["tp8"], profile=data["profile_tp8"])]
        config = "glm-aggregated"
    elif (split := SPLITS[base]) is None:
        pools = [_pool("both", 4, kv["both"])]
        config = "glm-aggregated"
    else:
        profile = None
        if base == ONE_NODE:
            profile = data["profile_dp8"]
            rank = data["kv_tokens_dp8"]["MTP" if "MTP" in extra else "no MTP"]
            kv = {"prefill": rank, "decode": rank}
        pools = [
            _pool("prefill", split[0], kv["prefill"], profile),
            _pool("decode", split[1], kv["decode"], profile),
        ]
        if "MTP" in extra:
            pools[1]["engine"] |= _MTP_ENGINE
        config = "glm-split"
        if "CPU" in extra:
            pools[1]["cache"] = False
            config = "glm-split-cpu"
            tier = {"cpu_bytes_to_use": data["cpu_bytes_per_prefill_rank"], "kv_load_failure_policy": "recompute"}
            document["cache"] = {"kind": "offloading", "offloading": tier}
            document["kv_transfer"] = {"load_failure_policy": "recompute"}
    return Experiment.model_validate(
        document
        | {
            "name": f"pd-ratio-{name.replace(' ', '-')}",
            "seed": seed,
            "trace": {"path": "made by the study", "max_call_tokens": data["max_call_tokens"]},
            "load": {
                "arrivals": "at_once",
                "client_timeout_s": None,
                "gap_cap_s": data["gap_cap_s"],
                "warmup_s": size["warmup_s"],
                "until_s": size["until_s"],
            },
            "cluster": {"gpus_per_node": 8, "pools": pools},
            "model": {"profile": data["profile"]},
            "router": {
                "kind": "llm-d",
                "release": "v0.10.0",
                "config": str(router_config(config, "v0.10.0")),
                "block_tokens": None,
            },
            "fabric": {"topology": "rail-400g"},
            "output": {"report": False},
        }
    )


def _pool(role: str, replicas: int, kv_tokens: int, profile: str | None = None) -> dict[str, Any]:
    engine = {"num_gpu_blocks": kv_tokens // _BLOCK_TOKENS}
    return {"role": role, "replicas": replicas, "profile": profile, "engine": engine}


def study(results: Sequence[ArmResult], scale: str) -> Study:
    """The study's frame and its answers."""
    data = read("pd-ratio")
    answers = []
    for concurrency in sorted({r.x for r in results if r.x is not None}):
        here = [r for r in results if r.x == concurrency and r.series in SAME_SIZE and r.figures.get("ttft_p50_s")]
        for figure, word in (("ttft_p50_s", "lowest TTFT p50"), ("itl_p99_s", "lowest ITL p99")):
            known = [(value, r.series) for r in here if (value := r.figures.get(figure)) is not None]
            if known:
                best = min(known)
                flat = next((value for value, name in known if name == "aggregated"), None)
                more = "" if flat is None else f", {flat / best[0]:.1f} times lower than aggregated"
                answers.append(f"{concurrency:g} users: {word} with {best[1]} ({best[0] * 1e3:,.0f} ms{more})")
        known = [(value, r.series) for r in here if (value := r.figures.get("output_tok_s")) is not None]
        if known:
            most = max(known)
            answers.append(f"{concurrency:g} users: most output with {most[1]} ({most[0]:,.0f} tok/s)")
    return Study(
        "pd-ratio",
        str(data["title"]),
        [str(source) for source in data["sources"].values()],
        [str(note) for note in data["notes"]],
        (
            *("ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s", "tpot_p50_s", "tpot_p99_s", "output_tok_s"),
            *("completed_per_s", "hit_share", "reused_share", "interference_steps"),
            *("busy_prefill", "busy_decode", "busy_both", "transfer_mean_s"),
        ),
        "users at once",
        ("ttft_p50_s", "tpot_p50_s", "itl_p99_s", "output_tok_s"),
        answers,
    )
