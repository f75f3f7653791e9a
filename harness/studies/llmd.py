"""Repeats one of llm-d's published ladders: every arm, every seed, each in a folder of its own under the study's."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.experiment import Experiment
from harness.folders import write_whole
from harness.front_end import FrontEndConfig
from harness.results.store import Run
from harness.runner import run_experiment
from harness.studies.front_end import front_end_of
from harness.studies.ladder import Arm, Ladder, router_config
from harness.studies.shared_prefix import lengths, staged_load
from harness.studies.stages import StageResult, stage_results
from harness.workload import Loaded

STAGES = "stages.json"


@dataclass(frozen=True, slots=True)
class Options:
    """What of a ladder is run, and how."""

    scale: str = "small"
    release: str | None = None
    arms: tuple[str, ...] = ()
    seeds: int | None = None
    observed_lengths: bool = True
    front_end: bool = True
    show_progress: bool = True


@dataclass(slots=True)
class ArmResult:
    """One arm: results per seed, and what a reader must know of its runs."""

    name: str
    arm: Arm
    seeds: list[int]
    runs: list[list[StageResult]]
    invalid: list[str] = field(default_factory=list)
    router: dict[str, Any] = field(default_factory=dict)
    wall_s: float = 0.0
    digests: list[str] = field(default_factory=list)


def chosen_arms(ladder: Ladder, options: Options) -> list[str]:
    """Names of the arms to run, checked."""
    for name in options.arms:
        if name not in ladder.arms:
            raise InputError(f"--arm {name}", "no such arm", f"choose from: {', '.join(ladder.arms)}")
    if options.arms:
        return [name for name in ladder.arms if name in options.arms]
    return [name for name, arm in ladder.arms.items() if arm.small or options.scale == "full"]


def experiment_of(ladder: Ladder, name: str, seed: int, options: Options) -> Experiment:
    """One arm of a ladder as an experiment."""
    arm = ladder.arms[name]
    router: dict[str, Any] = {"kind": arm.router, "block_tokens": None}
    if arm.config is not None:
        release = options.release or ladder.release
        router |= {"release": release, "config": str(router_config(arm.config, release))}
    front_end = FrontEndConfig()
    if options.front_end:
        size = lengths(ladder.workload, options.observed_lengths)
        front_end = front_end_of(ladder, arm, size.system_tokens + size.question_tokens)
    return Experiment.model_validate(
        {
            "name": f"{ladder.name}-{name}",
            "seed": seed,
            "trace": {"path": "shared_prefix"},
            "load": {"arrivals": "at_once", "client_timeout_s": ladder.load.request_timeout_s},
            "cluster": {
                "nodes": ladder.nodes,
                "gpus_per_node": ladder.gpus_per_node,
                "engine": ladder.engine.model_dump(mode="json"),
            },
            "model": {"profile": ladder.profile},
            "router": router,
            "cache": arm.cache.model_dump(mode="json"),
            "fabric": ladder.fabric.model_dump(mode="json"),
            "front_end": front_end.model_dump(mode="json"),
            "output": {"report": False},
        }
    )


def run_ladder(
    ladder: Ladder, out: Path, options: Options, *, command: str = "", tell: Callable[[str], None] = lambda _: None
) -> list[ArmResult]:
    """Every arm with every seed. A run whose folder holds a finished one of the same inputs is not repeated."""
    seeds = options.seeds or (1 if options.scale == "small" else ladder.seeds)
    results = []
    for name in chosen_arms(ladder, options):
        result = ArmResult(name, ladder.arms[name], [], [])
        for seed in range(1, seeds + 1):
            tell(f"{ladder.name}: {name}, seed {seed}")
            _run_arm(ladder, name, seed, out / name / f"seed-{seed}", options, command, result)
        results.append(result)
    return results


def _run_arm(
    ladder: Ladder, name: str, seed: int, out: Path, options: Options, command: str, result: ArmResult
) -> None:
    experiment = experiment_of(ladder, name, seed, options)
    inputs = {
        "experiment": _portable(experiment),
        "workload": ladder.workload.model_dump(mode="json"),
        "load": ladder.load.model_dump(mode="json"),
        "scale": options.scale,
        "observed_lengths": options.observed_lengths,
    }
    document = _finished(out / STAGES, inputs)
    if document is None:
        document = _measure(ladder, experiment, seed, out, options, command, f"{name} {seed}")
        document["inputs"] = inputs
        write_whole(out / STAGES, json.dumps(document, indent=1) + "\n")
    result.seeds.append(seed)
    result.runs.append([StageResult(**stage) for stage in document["stages"]])
    result.invalid += [f"seed {seed}: {reason}" for reason in document["invalid"]]
    result.router = document["router"]
    result.wall_s += document["wall_s"]
    result.digests.append(document["digest"])


def _measure(
    ladder: Ladder, experiment: Experiment, seed: int, out: Path, options: Options, command: str, label: str
) -> dict[str, Any]:
    stages = ladder.load.at(options.scale)
    block = ladder.engine.block_size or 16
    load = staged_load(ladder.workload, ladder.load, stages, seed, block, options.observed_lengths)
    run = run_experiment(
        experiment,
        out,
        loaded=Loaded([load.session], "shared_prefix"),
        label=label,
        command=command,
        show_progress=options.show_progress,
    )
    measured = stage_results(_records(run), load.stage_of, stages, ladder.load.warmup_stages)
    identity = run.info.router
    return {
        "stages": [stage.as_dict() for stage in measured],
        "invalid": list(run.info.invalid),
        "router": {key: identity.get(key) for key in ("kind", "release", "sha256", "unmodified", "config", "added")},
        "wall_s": round(run.info.wall_s or 0.0, 1),
        "digest": run.summary["digest"],
        "versions": run.info.versions,
    }


def _records(run: Run) -> Sequence[Any]:
    from harness.results.records import to_records

    return to_records(run.calls)


def _portable(experiment: Experiment) -> dict[str, Any]:
    """The experiment as data, with the router config's text in place of its path."""
    document = experiment.model_dump(mode="json")
    if experiment.router.kind == "llm-d":
        document["router"]["config"] = Path(experiment.router.config).read_text(encoding="utf-8")
    return document


def _finished(path: Path, inputs: dict[str, Any]) -> dict[str, Any] | None:
    """A result of an earlier run of exactly these inputs."""
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) and document.get("inputs") == json.loads(json.dumps(inputs)) else None
