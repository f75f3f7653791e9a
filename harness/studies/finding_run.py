"""Runs a finding's arms side by side, each in a process and a folder of its own; what has run is not run again."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from harness.errors import ComponentError
from harness.folders import writing
from harness.results.runinfo import read_info
from harness.results.store import INFO, REPORT
from harness.studies.finding import Finding, Scale, Summary, derived, label
from harness.studies.taken_over import stranger, take_over
from harness.sweep.points import Point, described, file_digests
from harness.sweep.pool import Listed, Processes, claim, complain, drive, finished, summary_of
from harness.tiers import check_installed
from harness.trace.generate import generate_sessions
from harness.trace.profile import load_profile
from harness.trace.write import write_trace

RECORD = "study-points.json"


@dataclass(slots=True)
class FindingResult:
    """Summaries by arm and rung (`label`): the numbers are means over seeds; `runs` has every run's own."""

    finding: Finding
    scale: Scale
    arms: dict[str, Summary]
    runs: dict[str, list[Summary]]
    versions: dict[str, Any] = field(default_factory=dict)
    """Of the harness, LMCache and what else the numbers depend on."""
    pages: dict[str, list[str]] = field(default_factory=dict)
    """The pages of an arm's runs, in their order, relative to the study's folder; empty where there is none."""

    @property
    def arms_run(self) -> list[str]:
        """Names of the arms, without the ladder's values."""
        return [arm.name for arm in self.finding.arms_at(self.scale)]

    @property
    def rungs(self) -> list[float] | list[None]:
        """Values of the ladder; [None] without one."""
        return self.finding.rungs_at(self.scale)


def run_finding(
    finding: Finding, scale: Scale, out: Path, *, seeds: int = 1, jobs: int = 1, show_progress: bool = True
) -> FindingResult:
    """Run what has not run yet. The error names the arms that failed (see `complain`); the others are kept.

    What a study in a folder beside `out` has run already is copied from there.
    """
    chosen = finding.scales[scale]
    sessions = chosen.sessions or finding.trace.sessions
    made = finding.trace
    profile = load_profile(made.profile)
    trace = out.resolve() / f"trace-{made.profile}-{made.seed}-{sessions}.jsonl.gz"
    numbers = [made.seed + n for n in range(seeds)]
    points = [
        Point(
            f"{label(arm.name, rung)},seed={seed}" if seeds > 1 else label(arm.name, rung),
            {"arm": label(arm.name, rung), "seed": str(seed)},
            finding.experiment_of(arm, scale, trace, seed, rung),
        )
        for arm in finding.arms_at(scale)
        for rung in finding.rungs_at(scale, arm)
        for seed in numbers
    ]
    if any(point.experiment.cache.kind == "lmcache" for point in points):
        check_installed()
    specification: dict[str, Any] = {"study": finding.name, "scale": scale, "seeds": seeds, "points": described(points)}
    # the trace's name says how it is generated; what else the arms read may be edited while they wait to go on
    files = file_digests(point.experiment for point in points)
    named = {name: digest for name, digest in files.items() if name != str(trace)}
    if named:
        specification["files"] = named
    claim(out, specification, RECORD)
    if not named:  # files that arms name may have been edited since the others ran
        with writing(out):
            taken = take_over(points, out)
        for name, run in taken.items():
            strange = stranger(out / name)
            if show_progress or strange:
                print(f"{name}: taken over from {run}" + (f", {strange}" if strange else ""), file=sys.stderr)
    if not trace.exists() and not all(finished(out / point.name) for point in points):
        with writing(out):
            write_trace(trace, generate_sessions(profile, made.seed, sessions))
    ended = drive(
        Listed(points), out, Processes(jobs), f"study {finding.name}", len(points), show_progress=show_progress
    )
    complain(ended, out, f"study {finding.name}")
    runs: dict[str, list[Summary]] = {}
    pages: dict[str, list[str]] = {}
    for point in points:
        summary = summary_of(out / point.name)
        if summary is None:
            raise ComponentError("study", f"{out / point.name} has lost its summary", "run the same command again")
        runs.setdefault(point.values["arm"], []).append(derived(summary, point.experiment.cluster.nodes))
        page = f"{point.name}/{REPORT}"
        pages.setdefault(point.values["arm"], []).append(page if (out / page).is_file() else "")
    versions = versions_of([read_info(out / point.name / INFO).versions for point in points])
    return FindingResult(finding, scale, {arm: mean_of(some) for arm, some in runs.items()}, runs, versions, pages)


def versions_of(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Versions that all runs have in common, and of the others each; runs that were taken over may have others."""
    some = {name: list(dict.fromkeys(run.get(name, "unknown") for run in runs)) for run in runs for name in run}
    return {name: values[0] if len(values) == 1 else ", ".join(map(str, values)) for name, values in some.items()}


def mean_of(summaries: list[Summary]) -> Summary:
    """Every number's mean over runs; what is no number, or not in all of them, is the first one's."""
    if len(summaries) == 1:
        return summaries[0]
    return {key: _mean([s.get(key) for s in summaries]) for key in summaries[0]}


def _mean(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        some = [value for value in values if isinstance(value, dict)]
        return {key: _mean([value.get(key) for value in some]) for key in first}
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        return fmean(values)
    return first
