"""`harness study restore` and `harness study shared-bandwidth`: studies that are one table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from harness.errors import InputError
from harness.runner import command_line
from harness.studies.outcome import deliver
from harness.studies.tables import TableStudy, markdown, render

TABLE_STUDIES = {
    "prefill": "Cold prefill of single requests, point by point, next to llm-d's published rates and ladders",
    "restore": "Restoring a prefix from DRAM or a peer against computing it again, by length",
    "storage": "A storage tier (Lustre) below node DRAM on a fleet under load, Llama-3.3-70B",
    "shared-bandwidth": "The shared tier's bandwidth cut step by step, and what that does to the tail of TTFT",
    "workload": "What is agentic traffic made of?",
    "kv-size": "How large is the KV cache of agentic calls?",
}

Scale = Annotated[str, typer.Option(help="small: minutes; full: everything.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Where to write.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]


def study_restore(
    case: Annotated[list[str] | None, typer.Option("--case", help="Only this case (name or file); repeatable.")] = None,
    scale: Scale = "small",
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Load against recompute by length, next to published measurements: ours, ratio, and the cause of what misses."""
    from harness.studies.restore import case_names, load_case, run_case
    from harness.studies.restore_report import document, restore_study

    folder, command = _begin("restore", scale, out)
    cases = [load_case(name) for name in case or case_names()]
    lengths = 2 if scale == "small" else None
    results = [run_case(one, folder / one.name, lengths, command=command, show_progress=not as_json) for one in cases]
    _end(folder, restore_study(results, command), document(results, command, scale), as_json)


def study_shared_bandwidth(scale: Scale = "small", out: Out = None, as_json: AsJson = False) -> None:
    """Eight nodes on one shared store whose bandwidth is cut: restore times and the tail of TTFT grow."""
    from harness.studies.bandwidth import bandwidth_study, document, run_steps

    folder, command = _begin("shared-bandwidth", scale, out)
    steps = run_steps(scale, folder, command=command, show_progress=not as_json)
    _end(folder, bandwidth_study(steps, scale, command), document(steps, scale, command), as_json)


def study_storage(scale: Scale = "small", out: Out = None, as_json: AsJson = False) -> None:
    """A storage tier below node DRAM on a fleet under load, next to llm-d's published runs on Lustre."""
    from harness.studies.storage import document, load_case, run_arms, storage_study

    folder, command = _begin("storage", scale, out)
    case = load_case()
    outcomes = run_arms(case, scale, folder, command=command, show_progress=not as_json)
    _end(folder, storage_study(case, outcomes, command), document(outcomes, scale, command), as_json)


def _begin(name: str, scale: str, out: Path | None) -> tuple[Path, str]:
    if scale not in ("small", "full"):
        raise InputError("--scale", f"unknown value {scale}", "choose one of: small, full")
    folder = out or Path("runs") / f"study-{name}-{scale}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {folder}", f"cannot be used ({error.strerror})", "give another folder") from None
    return folder, command_line("harness", *sys.argv[1:])


def _end(folder: Path, study: TableStudy, data: dict[str, Any], as_json: bool) -> None:
    deliver(folder, data, markdown(study), render(study), as_json)
