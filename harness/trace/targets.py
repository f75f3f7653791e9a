"""Generated statistics against published ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml

from harness.errors import InputError
from harness.trace.profile import FOLDER, Strict


class Target(Strict):
    """A published number and how far a generated trace may be from it."""

    name: str
    stat: str
    source: str = ""
    value: float | None = None
    within: float | None = None
    points: float | None = None
    range: tuple[float, float] | None = None


class Targets(Strict):
    """The targets of a profile, for traces of so many sessions."""

    sessions: int
    targets: list[Target]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A target beside what each seed gave; `met` per seed."""

    target: Target
    got: tuple[float, ...]
    met: tuple[bool, ...]


def load_targets(profile: str) -> Targets:
    """The targets that come with a profile."""
    path: Path = FOLDER / f"{profile}.targets.yaml"
    if not path.is_file():
        raise InputError(f"profile {profile}", "has no published targets", "targets come with the profile claude-code")
    return msgspec.convert(yaml.safe_load(path.read_text(encoding="utf-8")), Targets)


def stat_at(stats: dict[str, Any], path: str) -> float:
    """The number at a dotted path into trace statistics; a window's hit rate by its seconds."""
    value: Any = stats
    for step in path.split("."):
        if isinstance(value, list):
            value = next(row["hit"] for row in value if row["window_s"] == float(step))
        else:
            value = value[step]
    return float(value)


def is_met(target: Target, got: float) -> bool:
    """Whether a number is near enough to the target."""
    if target.range is not None:
        return target.range[0] <= got <= target.range[1]
    assert target.value is not None
    if target.points is not None:
        return abs(got - target.value) * 100 <= target.points
    return abs(got / target.value - 1) <= (target.within or 0.0)


def compare(targets: Targets, stats_by_seed: Sequence[dict[str, Any]]) -> list[Comparison]:
    """Every target against the statistics of each seed's trace."""
    rows = []
    for target in targets.targets:
        got = tuple(stat_at(stats, target.stat) for stats in stats_by_seed)
        rows.append(Comparison(target, got, tuple(is_met(target, value) for value in got)))
    return rows
