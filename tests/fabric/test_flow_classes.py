"""Classes of flows against a plain reference that keeps every flow's own account: equal to the nanobyte and ns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from harness.clock import NS_PER_S, VirtualClock
from harness.fabric import flows as flows_module
from harness.fabric.flows import ENDS, SETTLES, Fabric, Link
from harness.fabric.meter import RateMeter
from harness.fabric.share import Path, max_min_rates

BIN_NS = NS_PER_S // 7
LONG_NS = 3000 * NS_PER_S
"""Beyond all ends."""


@dataclass(slots=True, eq=False)
class PlainFlow:
    number: int
    path: Path
    bytes: int
    cap: int | None
    accounts: tuple[RateMeter, ...]
    done: Callable[[PlainFlow], None]
    rate: int = 0
    moved: int = 0
    ended: bool = False


class PlainFabric:
    """Every change: count on for every flow, share anew among all of them, look for the next end among all of them."""

    def __init__(self, clock: VirtualClock, sizes: list[int]) -> None:
        self.clock, self.sizes = clock, sizes
        self.meters = [RateMeter(BIN_NS, size) for size in sizes]
        self.flows: list[PlainFlow] = []
        self.new: list[PlainFlow] = []
        self.started = self.since_ns = self.wakes = 0
        self.settling = False

    def start(self, path, nbytes, done, *, setup_ns=0, cap_bytes_per_s=None, accounts=()) -> PlainFlow:
        self.started += 1
        flow = PlainFlow(self.started, path, nbytes, cap_bytes_per_s, accounts, done)
        if setup_ns:
            self.clock.call_at(self.clock.now_ns + setup_ns, self.begin, flow, rank=ENDS)
        else:
            self.begin(flow)
        return flow

    def begin(self, flow: PlainFlow) -> None:
        if flow.ended:
            return
        self.new.append(flow)
        self.settle_later()

    def settle_later(self) -> None:
        if not self.settling:
            self.settling = True
            self.clock.call_at(self.clock.now_ns, self.settle, rank=SETTLES)

    def advance(self) -> None:
        for flow in self.flows:
            flow.moved += flow.rate * (self.clock.now_ns - self.since_ns)
        self.since_ns = self.clock.now_ns

    def settle(self) -> None:
        self.settling = False
        self.advance()
        self.flows += [flow for flow in self.new if not flow.ended]
        self.new.clear()
        capacity = dict(enumerate(self.sizes))
        rates = max_min_rates([flow.path for flow in self.flows], [flow.cap for flow in self.flows], capacity)
        for flow, rate in zip(self.flows, rates, strict=True):
            self.change(flow, rate)
        self.expect_end()

    def change(self, flow: PlainFlow, rate: int, over: int = 0) -> None:
        for meter in (*(self.meters[link] for link in flow.path), *flow.accounts):
            meter.set_rate(self.clock.now_ns, meter.rate + rate - flow.rate)
            if over:
                meter.take_back(over)
        flow.rate = rate

    def expect_end(self) -> None:
        self.wakes += 1
        left = [self.since_ns - (flow.moved - flow.bytes * NS_PER_S) // flow.rate for flow in self.flows if flow.rate]
        if left:
            self.clock.call_at(min(left), self.wake, self.wakes, rank=ENDS)

    def wake(self, number: int) -> None:
        if number != self.wakes:
            return
        self.advance()
        for flow in sorted(self.flows, key=lambda f: f.number):
            over = flow.moved - flow.bytes * NS_PER_S
            if over >= 0 and not flow.ended:
                flow.moved -= over
                self.leave(flow, over)
                flow.done(flow)
        self.expect_end()

    def leave(self, flow: PlainFlow, over: int = 0) -> None:
        flow.ended = True
        self.change(flow, 0, over)
        self.flows.remove(flow)
        self.settle_later()

    def cancel(self, flow: PlainFlow) -> None:
        if flow in self.flows:
            self.advance()
            self.leave(flow)
            self.expect_end()
        flow.ended = True

    def moved_bytes(self, flow: PlainFlow) -> float:
        since = self.clock.now_ns - self.since_ns
        return min(flow.moved + flow.rate * since, flow.bytes * NS_PER_S) / NS_PER_S

    def rate_bytes_per_s(self, link: int) -> int:
        return self.meters[link].rate

    def meter(self, link: int) -> RateMeter:
        self.meters[link].integrate(self.clock.now_ns)
        return self.meters[link]


paths = st.sampled_from([(0,), (1,), (0, 1), (1, 2), (0, 1, 2)])
caps = st.sampled_from([None, None, 10**6, 7 * 10**6, 10**9])
tenths = st.integers(0, 20).map(lambda tenth: tenth * NS_PER_S // 10)
"""Few instants, paths, caps and sizes: flows alike, and many changes at one time."""
loads = st.lists(
    st.tuples(
        tenths,
        paths,
        st.sampled_from([1, 10**6, 3 * 10**6]) | st.integers(1, 10**7),
        caps,
        st.integers(0, 2),
        st.sampled_from([0, 0, NS_PER_S // 10]),
        st.none() | tenths,
        st.integers(0, 3),
        st.none() | st.integers(0, 30),
    ),
    min_size=1,
    max_size=25,
)


def seen(make, sizes, load) -> list:
    """All that shows of a load: ends in their order, what had moved at each, and the accounts at the end."""
    clock = VirtualClock()
    fabric = make(clock, sizes)
    meters = [RateMeter(BIN_NS), RateMeter(BIN_NS)]
    accounts = ((), tuple(meters), tuple(meters[:1]))
    started: list = []
    log: list = []

    def look(*what) -> None:
        moved = [fabric.moved_bytes(flow) for flow in started]
        rates = [meter.rate for meter in meters] + [fabric.rate_bytes_per_s(link) for link in range(len(sizes))]
        log.append((clock.now_ns, *what, moved, rates))

    def start(path, nbytes, cap, account, setup_ns, cancel_after_ns, again, doomed) -> None:
        def ended(flow) -> None:
            look("ended", flow.number)
            if doomed is not None and doomed < len(started):
                fabric.cancel(started[doomed])
                look("cancelled", doomed)
            if again:
                start(path, nbytes, cap, account, setup_ns, cancel_after_ns, again - 1, doomed)

        options = {"setup_ns": setup_ns, "cap_bytes_per_s": cap, "accounts": accounts[account]}
        flow = fabric.start(path, nbytes, ended, **options)
        started.append(flow)
        if cancel_after_ns is not None:
            clock.call_later(cancel_after_ns, fabric.cancel, flow)

    for t_ns, *what in load:
        clock.call_at(t_ns, start, *what)
        clock.call_at(t_ns, look, "look")
    while clock.step():
        pass
    for meter in (*(fabric.meter(link) for link in range(len(sizes))), *meters):
        tops = [meter.percentile_bytes_per_s(q, LONG_NS) for q in (50, 99)]
        log.append((meter.rate, meter.nanobytes, meter.busy_ns, meter.full_ns, meter.series.until(LONG_NS), tops))
    log.append([(flow.number, flow.ended, flow.moved) for flow in started])
    return log


def with_classes(clock: VirtualClock, sizes: list[int]) -> Fabric:
    return Fabric(clock, [Link(f"l{i}", size) for i, size in enumerate(sizes)], BIN_NS)


@settings(max_examples=300, deadline=None)
@given(loads, st.lists(st.integers(10**6, 10**8), min_size=3, max_size=3))
def test_classes_are_equal_to_flows_one_by_one(load, sizes):
    assert seen(with_classes, sizes, load) == seen(PlainFabric, sizes, load)


def test_a_flow_that_ends_may_cancel_one_that_ends_at_the_same_time():
    load = [(0, (0,), 10**6, None, 1, 0, None, 0, 1), (0, (0,), 10**6, None, 1, 0, None, 0, None)]
    got = seen(with_classes, [10**6], load)
    assert got == seen(PlainFabric, [10**6], load)
    assert [what[2] for what in got if what[1] == "ended"] == [1]


def test_ends_of_one_time_come_in_the_order_of_the_flows_whatever_their_classes():
    slow = 10**6
    load = [
        (0, (0,), 3 * slow, slow, 0, 0, None, 0, None),
        (0, (1,), 2 * slow, slow, 0, 0, None, 0, None),
        (NS_PER_S, (0,), slow, slow, 0, 0, None, 0, None),
    ]
    got = seen(with_classes, [10**8] * 2, load)
    ends = [(what[0], what[2]) for what in got if what[1] == "ended"]
    assert ends == [(2 * NS_PER_S, 2), (2 * NS_PER_S, 3), (3 * NS_PER_S, 1)]


def test_time_does_not_go_on_for_the_end_of_a_cancelled_flow():
    clock = VirtualClock()
    fabric = with_classes(clock, [10**6, 10**6])
    fabric.start((0,), 10**6, lambda flow: None)
    doomed = fabric.start((1,), 5 * 10**6, lambda flow: None)
    clock.call_at(NS_PER_S // 2, fabric.cancel, doomed)
    while clock.step():
        pass
    assert clock.now_ns == NS_PER_S


def test_flows_alike_are_shared_out_as_one(monkeypatch):
    """What a recomputation costs must not grow with the queue on a link."""
    entries = []

    def counted(paths, *more, **options):
        entries.append(len(paths))
        return max_min_rates(paths, *more, **options)

    monkeypatch.setattr(flows_module, "max_min_rates", counted)
    clock = VirtualClock()
    fabric = with_classes(clock, [10**9, 10**9])
    for number in range(1000):
        path = (0,) if number % 2 else (0, 1)
        clock.call_at(number, fabric.start, path, 10**6 + number, lambda flow: None)
    while clock.step():
        pass
    assert fabric.totals.finished == 1000
    assert fabric.totals.flows_recomputed > 100_000
    assert max(entries) == 2
