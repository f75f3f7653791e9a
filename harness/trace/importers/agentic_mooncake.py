"""Import of agentic Mooncake traces, version 2 (Dynamo, AISimulate): typed edges between the calls of a play.

A header row {schema, version, block_size, hash_id_scope, source}, then a row per request: request_id, play_id,
session_id, model, input_length, output_length, hash_ids, not_before_ms, recorded_api_time_ms, dependencies
[{request_id, trigger dispatch|completion, delay_ms, relation}]. A play becomes a session, its `session_id`s
become chains. The rows of a play stand together, in any order; memory is one play.

The format gives each edge a delay of its own, a call here has one gap. Equal delays carry over exactly. Else the
gap is what the recording shows between the latest of the events and the call (an edge whose event has no recorded
time stands for it by its delay), so that a replay that takes as long as recorded starts each call when it was
recorded. Of several dispatch edges the one whose call started last is kept.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta, Struct

from harness.trace import source
from harness.trace.chains import MAIN, end_s
from harness.trace.importers.common import (
    TIME_DIGITS,
    BlockId,
    Ids,
    full_blocks,
    hashed_call,
    refused,
    typed_row,
)
from harness.trace.importers.options import ImportOptions
from harness.trace.model import Call, Session
from harness.trace.prefixes import PrefixIndex
from harness.trace.rows import Count, Name, Seconds

SCHEMA = "dynamo.agentic_mooncake"
VERSION = 2
BARRIER = "replay_barrier"
ROW_LIMIT_BYTES = 16 << 20
"""A prompt of a million tokens in blocks of 16 has 62,500 ids."""


class HeaderRow(Struct):
    """First row of the file."""

    schema: str
    version: int
    block_size: Annotated[int, Meta(ge=1, le=2**20)]
    hash_id_scope: str = "local"


class EdgeRow(Struct):
    """One dependency of a request."""

    trigger: Literal["dispatch", "completion"]
    request_id: Name | None = None
    predecessor: Name | None = None
    delay_ms: Seconds | None = None
    delay: Seconds | None = None
    relation: str = "sequence"


class RequestRow(Struct):
    """A request; further keys are ignored, `stop` is what this project's exporter adds."""

    request_id: Name
    play_id: Name
    session_id: Name
    not_before_ms: Seconds
    model: str | None = None
    input_length: Count | None = None
    input_tokens: Count | None = None
    output_length: Count | None = None
    output_tokens: Count | None = None
    hash_ids: list[BlockId] | None = None
    recorded_api_time_ms: Seconds | None = None
    dependencies: list[EdgeRow] = []
    stop: str | None = None


@dataclass(slots=True)
class _Request:
    number: int
    row: RequestRow
    ids: Ids
    unnamed_blocks: int
    """Blocks of a request without ids: all new."""
    input_tokens: int
    output_tokens: int


def is_agentic_mooncake(first_row: dict[str, Any]) -> bool:
    """Whether a file's first row is a header of this format, of whatever version."""
    return "agentic_mooncake" in str(first_row.get("schema", ""))


def read_agentic_mooncake(path: Path, check_blocks: bool, options: ImportOptions) -> Iterator[Session]:
    """Sessions of a trace, one per play."""
    lines = source.read_lines(path, ROW_LIMIT_BYTES)
    number, first = next(lines)
    header = typed_row(path, number, first, HeaderRow)
    if header.version != VERSION:
        what = f"{header.version}: only version {VERSION} is read"
        raise refused(path, number, "version", what, "convert the file with a current release of its tool")
    done: set[str] = set()
    play: list[_Request] = []
    for number, line in lines:
        row = typed_row(path, number, line, RequestRow)
        if play and row.play_id != play[0].row.play_id:
            done.add(play[0].row.play_id)
            yield _session(path, header, play)
            play = []
        if row.play_id in done:
            what = f"{row.play_id!r} stood further up already: the rows of a play must stand together"
            raise refused(path, number, "play_id", what, "sort the rows after the header by play_id")
        play.append(_request(path, number, row, header.block_size, check_blocks))
    if play:
        yield _session(path, header, play)


def _request(path: Path, number: int, row: RequestRow, block: int, check_blocks: bool) -> _Request:
    input_tokens = row.input_length if row.input_length is not None else row.input_tokens
    output_tokens = row.output_length if row.output_length is not None else row.output_tokens
    if input_tokens is None or output_tokens is None:
        raise refused(path, number, "input_length" if input_tokens is None else "output_length", "is missing")
    ids: Any
    if row.hash_ids is None:
        ids, unnamed = np.empty(0, dtype=np.int64), input_tokens // block
    else:
        ids, unnamed = full_blocks(path, number, row.hash_ids, input_tokens, block, check_blocks), 0
    row.hash_ids = None
    return _Request(number, row, ids, unnamed, input_tokens, output_tokens)


def _session(path: Path, header: HeaderRow, play: list[_Request]) -> Session:
    ordered = _ordered(path, play)
    number = {request.row.request_id: index for index, request in enumerate(ordered)}
    names = _chain_names([request.row.session_id for request in ordered])
    prefixes = PrefixIndex()
    calls: list[Call] = []
    floor_s = 0.0
    for index, request in enumerate(ordered):
        row = request.row
        # Rounding may put a call before one that it depends on; order of t is a rule of the trace.
        floor_s = max(floor_s, row.not_before_ms / 1000)
        call = hashed_call(prefixes, index, request.ids, floor_s, request.input_tokens, request.output_tokens)
        call.new_blocks += request.unnamed_blocks
        call.api_s = None if row.recorded_api_time_ms is None else round(row.recorded_api_time_ms / 1000, TIME_DIGITS)
        call.chain, call.model, call.stop = names[row.session_id], row.model or None, row.stop
        calls.append(call)
        _release(calls, call, row, number)
    return Session(
        play[0].row.play_id, header.block_size, calls, "global" if header.hash_id_scope == "global" else "local"
    )


def _ordered(path: Path, play: list[_Request]) -> list[_Request]:
    """Requests by recorded time, each after those that it depends on."""
    by_id: dict[str, _Request] = {}
    for request in play:
        if by_id.setdefault(request.row.request_id, request) is not request:
            raise refused(path, request.number, "request_id", f"{request.row.request_id!r} stands twice in its play")
    waits: dict[str, int] = {}
    followers: dict[str, list[_Request]] = {}
    for request in play:
        names = set()
        for edge in request.row.dependencies:
            name = edge.request_id or edge.predecessor
            if name is None or name not in by_id:
                raise refused(path, request.number, "dependencies", f"{name!r} is not a request of the same play")
            names.add(name)
        waits[request.row.request_id] = len(names)
        for name in names:
            followers.setdefault(name, []).append(request)
    return _by_time(path, play, waits, followers)


def _by_time(
    path: Path, play: list[_Request], waits: dict[str, int], followers: dict[str, list[_Request]]
) -> list[_Request]:
    ready = [(r.row.not_before_ms, place, r) for place, r in enumerate(play) if not waits[r.row.request_id]]
    place_of = {r.row.request_id: place for place, r in enumerate(play)}
    heapq.heapify(ready)
    ordered: list[_Request] = []
    while ready:
        _, _, request = heapq.heappop(ready)
        ordered.append(request)
        for follower in followers.get(request.row.request_id, ()):
            name = follower.row.request_id
            waits[name] -= 1
            if not waits[name]:
                heapq.heappush(ready, (follower.row.not_before_ms, place_of[name], follower))
    if len(ordered) < len(play):
        stuck = next(r for r in play if waits[r.row.request_id])
        raise refused(path, stuck.number, "dependencies", "the request waits for itself, by way of others")
    return ordered


def _chain_names(session_ids: list[str]) -> dict[str, str]:
    """Chains of a play: the names that this project's exporter wrote, else main, f1, f2, .. in order of time."""
    found = list(dict.fromkeys(session_ids))
    own = [name.rpartition("/")[2] for name in found]
    if all(_is_chain_name(name) for name in own) and len(set(own)) == len(own):
        return dict(zip(found, own, strict=True))
    return {name: MAIN if place == 0 else f"f{place}" for place, name in enumerate(found)}


def _is_chain_name(name: str) -> bool:
    return name == MAIN or (name[:1] in ("f", "s") and name[1:].replace(".", "", 1).isdigit())


def _release(calls: list[Call], call: Call, row: RequestRow, number: dict[str, int]) -> None:
    edges = [(number[edge.request_id or edge.predecessor or ""], edge) for edge in row.dependencies]
    starts = [index for index, edge in edges if edge.trigger == "dispatch"]
    call.deps = tuple(sorted({index for index, edge in edges if edge.trigger == "completion"}))
    call.on_start = max(starts, key=lambda index: (calls[index].t_s, index), default=None)
    if not edges:
        call.gap_s = call.t_s
        return
    delays = {_delay_s(edge) for _, edge in edges}
    if len(delays) == 1 and all(edge.relation != BARRIER for _, edge in edges):
        call.gap_s = round(delays.pop(), TIME_DIGITS)
        return
    events = [_event_s(calls, call, index, edge) for index, edge in edges]
    known = [event for event in events if event is not None]
    call.gap_s = round(max(call.t_s - max(known), 0.0), TIME_DIGITS) if known else 0.0


def _delay_s(edge: EdgeRow) -> float:
    return (edge.delay_ms if edge.delay_ms is not None else edge.delay or 0.0) / 1000


def _event_s(calls: list[Call], call: Call, index: int, edge: EdgeRow) -> float | None:
    earlier = calls[index]
    if edge.trigger == "dispatch":
        return earlier.t_s
    if earlier.api_s is not None:
        return end_s(earlier)
    return None if edge.relation == BARRIER else call.t_s - _delay_s(edge)
