"""The commands of the live cluster. What they need beyond the harness is the extra [live]."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from harness import experiment as experiments
from harness.errors import InputError

_NEEDED = ("fastapi", "uvicorn")


def check_extra() -> None:
    """InputError where the extra [live] is not installed."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError("harness live", f"needs {', '.join(missing)}", "pip install '.[live]'")


def live(
    file: Annotated[Path, typer.Argument(metavar="EXPERIMENT.yaml", help="Experiment file with a section `live`.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="a.b=c", help="Override a field; repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder for logs and records.")] = None,
) -> None:
    """The cluster on the wall clock: worker servers, the real router, Envoy, and a page, until Ctrl-C."""
    check_extra()
    from harness.folders import fresh_folder
    from harness.live.run import run_live

    experiment = experiments.load_experiment(file, overrides)
    folder = fresh_folder(out or Path(experiment.output.dir) / experiment.name)
    run_live(experiment, folder)
