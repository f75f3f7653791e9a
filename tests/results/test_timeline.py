"""The timeline recorder against a plain reference that remembers every event."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import InputError
from harness.results.timeline import Timeline, TimelineRecorder

Change = tuple[int, int, int]
_changes = st.lists(st.tuples(st.integers(0, 40_000), st.integers(0, 5), st.integers(0, 5)), max_size=12)
_busy = st.lists(
    st.tuples(st.integers(0, 40_000), st.integers(0, 9_000), st.integers(0, 10_000), st.integers(0, 500)),
    max_size=8,
)


def _record(changes: list[Change], busy: list[tuple[int, int, int, int]], end: int) -> Timeline:
    recorder = TimelineRecorder([0, 1], max_bins=8, first_bin_ns=10)
    for t, running, waiting in changes:
        recorder.level(1, t, running, waiting, running / 10)
    for start, length, computed, output in busy:
        recorder.busy(1, start, start + length, computed, output)
    return recorder.finish(end)


def _reference(changes: list[Change], end: int, low: int, high: int, value: int) -> int:
    """Integral of running (value 1) or waiting (2) over low..high."""
    total = 0
    for i, change in enumerate(changes):
        until = changes[i + 1][0] if i + 1 < len(changes) else end
        total += change[value] * max(0, min(until, high) - max(change[0], low))
    return total


@given(_changes.map(sorted), _busy)
def test_bins_hold_the_exact_integrals(changes: list[Change], busy: list[tuple[int, int, int, int]]) -> None:
    end = max([t for t, *_ in changes] + [s + length for s, length, *_ in busy] + [0]) + 777
    timeline = _record(changes, busy, end)
    assert timeline.bins <= 8 and timeline.bin_ns * timeline.bins >= end
    assert int(timeline.widths_ns.sum()) == end
    for b in range(timeline.bins):
        low, high = b * timeline.bin_ns, (b + 1) * timeline.bin_ns
        assert timeline.running_ns[1, b] == _reference(changes, end, low, high, 1)
        assert timeline.waiting_ns[1, b] == _reference(changes, end, low, high, 2)
        worked = sum(max(0, min(s + length, high) - max(s, low)) for s, length, *_ in busy)
        assert timeline.busy_ns[1, b] == worked
    assert timeline.computed_tokens.sum() == sum(c for *_, c, _ in busy)
    assert timeline.output_tokens.sum() == sum(o for *_, o in busy)
    assert not timeline.running_ns[0].any()
    np.testing.assert_allclose(timeline.kv_usage_ns, timeline.running_ns / 10)


@given(_changes.map(sorted), _busy, st.integers(1, 8))
def test_coarser_bins_keep_the_sums(changes: list[Change], busy: list[tuple[int, int, int, int]], bins: int) -> None:
    timeline = _record(changes, busy, 60_000)
    coarse = timeline.coarsened(bins)
    assert coarse.bins <= bins
    assert (coarse.running_ns.sum(axis=1) == timeline.running_ns.sum(axis=1)).all()
    assert (coarse.computed_tokens.sum(axis=1) == timeline.computed_tokens.sum(axis=1)).all()
    assert int(coarse.widths_ns.sum()) == 60_000


def test_file_round_trip(tmp_path: Path) -> None:
    timeline = _record([(3, 1, 0), (500, 2, 4)], [(10, 300, 77, 5)], 900)
    timeline.write(tmp_path / "timeline.parquet")
    again = Timeline.read(tmp_path / "timeline.parquet")
    assert (again.nodes, again.bin_ns, again.end_ns) == (timeline.nodes, timeline.bin_ns, timeline.end_ns)
    for name in ("running_ns", "waiting_ns", "kv_usage_ns", "busy_ns", "computed_tokens", "output_tokens"):
        assert (getattr(again, name) == getattr(timeline, name)).all()


def test_busy_time_per_node_sums_its_endpoints() -> None:
    recorder = TimelineRecorder([4, 4, 2])
    for endpoint, length in enumerate((10, 20, 5)):
        recorder.busy(endpoint, 0, length)
    assert recorder.finish(100).busy_by_node_ns() == [5, 30]


def test_time_of_an_endpoint_must_not_go_back() -> None:
    recorder = TimelineRecorder([0, 0])
    recorder.level(0, 100, 1, 0, 0.1)
    recorder.level(1, 50, 1, 0, 0.1)
    with pytest.raises(ValueError, match="endpoint 0: time went back"):
        recorder.level(0, 99, 0, 0, 0.0)


def test_odd_bin_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="even"):
        TimelineRecorder([0], max_bins=7)


def test_a_broken_file_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "timeline.parquet").write_bytes(b"not parquet")
    with pytest.raises(InputError, match="not a readable timeline"):
        Timeline.read(tmp_path / "timeline.parquet")
