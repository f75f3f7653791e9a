"""The points of a sweep: which fields take which values, and the folder in which each point's run lies."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from harness.arms import split_values
from harness.errors import InputError
from harness.experiment import Experiment, load_experiment, resolved_yaml

MOST_POINTS: Final = 10_000
_LONGEST_NAME: Final = 80


@dataclass(frozen=True, slots=True)
class Axis:
    """One field of the experiment and the values that it takes, in the given order, as YAML text."""

    field: str
    values: tuple[str, ...]

    @property
    def short(self) -> str:
        """The field's last name: what folders and tables are headed with."""
        return self.field.rsplit(".", 1)[-1]


@dataclass(frozen=True, slots=True)
class Point:
    """One run: its values by field (YAML text), its experiment and the name of its folder."""

    name: str
    values: dict[str, str]
    experiment: Experiment


def parse_axis(text: str) -> Axis:
    """`a.b=v1,v2,...`; commas inside [], {} and quotes belong to a value."""
    field, sep, raw = text.partition("=")
    field = field.strip()
    if not sep or not field:
        raise InputError(f"--over {text}", "not of the form a.b=v1,v2", "write for example --over cluster.nodes=2,4,8")
    values = [part.strip() for part in split_values(raw)]
    if not values:
        raise InputError(f"--over {text}", "names no value", "write for example --over cluster.nodes=2,4,8")
    twice = next((value for value in values if values.count(value) > 1), None)
    if twice is not None:
        raise InputError(f"--over {text}", f"{twice} is named twice", "name each value once")
    return Axis(field, tuple(values))


def grid(file: Path, axes: Sequence[Axis], overrides: Sequence[str] = (), trace: str | None = None) -> list[Point]:
    """All combinations, the last axis fastest; every point's experiment is validated here."""
    fields = [axis.field for axis in axes]
    twice = next((field for field in fields if fields.count(field) > 1), None)
    if twice is not None:
        raise InputError(f"--over {twice}", "is given twice", "give all its values in one --over")
    count = 1
    for axis in axes:
        count *= len(axis.values)
    if count > MOST_POINTS:
        raise InputError("--over", f"{count:,} points", f"at most {MOST_POINTS:,} are run")
    heads = [axis.short if [a.short for a in axes].count(axis.short) == 1 else axis.field for axis in axes]
    points: list[Point] = []
    seen: dict[str, str] = {}
    for number, values in enumerate(itertools.product(*(axis.values for axis in axes))):
        chosen = dict(zip(fields, values, strict=True))
        experiment = load_experiment(file, overrides, trace, over=[f"{f}={v}" for f, v in chosen.items()])
        name = _safe(",".join(f"{head}={value}" for head, value in zip(heads, values, strict=True)))
        if len(name) > _LONGEST_NAME or any(point.name.lower() == name.lower() for point in points):
            name = f"point-{number + 1:04}"
        same = seen.setdefault(experiment.model_dump_json(), name)
        if same != name:
            raise InputError(
                "--over", f"{name} is the same experiment as {same}", "give each value once, in one spelling"
            )
        points.append(Point(name, chosen, experiment))
    return points


def _safe(text: str) -> str:
    """A folder's name; a path's last part says enough."""
    shortened = re.sub(r"[^=,]*/([^/,=]*)", r"\1", text)
    return re.sub(r"[^\w.,=+-]", "_", shortened).strip(".") or "point"


def specification(points: Sequence[Point]) -> dict[str, Any]:
    """What a sweep consists of, as data: a sweep is only taken up again if this has not changed."""
    return {"points": described(points), "files": file_digests([point.experiment for point in points])}


def described(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Every point with its experiment in full, as data."""
    return [
        {"name": point.name, "values": point.values, "experiment": yaml.safe_load(resolved_yaml(point.experiment))}
        for point in points
    ]


def file_digests(experiments: Iterable[Experiment]) -> dict[str, str]:
    """SHA-256 of every file that the experiments name by its full path (traces, configs, profiles), folders' files too.

    With them in the specification, results from before and after an edit cannot end up in one table.
    """
    paths: dict[str, None] = {}
    for experiment in experiments:
        paths |= dict.fromkeys(_named_paths(experiment.model_dump(mode="json")))
    found = {}
    for name in paths:
        path = Path(name)
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in files:
            with file.open("rb") as content:
                found[str(file)] = hashlib.file_digest(content, "sha256").hexdigest()
    return found


def _named_paths(value: Any) -> Iterator[str]:
    """Full paths of things that are there, wherever they stand in the document; the output folder is not one."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key != "output":
                yield from _named_paths(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _named_paths(inner)
    elif isinstance(value, str) and value.startswith("/") and len(value) < 4096 and Path(value).exists():
        yield value
