"""What a finding's fields must agree on: arms that exist, directions that can be judged, fields left to the study."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import InputError

if TYPE_CHECKING:
    from harness.studies.finding import Check, Finding

_THE_STUDY_SETS = ("name", "seed", "arms", "trace.path")
_LONGEST_NAME = 80
_FILES = (".json", ".jsonl", ".md", ".html", ".gz")
"""Endings of the files that a study writes beside its arms' folders."""


def check_finding(finding: Finding, path: Path) -> None:
    """InputError names the first field of the file that does not fit the others."""
    for field, what, remedy in _faults(finding):
        raise InputError(str(path), f"field {field}: {what}", remedy)


def _faults(finding: Finding) -> Iterator[tuple[str, str, str]]:
    names = [arm.name for arm in finding.arms]
    yield from _arm_names(names)
    if not finding.scales:
        yield "scales", "holds none", "give at least `small: {}`"
    for scale, size in finding.scales.items():
        if size.arms is not None:
            yield from _known(f"scales.{scale}.arms", size.arms, names)
            if not size.arms:
                yield f"scales.{scale}.arms", "names none", "name arms, or leave it out for all"
        yield from _own_fields(f"scales.{scale}.set", size.set, _THE_STUDY_SETS)
    for n, arm in enumerate(finding.arms):
        yield from _own_fields(f"arms.{n}.set", arm.set, (*_THE_STUDY_SETS, "trace"))
    yield from _rungs(finding)
    section = finding.experiment.get("trace")
    keys = [key for key in finding.experiment if key != "trace"]
    keys += [f"trace.{key}" for key in section] if isinstance(section, dict) else []
    yield from _own_fields("experiment", keys, _THE_STUDY_SETS)
    for n, figure in enumerate(finding.figures):
        for key in ("arm", "over", "minus"):
            name = getattr(figure, key)
            yield from _known(f"figures.{n}.{key}", [] if name is None else [name], names)
        if finding.ladder is not None and figure.at is None:
            yield f"figures.{n}.at", "is missing", "say at which value of the ladder the figure is taken"
    for n, check in enumerate(finding.checks):
        yield from _direction(f"checks.{n}", check, names)


def _rungs(finding: Finding) -> Iterator[tuple[str, str, str]]:
    """Values of the ladder that scales, arms and figures pick."""
    known = finding.ladder.values if finding.ladder is not None else []
    picked = [(f"scales.{name}.rungs", scale.rungs or []) for name, scale in finding.scales.items()]
    picked += [(f"arms.{n}.rungs", arm.rungs or []) for n, arm in enumerate(finding.arms)]
    picked += [(f"figures.{n}.at", [figure.at]) for n, figure in enumerate(finding.figures) if figure.at is not None]
    for field, values in picked:
        for value in values:
            if value not in known:
                listed = f"its values are: {', '.join(f'{one:g}' for one in known)}" if known else "there is no ladder"
                yield field, f"{value:g} is no value of the ladder", listed


def _arm_names(names: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """An arm's name is its folder's, beside the study's own files."""
    if not names:
        yield "arms", "holds none", "give at least one, `- name: ...`"
    for n, name in enumerate(names):
        if name.startswith((".", "-")) or not name.strip():
            yield f"arms.{n}.name", f"{name!r} is no name for a folder", "begin it with a letter or a digit"
        if name.lower().endswith(_FILES) or len(name) > _LONGEST_NAME:
            what = f"{name[:_LONGEST_NAME]!r} is no name for a folder here"
            yield f"arms.{n}.name", what, f"at most {_LONGEST_NAME} characters, not ending as a file ({_FILES[0]} ...)"
        if name in names[:n]:
            yield f"arms.{n}.name", f"{name} stands twice", "name arms apart"


def _known(field: str, wanted: Sequence[str], names: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    for name in wanted:
        if name not in names:
            yield field, f"no arm is called {name}", f"the arms are: {', '.join(names)}"


def _direction(field: str, check: Check, names: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    if (check.rising is None) == (check.falling is None):
        yield field, "needs either rising or falling", "list the arms along which the number goes that way"
    way = "falling" if check.rising is None else "rising"
    along = getattr(check, way) or []
    yield from _known(f"{field}.{way}", along, names)
    if len(along) < 2 or len(set(along)) < len(along):
        yield f"{field}.{way}", "needs two arms or more, each once", "list the arms in order"


def _own_fields(field: str, keys: Iterable[str], not_these: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    for key in keys:
        for name in not_these:
            if key == name or key.startswith(f"{name}.") or name.startswith(f"{key}."):
                remedy = "use the file's own name and trace, and --seeds"
                yield f"{field}.{key}", "is not an arm's or an experiment's to set here", remedy
