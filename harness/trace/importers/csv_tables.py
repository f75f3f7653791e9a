"""Import of tables of requests: Azure, BurstGPT, Vidur. They have lengths and times, no block ids.

What requests share is not in such a file, and mostly not which of them form a conversation either, so its user must
say: `calls_per_session` (1: unrelated requests, replayed at their times) and, for more than 1 or where the table has
sessions, `reuse`. Sessions are then made as follows: with probability 1 - 1/calls_per_session a request goes on with
an open session, the one with the longest context that fits into the request's prompt and whose last call is at least
`think_s` old; if there is none, or else, it begins a session. This is a model, not a recording. The table is held in
memory.
"""

from __future__ import annotations

import csv
import random
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from harness.errors import InputError
from harness.trace import source
from harness.trace.importers.common import TIME_DIGITS, file_id, follow, refused, reusing_call
from harness.trace.importers.options import ImportOptions
from harness.trace.model import Call, Session

ROW_LIMIT_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Table:
    """Columns of one kind of table; `session`, `duration` and `model` only where the file has them."""

    name: str
    time: str
    input: str
    output: str
    session: str | None = None
    duration: str | None = None
    model: str | None = None


TABLES = (
    Table("azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    Table("burstgpt", "Timestamp", "Request tokens", "Response tokens", "Session ID", "Elapsed time", "Model"),
    Table("vidur", "arrived_at", "num_prefill_tokens", "num_decode_tokens"),
)


@dataclass(slots=True)
class _Request:
    at_s: float
    input_tokens: int
    output_tokens: int
    session: str
    duration_s: float | None
    model: str | None


def table_of(head: bytes) -> Table | None:
    """The table whose columns the first line of a file names."""
    columns = _columns(head.split(b"\n", 1)[0])
    return next((table for table in TABLES if {table.time, table.input, table.output} <= set(columns)), None)


def missing_column(head: bytes) -> tuple[str, str] | None:
    """Of the table that the first line nearly names, its name and the one column that is missing; None otherwise."""
    columns = set(_columns(head.split(b"\n", 1)[0]))
    for table in TABLES:
        needed = (table.time, table.input, table.output)
        missing = [column for column in needed if column not in columns]
        if len(missing) == 1:
            return table.name, missing[0]
    return None


def _columns(line: bytes) -> list[str]:
    text = line.decode("utf-8-sig", "replace").strip()
    try:
        return [column.strip() for column in next(csv.reader([text]), [])]
    except csv.Error:
        return []


def read_csv(path: Path, check_blocks: bool, options: ImportOptions) -> Iterator[Session]:
    """Sessions of a table by the model that the options give. `check_blocks` changes nothing here."""
    lines = source.read_lines(path, ROW_LIMIT_BYTES)
    _, first = next(lines)
    table, columns = table_of(first), _columns(first)
    if table is None:
        raise refused(path, 1, "", f"no known table has the columns {', '.join(columns[:8])}")
    has_sessions = table.session in columns
    if options.calls_per_session is None and not (has_sessions and options.reuse is not None):
        raise _unknown_model(path, has_sessions)
    requests = [_request(path, number, line, table, columns) for number, line in lines]
    requests.sort(key=lambda request: request.at_s)
    if not requests:
        return
    first_s = requests[0].at_s
    block = options.block()
    if has_sessions and options.calls_per_session is None:
        yield from _recorded(requests, first_s, block, options.reuse or 0.0)
    elif options.calls_per_session == 1:
        yield _independent(file_id(path), requests, first_s, block)
    else:
        if options.reuse is None:
            raise _unknown_model(path, has_sessions)
        yield from _made(file_id(path), requests, first_s, block, options)


def _unknown_model(path: Path, has_sessions: bool) -> InputError:
    if has_sessions:
        what = "the table has sessions, but does not say what their calls have in common"
        return InputError(
            str(path),
            what,
            "give `harness trace convert` --reuse (share of the previous prompt that a call repeats, 0 to 1)",
        )
    what = "the table has neither sessions nor block ids, so it does not say what its requests have in common"
    remedy = "give `harness trace convert` --calls-per-session 1 (unrelated requests), or a mean above 1 and --reuse"
    return InputError(str(path), what, remedy)


def _request(path: Path, number: int, line: bytes, table: Table, columns: list[str]) -> _Request:
    try:
        cells = next(csv.reader([line.decode("utf-8")]), [])
    except UnicodeDecodeError:
        raise refused(path, number, "", "is not UTF-8", "save the table as UTF-8") from None
    except csv.Error as error:
        raise refused(path, number, "", f"is not CSV ({error})") from None
    if len(cells) != len(columns):
        raise refused(path, number, "", f"has {len(cells)} cells, the header {len(columns)} columns")
    row = dict(zip(columns, cells, strict=True))

    def read(column: str, kind: Callable[[str], float], what: str) -> float:
        try:
            value = kind(row[column].strip())
        except ValueError:
            value = -1.0
        if not 0 <= value <= 1e15:
            raise refused(path, number, column, f"is not {what}: {row[column][:40]!r}")
        return value

    duration = table.duration if table.duration in row else None
    return _Request(
        read(table.time, _moment_s, "a time"),
        int(read(table.input, int, "a number of tokens")),
        int(read(table.output, int, "a number of tokens")),
        row.get(table.session or "", ""),
        read(duration, float, "a duration") if duration is not None and row[duration].strip() else None,
        row.get(table.model or "") or None,
    )


def _moment_s(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        moment = datetime.fromisoformat(text)
    moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
    return moment.timestamp()


def _independent(name: str, requests: list[_Request], first_s: float, block: int) -> Session:
    calls = []
    for index, request in enumerate(requests):
        call = _call(None, index, 0.0, block, request, request.at_s - first_s)
        call.gap_s = call.t_s
        calls.append(call)
    return Session(name, block, calls, start_s=0.0)


def _call(previous: Call | None, index: int, reuse: float, block: int, request: _Request, t_s: float) -> Call:
    call = reusing_call(previous, index, reuse, block, t_s, request.input_tokens, request.output_tokens)
    call.api_s, call.model = request.duration_s, request.model
    return call


def _line(name: str, requests: list[_Request], first_s: float, block: int, reuse: float) -> Session:
    """A session of calls one after the other."""
    start_s = requests[0].at_s
    calls: list[Call] = []
    for request in requests:
        previous = calls[-1] if calls else None
        call = _call(previous, len(calls), reuse, block, request, request.at_s - start_s)
        end_s = 0.0 if previous is None else previous.t_s + (previous.api_s or 0.0)
        follow(call, previous, call.t_s - end_s)
        calls.append(call)
    return Session(name, block, calls, start_s=round(start_s - first_s, TIME_DIGITS))


def _recorded(requests: list[_Request], first_s: float, block: int, reuse: float) -> Iterator[Session]:
    sessions: dict[str, list[_Request]] = {}
    for number, request in enumerate(requests):
        # BurstGPT leaves the session of a single request to the API empty.
        sessions.setdefault(request.session or f"request-{number}", []).append(request)
    for name, members in sessions.items():
        yield _line(name, members, first_s, block, reuse)


def _made(name: str, requests: list[_Request], first_s: float, block: int, options: ImportOptions) -> Iterator[Session]:
    assert options.calls_per_session is not None
    assert options.reuse is not None
    rng = random.Random(options.seed)
    goes_on = 1 - 1 / options.calls_per_session
    sessions: list[list[_Request]] = []
    resting: list[tuple[float, int, int]] = []
    """(moment from which it may go on, context, session) in order of time; then moved to `open`."""
    ready: list[tuple[int, int]] = []
    """(context in tokens, session), sorted."""
    for request in requests:
        while resting and resting[0][0] <= request.at_s:
            _, context, number = resting.pop(0)
            insort(ready, (context, number))
        place = bisect_right(ready, (request.input_tokens, len(sessions))) - 1
        if rng.random() < goes_on and place >= 0:
            number = ready.pop(place)[1]
        else:
            number = len(sessions)
            sessions.append([])
        sessions[number].append(request)
        over_s = request.at_s + (request.duration_s or 0.0)
        insort(resting, (over_s + options.think_s, request.input_tokens + request.output_tokens, number))
    for number, members in enumerate(sessions):
        yield _line(f"{name}-{number}", members, first_s, block, options.reuse)
