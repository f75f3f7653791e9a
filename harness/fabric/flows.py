"""Flows on links: each takes its set-up time, then moves its bytes at the max-min fair rate of the moment.

Rates are whole bytes per second, rounded down (1e-9 of a GB/s link). What has moved is counted in nanobytes (rate times
nanoseconds), so nothing is lost between recomputations; a flow ends at the first nanosecond by which all has moved.
Recomputation happens once per instant, after all that happens in it, and only for flows that are connected to a changed
link; a flow whose rate stays keeps its end.

Flows of one path, cap and accounts have the same rate at all times. Such a class of flows is served like one queue by
processor sharing: what each of its flows has moved is told by one sum, and their order of ending is known when they
join. So a recomputation costs in proportion to the connected classes, however many flows wait for a link.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterable, Sequence
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
    flow_class: FlowClass | None = None
    """Those that it moves with, while it has a rate."""
    joined: int = 0
    """Its class's `moved` when it got its rate."""
    moved: int = 0
    """Nanobytes, when it is over."""
    finish_ns: int | None = None
    cancelled: bool = False

    @property
    def ended(self) -> bool:
        """Whether it finished or was cancelled."""
        return self.cancelled or self.finish_ns is not None


@dataclass(slots=True, eq=False)
class FlowClass:
    """Flows of one path, cap and accounts that move now, all at the same rate."""

    number: int
    path: Path
    cap: int | None
    accounts: tuple[RateMeter, ...]
    since_ns: int
    flows: int = 0
    rate: int = 0
    """Bytes per second of each flow."""
    carried: int = 0
    """Bytes per second of all flows together that links and accounts know of."""
    moved: int = 0
    """Nanobytes up to since_ns of a flow that has been here all the time."""
    ends: list[tuple[int, int, Flow]] = field(default_factory=list)
    """Heap of (what `moved` is when the flow has all its bytes, its number, it); a cancelled one until it is first."""
    version: int = 0
    """Of its entry in the fabric's heap of ends."""

    def advance(self, now: int) -> None:
        """Count what has moved up to now."""
        self.moved += self.rate * (now - self.since_ns)
        self.since_ns = now

    def join(self, flow: Flow, now: int) -> None:
        """The flow moves from now on."""
        self.advance(now)
        self.flows += 1
        flow.flow_class, flow.joined = self, self.moved
        heapq.heappush(self.ends, (self.moved + flow.bytes * NS_PER_S, flow.number, flow))

    def next_end_ns(self) -> int | None:
        """When the first of its flows has all its bytes, at the present rate; None if there is none."""
        ends = self.ends
        while ends and ends[0][2].ended:
            heapq.heappop(ends)
        return self.since_ns - (self.moved - ends[0][0]) // self.rate if ends else None

    def take_ended(self, now: int) -> list[Flow]:
        """The flows that have all their bytes by now, which are taken from `ends`."""
        self.advance(now)
        ended = []
        while self.ends and self.ends[0][0] <= self.moved:
            _, _, flow = heapq.heappop(self.ends)
            if not flow.ended:
                ended.append(flow)
        return ended


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
    classes: dict[FlowClass, None] = field(default_factory=dict)


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
        self._classes: dict[tuple[Path, int | None, tuple[RateMeter, ...]], FlowClass] = {}
        self._classes_made = 0
        self._ends: list[tuple[int, int, int, FlowClass]] = []
        """Heap of (next end of a class, its number, its version, it); one of an older version until it is first."""
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
        self.totals.cancelled += 1
        self._new.pop(flow, None)
        if flow.flow_class is not None:
            flow_class = flow.flow_class
            flow_class.advance(self.clock.now_ns)
            flow.moved = flow_class.moved - flow.joined
            self._leave(flow, flow_class)
            self._expect_end(flow_class)

    def moved_bytes(self, flow: Flow) -> float:
        """Bytes that have arrived by now."""
        moved = flow.moved
        if flow.flow_class is not None:
            flow.flow_class.advance(self.clock.now_ns)
            moved = flow.flow_class.moved - flow.joined
        return min(moved, flow.bytes * NS_PER_S) / NS_PER_S

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
        if not flow.bytes:
            self._finish(flow)
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
        joined = dict.fromkeys([self._join(flow) for flow in self._new])
        self._new.clear()
        classes, links = self._connected(joined)
        self._dirty.clear()
        self.totals.recomputations += 1
        if classes:
            self._share(classes, links, joined)
        self._arm()

    def _share(self, classes: Sequence[FlowClass], links: Sequence[int], joined: Container[FlowClass]) -> None:
        """Give connected classes, which have these links to themselves, their rates; `joined`: those with new flows."""
        now = self.clock.now_ns
        flows = [one.flows for one in classes]
        self.totals.flows_recomputed += sum(flows)
        rates = max_min_rates([one.path for one in classes], [one.cap for one in classes], self._capacity, flows=flows)
        sums = dict.fromkeys(links, 0)
        for one, rate in zip(classes, rates, strict=True):
            carried = rate * one.flows
            for link in one.path:
                sums[link] += carried
            if carried != one.carried:
                for account in one.accounts:
                    account.set_rate(now, account.rate + carried - one.carried)
                one.carried = carried
            if rate != one.rate:
                one.advance(now)
                one.rate = rate
                self._expect_end(one)
            elif one in joined:
                self._expect_end(one)
        for link, carried in sums.items():
            meter = self._links[link].meter
            if meter.rate != carried:
                meter.set_rate(now, carried)

    def _join(self, flow: Flow) -> FlowClass:
        """Put a flow that begins to move into its class, which may be new."""
        now = self.clock.now_ns
        key = flow.path, flow.cap, flow.accounts
        flow_class = self._classes.get(key)
        if flow_class is None:
            self._classes_made += 1
            flow_class = self._classes[key] = FlowClass(self._classes_made, *key, now)
            for link in flow.path:
                self._links[link].classes[flow_class] = None
        flow_class.join(flow, now)
        for link in flow.path:
            self._dirty[link] = None
        return flow_class

    def _connected(self, joined: Iterable[FlowClass]) -> tuple[list[FlowClass], list[int]]:
        """The classes that share links with changed links, directly or through others, and all their links."""
        classes = dict.fromkeys(joined)
        links = dict(self._dirty)
        frontier = list(links)
        while frontier:
            for flow_class in self._links[frontier.pop()].classes:
                if flow_class not in classes:
                    classes[flow_class] = None
                    for link in flow_class.path:
                        if link not in links:
                            links[link] = None
                            frontier.append(link)
        return list(classes), list(links)

    def _expect_end(self, flow_class: FlowClass) -> None:
        """Enter the class's next end anew: its rate or its first flow has changed."""
        flow_class.version += 1
        end = flow_class.next_end_ns()
        if end is not None:
            heapq.heappush(self._ends, (end, flow_class.number, flow_class.version, flow_class))

    def _arm(self) -> None:
        ends = self._ends
        while ends and ends[0][2] != ends[0][3].version:
            heapq.heappop(ends)
        if ends and (self._wake_ns is None or ends[0][0] < self._wake_ns):
            self._wake_ns = ends[0][0]
            self.clock.call_at(ends[0][0], self._wake, ends[0][0], rank=ENDS)

    def _wake(self, due_ns: int) -> None:
        """End what has all its bytes by now, in order of the flows' numbers."""
        if due_ns != self._wake_ns:
            return
        self._wake_ns = None
        due: list[FlowClass] = []
        while self._ends and self._ends[0][0] <= due_ns:
            _, _, version, flow_class = heapq.heappop(self._ends)
            if version == flow_class.version:
                due.append(flow_class)
        ended = [(flow.number, flow, flow_class) for flow_class in due for flow in flow_class.take_ended(due_ns)]
        for _, flow, flow_class in sorted(ended):
            if flow.cancelled:  # by one that ended just before
                continue
            flow.moved = flow.bytes * NS_PER_S
            self._leave(flow, flow_class, over=flow_class.moved - flow.joined - flow.moved)
            self._finish(flow)
        for flow_class in due:
            self._expect_end(flow_class)
        self._arm()

    def _leave(self, flow: Flow, flow_class: FlowClass, over: int = 0) -> None:
        """Take a flow's rate, and the nanobytes that it counted beyond its last byte, from its links and accounts."""
        now, rate = self.clock.now_ns, flow_class.rate
        flow.flow_class = None
        flow_class.flows -= 1
        flow_class.carried -= rate
        if not flow_class.flows:
            del self._classes[flow_class.path, flow_class.cap, flow_class.accounts]
        for link in flow_class.path:
            state = self._links[link]
            state.meter.set_rate(now, state.meter.rate - rate)
            if over:
                state.meter.take_back(over)
            if not flow_class.flows:
                del state.classes[flow_class]
            self._dirty[link] = None
        for account in flow_class.accounts:
            account.set_rate(now, account.rate - rate)
            if over:
                account.take_back(over)
        if flow_class.path:
            self._settle_later()

    def _finish(self, flow: Flow) -> None:
        flow.finish_ns = self.clock.now_ns
        self.totals.finished += 1
        self.totals.finished_bytes += flow.bytes
        flow.done(flow)
