"""The measured points that the study repeats, and which profile prices each group of them.

`harness/studies/data/silicon/` holds the points (`points.csv`, taken from aiconfigurator-core's own sample), the groups
(`groups.yaml`: profile, lengths, what is known of the set-up), the fitted corrections (`calibrations.json`, written by
`harness study validation --refit`) and those profiles that are used here only (`profiles/`).
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fake_workers.pricing.calibration import Calibration
from fake_workers.pricing.profile import StepProfile
from fake_workers.pricing.registry import load_profile, profile_names

DATA = Path(__file__).parent.parent / "data" / "silicon"
POINTS, GROUPS, CALIBRATIONS, PROFILES = "points.csv", "groups.yaml", "calibrations.json", "profiles"


@dataclass(frozen=True, slots=True)
class Point:
    """One measured operating point; times in ms, lengths in tokens. `row` is its id in the source."""

    prompt_tokens: int
    output_tokens: int
    concurrency: int
    ttft_ms: float
    tpot_ms: float
    version: str
    row: str


@dataclass(frozen=True, slots=True)
class Layout:
    """Points of one model on one GPU type under one engine in one layout."""

    group: str
    layout: str
    profile: str
    points: tuple[Point, ...]
    length_ratio: float
    budget_tokens: int
    num_gpu_blocks: int | None
    requests_per_client: int = 10

    @property
    def name(self) -> str:
        """Key of the fitted correction."""
        return f"{self.group} {self.layout}"


@dataclass(frozen=True, slots=True)
class Group:
    """All layouts of one model, GPU and engine, and what a reader has to know of them."""

    name: str
    layouts: tuple[Layout, ...]
    note: str


@dataclass(frozen=True, slots=True)
class Correction:
    """A fitted correction: of step times (in the engine), and of the time around it (per request)."""

    steps: Calibration
    around_ns: int

    def as_dict(self) -> dict[str, str | int]:
        """For calibrations.json."""
        return {**self.steps.as_dict(), "around_ns": self.around_ns}


def load_groups(folder: Path = DATA) -> list[Group]:
    """The groups with their points, in the order of the file."""
    rows: dict[tuple[str, str], list[Point]] = {}
    with (folder / POINTS).open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            rows.setdefault((row["group"], row["layout"]), []).append(
                Point(
                    int(row["prompt_tokens"]),
                    int(row["output_tokens"]),
                    int(row["concurrency"]),
                    float(row["ttft_ms"]),
                    float(row["tpot_ms"]),
                    row["version"],
                    row["row"],
                )
            )
    document = yaml.safe_load((folder / GROUPS).read_text(encoding="utf-8"))
    groups = []
    for name, entry in document["groups"].items():
        layouts = tuple(
            Layout(
                name,
                layout,
                profile,
                tuple(rows.pop((name, layout))),
                float(entry.get("length_ratio", 0.8)),
                int(entry.get("max_num_batched_tokens", 8192)),
                entry.get("num_gpu_blocks", {}).get(layout),
                int(entry.get("requests_per_client", 10)),
            )
            for layout, profile in entry["layouts"].items()
        )
        groups.append(Group(name, layouts, entry.get("note", "")))
    return groups


def profile_of(layout: Layout, folder: Path = DATA) -> StepProfile:
    """The profile that prices a layout."""
    return named_profile(layout.profile, folder)


def named_profile(name: str, folder: Path = DATA) -> StepProfile:
    """A shipped profile, or one that only this study uses."""
    return load_profile(name if name in profile_names() else folder / PROFILES / f"{name}.npz")


def load_corrections(folder: Path = DATA) -> dict[str, Correction]:
    """Fitted corrections by layout name; empty if there are none."""
    path = folder / CALIBRATIONS
    if not path.exists():
        return {}
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return {name: _correction(entry) for name, entry in document["corrections"].items()}


def _correction(entry: dict[str, Any]) -> Correction:
    steps = Calibration.of(
        entry["scale_prefill"], entry["scale_decode"], int(entry["per_step_ns"]), int(entry["per_seq_ns"])
    )
    return Correction(steps, int(entry["around_ns"]))


DOUBT = 1.1


def doubtful(points: tuple[Point, ...]) -> set[str]:
    """Rows whose TPOT lies more than a tenth above that of a higher concurrency of the same lengths.

    More clients never make a token faster, so either that run was disturbed or it was another set-up.
    """
    return {
        p.row
        for p in points
        if any(
            q.concurrency > p.concurrency
            and (q.prompt_tokens, q.output_tokens) == (p.prompt_tokens, p.output_tokens)
            and p.tpot_ms > DOUBT * q.tpot_ms
            for q in points
        )
    }
