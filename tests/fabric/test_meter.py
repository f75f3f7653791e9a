"""Meters on hand-made transfers whose mean, percentile and full time are known."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.clock import NS_PER_S, VirtualClock
from harness.fabric.flows import Fabric, Flow, Link
from harness.fabric.meter import RateMeter

GB = 10**9


def _run(clock: VirtualClock) -> None:
    while clock.step():
        pass


def test_one_link_known_bytes_known_mean_and_percentiles():
    """200 s: 2 s full at 10 GB/s, then 3 s at 4 GB/s (the flow's own cap), idle otherwise."""
    clock = VirtualClock()
    fabric = Fabric(clock, [Link("l", 10 * GB)])
    tier = RateMeter()
    clock.call_at(10 * NS_PER_S, lambda: fabric.start((0,), 20 * GB, lambda flow: None, accounts=(tier,)))
    clock.call_at(
        50 * NS_PER_S,
        lambda: fabric.start((0,), 12 * GB, lambda flow: None, cap_bytes_per_s=4 * GB, accounts=(tier,)),
    )
    clock.call_at(200 * NS_PER_S, lambda: None)
    _run(clock)
    end = clock.now_ns
    for meter in (fabric.meter(0), tier):
        assert meter.mean_bytes_per_s(end) == 32 * GB / 200
        # ranks 0..199: 195 idle seconds, three of 4 GB/s (195..197), two of 10 GB/s; p99 is rank 197.01
        assert meter.percentile_bytes_per_s(99, end) == pytest.approx(4 * GB + 0.01 * 6 * GB)
        assert meter.percentile_bytes_per_s(98.5, end) == pytest.approx(4 * GB)
        assert meter.percentile_bytes_per_s(100, end) == 10 * GB
        assert meter.percentile_bytes_per_s(97, end) == 0
        assert meter.busy_ns == 5 * NS_PER_S
        assert sum(meter.series.until(end)) == 32 * GB * NS_PER_S
    assert fabric.meter(0).full_ns == 2 * NS_PER_S
    assert tier.full_ns == 0


def test_a_begun_interval_counts_in_no_percentile():
    meter = RateMeter()
    meter.set_rate(0, 5)
    meter.integrate(NS_PER_S * 5 // 2)
    assert meter.percentile_bytes_per_s(0, NS_PER_S * 5 // 2) == 5
    assert meter.percentile_bytes_per_s(50, NS_PER_S // 2) is None


def test_bytes_in_no_time_count():
    meter = RateMeter()
    meter.add(NS_PER_S // 2, 8)
    assert (meter.percentile_bytes_per_s(100, 2 * NS_PER_S), meter.mean_bytes_per_s(2 * NS_PER_S)) == (8, 4)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 3_000_000_000),
            st.sets(st.integers(0, 2), min_size=1, max_size=2),
            st.integers(0, GB),
            st.integers(0, 1),
            st.none() | st.integers(1, 2_000_000_000),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_what_tiers_sent_is_what_arrived(flows):
    """Each account has exactly what its flows moved, those that were cancelled included; so has its series."""
    clock = VirtualClock()
    fabric = Fabric(clock, [Link(f"l{i}", GB // 3) for i in range(3)])
    meters = [RateMeter(NS_PER_S // 7), RateMeter(NS_PER_S // 7)]
    both = RateMeter()
    started: list[tuple[int, Flow]] = []

    def start(path, nbytes, account, cancel_after):
        flow = fabric.start(path, nbytes, lambda flow: None, accounts=(meters[account], both))
        started.append((account, flow))
        if cancel_after is not None:
            clock.call_later(cancel_after, fabric.cancel, flow)

    for t_ns, links, nbytes, account, cancel_after in flows:
        clock.call_at(t_ns, start, tuple(links), nbytes, account, cancel_after)
    _run(clock)
    end = clock.now_ns + 1
    for account, meter in enumerate(meters):
        moved = sum(flow.moved for mine, flow in started if mine == account)
        assert (meter.nanobytes, sum(meter.series.until(end)), meter.rate) == (moved, moved, 0)
    assert both.nanobytes == sum(meter.nanobytes for meter in meters)
