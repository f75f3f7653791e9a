"""Export to Mooncake traces, with block ids that count through the whole file.

A trace of one session of unrelated calls is written in the timestamp form. Of any other, a session whose calls follow
one another is written in the multi-turn form (session_id, delay). The format has no parallel calls: in a session that
has some, each chain becomes a session of its own that starts when its first call was recorded, and dependencies between
chains are lost. Recorded durations, models and stop reasons have no place; the block size is not in the file either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from harness.trace.chains import end_s
from harness.trace.exporters.ids import BlockNumbers
from harness.trace.model import Call, Session
from harness.trace.write import write_rows

MS_PER_S = 1000
MS_DIGITS = 6


def export_mooncake(path: str | Path, sessions: Iterable[Session]) -> int:
    """Write sessions as Mooncake rows, gzip where the name ends in .gz; returns the number of calls."""
    calls = 0

    def counted() -> Iterator[bytes]:
        nonlocal calls
        for row in mooncake_rows(sessions):
            calls += 1
            yield msgspec.json.encode(row) + b"\n"

    write_rows(path, counted())
    return calls


def mooncake_rows(sessions: Iterable[Session]) -> Iterator[dict[str, Any]]:
    """The rows, sessions one after the other."""
    numbers = BlockNumbers()
    stream = iter(sessions)
    first = next(stream, None)
    if first is None:
        return
    second = next(stream, None)
    if second is None and is_unrelated(first):
        start_s = first.start_s or 0.0
        for call, ids in zip(first.calls, numbers.prompts(first), strict=True):
            yield {"timestamp": _ms(start_s + call.gap_s), **_sizes(call, ids)}
        return
    for session in chain([first], [] if second is None else [second], stream):
        yield from _session_rows(session, numbers)


def is_unrelated(session: Session) -> bool:
    """Whether calls are released at fixed times, whatever the others do."""
    return len(session.calls) > 1 and all(not call.deps and call.on_start is None for call in session.calls)


def is_line(session: Session) -> bool:
    """Whether each call waits for the end of the one before it and nothing else."""
    return all(
        call.on_start is None and call.deps == ((index - 1,) if index else ())
        for index, call in enumerate(session.calls)
    )


def _session_rows(session: Session, numbers: BlockNumbers) -> Iterator[dict[str, Any]]:
    line = is_line(session)
    unrelated = not line and is_unrelated(session)
    rows: dict[str, list[dict[str, Any]]] = {}
    last: dict[str, Call] = {}
    for call, ids in zip(session.calls, numbers.prompts(session), strict=True):
        name = session.id if line else f"{session.id}/{call.index if unrelated else call.chain}"
        row: dict[str, Any] = {"session_id": name}
        earlier = last.get(name)
        if earlier is not None:
            row["delay"] = _ms(call.gap_s if line else max(call.t_s - end_s(earlier), 0.0))
        elif not line:
            row["timestamp"] = _ms((session.start_s or 0.0) + call.t_s)
        else:
            if session.start_s is not None:
                row["timestamp"] = _ms(session.start_s)
            if call.gap_s:
                row["delay"] = _ms(call.gap_s)
        rows.setdefault(name, []).append(row | _sizes(call, ids))
        last[name] = call
    for members in rows.values():
        yield from members


def _sizes(call: Call, ids: list[int]) -> dict[str, Any]:
    return {"input_length": call.input_tokens, "output_length": call.output_tokens, "hash_ids": ids}


def _ms(seconds: float) -> float:
    value = round(seconds * MS_PER_S, MS_DIGITS)
    return int(value) if value == int(value) else value
