"""Part `silicon` of the validation study: every measured point through the engine, raw and corrected."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fake_workers.pricing.calibration import RAW
from harness.studies.validation.fit import fit, fit_concurrencies, predict
from harness.studies.validation.points import (
    CALIBRATIONS,
    DATA,
    Correction,
    Group,
    Layout,
    doubtful,
    load_corrections,
    load_groups,
    profile_of,
)

GOAL_TPOT, GOAL_TTFT = 0.10, 0.15
LEAST_POINTS = 10
"""Groups with fewer points are shown, not judged."""
SMALL_CONCURRENCY = 8
"""Highest concurrency of `--scale small`."""


@dataclass(frozen=True, slots=True)
class Result:
    """One point: measured, from the raw tables, corrected (equal to raw where there is no correction); ms."""

    group: str
    layout: str
    version: str
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    fitted: bool
    doubtful: bool
    ttft_ms: float
    tpot_ms: float
    raw_ttft_ms: float
    raw_tpot_ms: float
    ttft_corrected_ms: float
    tpot_corrected_ms: float


@dataclass(frozen=True, slots=True)
class Score:
    """Mean absolute relative errors of one group; `held` over the points that no fit has seen."""

    group: str
    points: int
    held: int
    doubtful: int
    raw_tpot: float
    raw_ttft: float
    raw_tpot_bias: float
    raw_ttft_bias: float
    tpot: float
    ttft: float
    tpot_all: float
    ttft_all: float

    @property
    def judged(self) -> bool:
        """Whether it has points enough."""
        return self.points >= LEAST_POINTS and self.held > 0

    @property
    def met(self) -> bool:
        """Whether both goals are met on the points that no fit has seen."""
        return self.tpot <= GOAL_TPOT and self.ttft <= GOAL_TTFT


def run_layout(layout: Layout, correction: Correction | None, max_concurrency: int) -> list[Result]:
    """All points of a layout up to a concurrency."""
    profile = profile_of(layout)
    chosen, doubt = fit_concurrencies(layout.points), doubtful(layout.points)
    results = []
    for point in layout.points:
        if point.concurrency > max_concurrency:
            continue
        raw = predict(profile, layout, point, RAW)
        ttft, tpot = raw.ttft_ms, raw.tpot_ms
        if correction is not None:
            corrected = predict(profile, layout, point, correction.steps)
            ttft, tpot = corrected.ttft_ms + correction.around_ns / 1e6, corrected.tpot_ms
        results.append(
            Result(
                layout.group,
                layout.layout,
                point.version,
                point.prompt_tokens,
                point.output_tokens,
                point.concurrency,
                correction is not None and point.concurrency in chosen,
                point.row in doubt,
                point.ttft_ms,
                point.tpot_ms,
                round(raw.ttft_ms, 3),
                round(raw.tpot_ms, 4),
                round(ttft, 3),
                round(tpot, 4),
            )
        )
    return results


def score(group: str, results: Sequence[Result]) -> Score:
    """Errors of one group; doubtful points count nowhere but in their number."""
    sound = [r for r in results if not r.doubtful]
    held = [r for r in sound if not r.fitted]

    def mean(values: Iterable[float]) -> float:
        found = list(values)
        return statistics.fmean(found) if found else float("nan")

    return Score(
        group,
        len(results),
        len(held),
        len(results) - len(sound),
        mean(abs(r.raw_tpot_ms / r.tpot_ms - 1) for r in sound),
        mean(abs(r.raw_ttft_ms / r.ttft_ms - 1) for r in sound),
        mean(r.raw_tpot_ms / r.tpot_ms - 1 for r in sound),
        mean(r.raw_ttft_ms / r.ttft_ms - 1 for r in sound),
        mean(abs(r.tpot_corrected_ms / r.tpot_ms - 1) for r in held),
        mean(abs(r.ttft_corrected_ms / r.ttft_ms - 1) for r in held),
        mean(abs(r.tpot_corrected_ms / r.tpot_ms - 1) for r in sound),
        mean(abs(r.ttft_corrected_ms / r.ttft_ms - 1) for r in sound),
    )


def chosen_groups(names: Sequence[str], folder: Path = DATA) -> list[Group]:
    """Groups whose name holds one of `names`; all of them for none."""
    return [g for g in load_groups(folder) if not names or any(name in g.name for name in names)]


def run_silicon(
    groups: Sequence[Group],
    *,
    small: bool,
    refit: bool,
    jobs: int,
    tell: Callable[[str], None] = lambda _: None,
    folder: Path = DATA,
) -> list[Result]:
    """Run the groups, layouts side by side in `jobs` processes; `refit` writes new corrections first."""
    layouts = [layout for group in groups for layout in group.layouts]
    results: list[Result] = []
    with ProcessPoolExecutor(jobs) as pool:
        if refit:
            fitted = dict(load_corrections(folder))
            for layout, correction in zip(layouts, pool.map(_fit, layouts), strict=True):
                tell(f"fitted {layout.name}")
                fitted[layout.name] = correction
                save_corrections(fitted, folder)
        corrections = load_corrections(folder)
        limit = SMALL_CONCURRENCY if small else 1 << 30
        tasks = [(layout, corrections.get(layout.name), limit) for layout in layouts]
        for layout, found in zip(layouts, pool.map(_run, tasks), strict=True):
            tell(f"ran {layout.name}: {len(found)} points")
            results += found
    return results


def _fit(layout: Layout) -> Correction:
    return fit(profile_of(layout), layout)


def _run(task: tuple[Layout, Correction | None, int]) -> list[Result]:
    return run_layout(*task)


def save_corrections(corrections: dict[str, Correction], folder: Path = DATA) -> None:
    """Write calibrations.json."""
    document = {
        "written_by": "harness study validation --refit",
        "corrections": {name: corrections[name].as_dict() for name in sorted(corrections)},
    }
    (folder / CALIBRATIONS).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def scores(groups: Sequence[Group], results: Sequence[Result]) -> list[Score]:
    """One score per group that has results."""
    by_group = {group.name: [r for r in results if r.group == group.name] for group in groups}
    return [score(name, found) for name, found in by_group.items() if found]


def document(groups: Sequence[Group], results: Sequence[Result]) -> dict[str, Any]:
    """Scores and points as plain data."""
    return {
        "scores": [asdict(one) for one in scores(groups, results)],
        "notes": {group.name: group.note for group in groups if group.note},
        "points": [asdict(result) for result in results],
    }
