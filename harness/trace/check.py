"""Every violation of a trace file, not only the first: for people who write traces."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.errors import InputError
from harness.trace import rows, source
from harness.trace.read import detect_format, read_trace

MAX_VIOLATIONS = 1000
"""Where to stop: a file that is something else breaks a rule in every line."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule: line (0: the file as a whole), field ("" for the row as a whole), what is wrong, what
    to do.
    """

    line: int
    field: str
    what: str
    remedy: str


def check_trace(path: str | Path) -> list[Violation]:
    """Violations of a trace in order of lines, at most MAX_VIOLATIONS; empty for a good one.

    Row-per-call files are checked row by row to the end. Of the other formats, and where the bytes themselves
    are broken (truncated gzip), what stopped the reading is given.
    """
    path = Path(path)
    if detect_format(path) not in ("own", "delta"):
        return _first_error(path)
    found: list[Violation] = []
    own = detect_format(path) == "own"
    seen: set[str] = set()
    state: rows.SessionState | None = None
    try:
        for number, line in source.read_lines(path):
            state = _check_row(number, line, own, seen, state, found)
            if len(found) >= MAX_VIOLATIONS:
                return found[:MAX_VIOLATIONS]
    except InputError as error:
        found.append(_from_error(error))
    return found


def _check_row(
    number: int,
    line: bytes,
    own: bool,
    seen: set[str],
    state: rows.SessionState | None,
    found: list[Violation],
) -> rows.SessionState | None:
    def report(problem: rows.Problem) -> None:
        found.append(Violation(number, problem.field, problem.what, problem.remedy))

    value = rows.decode_object(line)
    if isinstance(value, rows.Problem):
        report(value)
        return state
    if "session" in value:
        header = rows.to_row(value, rows.HeaderRow) if own else rows.to_row(value, rows.DeltaHeaderRow)
        if isinstance(header, list):
            for problem in header:
                report(problem)
            return None
        for problem in rows.header_problems(header, seen):
            report(problem)
        seen.add(header.session)
        fresh = rows.SessionState(header.block)
        if isinstance(header, rows.HeaderRow):
            fresh.prefix_blocks, fresh.models = [p.blocks for p in header.prefix], len(header.models)
        return fresh
    row = rows.to_row(value, rows.CallRow) if own else rows.to_row(value, rows.DeltaCallRow)
    if isinstance(row, list):
        for problem in row:
            report(problem)
        # The rows below name calls by number: keep the count right, so that one bad row is not reported as
        # many.
        if state is not None:
            state.blocks.append(rows.UNKNOWN_BLOCKS)
        return state
    if state is None:
        if not seen:
            report(rows.Problem("session", "is missing: a call stands before the first header row"))
        return state
    for problem in rows.call_problems(row, state, check_blocks=True):
        report(problem)
    rows.advance(row, state)
    return state


def _first_error(path: Path) -> list[Violation]:
    try:
        for _ in read_trace(path):
            pass
    except InputError as error:
        return [_from_error(error)]
    return []


def _from_error(error: InputError) -> Violation:
    line, field = 0, ""
    for part in error.where.split(": ")[1:]:
        if part.startswith("line ") and part[5:].isdigit():
            line = int(part[5:])
        else:
            field = f"{field}: {part.removeprefix('field ')}" if field else part.removeprefix("field ")
    return Violation(line, field, error.what, error.remedy)
