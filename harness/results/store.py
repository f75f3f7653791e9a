"""Folders of runs: everything that the report needs is written there, so that it can be rendered again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import polars as pl

from harness.errors import InputError
from harness.folders import write_whole
from harness.results import invariants
from harness.results.records import CallRecord, digest, read_calls, to_frame, to_records, write_calls
from harness.results.runinfo import RunInfo, read_info, write_info
from harness.results.summary import summarise, to_json
from harness.results.tier_data import TierData
from harness.results.timeline import Timeline

CALLS: Final = "calls.parquet"
SUMMARY: Final = "summary.json"
INFO: Final = "run.json"
TIMELINE: Final = "timeline.parquet"
EXPERIMENT: Final = "experiment.resolved.yaml"
REPORT: Final = "report.html"
COMPARISON: Final = "comparison.json"


class _Entry(msgspec.Struct):
    """One run of a comparison; `dir` relative to the comparison's folder where it lies inside."""

    label: str
    dir: str
    digest: str


class _Listing(msgspec.Struct, omit_defaults=True):
    """comparison.json: the runs in the order of the table, and the arms that did not come to run."""

    schema: int
    runs: list[_Entry]
    missing: list[str] = []


@dataclass(slots=True)
class Run:
    """One run as it lies in its folder."""

    dir: Path
    calls: pl.DataFrame
    info: RunInfo
    summary: dict[str, Any]
    timeline: Timeline | None = None
    tiers: TierData | None = None
    """Of a run with cache tiers."""


def write_run(
    dir: Path,
    records: Sequence[CallRecord],
    info: RunInfo,
    timeline: Timeline | None = None,
    arrived: int | None = None,
    drained: bool = False,
    report: bool = True,
    tiers: TierData | None = None,
    live: bool = False,
) -> Run:
    """Write calls.parquet, timeline.parquet, the tables of tiers, run.json, experiment.resolved.yaml, summary.json
    and report.html.

    Broken invariants (see `invariants.violations` for `arrived`, `drained`, `live`) are added to `info.invalid`.
    """
    dir.mkdir(parents=True, exist_ok=True)
    calls = to_frame(sorted(records, key=lambda r: r.call_id))
    info.invalid.extend(v for v in invariants.violations(calls, arrived, drained, live=live) if v not in info.invalid)
    write_calls(dir / CALLS, calls)
    write_info(dir / INFO, info)
    write_whole(dir / EXPERIMENT, info.experiment_yaml)
    if timeline is not None:
        timeline.write(dir / TIMELINE)
    if tiers is not None:
        tiers.write(dir)
    summary = summarise(calls, info, timeline, digest(records), tiers)
    run = Run(dir, calls, info, summary, timeline, tiers)
    if report:
        render([run], dir / REPORT)
    write_whole(dir / SUMMARY, to_json(summary))  # the last file: who finds it finds all
    return run


def load_run(dir: Path) -> Run:
    """Read a run's folder; the summary is made again from the records."""
    info, calls = read_info(dir / INFO), read_calls(dir / CALLS)
    timeline = Timeline.read(dir / TIMELINE) if (dir / TIMELINE).exists() else None
    tiers = TierData.read(dir)
    summary = summarise(calls, info, timeline, digest(to_records(calls)), tiers)
    return Run(dir, calls, info, summary, timeline, tiers)


def write_comparison(dir: Path, runs: Sequence[Run], missing: Sequence[str] = ()) -> Path:
    """Write report.html and comparison.json (the runs' folders in order) of several runs; returns the
    report's path. `missing` names arms that did not come to run.
    """
    dir.mkdir(parents=True, exist_ok=True)
    entries = [_Entry(run.info.title, _relative(run.dir, dir), run.summary["digest"]) for run in runs]
    document = msgspec.json.format(msgspec.json.encode(_Listing(1, entries, list(missing))), indent=2)
    write_whole(dir / COMPARISON, document + b"\n")
    render(runs, dir / REPORT, missing)
    return dir / REPORT


def find_runs(dirs: Sequence[Path]) -> list[Path]:
    """Folders of single runs among or directly below the given ones, a comparison's in the order of its
    table.
    """
    found: list[Path] = []
    for dir in dirs:
        if (dir / INFO).exists():
            some = [dir]
        elif (dir / COMPARISON).exists():
            some = [dir / entry.dir for entry in _listed(dir / COMPARISON).runs]
        else:
            some = sorted(path.parent for path in dir.glob(f"*/{INFO}"))
        if not some:
            raise InputError(str(dir), "no run in it", "give a folder that `harness run` or `compare` wrote")
        found.extend(path for path in some if path not in found)
    return found


def report(dirs: Sequence[Path], out: Path | None = None) -> Path:
    """`harness report DIR...`: render again from what the folders hold; into the first folder unless `out` is
    given.
    """
    runs = [load_run(path) for path in find_runs(dirs)]
    lists = [_listed(path) for dir in dirs if (path := dir / COMPARISON).exists()]
    missing = [name for found in lists for name in found.missing]
    target = out or dirs[0] / REPORT
    try:
        render(runs, target, missing)
    except OSError as error:
        raise InputError(
            f"--out {target}", f"cannot be written ({error.strerror or error})", "give another file"
        ) from None
    return target


def render(runs: Sequence[Run], path: Path, missing: Sequence[str] = ()) -> None:
    """Write the HTML report of the runs; `missing` as in `write_comparison`."""
    from harness.results.report import render_html  # plotly is only read where a page is made

    write_whole(path, render_html(distinct(runs), missing))


def distinct(runs: Sequence[Run]) -> list[Run]:
    """The runs with labels that tell them apart: the router's release and the seed are added where they do,
    numbers where nothing else does.
    """
    labels = [run.info.title for run in runs]
    extras = (
        [str(run.info.router.get("release") or "") for run in runs],
        [f"seed {run.info.seed}" for run in runs],
        [f"#{i + 1}" for i in range(len(runs))],
    )
    for extra in extras:
        shared = {label for label in labels if labels.count(label) > 1}
        told = {label: len({e for e, mine in zip(extra, labels, strict=True) if mine == label}) > 1 for label in shared}
        labels = [
            f"{label} {more}".strip() if told.get(label) else label for label, more in zip(labels, extra, strict=True)
        ]
    return [
        run
        if run.info.title == label
        else replace(run, info=replace(run.info, label=label), summary=run.summary | {"label": label})
        for run, label in zip(runs, labels, strict=True)
    ]


def _listed(path: Path) -> _Listing:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Listing)
    except msgspec.MsgspecError as error:
        raise InputError(str(path), f"not a list of runs ({error})", "name the runs' folders instead") from None


def _relative(path: Path, base: Path) -> str:
    """Relative where the run lies below the comparison, so that the folder can be moved; absolute
    elsewhere.
    """
    try:
        return path.resolve().relative_to(base.resolve()).as_posix()
    except ValueError:
        return str(path.resolve())
