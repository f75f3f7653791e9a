"""Runs that another study has made already: many studies hold one arm in common, and an arm may take an hour."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.experiment import Experiment, load_experiment, resolved_yaml
from harness.identity import harness_code, harness_version
from harness.results.records import to_records
from harness.results.runinfo import read_info
from harness.results.store import INFO, load_run, write_run
from harness.run_facts import prices_of
from harness.sweep.points import Point
from harness.sweep.pool import finished
from harness.sweep.worker import POINT

_HARNESS: dict[str, Callable[[], str]] = {"harness": harness_version, "harness code": harness_code}
"""Of which harness a run is, as run.json keeps it. LMCache's release goes with it: each harness takes one only."""
_PARTIAL = ".part-"
"""Begins the name of a copy under way, or of one that was cut off: no run to copy from."""


def take_over(points: Sequence[Point], out: Path) -> dict[str, Path]:
    """Copy runs of the same experiments from studies in folders beside `out`; returns whence, by point name.

    The same is the same in every field but the study's name, the folder of the generated trace, and prices: no decision
    depends on what a token costs, so that a copy is priced anew from its records.
    """
    missing = {point.name: _what(point.experiment) for point in points if not (out / point.name).exists()}
    wanted_of = {point.name: point.experiment for point in points}
    found: dict[str, Path] = {}
    repriced: set[str] = set()
    for file in sorted(out.resolve().parent.glob(f"*/*/{POINT}")):
        run = file.parent
        if not missing or run.parent == out.resolve() or run.name.startswith(_PARTIAL) or not finished(run):
            continue
        try:
            made = load_experiment(file)
            read_info(run / INFO)
        except InputError:  # an older harness's, or broken: it is run instead
            continue
        there = _what(made)
        for name in [name for name, wanted in missing.items() if wanted == there]:
            del missing[name]
            found[name] = run
            if made.prices != wanted_of[name].prices:
                repriced.add(name)
    for name, run in list(found.items()):
        partial = out / f"{_PARTIAL}{name}"
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(run, partial)
        try:
            if name in repriced:
                _price(partial, wanted_of[name])
            else:
                load_run(partial)
        except InputError:  # its records cannot be read: it is run instead
            shutil.rmtree(partial)
            del found[name]
            continue
        partial.rename(out / name)
    return found


def stranger(run: Path) -> str:
    """What to say of a run that another harness made, or one that did not say which it was; nothing of one of ours.

    Such a run is taken over all the same: most changes leave its results alone, and whoever knows of one that does not
    can give a folder elsewhere.
    """
    made = read_info(run / INFO).versions
    known = [made[name] for name in _HARNESS if name in made]
    ours = [get() for get in _HARNESS.values()]
    if known == ours:
        return ""
    return f"made by another harness ({', '.join(known) or 'unknown'}; this is {', '.join(ours)})"


def _what(experiment: Experiment) -> dict[str, Any]:
    document = experiment.model_dump(mode="json")
    del document["name"], document["prices"]
    document["trace"]["path"] = Path(document["trace"]["path"]).name
    return document


def _price(run: Path, experiment: Experiment) -> None:
    """Write a run's folder again as a run of the experiment, from which it differs in prices alone."""
    made = load_run(run)
    document, text = experiment.model_dump(mode="json"), resolved_yaml(experiment)
    info = replace(
        made.info, experiment=document, experiment_yaml=text, name=experiment.name, prices=prices_of(experiment)
    )
    (run / POINT).write_text(text, encoding="utf-8")
    wanted = experiment.output.report
    write_run(run, to_records(made.calls), info, made.timeline, report=wanted, tiers=made.tiers)
