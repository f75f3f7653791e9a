"""Sessions that are under way when a run begins."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from harness.clock import to_ns
from harness.trace.model import Call, Session
from harness.trace.runs import common_blocks


def under_way(sessions: Sequence[Session], starts_ns: Sequence[int]) -> tuple[list[Session], list[int]]:
    """Sessions and arrivals as a run that begins at 0 has them, where some (`starts_ns` < 0) arrived before.

    Of those, calls whose recorded time has passed are cut off, and sessions that are over are left out. A session
    arrives with its first call.
    """
    some: list[Session] = []
    starts: list[int] = []
    for session, start_ns in zip(sessions, starts_ns, strict=True):
        if start_ns < 0:
            first = bisect_left(session.calls, -start_ns, key=_at_ns)
            if first == len(session.calls):
                continue
            start_ns += _at_ns(session.calls[first])
            session = begun(session, first)
        some.append(session)
        starts.append(start_ns)
    return some, starts


def has_times(session: Session) -> bool:
    """Whether the calls' t can be their recorded starts: not where all are 0 and some begin after others.

    Gaps do not replace them: a call begins a gap after others have ended, and when that is depends on the cluster.
    """
    calls = session.calls
    return not calls or calls[-1].t_s > 0 or not any(call.deps or call.gap_s for call in calls)


def _at_ns(call: Call) -> int:
    return to_ns(call.t_s)


def begun(session: Session, first: int) -> Session:
    """The session from call `first` on: what came before is neither sent nor in any cache.

    A prompt that repeats a call from before repeats, of the calls that are left, the one it has most in common with.
    A call that waited for calls from before begins as long after the first one as recorded.
    """
    if first == 0:
        return session
    old = session.calls
    roots: list[int] = []
    made = []
    for call in old[first:]:
        ref, keep, prefix = call.ref, call.keep_blocks, call.prefix
        if call.ref < first:
            ref, keep, prefix = _oldest(session, roots, call)
            roots.append(call.index)
        deps = tuple(dep - first for dep in call.deps if dep >= first)
        start = call.on_start - first if call.on_start is not None and call.on_start >= first else None
        gap_s = call.gap_s
        if not deps and start is None:
            start = None if call.index == first else 0
            gap_s = max(0.0, call.t_s - old[first].t_s)
        made.append(
            replace(
                call,
                index=call.index - first,
                ref=ref - first if ref >= 0 else -1,
                keep_blocks=keep,
                new_blocks=call.blocks - keep,
                prefix=prefix,
                deps=deps,
                on_start=start,
                gap_s=gap_s,
            )
        )
    return replace(session, calls=made)


def _oldest(session: Session, roots: Sequence[int], call: Call) -> tuple[int, int, int]:
    """(ref, blocks kept, shared prefix) of a call whose own predecessor is cut off, over the `roots` before it."""
    ref, keep = -1, 0
    for root in roots:
        shared = common_blocks(session.calls, root, call.index, keep)
        if shared > keep:
            ref, keep = root, shared
    if ref >= 0:
        return ref, keep, -1
    origin, kept = call, call.blocks
    while origin.ref >= 0:
        kept = min(kept, origin.keep_blocks)
        origin = session.calls[origin.ref]
    whole = origin.prefix >= 0 and kept >= session.prefix[origin.prefix].blocks
    return -1, 0, origin.prefix if whole else -1
