"""The shared tier's bandwidth cut step by step: eight nodes, one store, and the tail of the time to first token.

Node DRAM is a write buffer only (`skip_l1`), so that every prefix of a conversation comes over the store's link:
what queueing does there is the whole difference between the steps. The load is the same in all of them.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from harness.experiment import Experiment
from harness.results.store import Run
from harness.runner import run_experiment
from harness.studies.tables import Line, Plot, TableStudy
from harness.trace.model import Call, Session
from harness.workload import Loaded

STEPS_GBYTES_PER_S = (120.0, 60.0, 32.0, 20.0)
NODES = 8
_TOPOLOGY = """\
about: one-switch, with {rate} GB/s to and from the store
counts: {{n: 8, g: 8}}
links:
  - {{from: "gpu[n,g]", to: "host[n]", gbytes_per_s: 63, latency_us: 1}}
  - {{from: "host[n]", to: switch, gbytes_per_s: 50, latency_us: 2}}
  - {{from: switch, to: store, gbytes_per_s: {rate}, latency_us: 2}}
"""


@dataclass(frozen=True, slots=True)
class Size:
    """The load: sessions of growing prompts, one call after the other."""

    sessions: int
    turns: int
    first_tokens: int
    turn_tokens: int
    gap_mean_s: float
    sessions_per_hour_per_node: float


SIZES = {
    "small": Size(64, 8, 40_960, 2_048, 6.0, 140.0),
    "full": Size(640, 20, 40_960, 2_048, 6.0, 45.0),
}


@dataclass(frozen=True, slots=True)
class Step:
    """One bandwidth: times in seconds, over completed calls that restored something."""

    gbytes_per_s: float
    calls: int
    link_use: float
    """Share of the store's outgoing link in use while calls were under way."""
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    digest: str


def sessions_of(size: Size, seed: int, block: int) -> list[Session]:
    """Conversations that start with a prompt of their own and add a turn after a random pause."""
    rng = np.random.default_rng([seed, 7])
    sessions = []
    for number in range(size.sessions):
        calls: list[Call] = []
        for turn in range(size.turns):
            keep = calls[-1].blocks if calls else 0
            new = (size.turn_tokens if calls else size.first_tokens) // block
            calls.append(
                Call(
                    index=turn,
                    t_s=0.0,
                    api_s=None,
                    chain="main",
                    input_tokens=(keep + new) * block,
                    output_tokens=64,
                    ref=turn - 1,
                    keep_blocks=keep,
                    new_blocks=new,
                    deps=(turn - 1,) if turn else (),
                    gap_s=float(rng.exponential(size.gap_mean_s)) if turn else 0.0,
                )
            )
        sessions.append(Session(id=f"s{number}", block_tokens=block, calls=calls))
    return sessions


def run_steps(
    scale: str,
    out: Path,
    steps: tuple[float, ...] = STEPS_GBYTES_PER_S,
    *,
    command: str = "",
    show_progress: bool = True,
) -> list[Step]:
    """The same load at each bandwidth."""
    size = SIZES[scale]
    loaded = Loaded(sessions_of(size, seed=1, block=64), "made")
    measured = []
    for rate in steps:
        with tempfile.TemporaryDirectory() as folder:
            topology = Path(folder) / "store.yaml"
            topology.write_text(_TOPOLOGY.format(rate=rate))
            run = run_experiment(
                _experiment(size, str(topology)),
                out / f"{rate:g}",
                loaded=loaded,
                label=f"{rate:g} GB/s",
                command=command,
                show_progress=show_progress,
            )
        measured.append(_step(rate, run))
    return measured


def _experiment(size: Size, topology: str) -> Experiment:
    return Experiment.model_validate(
        {
            "name": "shared-bandwidth",
            "trace": {"path": "made"},
            "load": {"sessions_per_hour_per_node": size.sessions_per_hour_per_node},
            "cluster": {"nodes": NODES, "gpus_per_node": 8, "engine": {"enable_prefix_caching": False}},
            "model": {"profile": "llama-3.3-70b-fp8-tp8-h100"},
            "router": {"kind": "session_sticky"},
            "cache": {
                "kind": "lmcache",
                "lmcache": {
                    "chunk_size": 256,
                    "l1_size_gb": 256,
                    "l2_store_policy": "skip_l1",
                    "l2_adapters": [{"name": "store", "at": "store"}],
                },
            },
            "fabric": {"topology": topology},
            "output": {"report": False},
        }
    )


def _step(rate: float, run: Run) -> Step:
    done = run.calls.filter((pl.col("outcome") == "completed") & (pl.col("shared_tokens") > 0))
    ttft = (done["first_token_ns"] - done["arrival_ns"]).to_numpy() / 1e9
    assert run.info.tier is not None
    store = next(tier for tier in run.info.tier["tiers"] if tier["name"] == "store")
    span_s = (int(run.calls["finish_ns"].max()) - int(run.calls["arrival_ns"].min())) / 1e9  # type: ignore[arg-type]
    p50, p90, p99 = (float(np.percentile(ttft, q)) for q in (50, 90, 99))
    use = store["read_bytes"] / (rate * 1e9 * span_s)
    return Step(rate, done.height, use, p50, p90, p99, run.summary["digest"])


def bandwidth_study(steps: list[Step], scale: str, command: str) -> TableStudy:
    """All steps in one table."""
    size = SIZES[scale]
    first, last = steps[0], steps[-1]
    cut, grown = first.gbytes_per_s / last.gbytes_per_s, last.ttft_p90_s / first.ttft_p90_s
    answers = [
        f"From {first.gbytes_per_s:g} to {last.gbytes_per_s:g} GB/s, {cut:.0f} times less, the p90 of TTFT grows "
        f"{grown:.0f} times: from {first.ttft_p90_s:.2f} to {last.ttft_p90_s:.2f} s. The median goes from "
        f"{first.ttft_p50_s:.2f} to {last.ttft_p50_s:.2f} s, the p99 from {first.ttft_p99_s:.2f} to "
        f"{last.ttft_p99_s:.2f}.",
        f"The store's link carries {first.link_use:.0%} of what it could at {first.gbytes_per_s:g} GB/s and "
        f"{last.link_use:.0%} at {last.gbytes_per_s:g}: transfers share it, and each waits for the others.",
        "Where the link is wide, the p99 is that of calls behind another conversation's first prompt, computed cold.",
    ]
    headings = ["GB/s of the store", "link in use", *(f"TTFT {q}, s" for q in _Q)]
    rows = [
        [
            f"{step.gbytes_per_s:g}",
            f"{step.link_use:.0%}",
            *(f"{getattr(step, f'ttft_{q}_s'):.3f}" for q in _Q),
        ]
        for step in steps
    ]
    return TableStudy(
        name="shared-bandwidth",
        title="The shared tier's bandwidth, cut step by step",
        answers=answers,
        headings=headings,
        rows=rows,
        plots=[
            Plot(
                title="Time to first token of calls that restore their prefix",
                caption="By the bandwidth of the shared store for eight nodes.",
                x="GB/s",
                y="s",
                lines=[
                    Line(q, [(step.gbytes_per_s, getattr(step, f"ttft_{q}_s")) for step in steps], color)
                    for color, q in enumerate(_Q)
                ],
                log="xy",
            )
        ],
        notes=[
            f"{size.sessions:,} conversations of {size.turns} calls, {NODES} nodes of 8 H100 (Llama-3.3-70B FP8, TP8); "
            f"prompts from {size.first_tokens:,} tokens, {size.turn_tokens:,} more per call, pauses of "
            f"{size.gap_mean_s:g} s on average, {size.sessions_per_hour_per_node:g} conversations per hour and node.",
            "GPUs keep nothing between calls and node DRAM is a write buffer (skip_l1): prefixes come from the store.",
            "No published figure: tests/harness/test_shared_link.py holds a single link inside a run to the analytic "
            "answer of processor sharing.",
        ],
        legend=list(_Q),
        command=command,
    )


_Q = ("p50", "p90", "p99")


def document(steps: list[Step], scale: str, command: str) -> dict[str, Any]:
    """The study as data."""
    return {
        "study": "shared-bandwidth",
        "scale": scale,
        "command": command,
        "size": asdict(SIZES[scale]),
        "steps": [asdict(step) for step in steps],
    }
