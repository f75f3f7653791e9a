"""Flows on the clock: ends, conservation, capacity, cancellation, queueing answers."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.clock import NS_PER_S, VirtualClock
from harness.errors import InputError
from harness.fabric.flows import Fabric, Flow, Link

GB = 10**9


def run(clock: VirtualClock) -> None:
    while clock.step():
        pass


class Bed:
    """A fabric whose ended flows are kept in order."""

    def __init__(self, *bytes_per_s: int, latency_ns: int = 0) -> None:
        self.clock = VirtualClock()
        self.fabric = Fabric(self.clock, [Link(f"l{i}", rate, latency_ns) for i, rate in enumerate(bytes_per_s)])
        self.ended: list[Flow] = []

    def at(self, t_ns: int, path: tuple[int, ...], nbytes: int, **more) -> None:
        self.clock.call_at(t_ns, lambda: self.fabric.start(path, nbytes, self.ended.append, **more))


def test_one_flow_takes_setup_latency_and_bytes_over_capacity():
    bed = Bed(10 * GB, 20 * GB, latency_ns=1_000)
    bed.at(500, (0, 1), 5 * GB, setup_ns=7_000)
    run(bed.clock)
    assert [flow.finish_ns for flow in bed.ended] == [500 + 7_000 + 2_000 + NS_PER_S // 2]


def test_two_flows_share_and_the_longer_one_speeds_up():
    bed = Bed(10 * GB)
    bed.at(0, (0,), 10 * GB)
    bed.at(0, (0,), 20 * GB)
    run(bed.clock)
    assert [flow.finish_ns for flow in bed.ended] == [2 * NS_PER_S, 3 * NS_PER_S]


def test_a_cap_leaves_the_rest_of_the_link_to_others():
    bed = Bed(10 * GB)
    bed.at(0, (0,), 2 * GB, cap_bytes_per_s=2 * GB)
    bed.at(0, (0,), 8 * GB)
    run(bed.clock)
    assert [flow.finish_ns for flow in bed.ended] == [NS_PER_S, NS_PER_S]


def test_no_bytes_take_the_setup_only():
    bed = Bed(GB)
    bed.at(3, (0,), 0, setup_ns=10)
    run(bed.clock)
    assert [flow.finish_ns for flow in bed.ended] == [13]


def test_an_unconnected_flow_is_left_alone():
    bed = Bed(GB, GB)
    bed.at(0, (0,), GB)
    for k in range(50):
        bed.at(k * 1_000_000, (1,), 1_000_000)
    run(bed.clock)
    assert bed.fabric.totals.flows_recomputed < 60
    assert max(flow.finish_ns for flow in bed.ended) == NS_PER_S


def test_cancelling_frees_the_link_and_never_calls_back():
    bed = Bed(10 * GB)
    doomed: list[Flow] = []
    bed.clock.call_at(0, lambda: doomed.append(bed.fabric.start((0,), 10 * GB, bed.ended.append)))
    bed.clock.call_at(0, lambda: doomed.append(bed.fabric.start((0,), GB, bed.ended.append, setup_ns=10**10)))
    bed.at(0, (0,), 10 * GB)
    bed.clock.call_at(NS_PER_S, lambda: [bed.fabric.cancel(flow) for flow in doomed * 2])
    run(bed.clock)
    assert [flow.finish_ns for flow in bed.ended] == [NS_PER_S + NS_PER_S // 2]
    assert bed.fabric.moved_bytes(doomed[0]) == 5 * GB
    assert bed.fabric.meter(0).nanobytes == 15 * GB * NS_PER_S
    assert bed.fabric.totals.cancelled == 2


def test_a_flow_started_when_another_ends_shares_from_then_on():
    bed = Bed(10 * GB)
    bed.clock.call_at(
        0, lambda: bed.fabric.start((0,), 10 * GB, lambda flow: bed.fabric.start((0,), 10 * GB, bed.ended.append))
    )
    run(bed.clock)
    assert [flow.finish_ns for flow in bed.ended] == [2 * NS_PER_S]


def test_bad_links_and_flows_are_refused():
    with pytest.raises(InputError):
        Fabric(VirtualClock(), [Link("slow", 10)])
    bed = Bed(GB)
    with pytest.raises(ValueError, match="twice"):
        bed.fabric.start((0, 0), 1, bed.ended.append)
    with pytest.raises(ValueError, match="link or a cap"):
        bed.fabric.start((), 1, bed.ended.append)


flow_lists = st.lists(
    st.tuples(
        st.integers(0, 2_000_000_000),
        st.sets(st.integers(0, 3), min_size=1, max_size=3),
        st.integers(0, 3 * GB),
        st.none() | st.integers(10**7, GB),
        st.none() | st.integers(1, 2_000_000_000),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(flow_lists, st.lists(st.integers(10**7, 2 * GB), min_size=4, max_size=4))
def test_bytes_sent_are_bytes_received_and_no_link_is_overfull(flows, sizes):
    """Every link's account is the sum of what its flows moved, to the nanobyte; rates never exceed the capacity."""
    clock = VirtualClock()
    fabric = Fabric(clock, [Link(f"l{i}", size) for i, size in enumerate(sizes)], meter_bin_ns=NS_PER_S // 3)
    started: list[Flow] = []
    done: list[Flow] = []

    def start(path, nbytes, cap, cancel_after):
        flow = fabric.start(path, nbytes, done.append, cap_bytes_per_s=cap)
        started.append(flow)
        if cancel_after is not None:
            clock.call_later(cancel_after, fabric.cancel, flow)

    for t_ns, links, nbytes, cap, cancel_after in flows:
        clock.call_at(t_ns, start, tuple(links), nbytes, cap, cancel_after)
    while clock.step():
        for link, size in enumerate(sizes):
            assert 0 <= fabric.rate_bytes_per_s(link) <= size
    for flow in started:
        assert flow.ended
        assert flow.cancelled or flow.moved == flow.bytes * NS_PER_S
        assert not (flow.cancelled and flow in done)
    for link, size in enumerate(sizes):
        meter = fabric.meter(link)
        assert meter.nanobytes == sum(flow.moved for flow in started if link in flow.path)
        series = meter.series.until(clock.now_ns)
        assert sum(series) == meter.nanobytes
        assert all(moved <= size * meter.series.bin_ns for moved in series)
        assert fabric.rate_bytes_per_s(link) == 0


@settings(max_examples=100, deadline=None)
@given(flow_lists, st.integers(10**7, 2 * GB))
def test_one_link_serves_as_processor_sharing(flows, size):
    """Against an event-driven reference in exact fractions: every flow on one link ends within the rounding."""
    clock = VirtualClock()
    fabric = Fabric(clock, [Link("l", size)])
    done: list[Flow] = []
    jobs = sorted((t_ns, nbytes) for t_ns, _, nbytes, _, _ in flows if nbytes)
    for t_ns, nbytes in jobs:
        clock.call_at(t_ns, lambda n=nbytes: fabric.start((0,), n, done.append))
    run(clock)
    expected = processor_sharing(jobs, size)
    got = sorted(flow.finish_ns for flow in done)
    # rates are rounded down to whole bytes/s: relative error below flows / size, and up to 1 ns per recomputation
    for a, b in zip(got, sorted(expected), strict=True):
        assert abs(a - b) <= 2 + len(jobs) + b * len(jobs) / size * 4


def processor_sharing(jobs, size):
    """Finish times in exact ns of jobs (arrival ns, bytes) on one link of `size` bytes/s."""
    now, left, ends, queue = Fraction(0), [], [], list(jobs)
    while queue or left:
        rate = Fraction(size, NS_PER_S) / len(left) if left else None
        finish = now + min(left) / rate if left else None
        if queue and (finish is None or queue[0][0] <= finish):
            t_ns, nbytes = queue.pop(0)
            moved = (t_ns - now) * rate if rate else 0
            left = [value - moved for value in left] + [Fraction(nbytes)]
            now = Fraction(t_ns)
        else:
            moved = (finish - now) * rate
            left = [value - moved for value in left if value - moved > 0] if left else []
            ends += [finish] * (sum(1 for _ in jobs) - len(queue) - len(left) - len(ends))
            now = finish
    return ends


def test_queueing_on_one_link_gives_the_analytic_mean():
    """M/M/1 processor sharing: mean time in system is service / (1 - load) (Kleinrock); seeded, 40,000 transfers."""
    import random

    rnd = random.Random(7)
    load, size, mean_bytes = 0.6, GB, 10**7
    bed = Bed(size)
    t = 0.0
    for _ in range(40_000):
        t += rnd.expovariate(load * size / mean_bytes)
        bed.at(round(t * NS_PER_S), (0,), max(1, round(rnd.expovariate(1 / mean_bytes))))
    run(bed.clock)
    mean_s = sum(flow.finish_ns - flow.started_ns for flow in bed.ended) / len(bed.ended) / NS_PER_S
    assert mean_s == pytest.approx(mean_bytes / size / (1 - load), rel=0.05)


def test_equal_runs_are_equal():
    def once() -> list[tuple[int, int]]:
        import random

        rnd = random.Random(3)
        bed = Bed(GB, 2 * GB, 3 * GB)
        for _ in range(300):
            path = tuple(sorted(rnd.sample(range(3), rnd.randint(1, 3))))
            bed.at(rnd.randrange(NS_PER_S), path, rnd.randrange(10**7))
        run(bed.clock)
        return [(flow.number, flow.finish_ns) for flow in bed.ended]

    assert once() == once()
