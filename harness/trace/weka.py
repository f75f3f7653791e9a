"""Import of weka traces (Claude Code recordings of kv-cache-tester and cc-traces-weka): one JSON document per
session.

Block ids are chained prefix hashes: an equal id means an equal prefix up to and including it. Three traps of
the format: the times inside a sub-agent entry are relative to the entry in one corpus and absolute in the
other (decided per session: a child before its entry means relative); some corpora store every turn twice,
once as type s and once as n; unlabelled agents run beside the main conversation as flat calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Raw, Struct
from numpy.typing import NDArray

from harness.errors import InputError
from harness.trace import source
from harness.trace.chains import MAIN, split_chains
from harness.trace.dependencies import derive_dependencies
from harness.trace.model import Call, Session
from harness.trace.prefixes import PrefixIndex
from harness.trace.rows import BLOCKS_REMEDY, Count, Seconds

REMEDY = "check that the file is an unmodified weka trace"
MARKS = (b'"requests"', b'"hash_id_scope"', b'"hash_ids"')
SUBAGENT = "subagent"


class _Document(Struct):
    id: Annotated[str, Meta(min_length=1)]
    requests: list[Raw]
    block_size: Annotated[int, Meta(ge=1, le=2**20)] = 64
    hash_id_scope: str = "local"


class _Request(Struct, kw_only=True):
    t: float
    type: str = "n"
    model: str | None = None
    input: Count = msgspec.field(name="in", default=0)
    out: Count = 0
    hash_ids: Raw = Raw(b"[]")
    api_time: Seconds | None = None
    stop: str | None = None
    requests: list[Raw] = []


class _Leaf(_Request, kw_only=True):
    """A call itself, where input and output are required."""

    input: Count = msgspec.field(name="in")
    out: Count
    hash_ids: Raw


@dataclass(slots=True)
class _Flat:
    """A call with its absolute time and its place in the document."""

    t_s: float
    row: _Leaf
    label: str
    place: str


def looks_like(head: bytes) -> bool:
    """Whether the first bytes of a file are those of a weka document."""
    return sum(mark in head for mark in MARKS) >= 2 or b'"requests"' in head


def read_weka(path: Path, check_blocks: bool) -> Iterator[Session]:
    """Sessions of a file: one document, or one document a line.

    `check_blocks`: refuse calls whose ids do not fit their input tokens.
    """
    lines = source.read_lines(path, source.LIMITS.get().document_bytes)
    number, first = next(lines, (0, b""))
    if not first:
        return
    try:
        document = msgspec.json.decode(first, type=_Document)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if isinstance(error, msgspec.ValidationError):
            raise _refused(path, "", "line 1", error) from None
        yield _session(path, "", _parse(path, "", source.read_document(path), _Document), check_blocks)
        return
    yield _session(path, f"line {number}", document, check_blocks)
    for number, line in lines:
        yield _session(path, f"line {number}", _parse(path, f"line {number}", line, _Document), check_blocks)


def _parse(path: Path, place: str, data: bytes | Raw, kind: Any) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _refused(path, place, "", error) from None


def _refused(path: Path, place: str, field: str, error: Exception | str) -> InputError:
    where = ": ".join(part for part in (str(path), place, field) if part)
    if "UTF-8" in str(error) or isinstance(error, UnicodeDecodeError):
        return InputError(where, "is not UTF-8", REMEDY)
    text, _, at = str(error).partition(" - at ")
    if at:
        where += f": field {at.strip('`$.')}"
    return InputError(where, text.replace("`", "").lower() if at else text, REMEDY)


def _session(path: Path, place: str, document: _Document, check_blocks: bool) -> Session:
    if document.hash_id_scope not in ("local", "global"):
        raise _refused(path, place, "field hash_id_scope", f"must be local or global, got {document.hash_id_scope!r}")
    flat = _flatten(path, place, document.requests)
    flat.sort(key=lambda call: call.t_s)
    session = Session(document.id, document.block_size, [], "global" if document.hash_id_scope == "global" else "local")
    labels: list[str] = []
    prefixes = PrefixIndex()
    for call, ids in _without_twins(path, flat):
        row = call.row
        index = len(session.calls)
        blocks = min(len(ids), row.input // document.block_size) if check_blocks else len(ids)
        tail = row.input - len(ids) * document.block_size
        # One id more than full blocks is a hashed partial block: dropped, since nothing can share it.
        if check_blocks and not -document.block_size < tail < document.block_size:
            what = f"{row.input} tokens do not fit {len(ids)} block ids of {document.block_size} tokens"
            raise InputError(f"{path}: {call.place}: field in", what, BLOCKS_REMEDY)
        ref, keep = prefixes.add(ids[:blocks])
        session.calls.append(
            Call(
                index=index,
                t_s=call.t_s,
                api_s=row.api_time,
                chain="",
                input_tokens=row.input,
                output_tokens=row.out,
                ref=ref,
                keep_blocks=keep,
                new_blocks=blocks - keep,
                model=row.model,
                stop=row.stop or None,
            )
        )
        labels.append(call.label)
    split_chains(session.calls, labels)
    derive_dependencies(session)
    return session


def _flatten(path: Path, place: str, requests: list[Raw]) -> list[_Flat]:
    """Every call with its absolute time; sub-agent groups are labelled s1, s2, .. in the order of the
    document.
    """
    parsed = _parse_tree(path, place, requests, "requests")
    relative = _is_relative(parsed)
    flat: list[_Flat] = []
    groups = 0

    def walk(entries: list[tuple[str, _Request, list[Any]]], label: str, base_s: float) -> None:
        nonlocal groups
        for spot, row, children in entries:
            t_s = base_s + row.t
            if row.type == SUBAGENT:
                groups += 1
                walk(children, f"s{groups}", t_s if relative else 0.0)
                continue
            if t_s < 0:
                raise InputError(f"{path}: {spot}: field t", f"{row.t} is before the session's start", REMEDY)
            assert isinstance(row, _Leaf)
            flat.append(_Flat(round(t_s, 6), row, label, spot))

    walk(parsed, MAIN, 0.0)
    return flat


def _parse_tree(
    path: Path, place: str, raws: list[Raw], name: str, depth: int = 0
) -> list[tuple[str, _Request, list[Any]]]:
    if depth > 20:
        raise InputError(f"{path}: {name}", "sub-agents are nested more than 20 deep", REMEDY)
    entries = []
    for index, raw in enumerate(raws):
        spot = f"{place}: {name}[{index}]" if place else f"{name}[{index}]"
        row: _Request = _parse(path, spot, raw, _Request)
        children: list[Any] = []
        if row.type == SUBAGENT:
            children = _parse_tree(path, place, row.requests, f"{name}[{index}].requests", depth + 1)
        else:
            row = _parse(path, spot, raw, _Leaf)
        entries.append((spot, row, children))
    return entries


def _is_relative(entries: list[tuple[str, _Request, list[Any]]]) -> bool:
    for _, row, children in entries:
        if row.type == SUBAGENT and any(child.t < row.t for _, child, _ in children):
            return True
        if children and _is_relative(children):
            return True
    return False


def _without_twins(path: Path, flat: list[_Flat]) -> Iterator[tuple[_Flat, NDArray[np.int64]]]:
    """Calls with their ids, without the second record of a turn that stands as s and as n.

    Twins have other types, equal ids, input and label, and overlap in time or start within a second of each
    other.
    """
    recent: dict[tuple[str, bytes], _Flat] = {}
    for call in flat:
        try:
            ids = np.array(_parse(path, call.place, call.row.hash_ids, list[int]), dtype=np.int64)
        except OverflowError:
            raise InputError(f"{path}: {call.place}: field hash_ids", "an id exceeds 64 bits", REMEDY) from None
        key = (call.label, ids.tobytes())
        twin = recent.get(key)
        if twin is not None and _are_twins(twin, call):
            del recent[key]
            continue
        if len(ids):
            recent[key] = call
        yield call, ids


def _are_twins(first: _Flat, second: _Flat) -> bool:
    a, b = first.row, second.row
    if {a.type, b.type} != {"s", "n"} or a.input != b.input or a.model != b.model:
        return False
    return second.t_s < first.t_s + max(a.api_time or 0.0, 1.0)
