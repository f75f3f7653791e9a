"""The KV block pool of one engine, kept as runs of blocks instead of single ones.

Same decisions as vLLM 0.32's BlockPool block by block (v1/core/block_pool.py): the free queue hands out never-cached
blocks first and then the least recently freed cached ones; a request's blocks are freed tail first; a freed block with
a hash goes to the back of the queue, one without to the front; two requests that compute the same content at once hold
two physical blocks under one identity, of which a lookup finds the one that was inserted first.

Physical block ids never matter to a decision, so none are kept. A `Run` is consecutive blocks of one origin call in one
state; it is split only where something really differs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from operator import attrgetter

PromptRuns = list[tuple[int, int, int]]
"""A prompt as (origin, start, end) in blocks, end exclusive; positions run on from 0 without a gap."""

_start = attrgetter("start")


class Run:
    """Physical blocks start..end-1 of `origin`, all with the same references and the same neighbours in the free queue.

    A split leaves `parts` behind so that holders of the whole find the halves when they let go.
    """

    __slots__ = ("end", "next", "origin", "parts", "prev", "primary", "refs", "start")

    def __init__(self, origin: int, start: int, end: int, refs: int, primary: bool) -> None:
        self.origin = origin
        self.start = start
        self.end = end
        self.refs = refs
        self.primary = primary
        self.parts: tuple[Run, Run] | None = None
        self.prev: Run | None = None
        self.next: Run | None = None

    def __repr__(self) -> str:
        return f"Run({self.origin}:{self.start}-{self.end} refs={self.refs}{'' if self.primary else ' shadow'})"


def whole_runs(held: Iterable[Run]) -> list[Run]:
    """The runs as they are now: split ones replaced by their parts, in position order."""
    out: list[Run] = []
    for run in held:
        if run.parts is None:
            out.append(run)
            continue
        stack = [run]
        while stack:
            top = stack.pop()
            if top.parts is None:
                out.append(top)
            else:
                stack.append(top.parts[1])
                stack.append(top.parts[0])
    return out


class BlockPool:
    """`blocks` usable blocks (vLLM's num_gpu_blocks less the null block)."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.blank = blocks
        """Free blocks without content identity; always in front of the cached ones in vLLM's queue."""
        self.free_cached = 0
        """Free blocks that still answer a lookup (the evictable part of the cache)."""
        self._index: dict[int, list[Run]] = {}
        self._shadows: dict[int, list[Run]] = {}
        head, tail = Run(-1, 0, 0, 0, False), Run(-1, 0, 0, 0, False)
        head.next, tail.prev = tail, head
        self._head, self._tail = head, tail

    @property
    def free(self) -> int:
        """Free blocks, cached or not."""
        return self.blank + self.free_cached

    @property
    def usage(self) -> float:
        """vllm:kv_cache_usage_perc: share of usable blocks that some request holds."""
        return 1.0 - self.free / self.blocks if self.blocks else 0.0

    # ------------------------------------------------------------------ lookup

    def match(self, prompt: PromptRuns, max_blocks: int) -> tuple[list[tuple[Run, int, int]], int, int]:
        """Longest cached prefix of at most `max_blocks` blocks.

        Returns the hit as (run, from, to) slices, its length in blocks, and how many of these blocks are free now
        (they leave the free queue when the hit is taken).
        """
        hits: list[tuple[Run, int, int]] = []
        found = idle = 0
        index = self._index
        for origin, pos, end in prompt:
            if end - pos > max_blocks - found:
                end = pos + max_blocks - found
            runs = index.get(origin)
            if runs is None:
                if pos < end:
                    break
                continue
            while pos < end:
                i = bisect_right(runs, pos, key=_start) - 1 if len(runs) > 1 else 0
                run = runs[i] if i >= 0 else None
                if run is None or not run.start <= pos < run.end:
                    return hits, found, idle
                stop = run.end if run.end < end else end
                hits.append((run, pos, stop))
                found += stop - pos
                if run.refs == 0:
                    idle += stop - pos
                pos = stop
        return hits, found, idle

    def holds(self, origin: int) -> bool:
        """Whether any block of `origin` answers a lookup."""
        return origin in self._index

    def cached_prefix(self, prompt: PromptRuns) -> int:
        """Blocks of the prompt's prefix that a lookup without a limit would find now: the truth about a cache."""
        return self.match(prompt, 1 << 62)[1]

    # ------------------------------------------------------------------ taking

    def acquire(self, hits: list[tuple[Run, int, int]]) -> list[Run]:
        """Reference the hit blocks; free ones leave the queue."""
        held: list[Run] = []
        for run, start, end in hits:
            if run.parts is not None:
                # an earlier slice of this same hit split the run
                run = next(r for r in whole_runs((run,)) if r.start <= start < r.end)
            if start > run.start:
                run = self._split(run, start)[1]
            if end < run.end:
                run = self._split(run, end)[0]
            if run.refs == 0:
                self._unlink(run)
                self.free_cached -= end - start
            run.refs += 1
            held.append(run)
        return held

    def take(self, count: int) -> list[tuple[int, int, int]]:
        """Allocate `count` blocks; returns what had to be evicted, in order, as (origin, start, end), tail first."""
        blank = self.blank
        if count <= blank:
            self.blank = blank - count
            return []
        self.blank = 0
        return self._evict(count - blank)

    def insert(self, origin: int, start: int, end: int) -> list[Run]:
        """Blocks start..end-1 of `origin`, held by one request, get their identity. Returns them as runs."""
        runs = self._index.get(origin)
        if not runs:
            run = Run(origin, start, end, 1, True)
            if runs is None:
                self._index[origin] = [run]
            else:
                runs.append(run)
            return [run]
        made: list[Run] = []
        pos = start
        while pos < end:
            i = bisect_right(runs, pos, key=_start)
            if i and pos < runs[i - 1].end:
                stop = min(end, runs[i - 1].end)
                run = Run(origin, pos, stop, 1, False)
                self._shadows.setdefault(origin, []).append(run)
            else:
                stop = min(end, runs[i].start) if i < len(runs) else end
                run = Run(origin, pos, stop, 1, True)
                runs.insert(i, run)
            made.append(run)
            pos = stop
        return made

    def extend(self, run: Run, end: int) -> bool:
        """Lengthen a run that one request holds alone up to `end`; False where that is not possible in place."""
        if run.refs != 1 or run.parts is not None or not run.primary:
            return False
        runs = self._index[run.origin]
        if len(runs) > 1:
            i = bisect_right(runs, run.start, key=_start)
            if i < len(runs) and runs[i].start < end:
                return False
        run.end = end
        return True

    # ------------------------------------------------------------------ freeing

    def release(self, held: list[Run], blanks: int) -> None:
        """A request lets go of its blocks: `held` in position order, then `blanks` without identity at its tail."""
        self.blank += blanks
        for run in reversed(whole_runs(held)):
            run.refs -= 1
            if run.refs == 0:
                self._append(run)

    def clear(self) -> bool:
        """Drop every identity (vLLM's reset_prefix_cache); refused (False) while any block is held."""
        if self.free != self.blocks:
            return False
        self._index.clear()
        self._shadows.clear()
        self._head.next, self._tail.prev = self._tail, self._head
        self.blank, self.free_cached = self.blocks, 0
        return True

    # ------------------------------------------------------------------ inspection (tests, invariants, reports)

    def queue(self) -> list[tuple[int, int, int]]:
        """The evictable runs, next victim first, as (origin, start, end)."""
        out = []
        run = self._head.next
        while run is not None and run is not self._tail:
            out.append((run.origin, run.start, run.end))
            run = run.next
        return out

    def resident(self) -> list[tuple[int, int, int]]:
        """What lookups find, as sorted (origin, start, end)."""
        return sorted((r.origin, r.start, r.end) for runs in self._index.values() for r in runs)

    # ------------------------------------------------------------------ internals

    def _append(self, run: Run) -> None:
        """To the back of the free queue; joined with the run before it where that is the continuation (fewer runs)."""
        self.free_cached += run.end - run.start
        last = self._tail.prev
        assert last is not None
        if (
            last.origin == run.origin
            and last.start == run.end
            and last.primary
            and run.primary
            and last is not self._head
        ):
            runs = self._index[run.origin]
            i = bisect_right(runs, run.start, key=_start) - 1
            runs[i] = last
            del runs[i + 1]
            last.start = run.start
            return
        run.prev, run.next = last, self._tail
        last.next = run
        self._tail.prev = run

    @staticmethod
    def _unlink(run: Run) -> None:
        assert run.prev is not None and run.next is not None
        run.prev.next, run.next.prev = run.next, run.prev
        run.prev = run.next = None

    def _split(self, run: Run, at: int) -> tuple[Run, Run]:
        left = Run(run.origin, run.start, at, run.refs, run.primary)
        right = Run(run.origin, at, run.end, run.refs, run.primary)
        run.parts = (left, right)
        table = self._index[run.origin] if run.primary else self._shadows[run.origin]
        i = bisect_right(table, run.start, key=_start) - 1 if run.primary else table.index(run)
        table[i : i + 1] = (left, right)
        if run.refs == 0:
            # the queue evicts the tail first, so the right half comes first
            assert run.prev is not None and run.next is not None
            right.prev, right.next, left.prev, left.next = run.prev, left, right, run.next
            run.prev.next, run.next.prev = right, left
        return left, right

    def _evict(self, count: int) -> list[tuple[int, int, int]]:
        evicted: list[tuple[int, int, int]] = []
        self.free_cached -= count
        while count:
            run = self._head.next
            assert run is not None and run is not self._tail, "allocation beyond the free blocks"
            size = run.end - run.start
            n = size if size < count else count
            end = run.end
            run.end = end - n
            evicted.append((run.origin, run.end, end))
            count -= n
            if n == size:
                self._unlink(run)
            if run.primary:
                self._drop_primary(run, end, n == size)
            elif n == size:
                shadows = self._shadows[run.origin]
                shadows.remove(run)
                if not shadows:
                    del self._shadows[run.origin]
        return evicted

    def _drop_primary(self, run: Run, end: int, gone: bool) -> None:
        """`run` lost blocks run.end..end-1 (all if `gone`): duplicates of these, if any, are found from now on."""
        origin = run.origin
        runs = self._index[origin]
        if gone:
            if len(runs) == 1:
                runs.clear()
            else:
                i = bisect_right(runs, run.start, key=_start) - 1
                del runs[i]
        shadows = self._shadows.get(origin)
        if shadows:
            self._promote(origin, runs, shadows, run.end, end)
        if not runs:
            del self._index[origin]

    def _promote(self, origin: int, runs: list[Run], shadows: list[Run], start: int, end: int) -> None:
        """Duplicates of blocks start..end-1 that were inserted first become the ones that a lookup finds."""
        uncovered = [(start, end)]
        for shadow in list(shadows):
            rest: list[tuple[int, int]] = []
            for lo, hi in uncovered:
                a, b = max(lo, shadow.start), min(hi, shadow.end)
                if a >= b:
                    rest.append((lo, hi))
                    continue
                piece = next(
                    (r for r in whole_runs((shadow,)) if r.start <= a < r.end and not r.primary),
                    None,
                )
                assert piece is not None
                if a > piece.start:
                    piece = self._split(piece, a)[1]
                if b < piece.end:
                    piece = self._split(piece, b)[0]
                shadows.remove(piece)
                piece.primary = True
                runs.insert(bisect_right(runs, a, key=_start), piece)
                if lo < a:
                    rest.append((lo, a))
                if b < hi:
                    rest.append((b, hi))
            uncovered = rest
            if not uncovered:
                break
        if not shadows:
            del self._shadows[origin]
