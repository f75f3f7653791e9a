"""`harness sweep` and `harness capacity`."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from harness import runner
from harness.arms import arms_of, router_arms, router_choices
from harness.errors import InputError
from harness.experiment import load_experiment, resolved_yaml
from harness.folders import whole, write_whole, writing
from harness.results.compare import lookup
from harness.results.store import REPORT
from harness.sweep.capacity import CapacitySource, check
from harness.sweep.page import answer, capacity_page, columns_with_values, full_title, sweep_page, to_know
from harness.sweep.points import Axis, Point, file_digests, grid, parse_axis, specification
from harness.sweep.pool import Executor, Listed, Processes, claim, complain, drive, summary_of
from harness.sweep.search import RateLadder
from harness.sweep.slo import parse_slo
from harness.workload import load_sessions

SWEEP: Final = "sweep.json"
SEARCH: Final = "search.json"
TABLE: Final = "points.csv"
CAPACITY: Final = "capacity.json"

ExperimentFile = Annotated[Path, typer.Argument(metavar="EXPERIMENT.yaml", help="Experiment file.")]
TraceFile = Annotated[str | None, typer.Option("--trace", metavar="FILE", help="Replay this trace instead.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="a.b=c", help="Override a field for all points; repeatable.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
Jobs = Annotated[
    int | None, typer.Option("--jobs", min=1, max=256, help="Runs at one time; default: as many as there are cores.")
]
Ray = Annotated[
    str | None,
    typer.Option("--ray", metavar="ADDRESS", help="Run on a Ray cluster: ray://HOST:10001, auto, or local."),
]
OutDir = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Where to write; the same command goes on with what it has begun there."),
]


def sweep(
    file: ExperimentFile,
    over: Annotated[
        list[str],
        typer.Option("--over", metavar="a.b=v1,v2,...", help="A field and its values; repeatable: all combinations."),
    ],
    jobs: Jobs = None,
    ray: Ray = None,
    shard: Annotated[
        str | None,
        typer.Option("--shard", metavar="I/N", help="Run only every N-th point, from the I-th (0 to N-1)."),
    ] = None,
    trace: TraceFile = None,
    overrides: Overrides = None,
    out: OutDir = None,
    as_json: AsJson = False,
) -> None:
    """Run an experiment at every point of a grid over its fields, side by side; goes on where it was stopped."""
    axes = [parse_axis(text) for text in over]
    base = load_experiment(file, overrides, trace)
    points = grid(file, axes, overrides or (), trace)
    mine = _shard(points, shard)
    folder = out or Path(base.output.dir) / f"{base.name}-sweep"
    claim(folder, specification(points), SWEEP)
    load_sessions(base)  # what is wrong with the trace is said once, before any run begins
    executor = _executor(jobs, ray)
    ended = drive(Listed(mine), folder, executor, "sweep", len(mine), show_progress=not as_json)
    summaries = _summaries(folder, points)
    command = runner.command_line("harness", *sys.argv[1:])
    with writing(folder):
        _write_csv(folder / TABLE, axes, points, summaries)
        write_whole(folder / REPORT, sweep_page(base.name, axes, points, summaries, command))
    if as_json:
        rows = [{"name": p.name, "values": p.values, "summary": summaries.get(p.name)} for p in points]
        print(json.dumps(rows, indent=2))
    else:
        _print_sweep(axes, points, summaries)
        print(f"\nreport: {folder / REPORT}")
    complain(ended, folder, "sweep")


def capacity(
    file: ExperimentFile,
    slo: Annotated[
        list[str],
        typer.Option(
            "--slo", metavar="NAME=LIMIT", help="e2e_p90_s=300, ttft_p90_s=5, output_rate_p10_tok_s=8; repeatable."
        ),
    ],
    router_config: Annotated[
        list[str] | None,
        typer.Option("--router-config", metavar="NAME_OR_FILE", help="As of `harness compare`; one search for each."),
    ] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            "--arm",
            metavar="NAME:a.b=v,c.d=w",
            help="As of `harness compare`. Default: the experiment's arms; if it has none, the experiment as it is.",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Seeds, from the experiment's upwards.")] = 3,
    start: Annotated[float | None, typer.Option(help="First rate tried; default: the experiment's.")] = None,
    low: Annotated[float, typer.Option(help="Lowest rate tried, sessions/h/node.")] = 0.01,
    high: Annotated[float, typer.Option(help="Highest rate tried, sessions/h/node.")] = 10_000.0,
    tolerance: Annotated[float, typer.Option(help="Width of a step of the ladder of rates; 0.05 is 5 %.")] = 0.05,
    warmup_share: Annotated[
        float, typer.Option(min=0.0, max=0.9, help="Part of the arrivals' span that is not measured.")
    ] = 0.25,
    jobs: Jobs = None,
    ray: Ray = None,
    trace: TraceFile = None,
    overrides: Overrides = None,
    out: OutDir = None,
    as_json: AsJson = False,
) -> None:
    """Find the highest load, in sessions per hour and node, that meets a service level."""
    slos = [parse_slo(text) for text in slo]
    names = [one.name for one in slos]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"--slo {twice}", "is given twice", "give the stricter limit only")
    base = load_experiment(file, overrides, trace)
    check(base)
    if low > high:
        raise InputError(f"--low {low:g} --high {high:g}", "are the wrong way round", "give the lower rate as --low")
    begin = start if start is not None else min(max(base.load.sessions_per_hour_per_node or 1.0, low), high)
    ladder = RateLadder(begin, tolerance, low, high)
    if arm and router_config:
        raise InputError("--arm", "does not go with --router-config", "set router.config in the arms")
    chosen = [] if router_config else arms_of(base, arm)
    if router_config:
        chosen = router_arms(base, router_choices(base, router_config))
    arms = {one.name: one.experiment for one in chosen} or {base.name: base}
    loaded = load_sessions(base)
    if not loaded.calls:
        raise InputError(base.trace.path, "holds no call", "give a trace to search with")
    source = CapacitySource(arms, range(base.seed, base.seed + seeds), slos, ladder, warmup_share, loaded)
    folder = out or Path(base.output.dir) / f"{base.name}-capacity"
    claim(folder, _search_specification(source, base), SEARCH)
    executor = _executor(jobs, ray)
    ended = drive(source, folder, executor, "capacity", None, show_progress=not as_json)
    command = runner.command_line("harness", *sys.argv[1:])
    found = source.capacities()
    document = {
        "experiment": base.name,
        "command": command,
        "slo": {s.name: s.limit for s in slos},
        "capacity": [one.as_dict() for one in found],
        "points": [probe.as_dict() for probe in sorted(source.probes, key=lambda p: (p.arm, p.seed, p.rate))],
    }
    with writing(folder):
        write_whole(folder / CAPACITY, json.dumps(document, indent=2) + "\n")
        write_whole(folder / REPORT, capacity_page(base.name, source, command))
    if as_json:
        print(json.dumps(document, indent=2))
    else:
        for one in found:
            print(answer(one))
        print(f"\nreport: {folder / REPORT}")
    complain(ended, folder, "capacity")


def _shard(points: Sequence[Point], text: str | None) -> list[Point]:
    """The points of one worker of several that share a folder."""
    if text is None:
        return list(points)
    index, sep, count = text.partition("/")
    if not (sep and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise InputError(f"--shard {text}", "not of the form I/N with I from 0 to N-1", "write for example --shard 0/4")
    return list(points)[int(index) :: int(count)]


def _executor(jobs: int | None, ray: str | None) -> Executor:
    if ray is None:
        return Processes(jobs or os.cpu_count() or 1)
    from harness.sweep.ray_pool import RayCluster  # Ray is an extra

    return RayCluster(ray, jobs)


def _search_specification(source: CapacitySource, base: Any) -> dict[str, Any]:
    return {
        "arms": {name: resolved_yaml(experiment) for name, experiment in source.arms.items()},
        "files": file_digests(source.arms.values()),
        "slo": {s.name: s.limit for s in source.slos},
        "seeds": list(source.seeds),
        "start": source.ladder.start,
        "tolerance": source.ladder.tolerance,
        "low": source.ladder.lowest,
        "high": source.ladder.highest,
        "warmup_share": source.warmup_share,
    }


def _summaries(folder: Path, points: Sequence[Point]) -> dict[str, dict[str, Any]]:
    """What has been written of all points, those of other shards too."""
    found = {point.name: summary_of(folder / point.name) for point in points}
    return {name: summary for name, summary in found.items() if summary is not None}


def _write_csv(path: Path, axes: Sequence[Axis], points: Sequence[Point], summaries: dict[str, dict[str, Any]]) -> None:
    """points.csv: a row per point, its fields and every number of its summary."""
    flat = {name: _flat({"summary": summary}) for name, summary in summaries.items()}
    keys = list(dict.fromkeys(key for row in flat.values() for key in row))
    with whole(path) as part, part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["point", *(axis.field for axis in axes), *keys])
        for point in points:
            row = flat.get(point.name, {})
            writer.writerow([point.name, *point.values.values(), *(row.get(key, "") for key in keys)])


def _flat(value: dict[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, dict):
            found |= _flat(inner, f"{before}{key}.")
        elif isinstance(inner, (int, float, str)):
            found[before + key] = inner
    return found


def _print_sweep(axes: Sequence[Axis], points: Sequence[Point], summaries: dict[str, dict[str, Any]]) -> None:
    columns = columns_with_values(summaries)
    table = Table(box=None, header_style="bold")
    for axis in axes:
        table.add_column(axis.short, no_wrap=True)
    for column in columns:
        table.add_column(full_title(column), justify="right")
    for point in points:
        summary = summaries.get(point.name, {})
        values = [lookup(summary, column.path) for column in columns]
        cells = ["-" if v is None else c.form(v) for c, v in zip(columns, values, strict=True)]
        table.add_row(*point.values.values(), *cells)
    Console(width=max(140, Console().width)).print(table)
    for note in to_know(summaries):
        print(f"Note: {note}")
    invalid = [name for name, summary in summaries.items() if not summary["validity"]["valid"]]
    if invalid:
        print(f"INVALID, not to be used: {', '.join(invalid)} (reasons in summary.json and the report).")
