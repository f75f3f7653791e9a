"""Read a trace of any known format, one session at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from msgspec import UNSET

from harness.errors import InputError
from harness.trace import importers, rows, source, weka
from harness.trace.chains import MAIN, split_chains
from harness.trace.dependencies import derive_dependencies
from harness.trace.importers import ImportOptions, csv_tables
from harness.trace.model import Call, Session, SharedPrefix
from harness.trace.runs import repair_blocks

Blocks = Literal["strict", "keep", "repair"]
"""What to do with a call whose blocks do not fit its input tokens: refuse it, take it as it is, or make them
fit.
"""
TracePath = str | Path
FORMAT_REMEDY = "docs/trace-import.md lists the formats that can be read; --from names one"
ROW_FORMATS = ("own", "delta")
FORMATS = (*ROW_FORMATS, "weka", *importers.BY_NAME)
"""Names of the formats that can be read."""


def read_trace(
    path: TracePath | Sequence[TracePath],
    blocks: Blocks = "strict",
    kind: str | None = None,
    options: ImportOptions | None = None,
) -> Iterator[Session]:
    """Sessions of a trace, in the file's order; memory is one session (docs/trace-import.md has the exceptions).

    `path`: a file, a folder (every .json, .jsonl, .csv and their .gz in it, by name) or a list of files. An
    empty file has no sessions. `kind`: one of FORMATS; None finds it in the first bytes. `options`: what the
    source does not say. Whatever breaks the format ends in an InputError that names file, line and field.
    """
    if kind is not None and kind not in FORMATS:
        raise InputError(f"--from {kind}", "is not a format that can be read", f"give one of {', '.join(FORMATS)}")
    for file in trace_files(path):
        for session in _read_file(file, blocks, kind, options or ImportOptions()):
            if blocks == "repair":
                repair_blocks(session)
            yield session


def trace_files(path: TracePath | Sequence[TracePath]) -> list[Path]:
    """The files that a path, a folder or a list of paths stands for."""
    if not isinstance(path, (str, Path)):
        return [file for item in path for file in trace_files(item)]
    path = Path(path)
    if not path.is_dir():
        return [path]
    endings = (".json", ".jsonl", ".csv", ".json.gz", ".jsonl.gz", ".csv.gz")
    files = sorted(file for file in path.iterdir() if file.name.endswith(endings) and file.is_file())
    if not files:
        what = "no .json or .jsonl file, nor a .csv, in this folder"
        raise InputError(str(path), what, "give a folder of traces or a trace file")
    return files


def detect_format(path: Path) -> str:
    """One of FORMATS, or `empty`, by the first bytes; InputError for anything else."""
    head = source.peek(path).lstrip()
    if not head:
        return "empty"
    first = head.split(b"\n", 1)[0]
    value = rows.decode_object(first)
    if not isinstance(value, dict) and first == head and head[:1] == b"{" and not weka.looks_like(head):
        # The first row is longer than what was peeked at: a prompt as text, or many block ids.
        _, first = next(source.read_lines(path, importers.TEXT_ROW_LIMIT_BYTES))
        value = rows.decode_object(first)
    if isinstance(value, dict):
        if "v" in value and "session" in value:
            return "own"
        if "session" in value and "block" in value:
            return "delta"
    name = importers.recognise(value if isinstance(value, dict) else None, head)
    if name is not None:
        return name
    if head[:1] == b"{" and weka.looks_like(head):
        return "weka"
    where = f"{path}: line 1"
    if not isinstance(value, dict) and isinstance(rows.decode_object(head), dict):
        value = rows.decode_object(head)
    if isinstance(value, dict):
        raise InputError(
            where, f"no known trace format begins with the fields {', '.join(list(value)[:6])}", FORMAT_REMEDY
        )
    if (nearly := csv_tables.missing_column(head)) is not None:
        raise InputError(where, f"is a table of {nearly[0]} without its column {nearly[1]}", FORMAT_REMEDY)
    raise InputError(where, value.what, value.remedy)


def _read_file(path: Path, blocks: Blocks, kind: str | None, options: ImportOptions) -> Iterator[Session]:
    found = detect_format(path) if kind is None or not source.peek(path).strip() else kind
    if found == "weka":
        yield from weka.read_weka(path, check_blocks=blocks == "strict")
    elif found in importers.BY_NAME:
        yield from importers.BY_NAME[found].read(path, blocks == "strict", options)
    elif found != "empty":
        yield from _read_rows(
            path, found == "own", check_blocks=blocks == "strict" or (blocks == "keep" and found == "own")
        )


def _read_rows(path: Path, own: bool, check_blocks: bool) -> Iterator[Session]:
    seen: set[str] = set()
    session: Session | None = None
    state = rows.SessionState(1)
    names: list[str] = []
    for number, line in source.read_lines(path):
        value = rows.decode_object(line)
        if isinstance(value, rows.Problem):
            raise _refused(path, number, value)
        if "session" in value:
            if session is not None:
                yield _finish(session, state, own)
            session, state, names = _begin(path, number, value, own, seen)
            continue
        if session is None:
            raise _refused(
                path, number, rows.Problem("session", "is missing: a call stands before the first header row")
            )
        row = rows.to_row(value, rows.CallRow) if own else rows.to_row(value, rows.DeltaCallRow)
        if isinstance(row, list):
            raise _refused(path, number, row[0])
        for problem in rows.call_problems(row, state, check_blocks):
            raise _refused(path, number, problem)
        rows.advance(row, state)
        session.calls.append(
            _own_call(row, names) if isinstance(row, rows.CallRow) else _delta_call(row, len(session.calls))
        )
    if session is not None:
        yield _finish(session, state, own)


def _begin(
    path: Path, number: int, value: dict[str, object], own: bool, seen: set[str]
) -> tuple[Session, rows.SessionState, list[str]]:
    row = rows.to_row(value, rows.HeaderRow) if own else rows.to_row(value, rows.DeltaHeaderRow)
    if isinstance(row, list):
        raise _refused(path, number, row[0])
    for problem in rows.header_problems(row, seen):
        raise _refused(path, number, problem)
    seen.add(row.session)
    session = Session(row.session, row.block, [], "global" if row.scope == "global" else "local")
    state = rows.SessionState(row.block)
    if not isinstance(row, rows.HeaderRow):
        return session, state, []
    session.start_s = row.start
    session.prefix = tuple(SharedPrefix(p.key, p.blocks) for p in row.prefix)
    state.prefix_blocks = [p.blocks for p in row.prefix]
    state.models = len(row.models)
    return session, state, row.models


def _own_call(row: rows.CallRow, names: list[str]) -> Call:
    return Call(
        row.i, row.t, row.api, row.chain, row.input, row.out, row.ref, row.keep, row.new,
        tuple(row.deps) if row.deps is not UNSET else (), row.on, row.gap,
        None if row.m is None else names[row.m], row.stop, row.pre,
    )  # fmt: skip


def _delta_call(row: rows.DeltaCallRow, index: int) -> Call:
    return Call(
        index,
        row.t,
        row.api,
        row.a,
        row.input,
        row.out,
        row.ref,
        row.keep,
        row.new,
        model=row.m,
        stop=row.stop or None,
    )


def _finish(session: Session, state: rows.SessionState, own: bool) -> Session:
    if not own:
        # These files name sub-agent groups sa1, sa2, ..; the project's chains are s1.0, s1.1, ..
        split_chains(session.calls, [MAIN if c.chain == MAIN else c.chain.replace("sa", "s", 1) for c in session.calls])
    if not state.has_deps:
        derive_dependencies(session)
    return session


def _refused(path: Path, number: int, problem: rows.Problem) -> InputError:
    where = f"{path}: line {number}" + (f": field {problem.field}" if problem.field else "")
    return InputError(where, problem.what, problem.remedy)


def count_calls(sessions: Iterable[Session]) -> tuple[int, int]:
    """(sessions, calls) of a stream of sessions."""
    totals = [0, 0]
    for session in sessions:
        totals[0] += 1
        totals[1] += len(session.calls)
    return totals[0], totals[1]
