"""What a sweep says beside its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.sweep.cli import _print_sweep
from harness.sweep.page import sweep_page, to_know
from harness.sweep.points import grid, parse_axis
from tests.harness.test_cli import EXPERIMENT

EMPTY = "no call was completed in the measured window"


def _summary(*notes: str, reasons: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"validity": {"valid": not reasons, "reasons": list(reasons), "notes": list(notes)}}


def test_notes_of_points_are_said_once_with_the_points_that_they_are_of() -> None:
    found = {f"seed={n}": _summary("of all", f"busy {n} %", "service level p90 e2e: met") for n in range(1, 6)}
    found["seed=6"] = _summary("of all", EMPTY)
    assert to_know(found) == [
        "of all",
        "busy 1 to 5 % (seed=1; seed=2; seed=3 and 2 more)",
        f"{EMPTY} (seed=6)",
    ]


def test_a_sweep_over_no_calls_ends_as_a_run_over_none_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a table, and the note that says why it is empty."""
    (tmp_path / "e.yaml").write_text(EXPERIMENT)
    axes = [parse_axis("seed=1,2")]
    points = grid(tmp_path / "e.yaml", axes)
    summaries = {point.name: _summary(EMPTY) for point in points}
    _print_sweep(axes, points, summaries)
    assert f"Note: {EMPTY}\n" in capsys.readouterr().out
    assert EMPTY in sweep_page("e", axes, points, summaries, "harness sweep")


def test_points_that_are_not_valid_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "e.yaml").write_text(EXPERIMENT)
    axes = [parse_axis("seed=1,2")]
    points = grid(tmp_path / "e.yaml", axes)
    _print_sweep(axes, points, {"seed=1": _summary(), "seed=2": _summary(reasons=("it fell back",))})
    assert "INVALID, not to be used: seed=2 (" in capsys.readouterr().out
