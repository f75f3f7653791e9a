"""`harness study validation`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from harness.errors import InputError
from harness.runner import command_line
from harness.studies.outcome import deliver
from harness.studies.validation import silicon
from harness.studies.validation.longcontext import longcontext_document, longcontext_markdown, run_longcontext
from harness.studies.validation.replay import replay_document, replay_markdown, run_replay
from harness.studies.validation.text import markdown as validation_markdown

TITLE = "Measured TTFT and TPOT against the engine on raw and on corrected tables; long context"
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]


def study_validation(
    scale: Annotated[str, typer.Option(help="small: up to 8 clients; full: all measured points.")] = "full",
    part: Annotated[str, typer.Option(help="silicon, longcontext, llmservingsim or all.")] = "all",
    group: Annotated[
        list[str] | None, typer.Option("--group", help="Only groups whose name holds this; repeatable.")
    ] = None,
    points: Annotated[bool, typer.Option("--points", help="Print every point, not only the groups.")] = False,
    refit: Annotated[bool, typer.Option("--refit", help="Fit the corrections anew and keep them first.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; default: one per CPU.")] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Where to write.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measured serving points through the engine: predicted against measured, per model, GPU and engine."""
    _check("--scale", scale, ("small", "full"))
    _check("--part", part, ("silicon", "longcontext", "llmservingsim", "all"))
    folder = out or Path("runs") / f"study-validation-{scale}"
    command = command_line("harness", *sys.argv[1:])
    texts: list[str] = []
    document: dict[str, Any] = {"study": "validation", "scale": scale, "command": command}
    if part in ("silicon", "all"):
        groups = silicon.chosen_groups(group or ())
        if not groups:
            raise InputError("--group", "no group of that name", "see harness/studies/data/silicon/groups.yaml")
        results = silicon.run_silicon(
            groups,
            small=scale == "small",
            refit=refit,
            jobs=jobs or os.cpu_count() or 1,
            tell=lambda line: print(line, file=sys.stderr),
        )
        scores = silicon.scores(groups, results)
        document["silicon"] = silicon.document(groups, results)
        texts.append(validation_markdown(scores, {g.name: g.note for g in groups if g.note}, results, points))
    if part in ("longcontext", "all"):
        compared, sources = run_longcontext()
        document["longcontext"] = longcontext_document(compared, sources)
        texts.append(longcontext_markdown(compared, sources))
    if part in ("llmservingsim", "all"):
        replayed = run_replay()
        document["llmservingsim"] = replay_document(replayed)
        texts.append(replay_markdown(replayed))
    deliver(folder, document, "\n".join(texts), None, as_json)


def _check(where: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InputError(where, f"unknown value {value}", f"choose one of: {', '.join(allowed)}")
