"""What a call waited for, derived from recorded times, for sessions whose source says nothing about it.

- seq: the latest call of its own chain that had ended;
- join: the last call of every chain that its own chain had begun and that was over by then (each joined
  once);
- spawn: a chain's first call waits for the call of the parent chain that started last, for its end if it had
  ended, else for its start (`on_start`). A sub-agent's parent is main, a further lane of the agent's is the
  agent's first lane; an unlabelled chain's parent is the chain whose prompt it forks from, main where it
  forks from none.

The gap is what is left between the latest of these events and the recorded start, so that a replay in which
every call takes as long as recorded starts every call when it was recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.trace.chains import MAIN, end_s
from harness.trace.model import Call, Session

GAP_DIGITS = 9
"""Gaps are rounded to nanoseconds, the resolution of virtual time."""


@dataclass(slots=True)
class _Line:
    """A chain while its session is walked in order of t."""

    parent: str | None
    calls: list[int] = field(default_factory=list)
    children: list[str] = field(default_factory=list)
    """Chains that this one began and has not joined yet."""


def derive_dependencies(session: Session) -> None:
    """Set `deps`, `on_start` and `gap_s` of every call from recorded times; calls must be in order of t."""
    calls = session.calls
    last_of: dict[str, int] = {}
    over_s: dict[str, float] = {}
    for call in calls:
        last_of[call.chain] = call.index
        over_s[call.chain] = max(over_s.get(call.chain, 0.0), end_s(call))
    lines: dict[str, _Line] = {}
    for call in calls:
        deps: set[int] = set()
        on_start: int | None = None
        line = lines.get(call.chain)
        if line is None:
            parent = _parent(calls, call, lines)
            line = lines[call.chain] = _Line(parent)
            if parent is not None:
                lines[parent].children.append(call.chain)
                on_start = _spawn(calls, call, lines[parent].calls[-1], deps)
        else:
            on_start = _follow(calls, call, line.calls, deps)
        _join(calls, call, line, lines, last_of, over_s, deps)
        line.calls.append(call.index)
        call.deps, call.on_start = tuple(sorted(deps)), on_start
        call.gap_s = round(max(call.t_s - release_base_s(calls, call), 0.0), GAP_DIGITS)


def _parent(calls: Sequence[Call], call: Call, lines: dict[str, _Line]) -> str | None:
    group, dot, lane = call.chain.partition(".")
    if dot and lane != "0" and f"{group}.0" in lines:
        return f"{group}.0"
    if not dot and call.ref >= 0:
        forked = calls[call.ref]
        if "." not in forked.chain and 2 * call.keep_blocks >= forked.blocks:
            return forked.chain
    return MAIN if MAIN in lines else next(iter(lines), None)


def _has_ended(earlier: Call, call: Call) -> bool:
    # A call without a recorded duration ends when it starts; two calls of one instant were not one after the
    # other.
    return end_s(earlier) <= call.t_s and earlier.t_s < call.t_s


def _spawn(calls: Sequence[Call], call: Call, by: int, deps: set[int]) -> int | None:
    if _has_ended(calls[by], call):
        deps.add(by)
        return None
    return by


def _follow(calls: Sequence[Call], call: Call, chain: list[int], deps: set[int]) -> int | None:
    """The latest ended call of the chain; with none ended (a chain that overlaps itself) the one that started
    last.
    """
    for earlier in reversed(chain):
        if _has_ended(calls[earlier], call):
            deps.add(earlier)
            return None
    return chain[-1]


def _join(
    calls: Sequence[Call],
    call: Call,
    line: _Line,
    lines: dict[str, _Line],
    last_of: dict[str, int],
    over_s: dict[str, float],
    deps: set[int],
) -> None:
    waiting = []
    for name in line.children:
        child = lines[name]
        over = over_s[name] <= call.t_s and last_of[name] == child.calls[-1]
        last = max(child.calls, key=lambda i: end_s(calls[i])) if over else -1
        if over and _has_ended(calls[last], call):
            deps.add(last)
        else:
            waiting.append(name)
    line.children = waiting


def release_base_s(calls: Sequence[Call], call: Call) -> float:
    """The moment (s from the session's start) that `gap_s` counts from, by recorded times."""
    base = 0.0
    for dep in call.deps:
        base = max(base, end_s(calls[dep]))
    if call.on_start is not None:
        base = max(base, calls[call.on_start].t_s)
    return base


def replayed_starts_s(session: Session) -> list[float]:
    """Start of every call (s) when a replay releases calls by deps, on_start and gap_s and each takes as long
    as recorded.
    """
    starts: list[float] = []
    for call in session.calls:
        base = 0.0
        for dep in call.deps:
            base = max(base, starts[dep] + (session.calls[dep].api_s or 0.0))
        if call.on_start is not None:
            base = max(base, starts[call.on_start])
        starts.append(base + call.gap_s)
    return starts
