"""`harness study`: repeats of published measurements."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from harness.errors import InputError
from harness.runner import command_line
from harness.studies import finding_text
from harness.studies.anatomy import kv_size_markdown, kv_sizes, workload, workload_data, workload_markdown
from harness.studies.disagg.cli import NAMES as DISAGGREGATION
from harness.studies.disagg.cli import register as register_disaggregation
from harness.studies.finding import SCALES, Finding, finding_names, load_finding, only
from harness.studies.finding_paths import check_paths
from harness.studies.finding_run import run_finding
from harness.studies.ladder import RELEASES, ladder_names, load_ladder
from harness.studies.llmd import Options, run_ladder
from harness.studies.outcome import deliver
from harness.studies.page import render_page
from harness.studies.prefill import DEFAULT, load_points, measure
from harness.studies.prefill import as_data as prefill_data
from harness.studies.prefill import markdown as prefill_markdown
from harness.studies.sidebyside import arm_table, markdown
from harness.studies.table_cli import TABLE_STUDIES, study_restore, study_shared_bandwidth, study_storage
from harness.studies.validation.cli import TITLE as VALIDATION
from harness.studies.validation.cli import study_validation

app = typer.Typer(no_args_is_help=True, help="Repeat published measurements and compare.")
register_disaggregation(app)

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
Arms = Annotated[list[str] | None, typer.Option("--arm", help="Only this arm; repeatable.")]
Rungs = Annotated[list[float] | None, typer.Option("--rung", help="Only this value of the study's ladder; repeatable.")]
app.command("restore")(study_restore)
app.command("validation")(study_validation)
app.command("storage")(study_storage)
app.command("shared-bandwidth")(study_shared_bandwidth)


@app.command("list")
def study_list(as_json: AsJson = False) -> None:
    """Studies that ship."""
    ladders = [load_ladder(name) for name in ladder_names()]
    findings = [load_finding(name) for name in finding_names()]
    if as_json:
        rows = [
            {"study": "llmd", "name": one.name, "title": one.title, "arms": list(one.arms), "source": one.source}
            for one in ladders
        ]
        rows += [{"study": name, "name": name, "title": title} for name, title in TABLE_STUDIES.items()]
        rows.append({"study": "validation", "name": "validation", "title": VALIDATION})
        rows += [
            {
                "study": found.name,
                "name": found.name,
                "title": found.title,
                "arms": [arm.name for arm in found.arms],
                "source": found.source,
            }
            for found in findings
        ]
        rows += [{"study": name, "name": name, "title": what} for name, what in DISAGGREGATION.items()]
        print(json.dumps(rows, indent=2))
        return
    table = Table(box=None, header_style="bold")
    for column in ("command", "what", "arms"):
        table.add_column(column, no_wrap=column == "command")
    for one in ladders:
        table.add_row(f"harness study llmd {one.name}", one.title, ", ".join(one.arms))
    for name, title in TABLE_STUDIES.items():
        table.add_row(f"harness study {name}", title, "")
    table.add_row("harness study validation", VALIDATION, "")
    for found in findings:
        table.add_row(f"harness study {found.name}", found.title, ", ".join(arm.name for arm in found.arms))
    for name, what in DISAGGREGATION.items():
        table.add_row(f"harness study {name}", what, "")
    Console(width=max(120, Console().width)).print(table)


@app.command("prefill")
def study_prefill(
    name: Annotated[str, typer.Argument(metavar="NAME_OR_FILE", help="A shipped file, or one of your own.")] = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Cold prefill of single requests, point by point, next to published times (seconds; needs nothing)."""
    file = load_points(name)
    results = [measure(series) for series in file.series]
    if as_json:
        print(json.dumps(prefill_data(file, results), indent=2))
        return
    Console(width=max(170, Console().width)).print(Markdown(prefill_markdown(file, results)))


@app.command("llmd")
def study_llmd(
    name: Annotated[
        str, typer.Argument(metavar="NAME_OR_FILE", help="A name of `harness study list`, or a ladder file.")
    ],
    scale: Annotated[str, typer.Option(help="small: four short stages, one seed; full: as published.")] = "small",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where to write; runs finished there are not repeated.")
    ] = None,
    arm: Annotated[list[str] | None, typer.Option("--arm", help="Only this arm; repeatable.")] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Seeds per arm; default: 1 if small, else the ladder's.")
    ] = None,
    release: Annotated[str | None, typer.Option(help="llm-d router release; default: the ladder's.")] = None,
    lengths: Annotated[
        str, typer.Option(help="Prompt lengths: observed (as the server counted, where published) or configured.")
    ] = "observed",
    front_end: Annotated[
        bool,
        typer.Option(help="What stands around the GPU as measured (docs/front-end.md), or nothing."),
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Repeat one of llm-d's published ladders: published, ours and ratio per stage, with a page."""
    _check("--scale", scale, ("small", "full"))
    if release is not None:
        _check("--release", release, RELEASES)
    _check("--lengths", lengths, ("observed", "configured"))
    ladder = load_ladder(name)
    options = Options(
        scale=scale,
        release=release,
        arms=tuple(arm or ()),
        seeds=seeds,
        observed_lengths=lengths == "observed",
        front_end=front_end,
        show_progress=not as_json,
    )
    folder = out or Path("runs") / f"study-{ladder.name}-{scale}"
    command = command_line("harness", *sys.argv[1:])
    results = run_ladder(ladder, folder, options, command=command, tell=lambda line: print(line, file=sys.stderr))
    tables = [arm_table(ladder, result, scale) for result in results]
    text = markdown(ladder, tables, results)
    document = {
        "study": "llmd",
        "ladder": ladder.name,
        "scale": scale,
        "command": command,
        "release": release or ladder.release,
        "lengths": lengths,
        "front_end": front_end,
        "arms": [
            {
                **table.as_dict(),
                "seeds": result.seeds,
                "digests": result.digests,
                "invalid": result.invalid,
                "router": result.router,
                "wall_s": result.wall_s,
            }
            for table, result in zip(tables, results, strict=True)
        ],
    }
    deliver(folder, document, text, render_page(ladder, tables, results, command), as_json)


@app.command("kv-size")
def study_kv_size(as_json: AsJson = False) -> None:
    """How large the KV cache of agentic calls is, next to published sizes (a second; runs nothing)."""
    sizes = kv_sizes()
    if as_json:
        print(json.dumps([asdict(size) for size in sizes], indent=2))
        return
    Console(width=max(140, Console().width)).print(Markdown(kv_size_markdown(sizes)))


@app.command("workload")
def study_workload(
    scale: Annotated[str, typer.Option(help="small: one seed; full: three.")] = "small",
    as_json: AsJson = False,
) -> None:
    """The anatomy of agentic traffic: the generated load next to the published trace's statistics."""
    _check("--scale", scale, ("small", "full"))
    seeds = [1] if scale == "small" else [1, 2, 3]
    rows = workload(seeds)
    if as_json:
        print(json.dumps(workload_data(rows, seeds), indent=2))
        return
    Console(width=max(140, Console().width)).print(Markdown(workload_markdown(rows, seeds)))


def _finding_command(name: str, title: str) -> None:
    """One command per finding that ships."""

    @app.command(name, help=f"{title} (docs/studies/findings.md)")
    def study(
        scale: Annotated[
            str,
            typer.Option(help="small: minutes; medium: the published load for fewer hours; full: as published."),
        ] = "small",
        out: Annotated[
            Path | None,
            typer.Option("--out", metavar="DIR", help="Where to write; what has run there is not repeated."),
        ] = None,
        seeds: Annotated[int, typer.Option(min=1, max=100, help="Seeds per arm.")] = 1,
        jobs: Annotated[int, typer.Option(min=1, max=256, help="Runs at one time.")] = 1,
        arm: Arms = None,
        rung: Rungs = None,
        as_json: AsJson = False,
    ) -> None:
        _run_finding(
            load_finding(name), f"study {name}", [name], scale, out, seeds, jobs, arm or (), rung or (), as_json
        )


def _run_finding(
    finding: Finding,
    where: str,
    words: Sequence[str],
    scale: str,
    out: Path | None,
    seeds: int,
    jobs: int,
    arms: Sequence[str],
    rungs: Sequence[float],
    as_json: bool,
) -> None:
    """`where`: what its file is called, `words`: how the command names the study. A part of a study has a folder of its
    own, from which the whole takes its runs over."""
    size = next((known for known in SCALES if known == scale and known in finding.scales), None)
    if size is None:
        raise InputError("--scale", scale, f"study {finding.name} has: {', '.join(finding.scales)}")
    check_paths(finding, where)
    picked = [*arms, *(f"{rung:g}" for rung in rungs)]
    folder = out or Path("runs") / "-".join([f"study-{finding.name}-{scale}", *picked]).replace(" ", "_")
    more = [word for arm in arms for word in ("--arm", arm)]
    more += [word for rung in rungs for word in ("--rung", f"{rung:g}")]
    more += ["--seeds", str(seeds)] if seeds > 1 else []
    # where it was run and in how many processes is nobody's business but the user's
    command = command_line("harness", "study", *words, "--scale", scale, *more)
    part = only(finding, size, arms, rungs)
    result = run_finding(part, size, folder, seeds=seeds, jobs=jobs, show_progress=not as_json)
    page = finding_text.render_page(result, command)
    deliver(folder, finding_text.as_data(result, command), finding_text.markdown(result, command), page, as_json)


@app.command("finding")
def study_finding(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A finding of your own (docs/studies/findings.md).")],
    scale: Annotated[str, typer.Option(help="One of the scales that the file defines.")] = "small",
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Where to write.")] = None,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Seeds per arm.")] = 1,
    jobs: Annotated[int, typer.Option(min=1, max=256, help="Runs at one time.")] = 1,
    arm: Arms = None,
    rung: Rungs = None,
    as_json: AsJson = False,
) -> None:
    """Run a finding from a file of your own: arms, published figures and directions as data."""
    name = str(file)
    finding = load_finding(name if "/" in name else f"./{name}")
    _run_finding(finding, name, ["finding", file.name], scale, out, seeds, jobs, arm or (), rung or (), as_json)


for _name in finding_names():
    _finding_command(_name, load_finding(_name).title)


def _check(where: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InputError(where, f"unknown value {value}", f"choose one of: {', '.join(allowed)}")
