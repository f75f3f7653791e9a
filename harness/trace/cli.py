"""Commands `harness trace ...`: the functions of this package behind a command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from harness.errors import InputError
from harness.folders import write_whole
from harness.trace import source as trace_source
from harness.trace.check import MAX_VIOLATIONS, check_trace
from harness.trace.exporters import EXPORTERS
from harness.trace.generate import generate_sessions
from harness.trace.importers import ImportOptions
from harness.trace.model import Session
from harness.trace.profile import load_profile, profile_names, without_shared_prefix
from harness.trace.read import FORMATS, Blocks, read_trace, trace_files
from harness.trace.sample import Moved, Strata, choose, kept, moved
from harness.trace.shape import Shape
from harness.trace.stats import trace_stats
from harness.trace.table import flat_stats, shown
from harness.trace.targets import compare, load_targets
from harness.trace.write import write_trace

app = typer.Typer(no_args_is_help=True, help="Traces: what is in them, convert, generate, check.")
TraceArgument = Annotated[Path, typer.Argument(metavar="FILE", help="Trace file, or a folder of them.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
RepairOption = Annotated[
    bool,
    typer.Option("--repair-blocks", help="Cut or extend each call's blocks to its input tokens (broken block ids)."),
]


def with_progress(sessions: Iterator[Session], what: str, total: int | None = None) -> Iterator[Session]:
    """Show on a terminal's standard error how many sessions are through; elsewhere nothing."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield from sessions
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("sessions"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total)
        for session in sessions:
            yield session
            progress.advance(task)


@app.command()
def stats(
    file: TraceArgument,
    as_json: JsonOption = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="PAGE", help="Also write a page with plots: one file, no network.")
    ] = None,
) -> None:
    """What is in a trace."""
    sessions = with_progress(read_trace(file, blocks="keep"), f"reading {file.name}")
    if html is None:
        found = trace_stats(sessions)
    else:
        if any(html.resolve() == part.resolve() for part in trace_files(file)):
            raise InputError(f"--html {html}", "is the trace itself", "give another name for the page")
        shape = Shape()
        found = trace_stats(shape.watch(sessions))
        _write_page(html, file.name or str(file), found, shape)
    if as_json:
        print(json.dumps(found, indent=1))
        return
    table = Table("statistic", "value", title=str(file))
    for name, value in flat_stats(found):
        table.add_row(name, shown(value))
    Console().print(table)


def _write_page(html: Path, name: str, found: dict[str, Any], shape: Shape) -> None:
    from harness.trace.page import render_trace_page  # plotly is wanted for pages alone

    try:
        write_whole(html, render_trace_page(name, found, shape))
    except OSError as error:
        raise InputError(f"--html {html}", f"cannot be written ({error.strerror})", "give a writable place") from None


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Trace file or folder of any readable format.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Trace to write; gzip where the name ends in .gz.")],
    kind: Annotated[str | None, typer.Option("--from", help=f"Format to read: {', '.join(FORMATS)}.")] = None,
    to: Annotated[
        Literal["own", "weka", "mooncake", "agentic_mooncake"], typer.Option(help="Format to write.")
    ] = "own",
    repair_blocks: RepairOption = False,
    block_tokens: Annotated[int | None, typer.Option(help="Tokens per block, where not the format's own size.")] = None,
    turns: Annotated[
        Literal["auto", "full", "delta"], typer.Option(help="Whether rows hold whole prompts or what they add.")
    ] = "auto",
    tokenizer: Annotated[str, typer.Option(help="For text: bytes, or the path of a tokenizer.json.")] = "bytes",
    bytes_per_token: Annotated[int, typer.Option(help="Size of a token of the tokenizer bytes.")] = 4,
    output_tokens: Annotated[int | None, typer.Option(help="For calls without an output length.")] = None,
    reuse: Annotated[
        float | None,
        typer.Option(help="Share of the previous prompt that a call repeats, where there are no block ids."),
    ] = None,
    calls_per_session: Annotated[
        float | None, typer.Option(help="Tables of requests: mean calls of a session; 1: unrelated requests.")
    ] = None,
    think: Annotated[float, typer.Option(help="Tables of requests: least seconds between calls of a session.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Tables of requests: seed of the sessions made.")] = 1,
    max_unpack_ratio: Annotated[float, typer.Option(help="Most bytes that a byte of gzip may unpack to.")] = 250.0,
    max_document_mib: Annotated[
        int, typer.Option(help="Longest document (one session of weka, a file of otel).")
    ] = 1024,
    as_json: JsonOption = False,
) -> None:
    """Write a trace of any readable format in the project's own, or in that of another tool."""
    if any(file.resolve() == target.resolve() for file in trace_files(source)):
        raise InputError(str(target), "is the input itself", "give another name for the output")
    trace_source.LIMITS.set(trace_source.Limits(ratio=max_unpack_ratio, document_bytes=max_document_mib << 20))
    options = ImportOptions(
        block_tokens=block_tokens,
        turns=turns,
        tokenizer=tokenizer,
        bytes_per_token=bytes_per_token,
        output_tokens=output_tokens,
        reuse=reuse,
        calls_per_session=calls_per_session,
        think_s=think,
        seed=seed,
    )
    blocks: Blocks = "repair" if repair_blocks else "strict"
    sessions = with_progress(read_trace(source, blocks, kind, options), f"converting {source.name}")
    calls = write_trace(target, sessions) if to == "own" else EXPORTERS[to](target, sessions)
    _say_written(target, calls, as_json)


@app.command()
def sample(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Trace file or folder of any readable format.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Trace in the project's format (.jsonl or .jsonl.gz).")],
    sessions: Annotated[int, typer.Option(min=1, help="Number of sessions to keep.")],
    seed: Annotated[int, typer.Option(help="Same seed, same sessions.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Cut a trace to some of its sessions, drawn by strata, and say how far each statistic moved."""
    if any(file.resolve() == target.resolve() for file in trace_files(source)):
        raise InputError(str(target), "is the input itself", "give another name for the output")
    strata = Strata()
    whole = trace_stats(with_progress(strata.watch(read_trace(source)), f"reading {source.name}"))
    chosen = choose(strata.found, sessions, seed)
    calls = write_trace(target, with_progress(kept(read_trace(source), chosen), "writing", sessions))
    changes = moved(flat_stats(whole), flat_stats(trace_stats(read_trace(target))))
    if as_json:
        rows = [{"name": m.name, "whole": m.whole, "sample": m.sample, "change": m.change} for m in changes]
        print(json.dumps({"file": str(target), "calls": calls, "statistics": rows}, indent=1))
        return
    table = Table(
        "statistic", "whole", "sample", "change", title=f"{sessions} of {len(strata.found)} sessions, seed {seed}"
    )
    for m in changes:
        table.add_row(m.name, shown(m.whole), shown(m.sample), _change(m))
    Console().print(table)
    _say_written(target, calls, as_json)


def _change(change: Moved) -> str:
    return "-" if change.change is None else f"{change.change:+.1%}"


@app.command()
def generate(
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Trace to write (.jsonl or .jsonl.gz).")],
    profile: Annotated[str, typer.Option(help=f"One of {', '.join(profile_names())}, or a YAML file.")] = "claude-code",
    seed: Annotated[int, typer.Option(help="Same seed, same trace.")] = 1,
    sessions: Annotated[int, typer.Option(min=0, help="Number of sessions.")] = 393,
    no_shared_prefix: Annotated[
        bool, typer.Option("--no-shared-prefix", help="Sessions have no system prompt and tools in common.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Generate a synthetic trace."""
    chosen = load_profile(profile)
    made = generate_sessions(without_shared_prefix(chosen) if no_shared_prefix else chosen, seed, sessions)
    _say_written(target, write_trace(target, with_progress(made, "generating", sessions)), as_json)


def _say_written(target: Path, calls: int, as_json: bool) -> None:
    size = target.stat().st_size
    if as_json:
        print(json.dumps({"file": str(target), "calls": calls, "bytes": size}))
    else:
        print(f"{target}: {calls:,} calls, {size / 1e6:.2f} MB")


@app.command()
def check(file: TraceArgument, as_json: JsonOption = False) -> None:
    """Name every violation of the trace format: line, field, what is wrong."""
    violations = check_trace(file)
    if as_json:
        rows = [{"line": v.line, "field": v.field, "what": v.what, "remedy": v.remedy} for v in violations]
        print(json.dumps(rows, indent=1))
    else:
        for v in violations:
            place = f"{file}: line {v.line}" if v.line else str(file)
            print(f"{place}: {v.field + ': ' if v.field else ''}{v.what}; {v.remedy}")
    if violations:
        more = " or more" if len(violations) >= MAX_VIOLATIONS else ""
        raise InputError(str(file), f"{len(violations)}{more} violations of the trace format", "see the list above")
    if not as_json:
        print(f"{file}: no violation")


@app.command("targets")
def show_targets(
    profile: Annotated[str, typer.Option(help="A profile with published targets.")] = "claude-code",
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "1,2,3",
    as_json: JsonOption = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
) -> None:
    """Hold generated traces against the published statistics that a profile is shaped after."""
    try:
        numbers = [int(seed) for seed in seeds.split(",")]
    except ValueError:
        raise InputError(f"--seeds {seeds}", "is not a list of whole numbers", "write for example 1,2,3") from None
    wanted, made = load_targets(profile), load_profile(profile)
    results = [
        trace_stats(with_progress(generate_sessions(made, seed, wanted.sessions), f"seed {seed}", wanted.sessions))
        for seed in numbers
    ]
    comparisons = compare(wanted, results)
    if as_json:
        rows = [
            {
                "name": c.target.name,
                "stat": c.target.stat,
                "target": c.target.value,
                "got": c.got,
                "met": c.met,
            }
            for c in comparisons
        ]
        print(json.dumps(rows, indent=1))
        return
    head = ["statistic", "target", *(f"seed {seed}" for seed in numbers), "mean deviation", "allowed", "met"]
    lines = [comparison_cells(c) for c in comparisons]
    if markdown:
        sys.stdout.write(
            "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *lines]) + "\n"
        )
        return
    table = Table(*head)
    for cells in lines:
        table.add_row(*cells)
    Console().print(table)


def comparison_cells(comparison: Any) -> list[str]:
    """One target as table cells; shares in percent."""
    target, got = comparison.target, comparison.got
    scale = 100.0 if "(%)" in target.name else 1.0
    mean = sum(got) / len(got)
    if target.points is not None:
        deviation, allowed = f"{(mean - target.value) * 100:+.2f} points", f"{target.points:g} points"
    elif target.range is not None:
        low, high = (bound * scale for bound in target.range)
        deviation, allowed = (
            "-" if target.value is None else f"{mean / target.value - 1:+.1%}",
            f"{low:g} to {high:g}",
        )
    else:
        deviation, allowed = f"{mean / target.value - 1:+.1%}", f"{target.within:.0%}"
    met = f"{sum(comparison.met)} of {len(got)}"
    value = "-" if target.value is None else shown(target.value * scale)
    return [target.name, value, *(shown(x * scale) for x in got), deviation, allowed, met]
