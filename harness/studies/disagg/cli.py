"""The commands of the disaggregation studies."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from harness.errors import InputError
from harness.runner import command_line
from harness.studies.disagg import evict, fabric, kv_dtype, point, ratio
from harness.studies.disagg.arms import ArmResult, StudyArm, run_arms
from harness.studies.disagg.page import Study, markdown, render
from harness.studies.outcome import deliver

NAMES = {
    "pd-point": "gpt-oss-120b, one rate: 8 prefill TP1 + 2 decode TP4 against 16 TP1",
    "pd-evict": "the same fleet under eviction pressure: no CPU tier, CPU tier unknown to the router, CPU tier scored",
    "pd-ratio": "GLM-5.2 on 64 H200, agentic traffic: aggregated, 3:1, 1:1, 1:3; llm-d's ladder with MTP and CPU tier",
    "pd-fabric": "the point over slower and slower networks: where aggregated serving wins",
    "kv-dtype": "BF16 against FP8 KV: long prefill, capacity, KV that moves",
}
"""Studies of this kind, for the list."""

Scale = Annotated[str, typer.Option(help="small: a minute or so; full: as published.")]
HalfScale = Annotated[
    str, typer.Option(help="small: a minute or so; half: half the fleet and load; full: as published.")
]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Where to write; runs finished there are not repeated.")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of arrivals, prompts and ties.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]


def register(app: typer.Typer) -> None:
    """Adds the commands to `harness study`."""

    @app.command("pd-point")
    def pd_point(
        scale: Scale = "small",
        out: Out = None,
        seed: Seed = 1,
        front_end: Annotated[bool, typer.Option("--front-end", help="With what is measured around the GPU.")] = False,
        as_json: AsJson = False,
    ) -> None:
        """One published rate, split over prefill and decode workers, next to its figures."""
        folder = _folder("pd-point", scale, out)
        _run(folder, scale, point.point_arms(scale, seed, front_end), point.study, as_json)

    @app.command("pd-evict")
    def pd_evict(
        scale: HalfScale = "small",
        out: Out = None,
        seed: Seed = 1,
        as_json: AsJson = False,
    ) -> None:
        """The same fleet with more documents than its GPUs hold: what a CPU tier and its score are worth."""
        folder = _folder("pd-evict", scale, out, ("small", "half", "full"))
        _run(folder, scale, evict.evict_arms(scale, seed), evict.study, as_json)

    @app.command("pd-fabric")
    def pd_fabric(scale: Scale = "small", out: Out = None, seed: Seed = 1, as_json: AsJson = False) -> None:
        """The same over slower and slower networks: the crossover below which aggregated serving wins."""
        folder = _folder("pd-fabric", scale, out)
        _run(folder, scale, fabric.fabric_arms(scale, seed, folder), fabric.study, as_json)

    @app.command("pd-ratio")
    def pd_ratio(
        scale: Scale = "small",
        out: Out = None,
        seed: Seed = 1,
        split: Annotated[list[str] | None, typer.Option("--split", help="Only this one; repeatable.")] = None,
        users: Annotated[list[int] | None, typer.Option("--users", min=1, help="Users at once; repeatable.")] = None,
        as_json: AsJson = False,
    ) -> None:
        """How many of a fleet's workers should prefill, by concurrency."""
        folder = _folder("pd-ratio", scale, out)
        for name in split or ():
            if name not in ratio.known_arms():
                raise InputError(f"--split {name}", "unknown", f"choose from: {', '.join(ratio.known_arms())}")
        arms = ratio.ratio_arms(scale, seed, tuple(split or ()), tuple(users or ()))
        _run(folder, scale, arms, ratio.study, as_json)

    @app.command("kv-dtype")
    def kv_dtypes(scale: Scale = "small", out: Out = None, seed: Seed = 1, as_json: AsJson = False) -> None:
        """BF16 against FP8 KV: long prefill, capacity, KV that moves."""
        folder = _folder("kv-dtype", scale, out)
        _run(folder, scale, kv_dtype.dtype_arms(scale, seed), kv_dtype.study, as_json)


def _folder(name: str, scale: str, out: Path | None, scales: Sequence[str] = ("small", "full")) -> Path:
    if scale not in scales:
        raise InputError("--scale", f"unknown value {scale}", f"choose {', '.join(scales[:-1])} or {scales[-1]}")
    return (out or Path("runs") / f"study-{name}-{scale}").resolve()


def _run(
    folder: Path,
    scale: str,
    arms: Sequence[StudyArm],
    frame: Callable[[Sequence[ArmResult], str], Study],
    as_json: bool,
) -> None:
    command = command_line("harness", *sys.argv[1:])
    results = run_arms(
        arms, folder, command=command, tell=lambda line: print(line, file=sys.stderr), show_progress=not as_json
    )
    study = frame(results, scale)
    document = {
        "study": study.name,
        "scale": scale,
        "command": command,
        "answers": study.answers,
        "arms": [asdict(result) for result in results],
    }
    deliver(folder, document, markdown(study, results), render(study, results, command), as_json, width=160)
