"""Flows on links: each takes its set-up time, then moves its bytes at the max-min fair rate of the moment.

Rates are whole bytes per second, rounded down (1e-9 of a GB/s link). What has moved is counted in nanobytes (rate times
nanoseconds), so nothing is lost between recomputations; a flow ends at the first nanosecond by which all has moved.
Recomputation happens once per instant, after all that happens in it, and only for flows that are connected to a changed
link; a flow whose rate stays keeps its end.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from harness.clock import VirtualClock
from harness.errors import InputError
from harness.fabric.meter import NS_PER_S, RateMeter
from harness.fabric.share import Path, max_min_rates

ENDS, SETTLES = -1, 9
"""Ranks on the clock: transfers end before what engines do at that time; shares are recomputed after all else."""

LEAST_CAPACITY = 1_000_000
"""Bytes per second: below this the rounding of rates would matter."""


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a connection."""

    name: str
    bytes_per_s: int
    latency_ns: int = 0


@dataclass(slots=True, eq=False)
class Flow:
    """One transfer. `done` is called at its end; not if it is cancelled."""

    number: int
    path: Path
    bytes: int
    cap: int | None
    done: Callable[[Flow], None]
    started_ns: int
    moving_ns: int
    """When set-up and latency are over."""
    accounts: tuple[RateMeter, ...] = ()
    """Whose traffic it is, beside its links'."""
    rate: int = 0
    moved: int = 0
    """Nanobytes up to since_ns."""
    since_ns: int = 0
    finish_ns: int | None = None
    cancelled: bool = False
    version: int = 0

    @property
    def ended(self) -> bool:
        """Whether it finished or was cancelled."""
        return self.cancelled or self.finish_ns is not None


@dataclass(slots=True)
class FlowTotals:
    """Counts over a run."""

    started: int = 0
    finished: int = 0
    cancelled: int = 0
    finished_bytes: int = 0
    recomputations: int = 0
    flows_recomputed: int = 0


@dataclass(slots=True)
class _LinkState:
    link: Link
    meter: RateMeter
    flows: dict[Flow, None] = field(default_factory=dict)


class Fabric:
    """All links and flows of a run."""

    def __init__(self, clock: VirtualClock, links: Sequence[Link], meter_bin_ns: int = NS_PER_S) -> None:
        for link in links:
            if link.bytes_per_s < LEAST_CAPACITY:
                raise InputError(
                    f"link {link.name}", f"{link.bytes_per_s} bytes/s", f"give at least {LEAST_CAPACITY} bytes/s"
                )
        self.clock = clock
        self.totals = FlowTotals()
        self.meter_interval_ns = meter_bin_ns
        self._links = [_LinkState(link, RateMeter(meter_bin_ns, link.bytes_per_s)) for link in links]
        self._capacity = {number: link.bytes_per_s for number, link in enumerate(links)}
        self._ends: list[tuple[int, int, int, Flow]] = []
        self._dirty: dict[int, None] = {}
        self._new: dict[Flow, None] = {}
        self._wake_ns: int | None = None
        self._settling = False

    # ------------------------------------------------------------------ flows

    def start(
        self,
        path: Path,
        nbytes: int,
        done: Callable[[Flow], None],
        *,
        setup_ns: int = 0,
        cap_bytes_per_s: int | None = None,
        accounts: tuple[RateMeter, ...] = (),
    ) -> Flow:
        """Begin a transfer now. It moves nothing during setup_ns plus the path's latencies.

        `accounts` meter it beside the links of its path.
        """
        if nbytes < 0 or setup_ns < 0 or (cap_bytes_per_s is not None and cap_bytes_per_s < 1):
            raise ValueError("bytes and set-up must not be negative, a cap must be positive")
        if not path and cap_bytes_per_s is None and nbytes:
            raise ValueError("a flow needs a link or a cap")
        if len(set(path)) != len(path):
            raise ValueError(f"path {path} uses a link twice")
        now = self.clock.now_ns
        moving = now + setup_ns + sum(self._links[link].link.latency_ns for link in path)
        self.totals.started += 1
        flow = Flow(self.totals.started, path, nbytes, cap_bytes_per_s, done, now, moving, accounts)
        if moving > now:
            self.clock.call_at(moving, self._begin, flow, rank=ENDS)
        else:
            self._begin(flow)
        return flow

    def cancel(self, flow: Flow) -> None:
        """Take a flow off its links now; what has moved has moved."""
        if flow.ended:
            return
        flow.cancelled = True
        flow.version += 1
        self.totals.cancelled += 1
        now = self.clock.now_ns
        if now >= flow.moving_ns and flow in self._new:
            del self._new[flow]
        elif flow.rate:
            self._rebase(flow, now)
            self._leave(flow, now)

    def moved_bytes(self, flow: Flow) -> float:
        """Bytes that have arrived by now."""
        if flow.finish_ns is not None:
            return float(flow.bytes)
        since = self.clock.now_ns - flow.since_ns if flow.rate else 0
        return min(flow.moved + flow.rate * since, flow.bytes * NS_PER_S) / NS_PER_S

    def rate_bytes_per_s(self, link: int) -> int:
        """What the link carries now."""
        return self._links[link].meter.rate

    def meter(self, link: int) -> RateMeter:
        """The link's account, up to now."""
        meter = self._links[link].meter
        meter.integrate(self.clock.now_ns)
        return meter

    def links(self) -> list[Link]:
        """All links by number."""
        return [state.link for state in self._links]

    # ------------------------------------------------------------------ events

    def _begin(self, flow: Flow) -> None:
        if flow.cancelled:
            return
        flow.since_ns = self.clock.now_ns
        if not flow.bytes:
            self._finish(flow, self.clock.now_ns)
            return
        self._new[flow] = None
        self._settle_later()

    def _settle_later(self) -> None:
        if not self._settling:
            self._settling = True
            self.clock.call_at(self.clock.now_ns, self._settle, rank=SETTLES)

    def _settle(self) -> None:
        """Recompute the rates of every flow connected to a change of this instant."""
        self._settling = False
        now = self.clock.now_ns
        flows: dict[Flow, None] = {}
        for flow in self._new:
            flows[flow] = None
            for link in flow.path:
                self._links[link].flows[flow] = None
                self._dirty[link] = None
        self._new.clear()
        reached = dict(self._dirty)
        frontier = list(reached)
        self._dirty.clear()
        while frontier:
            for flow in self._links[frontier.pop()].flows:
                if flow not in flows:
                    flows[flow] = None
                    for link in flow.path:
                        if link not in reached:
                            reached[link] = None
                            frontier.append(link)
        order = sorted(flows, key=lambda f: f.number)
        rates = max_min_rates([f.path for f in order], [f.cap for f in order], self._capacity)
        self.totals.recomputations += 1
        self.totals.flows_recomputed += len(order)
        sums = dict.fromkeys(reached, 0)
        for flow, rate in zip(order, rates, strict=True):
            for link in flow.path:
                sums[link] += rate
            if rate != flow.rate:
                self._rebase(flow, now)
                for account in flow.accounts:
                    account.set_rate(now, account.rate + rate - flow.rate)
                flow.rate = rate
                flow.version += 1
                end = now - (flow.moved - flow.bytes * NS_PER_S) // rate
                heapq.heappush(self._ends, (end, flow.number, flow.version, flow))
        for link, rate in sums.items():
            meter = self._links[link].meter
            if meter.rate != rate:
                meter.set_rate(now, rate)
        self._arm()

    def _rebase(self, flow: Flow, now: int) -> None:
        flow.moved += flow.rate * (now - flow.since_ns)
        flow.since_ns = now

    def _arm(self) -> None:
        ends = self._ends
        while ends and ends[0][2] != ends[0][3].version:
            heapq.heappop(ends)
        if ends and (self._wake_ns is None or ends[0][0] < self._wake_ns):
            self._wake_ns = ends[0][0]
            self.clock.call_at(ends[0][0], self._wake, ends[0][0], rank=ENDS)

    def _wake(self, due_ns: int) -> None:
        if due_ns != self._wake_ns:
            return
        self._wake_ns = None
        ends = self._ends
        while ends and ends[0][0] <= due_ns:
            _, _, version, flow = heapq.heappop(ends)
            if version != flow.version:
                continue
            self._rebase(flow, due_ns)
            self._leave(flow, due_ns, over=flow.moved - flow.bytes * NS_PER_S)
            flow.moved = flow.bytes * NS_PER_S
            flow.version += 1
            self._finish(flow, due_ns)
        self._arm()

    def _leave(self, flow: Flow, now: int, over: int = 0) -> None:
        for link in flow.path:
            state = self._links[link]
            state.meter.set_rate(now, state.meter.rate - flow.rate)
            if over:
                state.meter.take_back(over)
            del state.flows[flow]
            self._dirty[link] = None
        for account in flow.accounts:
            account.set_rate(now, account.rate - flow.rate)
            if over:
                account.take_back(over)
        flow.rate = 0
        if flow.path:
            self._settle_later()

    def _finish(self, flow: Flow, now: int) -> None:
        flow.finish_ns = now
        self.totals.finished += 1
        self.totals.finished_bytes += flow.bytes
        flow.done(flow)
