"""Share of blocks that a cache would have held, by how long it keeps what is not used.

Exact sliding window: a block is kept for the window from its last use, and every use restarts it. A use is
the start of a call that has the block in its prompt. With chained blocks a prompt's earlier block was used at
least as lately as a later one, so what is held is always a prefix, and last uses are kept per run of blocks,
not per block.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from harness.trace.model import Session
from harness.trace.runs import SessionRuns

WINDOWS_S: tuple[float, ...] = (60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0, float("inf"))
"""Windows of the curve in the statistics; 300 s and 3,600 s are those of the published analysis."""


def session_hits(session: Session, windows_s: Sequence[float] = WINDOWS_S) -> list[int]:
    """Blocks held at their call's start, summed over the session's calls, for each window (rising).

    The cache is the session's own: nothing is shared with other sessions.
    """
    hits = [0] * len(windows_s)
    runs = SessionRuns(())
    # For the run of new blocks of each call: ends of stretches (positions) and their last use, deeper is
    # never later.
    ends_of: list[list[int]] = []
    used_of: list[list[float]] = []
    for call in session.calls:
        runs.add(call)
        index = call.index
        origins, ends = runs.origins[index], runs.ends[index]
        now = call.t_s
        kept = len(origins) - (1 if call.new_blocks else 0)
        _count(hits, windows_s, now, origins[:kept], ends, ends_of, used_of)
        for origin, end in zip(origins[:kept], ends[:kept], strict=True):
            _touch(ends_of[origin], used_of[origin], end, now)
        ends_of.append([call.blocks])
        used_of.append([now])
    return hits


def _count(
    hits: list[int],
    windows_s: Sequence[float],
    now: float,
    origins: list[int],
    ends: list[int],
    ends_of: list[list[int]],
    used_of: list[list[float]],
) -> None:
    """Add to each window the depth (blocks) down to which this prompt was used within it; walks from the deep
    end.
    """
    window = 0
    for k in range(len(origins) - 1, -1, -1):
        stretch_ends, used = ends_of[origins[k]], used_of[origins[k]]
        start = ends[k - 1] if k else 0
        end = ends[k]
        last = min(bisect_right(stretch_ends, end - 1), len(stretch_ends) - 1)
        for s in range(last, -1, -1):
            depth = min(stretch_ends[s], end)
            if depth <= start:
                break
            # The longest windows reach deepest; `window` counts those still without an answer, from the short
            # end.
            age = now - used[s]
            while window < len(windows_s) and windows_s[len(windows_s) - 1 - window] >= age:
                hits[len(windows_s) - 1 - window] += depth
                window += 1
            if window == len(windows_s):
                return


def _touch(stretch_ends: list[int], used: list[float], end: int, now: float) -> None:
    """Set the last use of positions below `end` to `now`."""
    if stretch_ends[-1] == end:
        stretch_ends[:] = [end]
        used[:] = [now]
        return
    cut = bisect_right(stretch_ends, end)
    stretch_ends[:cut] = [end]
    used[:cut] = [now]
