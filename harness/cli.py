"""Command line: commands only. Every command ends with the exit codes of the contract (0, 2, 3, 4, 130)."""

from __future__ import annotations

import json
import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from harness import arms, runner
from harness import experiment as experiments
from harness.doctor import doctor
from harness.engine_cli import app as engine_app
from harness.errors import HarnessError, InputError
from harness.folders import results_folder
from harness.live.cli import bench, live, page
from harness.results import store
from harness.results.exports import FORMATS
from harness.results.summary import to_json
from harness.results.table import print_table
from harness.router.cli import app as router_app
from harness.studies.cli import app as study_app
from harness.sweep.cli import capacity, sweep
from harness.trace.cli import app as trace_app

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Simulate an LLM serving cluster around the real llm-d router.",
)
profile_app = typer.Typer(no_args_is_help=True, help="Step-time profiles of models on GPUs.")
app.add_typer(router_app, name="router")
app.add_typer(engine_app, name="engine")
app.add_typer(trace_app, name="trace")
app.add_typer(study_app, name="study")
app.add_typer(profile_app, name="profile")
app.command("doctor")(doctor)
app.command("sweep")(sweep)
app.command("capacity")(capacity)
app.command("live")(live)
app.command("bench")(bench)
app.command("page")(page)

ExperimentFile = Annotated[Path, typer.Argument(metavar="EXPERIMENT.yaml", help="Experiment file.")]
TraceFile = Annotated[str | None, typer.Option("--trace", metavar="FILE", help="Replay this trace instead.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="a.b=c", help="Override a field of the experiment; repeatable.")
]
OutDir = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Where to write; default: runs/NAME.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]


@app.command()
def run(
    file: ExperimentFile,
    trace: TraceFile = None,
    overrides: Overrides = None,
    out: OutDir = None,
    as_json: AsJson = False,
) -> None:
    """Run one experiment."""
    experiment = experiments.load_experiment(file, overrides, trace)
    with results_folder(out or Path(experiment.output.dir) / experiment.name) as folder:
        result = runner.run_experiment(experiment, folder, command=_command())
    _show([result], as_json, folder / store.REPORT if experiment.output.report else folder)


@app.command()
def compare(
    file: ExperimentFile,
    router_config: Annotated[
        list[str] | None,
        typer.Option(
            "--router-config",
            metavar="NAME_OR_FILE",
            help="A router config (file, or a shipped name) or a baseline; repeatable, or several after commas. "
            "Default: the experiment's arms; if it has none, every shipped config of the release, and the baselines "
            "round_robin and least_loaded.",
        ),
    ] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            "--arm",
            metavar="NAME:a.b=v,c.d=w",
            help="An arm that differs in any fields (values in YAML; NAME: alone is the experiment as it is), or one "
            "of the experiment's arms by its NAME; repeatable.",
        ),
    ] = None,
    trace: TraceFile = None,
    overrides: Overrides = None,
    out: OutDir = None,
    as_json: AsJson = False,
) -> None:
    """Run the same load under several router configs, or under arms that differ in anything: one table, one report."""
    base = experiments.load_experiment(file, overrides, trace)
    if arm and router_config:
        raise InputError("--arm", "does not go with --router-config", "set router.config in the arms")
    chosen = [] if router_config else arms.arms_of(base, arm)
    if not chosen:
        chosen = arms.router_arms(base, arms.router_choices(base, router_config))
    with results_folder(out or Path(base.output.dir) / base.name) as folder:
        results = runner.compare(chosen, folder, command=_command())
    _show(results, as_json, folder / store.REPORT)


@app.command()
def report(
    dirs: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of runs or comparisons.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Where to write the page.")] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Render report.html again from folders of results."""
    page = store.report(dirs, out)
    print(page)
    if open_page:
        webbrowser.open(page.resolve().as_uri())


@app.command()
def export(
    dir: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run or a comparison.")],
    format: Annotated[str, typer.Option("--format", help="llmd (llm-d's benchmark report), perfetto or csv.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where to write; default: beside the run.")
    ] = None,
) -> None:
    """Write results in another tool's format, a file per run."""
    if format not in FORMATS:
        raise InputError(f"--format {format}", "unknown format", f"choose one of: {', '.join(FORMATS)}")
    name, write = FORMATS[format]
    found = store.find_runs([dir])
    for path in found:
        folder = path if out is None else out if len(found) == 1 else out / path.name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write(store.load_run(path), folder / name)
        except OSError as error:
            raise InputError(
                f"--out {folder}", f"cannot be written ({error.strerror or error})", "give another folder"
            ) from None
        print(folder / name)


@app.command()
def schema() -> None:
    """Print the JSON Schema of the experiment file."""
    print(experiments.json_schema())


@profile_app.command("list")
def profile_list(as_json: AsJson = False) -> None:
    """Profiles that ship with the project."""
    from fake_workers.pricing.registry import list_profiles

    rows = list_profiles()
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    columns = ("name", "gpu", "tp", "dp", "ep", "kv_bytes_per_token", "kv_capacity_tokens", "max_model_len")
    table = Table(box=None, header_style="bold")
    for column in columns:
        words = column in ("name", "gpu")
        table.add_column(column.replace("_", " "), justify="left" if words else "right", no_wrap=words)
    for row in rows:
        table.add_row(*(f"{row[c]:,}" if isinstance(row[c], int) else str(row[c]) for c in columns))
    Console(width=max(120, Console().width)).print(table)


@profile_app.command("show")
def profile_show(name: Annotated[str, typer.Argument(metavar="NAME_OR_FILE")]) -> None:
    """Everything a profile says of itself, as JSON."""
    from fake_workers.pricing.registry import show_profile

    print(json.dumps(show_profile(name), indent=2))


@profile_app.command("build")
def profile_build(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME...", help="Profiles named in the project's list.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write to.")] = Path("."),
    roofline: Annotated[
        Path | None,
        typer.Option("--roofline", metavar="SPEC.yaml", help="Estimate from peak rates instead (last resort)."),
    ] = None,
) -> None:
    """Build profiles from the kernel database (needs the extra `profile`), or one from a roofline description."""
    if roofline is not None:
        from fake_workers.pricing.profile import save_profile
        from fake_workers.pricing.roofline import build_roofline, read_spec

        if names:
            raise InputError("harness profile build", "takes names or --roofline, not both", "drop one of them")
        spec = read_spec(roofline)
        path = out / f"{spec.name}.npz"
        save_profile(build_roofline(spec), path)
        print("estimated from peak rates, not measured: every report of a run says so", file=sys.stderr)
        print(path)
        return
    from fake_workers.pricing.build import build_known

    for path in build_known(names or [], out, lambda line: print(line, file=sys.stderr)):
        print(path)


@profile_app.command("import")
def profile_import(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE/tpN", help="A tp<N> folder of an LLMServingSim profile.")],
    config: Annotated[Path, typer.Option("--config", metavar="CONFIG.json", help="The model's Hugging Face config.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of CSV tables to write.")],
    kv_tokens: Annotated[int, typer.Option(min=0, help="Tokens that fit the KV memory; 0: not known.")] = 0,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Default: that of the config.")] = None,
    collectives: Annotated[
        str | None, typer.Option(metavar="GPU_OR_CSV", help="Measured all-reduce; needed for tensor parallelism.")
    ] = None,
) -> None:
    """Layer times as LLMServingSim's profiler writes them into tables for `profile:`."""
    from fake_workers.pricing.bundle import import_bundle, read_shape
    from fake_workers.pricing.collectives import load_collectives
    from fake_workers.pricing.registry import load_profile

    import_bundle(
        bundle,
        read_shape(config),
        out,
        name=out.name,
        kv_capacity_tokens=kv_tokens,
        max_model_len=max_model_len,
        collectives=load_collectives(collectives) if collectives else None,
    )
    load_profile(f"{out}/")
    print(out)


@profile_app.command("collectives")
def profile_collectives(
    gpu: Annotated[str | None, typer.Argument(metavar="GPU_OR_CSV", help="One GPU type; default: all.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measured collectives between GPUs: which operations, ranks and sizes; what is missing."""
    from fake_workers.pricing.collectives import GAPS, collective_gpus, load_collectives

    rows: list[dict[str, Any]] = []
    for one in [gpu] if gpu else collective_gpus():
        table = load_collectives(one)
        for op, ranks, kernel, low, high in table.measured():
            times = [table.time_ns(op, ranks, size) / 1e3 for size in (low, high)]
            row: dict[str, Any] = {
                "gpu": table.gpu,
                "op": op,
                "ranks": ranks,
                "kernel": kernel,
                "bytes": [low, high],
                "us": times,
            }
            rows.append(row)
        rows += [{"gpu": g, "op": op, "gap": why} for (g, op), why in GAPS.items() if g == table.gpu]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        if "gap" in row:
            print(f"{row['gpu']:8s} {row['op']:15s} gap: {row['gap']}")
        else:
            low, high = row["bytes"]
            what = f"{row['gpu']:8s} {row['op']:15s} {row['ranks']:2d} ranks  {row['kernel']:14s}"
            print(f"{what} {low:>11,} to {high:>13,} B  {row['us'][0]:9.2f} to {row['us'][1]:10.2f} us")


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: one clear line on standard error for every foreseen failure, with the contract's exit code."""
    runner.hear_signals()
    try:
        app(args=list(arguments) if arguments is not None else None, standalone_mode=True)
    except HarnessError as error:
        text = str(error).replace("\n", " ") if isinstance(error, InputError) else str(error)
        print(f"error: {_printable(text)}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # who read our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:  # a disk or a right that no command foresaw
        where = error.filename or "a file"
        print(f"error: {where}: {error.strerror or error}; free space, or give another folder", file=sys.stderr)
        sys.exit(3)


def _printable(text: str) -> str:
    """Names from files may hold terminal escapes."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def _command() -> str:
    return runner.command_line("harness", *sys.argv[1:])


def _show(results: list[store.Run], as_json: bool, page: Path) -> None:
    if as_json:
        summaries = [result.summary for result in results]
        print(to_json(summaries[0]) if len(summaries) == 1 else json.dumps(summaries, indent=2))
    else:
        print_table([result.summary for result in results])
        print(f"\nreport: {page}")


if __name__ == "__main__":
    main()
