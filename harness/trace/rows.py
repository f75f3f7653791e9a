"""Rows of the project's trace format (docs/trace-format.md): their types, their rules, what breaks them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

Count = Annotated[int, Meta(ge=0, le=2**40)]
Seconds = Annotated[float, Meta(ge=0, le=4e9)]
"""Up to 126 years: sums of them still fit nanoseconds in 64 bits."""
Name = Annotated[str, Meta(min_length=1, max_length=1000)]


class PrefixRow(Struct, forbid_unknown_fields=True):
    """One shared prefix of a header row."""

    key: Name
    blocks: Count


class HeaderRow(Struct, forbid_unknown_fields=True):
    """A session's header in the project's format."""

    v: Annotated[int, Meta(ge=1, le=1)]
    session: Name
    block: Annotated[int, Meta(ge=1, le=2**20)]
    scope: str = "local"
    start: Seconds | None = None
    prefix: list[PrefixRow] = []
    models: list[str] = []
    src: dict[str, Any] | None = None


class CallRow(Struct, forbid_unknown_fields=True):
    """A call in the project's format."""

    i: Count
    t: Seconds
    chain: Name
    input: Count = msgspec.field(name="in")
    out: Count
    ref: Annotated[int, Meta(ge=-1, le=2**40)]
    keep: Count
    new: Count
    api: Seconds | None = None
    deps: list[Count] | UnsetType = UNSET
    on: Count | None = None
    gap: Seconds = 0.0
    m: Count | None = None
    stop: str | None = None
    pre: Annotated[int, Meta(ge=-1, le=2**20)] = -1


class DeltaHeaderRow(Struct):
    """A session's header in the files that kv-cache-tester traces were reduced to: no version, further keys
    ignored.
    """

    session: Name
    block: Annotated[int, Meta(ge=1, le=2**20)]
    scope: str = "local"


class DeltaCallRow(Struct):
    """A call of such a file: no index, no dependencies; `a` is main or the sub-agent group."""

    t: Seconds
    a: Name
    input: Count = msgspec.field(name="in")
    out: Count
    ref: Annotated[int, Meta(ge=-1, le=2**40)]
    keep: Count
    new: Count
    api: Seconds | None = None
    m: str | None = None
    stop: str | None = None


Row = TypeVar("Row", bound=Struct)
UNKNOWN_BLOCKS = 2**60
"""Stands for the blocks of a call whose row could not be read, so that calls that build on it are not blamed.
"""
REMEDY = "correct the row, or make the trace again (docs/trace-format.md has the rules)"
BLOCKS_REMEDY = (
    "the file's block ids are broken; "
    "`harness trace convert --repair-blocks` cuts or extends each call's blocks to its input"
)


@dataclass(slots=True)
class Problem:
    """What is wrong with one field of a row."""

    field: str
    what: str
    remedy: str = REMEDY


@dataclass(slots=True)
class SessionState:
    """What the rules of a session's next row need of its earlier ones."""

    block_tokens: int
    prefix_blocks: list[int] = field(default_factory=list)
    models: int | None = None
    """Length of the header's model list; None where rows carry the model's name."""
    blocks: list[int] = field(default_factory=list)
    last_t_s: float = 0.0
    has_deps: bool | None = None


def decode_object(line: bytes) -> dict[str, Any] | Problem:
    """A line as a JSON object, or what is wrong with it."""
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if "UTF-8" in str(error) or isinstance(error, UnicodeDecodeError):
            return Problem("", "is not UTF-8", "save the trace as UTF-8, or check that it is one")
        return Problem("", f"is not JSON ({error})", "check that the file is a trace and complete")
    except RecursionError:
        return Problem("", "is not a trace row (nested too deeply)", "check that the file is a trace")
    if not isinstance(value, dict):
        return Problem("", f"is not a JSON object but {type(value).__name__}", "check that the file is a trace")
    return value


def to_row(value: dict[str, Any], kind: type[Row]) -> Row | list[Problem]:
    """A decoded line as a typed row, or every field that is missing, unknown or of a wrong type or range."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        pass
    problems = []
    fields = {f.encode_name: f for f in msgspec.structs.fields(kind)}
    for name, spec in fields.items():
        if name not in value:
            if spec.required:
                problems.append(Problem(name, "is missing"))
            continue
        try:
            msgspec.convert({"x": value[name]}, type=dict[str, spec.type])  # type: ignore[name-defined]
        except msgspec.ValidationError as error:
            problems.append(Problem(name, _plain(str(error), value[name])))
    if kind.__struct_config__.forbid_unknown_fields:
        problems += [Problem(name, "is not a field of this row") for name in value if name not in fields]
    return problems


def _plain(message: str, value: object) -> str:
    shown = repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."
    expected = message.split(" - at ")[0].split(", got ")[0]
    return f"{expected.replace('`', '').lower()}, got {shown}"


def header_problems(row: HeaderRow | DeltaHeaderRow, seen: set[str]) -> Iterator[Problem]:
    """Rules of a header that types cannot say; `seen` are the ids of the sessions before it."""
    if row.scope not in ("local", "global"):
        yield Problem("scope", f"must be local or global, got {row.scope!r}")
    if row.session in seen:
        yield Problem("session", f"the id {row.session!r} stands twice in the file")


def call_problems(row: CallRow | DeltaCallRow, state: SessionState, check_blocks: bool) -> Iterator[Problem]:
    """Rules between a call and the calls before it. `check_blocks`: blocks must fit the input tokens."""
    index = len(state.blocks)
    if row.t < state.last_t_s:
        yield Problem("t", f"{row.t} is before the call above it ({state.last_t_s}): calls stand in order of t")
    if row.ref >= index:
        yield Problem("ref", f"{row.ref} must be an earlier call (this is call {index})")
    elif row.ref < 0 and row.keep:
        yield Problem("keep", f"{row.keep} blocks are kept but ref names no call")
    elif row.ref >= 0 and row.keep > state.blocks[row.ref]:
        yield Problem("keep", f"{row.keep} is more than the {state.blocks[row.ref]} blocks of call {row.ref}")
    if check_blocks:
        tail = row.input - (row.keep + row.new) * state.block_tokens
        if not 0 <= tail < state.block_tokens:
            yield Problem(
                "in",
                f"{row.input} tokens, but keep + new = {row.keep + row.new} blocks of {state.block_tokens}",
                BLOCKS_REMEDY,
            )
    if isinstance(row, CallRow):
        yield from _own_problems(row, state, index)


def _own_problems(row: CallRow, state: SessionState, index: int) -> Iterator[Problem]:
    if row.i != index:
        yield Problem("i", f"{row.i} must be {index}: calls are numbered from 0 in each session")
    given = row.deps is not UNSET
    if state.has_deps is not None and given != state.has_deps:
        yield Problem("deps", "must stand in every call of a session or in none")
    if given:
        deps = row.deps if isinstance(row.deps, list) else []
        for dep in deps:
            if dep >= index:
                yield Problem("deps", f"{dep} must be an earlier call (this is call {index})")
        if any(b <= a for a, b in pairwise(deps)):
            yield Problem("deps", "must be in rising order, each call once")
        if row.on is not None and row.on >= index:
            yield Problem("on", f"{row.on} must be an earlier call (this is call {index})")
    elif row.on is not None or row.gap:
        yield Problem("on" if row.on is not None else "gap", "has no meaning without deps")
    if state.models is not None and row.m is not None and row.m >= state.models:
        yield Problem("m", f"{row.m} is not an index into the header's {state.models} models")
    if row.pre >= len(state.prefix_blocks):
        yield Problem("pre", f"{row.pre} is not an index into the header's {len(state.prefix_blocks)} prefixes")
    elif row.pre >= 0 and row.ref >= 0:
        yield Problem("pre", "only a call without ref can begin with a shared prefix")
    elif row.pre >= 0 and row.new < state.prefix_blocks[row.pre]:
        yield Problem("pre", f"the prefix has {state.prefix_blocks[row.pre]} blocks, the call only {row.new}")


def advance(row: CallRow | DeltaCallRow, state: SessionState) -> None:
    """Take a call into the state, whether or not it had problems."""
    state.blocks.append(row.keep + row.new)
    state.last_t_s = max(state.last_t_s, row.t)
    if isinstance(row, CallRow) and state.has_deps is None:
        state.has_deps = row.deps is not UNSET
