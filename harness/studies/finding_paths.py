"""Paths of a finding into summary.json, checked before anything runs: that there is such a number in some run."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from harness.errors import InputError
from harness.results.summary_fields import every_field
from harness.studies.finding import Finding, derived

_MOST_NAMED = 8


def check_paths(finding: Finding, file: str) -> None:
    """InputError names the first field of the file whose path leads to no number, whatever is run.

    A number that only some runs have (with cache tiers, prices, workers of roles) is not refused.
    """
    known = derived(every_field(), nodes=1)
    for field, path in _paths(finding):
        what = _fault(known, path)
        if what is not None:
            raise InputError(file, f"field {field}: {path} {what}", _remedy(known, path))


def _paths(finding: Finding) -> Iterator[tuple[str, str]]:
    """Fields of the file and the paths that they hold."""
    yield from ((f"shown.{title}", path) for title, path in finding.shown.items())
    yield from ((f"figures.{n}.path", figure.path) for n, figure in enumerate(finding.figures))
    yield from ((f"checks.{n}.path", check.path) for n, check in enumerate(finding.checks))


def _fault(known: dict[str, Any], path: str) -> str | None:
    """Why there can be no number at the path; None where there can be one (null may be a number in another run)."""
    value: Any = known
    for key in path.split("."):
        if isinstance(value, list):
            return "goes into a list, of which no entry can be named"
        if not isinstance(value, dict) or key not in value:
            return "is no field of summary.json"
        value = value[key]
    if isinstance(value, dict):
        return "is a section"
    return "is no number" if isinstance(value, (str, bool, list)) else None


def _remedy(known: dict[str, Any], path: str) -> str:
    """The numbers whose paths begin like it, else the most similar ones."""
    numbers = list(_numbers(known))
    near = [name for name in numbers if name.startswith(path)] or get_close_matches(path, numbers, n=3)
    if not near:
        return "docs/metrics.md has what there is"
    more = ", ..." if len(near) > _MOST_NAMED else ""
    return f"choose one of: {', '.join(near[:_MOST_NAMED])}{more} (docs/metrics.md)"


def _numbers(section: dict[str, Any], before: str = "") -> Iterator[str]:
    """Paths of all numbers of a section."""
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{before}{key}.")
        elif not isinstance(value, (str, bool, list)):
            yield before + key
