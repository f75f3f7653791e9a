"""Arms of a study: experiments with their load and their published figures; run, measured, kept for a next time."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from harness.experiment import Experiment
from harness.folders import write_whole
from harness.results.numbers import seconds
from harness.results.records import COMPLETED
from harness.results.store import Run
from harness.results.summary import DECODE, E2E, REUSED, TTFT, measured
from harness.runner import run_experiment
from harness.workload import Loaded

RESULT = "arm.json"


@dataclass(slots=True)
class StudyArm:
    """One run of a study. `x`: where it stands on the study's axis (a rate, a concurrency, a bandwidth)."""

    name: str
    experiment: Experiment
    load: Callable[[], Loaded]
    load_key: str
    """What the load is, in words: a finished run of the same experiment and load is not repeated."""
    published: dict[str, float] = field(default_factory=dict)
    series: str = ""
    x: float | None = None
    split: Callable[[pl.DataFrame], dict[str, pl.DataFrame]] | None = None
    """Parts of the load that are measured one by one (stages), by name."""


@dataclass(slots=True)
class ArmResult:
    """Figures of one arm (or one part of it)."""

    name: str
    figures: dict[str, float | None]
    published: dict[str, float]
    series: str = ""
    x: float | None = None
    parts: dict[str, dict[str, float | None]] = field(default_factory=dict)
    invalid: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    digest: str = ""
    wall_s: float = 0.0
    router: dict[str, Any] = field(default_factory=dict)


def run_arms(
    arms: Sequence[StudyArm], out: Path, *, command: str, tell: Callable[[str], None], show_progress: bool = True
) -> list[ArmResult]:
    """All arms, one after the other, each in a folder of its own."""
    results = []
    for arm in arms:
        folder = out / arm.name.replace("/", "-").replace(" ", "-")
        inputs = {"experiment": _portable(arm.experiment), "load": arm.load_key}
        kept = _finished(folder / RESULT, inputs)
        if kept is None:
            tell(arm.name)
            kept = _measure(arm, folder, command, show_progress)
            write_whole(folder / RESULT, json.dumps({"inputs": inputs, **kept}, indent=1) + "\n")
        results.append(
            ArmResult(
                arm.name,
                kept["figures"],
                arm.published,
                arm.series or arm.name,
                arm.x,
                kept["parts"],
                kept["invalid"],
                kept["notes"],
                kept["digest"],
                kept["wall_s"],
                kept["router"],
            )
        )
    return results


def _measure(arm: StudyArm, folder: Path, command: str, show_progress: bool) -> dict[str, Any]:
    run = run_experiment(
        arm.experiment, folder, loaded=arm.load(), label=arm.name, command=command, show_progress=show_progress
    )
    identity = run.info.router
    parts = {} if arm.split is None else {name: figures_of(calls) for name, calls in arm.split(run.calls).items()}
    load = arm.experiment.load
    if load.warmup_s and load.until_s is not None:
        whole = figures_of(measured(run.calls, run.info), load.until_s - load.warmup_s)
    else:
        whole = figures_of(run.calls)
    return {
        "figures": whole | run_figures(run),
        "parts": parts,
        "invalid": list(run.info.invalid),
        "notes": list(run.info.notes),
        "digest": run.summary["digest"],
        "wall_s": round(run.info.wall_s or 0.0, 1),
        "router": {key: identity.get(key) for key in ("kind", "release", "sha256", "unmodified", "config")},
    }


def figures_of(calls: pl.DataFrame, window_s: float | None = None) -> dict[str, float | None]:
    """Client-side figures of some calls: times in seconds, rates per second of the window in which they ended (None:
    from first arrival to last end).
    """
    done = calls.filter(pl.col("outcome") == COMPLETED)
    if done.is_empty():
        return {"requests": float(len(calls)), "completed": 0.0}
    ttft, e2e = seconds(done, TTFT), seconds(done, E2E)
    several = done.filter(pl.col("output_tokens") > 1)
    tpot = several.select((DECODE / (pl.col("output_tokens") - 1)).alias("v"))["v"].to_numpy() / 1e9
    ends, arrivals = calls["finish_ns"].drop_nulls().to_list(), calls["arrival_ns"].to_list()
    span_s = (max(ends) - min(arrivals)) / 1e9 if window_s is None else window_s
    figures: dict[str, float | None] = {"requests": float(len(calls)), "completed": float(len(done))}
    for name, values in (("ttft", ttft), ("e2e", e2e), ("tpot", tpot)):
        figures[f"{name}_mean_s"] = float(values.mean()) if len(values) else None
        for q in (50, 90, 95, 99):
            figures[f"{name}_p{q}_s"] = float(np.percentile(values, q)) if len(values) else None
    figures["completed_per_s"] = len(done) / span_s if span_s else None
    figures["output_tok_s"] = float(done["output_tokens"].sum()) / span_s if span_s else None
    whole = float(done["input_tokens"].sum())
    figures["hit_share"] = float(done["gpu_tokens"].sum()) / whole
    figures["reused_share"] = float(done.select(REUSED.sum()).item()) / whole
    return figures


def run_figures(run: Run) -> dict[str, float | None]:
    """Figures of the whole run that single calls do not show."""
    summary = run.summary
    gaps, mixed = summary["itl_token_s"], summary["interference"]
    figures: dict[str, float | None] = {f"itl_{q}_s": gaps[q] for q in ("p50", "p90", "p99")}
    figures["interference_steps"] = mixed["steps"]
    for pool in summary["pools"]:
        figures[f"busy_{pool['role']}"] = pool["busy"]
    split = summary["disaggregation"]
    if split is not None:
        figures["split_share"] = split["share"]
        figures["kv_moved_bytes"] = split["bytes"]
        figures["transfer_bytes_per_s"] = split["transfer_bytes_per_s"]["mean"]
        for name, values in split["ttft_parts_s"].items():
            figures[f"{name}_mean_s"] = values["mean"]
    return figures


def _portable(experiment: Experiment) -> dict[str, Any]:
    """The experiment as data, with the router config's text in place of its path."""
    document = experiment.model_dump(mode="json")
    path = Path(experiment.router.config)
    if experiment.router.kind == "llm-d" and path.is_file():
        document["router"]["config"] = path.read_text(encoding="utf-8")
    return document


def _finished(path: Path, inputs: dict[str, Any]) -> dict[str, Any] | None:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) and document.get("inputs") == json.loads(json.dumps(inputs)) else None
