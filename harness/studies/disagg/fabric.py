"""`study pd-fabric`: the point of `pd-point` over slower and slower networks, and where aggregated serving wins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

from harness.experiment import Experiment
from harness.studies.disagg.arms import ArmResult, StudyArm
from harness.studies.disagg.loads import unique_prompts
from harness.studies.disagg.page import Study
from harness.studies.disagg.point import KV_MOVED, base, merged, read, split_pools
from harness.studies.ladder import router_config

NETWORKS: tuple[tuple[str, float, float, str], ...] = (
    ("RDMA 8x400G", 3200, 2, "rdma-nixl-descriptors"),
    ("RDMA 400G", 400, 2, "rdma-nixl-descriptors"),
    ("RDMA 200G", 200, 2, "rdma-nixl-descriptors"),
    ("RDMA 100G", 100, 2, "rdma-nixl-descriptors"),
    ("TCP 100G", 100, 30, "rdma-nixl-descriptors"),
    ("RDMA 50G", 50, 2, "rdma-nixl-descriptors"),
    ("RDMA 25G", 25, 2, "rdma-nixl-descriptors"),
)
"""(name, Gbit/s per node, latency of a link in us, cost table). TCP: the kernel stack's latency and measured rate."""
TCP_GBYTES_PER_S = 2.7
"""What llm-d's P2P pages measured for this model over TCP: 15.7 us per token of 41.5 KB."""


def topology(folder: Path, name: str, gbit: float, latency_us: float) -> str:
    """A topology file with so much bandwidth per node (per GPU: an eighth, where NICs are per GPU)."""
    gbytes = TCP_GBYTES_PER_S if name.startswith("TCP") else gbit / 8
    if gbit >= 3200:
        wires = f'  - {{from: "gpu[n,g]", to: switch, gbytes_per_s: {gbytes / 8:g}, latency_us: {latency_us:g}}}\n'
        wires += '  - {from: "gpu[n,g]", to: "host[n]", gbytes_per_s: 63, latency_us: 1}\n'
    else:
        wires = '  - {from: "gpu[n,g]", to: "host[n]", gbytes_per_s: 63, latency_us: 1}\n'
        wires += f'  - {{from: "host[n]", to: switch, gbytes_per_s: {gbytes:g}, latency_us: {latency_us:g}}}\n'
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name.lower().replace(' ', '-')}.yaml"
    path.write_text(f"about: {name}, {gbytes:g} GB/s per node\ncounts: {{n: 2, g: 8}}\nlinks:\n{wires}")
    return str(path)


def fabric_arms(scale: str, seed: int, out: Path) -> list[StudyArm]:
    """Per rate: aggregated, then split over every network."""
    data = read("pd-point")
    work = data["workload"]
    duration = 6 if scale == "small" else 60
    rates = (45,) if scale == "small" else (45, 15)
    config = str(router_config("pd-guide", "v0.10.0"))
    arms = []
    for rate in rates:
        load = partial(unique_prompts, rate, duration, work["input_tokens"], work["output_tokens"], seed)
        key = f"{rate} req/s of {work['input_tokens']}/{work['output_tokens']} for {duration} s"
        common = base("pd-fabric", seed, data["block_size"], False, work["input_tokens"])
        aggregated = Experiment.model_validate(merged(common, cluster={"nodes": 2}, router={"kind": "random"}))
        for name, gbit, _, _ in NETWORKS:
            if name.startswith("RDMA") and gbit in (NETWORKS[0][1], NETWORKS[-1][1]):
                arms.append(StudyArm(f"aggregated {rate}/s", aggregated, load, key, {}, f"aggregated {rate}/s", gbit))
        for name, gbit, latency_us, cost in NETWORKS:
            split = merged(
                common,
                cluster={"pools": split_pools()},
                router={"kind": "llm-d", "release": "v0.10.0", "config": config},
                fabric={"topology": topology(out / "topologies", name, gbit, latency_us)},
                kv_transfer={**KV_MOVED, "cost": cost},
            )
            series = f"8P2D {rate}/s" + (" TCP" if name.startswith("TCP") else "")
            experiment = Experiment.model_validate(split)
            arms.append(StudyArm(f"{name} {rate}/s", experiment, load, key, {}, series, gbit))
    return arms


def aggregated_figure(results: Sequence[ArmResult], rate: str, figure: str) -> float | None:
    """The figure of aggregated serving, which no network changes."""
    return next((r.figures.get(figure) for r in results if r.series == f"aggregated {rate}"), None)


def crossover(results: Sequence[ArmResult], rate: str, figure: str) -> float | None:
    """Gbit/s per node below which aggregated serving has the lower figure; log-linear between networks. None: they
    do not cross."""
    flat = aggregated_figure(results, rate, figure)
    points = sorted(
        (r.x, r.figures[figure]) for r in results if r.series == f"8P2D {rate}" and r.x and r.figures.get(figure)
    )
    if flat is None:
        return None
    for (x0, y0), (x1, y1) in pairwise(points):
        if y0 is not None and y1 is not None and y0 > flat >= y1:
            share = (math.log(y0) - math.log(flat)) / (math.log(y0) - math.log(y1))
            return math.exp(math.log(x0) + share * (math.log(x1) - math.log(x0)))
    return None


def aggregated_wins(results: Sequence[ArmResult], rate: str, figure: str) -> str:
    """Where aggregated serving has the lower figure, in words."""
    at = crossover(results, rate, figure)
    if at is not None:
        return f"below {at:.0f} Gbit/s per node"
    flat = aggregated_figure(results, rate, figure)
    split = [value for r in results if r.series == f"8P2D {rate}" and (value := r.figures.get(figure)) is not None]
    everywhere = flat is not None and split and min(split) > flat
    return "at every bandwidth tried" if everywhere else "at no bandwidth tried"


def study(results: Sequence[ArmResult], scale: str) -> Study:
    """The study's frame and its answers."""
    rates = list(dict.fromkeys(r.series.rpartition(" ")[2] for r in results if r.series.startswith("aggregated")))
    answers = []
    for rate in rates:
        for figure, word in (("ttft_mean_s", "mean TTFT"), ("e2e_mean_s", "mean end-to-end time")):
            answers.append(f"{rate}: aggregated serving wins in {word} {aggregated_wins(results, rate, figure)}")
    return Study(
        "pd-fabric",
        "Prefill/decode split over slower and slower networks: gpt-oss-120b, 8 prefill TP1 + 2 decode TP4 on 16 H200",
        ["no published figures; load and fleet of llm-d's P/D guide (pd-point)"],
        [
            "The load is open: where a network cannot carry the KV that it makes, times grow with the run's length "
            f"({'6' if scale == 'small' else '60'} s here).",
            "One request moves 5,120 tokens of 41.5 KB: 212 MB (half of the layers send a window's tail only).",
            f"TCP: {TCP_GBYTES_PER_S:g} GB/s per node, as llm-d's P2P pages measured (15.7 us per token).",
        ],
        ("ttft_mean_s", "ttft_p99_s", "e2e_mean_s", "tpot_mean_s", "completed_per_s", "transfer_mean_s",
         "transfer_bytes_per_s", "kv_moved_bytes"),
        "Gbit/s per node",
        ("ttft_mean_s", "e2e_mean_s", "tpot_mean_s", "completed_per_s"),
        answers,
    )  # fmt: skip
