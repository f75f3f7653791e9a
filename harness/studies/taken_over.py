"""Runs that another study has made already: many studies hold one arm in common, and an arm may take an hour."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.experiment import Experiment, load_experiment
from harness.sweep.points import Point
from harness.sweep.pool import finished
from harness.sweep.worker import POINT

_PARTIAL = ".part-"
"""Begins the name of a copy under way, or of one that was cut off: no run to copy from."""


def take_over(points: Sequence[Point], out: Path) -> dict[str, Path]:
    """Copy runs of the same experiments from studies in folders beside `out`; returns whence, by point name.

    The same is the same in every field but the study's name and the folder of the generated trace.
    """
    missing = {point.name: _what(point.experiment) for point in points if not (out / point.name).exists()}
    found: dict[str, Path] = {}
    for file in sorted(out.resolve().parent.glob(f"*/*/{POINT}")):
        run = file.parent
        if not missing or run.parent == out.resolve() or run.name.startswith(_PARTIAL) or not finished(run):
            continue
        try:
            there = _what(load_experiment(file))
        except InputError:
            continue
        for name in [name for name, wanted in missing.items() if wanted == there]:
            del missing[name]
            found[name] = run
    for name, run in found.items():
        partial = out / f"{_PARTIAL}{name}"
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(run, partial)
        partial.rename(out / name)
    return found


def _what(experiment: Experiment) -> dict[str, Any]:
    document = experiment.model_dump(mode="json")
    document.pop("name")
    document["trace"]["path"] = Path(document["trace"]["path"]).name
    return document
