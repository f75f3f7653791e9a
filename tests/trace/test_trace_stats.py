"""Statistics against the published conventions on real files, and against plain counts on small sessions."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_builders import call, explicit_blocks, recorded_sessions

from harness.trace.model import Session
from harness.trace.read import read_trace
from harness.trace.stats import busiest_share, most_at_once, trace_stats

FILES = ["kvct_v6dedup.dev.delta.jsonl.gz", "kvct_v8.dev.delta.jsonl.gz", "neon.dev.delta.jsonl.gz"]


def leaves(tree: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    found = []
    for name, value in tree.items():
        found += leaves(value, (*path, name)) if isinstance(value, dict) else [((*path, name), value)]
    return found


@pytest.mark.parametrize("name", FILES)
def test_real_files_give_the_expected_numbers(shared: Path, name: str) -> None:
    expected = json.loads((shared / "facts/traces_expected.json").read_text())[name]
    found = trace_stats(read_trace(shared / "traces/weka_delta" / name, blocks="keep"))
    wanted = leaves(expected)
    assert len(wanted) == 29
    for path, value in wanted:
        got: Any = found
        for step in path:
            got = got[step]
        digits = len(str(value).partition(".")[2]) if isinstance(value, float) else 0
        assert round(got, digits) == value, path


def test_nothing_has_statistics_too() -> None:
    for sessions in ([], [Session("a", 64, [])]):
        found = trace_stats(sessions)
        assert (found["sessions"], found["calls"], found["input_tokens"]) == (len(sessions), 0, 0)
        assert found["block_hit_infinite"] is None and found["input_per_call"]["median"] is None
        json.dumps(found, allow_nan=False)


def test_a_small_session_by_hand() -> None:
    calls = [
        call(0, 0.0, 1000, api_s=10.0),
        call(1, 4.0, 1100, 0, 1000, api_s=2.0, chain="s1.0"),
        call(2, 70.0, 2000, 0, 1000, api_s=5.0, output_tokens=30),
        call(3, 2000.0, 2000, 2, 2000, api_s=None),
    ]
    found = trace_stats([Session("a", 64, calls)])
    assert found["calls"] == 4 and found["top_level_calls"] == 3
    assert found["blocks"] == {"kept": 4000, "new": 2100}
    assert [row["hit"] for row in found["block_hit_by_window"]][1] == pytest.approx(2000 / 6100)  # 5 min
    assert [row["hit"] for row in found["block_hit_by_window"]][3] == pytest.approx(4000 / 6100)  # 1 h
    assert found["gaps"]["zero_share"] == pytest.approx(1 / 3)
    assert found["gaps"]["idle_total_s"] == pytest.approx(60.0 + 1925.0)
    assert found["gaps"]["ge_1800s_arrival_share"] == pytest.approx(1 / 3)
    assert found["gap_in_main_chain_s"]["mean"] == pytest.approx((60.0 + 1925.0) / 2)
    assert found["in_flight"] == {"max": 2, "sessions_with_2_or_more": 1.0}
    assert found["sub_agents"]["groups"] == 1 and found["sub_agents"]["calls_per_group"]["mean"] == 1
    assert found["api_s"]["not_recorded"] == 1
    # 34 minutes: two calls in the first, one in the second, one at the end.
    assert found["busiest_minutes"]["half_of_calls"]["mean"] == pytest.approx(1 / 34)
    assert found["over_100k"] == {"call_share": 0.5, "input_share": pytest.approx(4000 / 6100)}
    json.dumps(found, allow_nan=False)


@given(st.lists(recorded_sessions(), min_size=1, max_size=3))
def test_blocks_and_flight_are_plain_counts(sessions: list[Session]) -> None:
    found = trace_stats(sessions)
    kept = new = most = 0
    for session in sessions:
        seen: set[tuple[int, int]] = set()
        for blocks in explicit_blocks(session.calls):
            kept += sum(block in seen for block in blocks)
            new += sum(block not in seen for block in blocks)
            seen.update(blocks)
        for c in session.calls:
            spans = [(o.t_s, o.t_s + (o.api_s or 0.0)) for o in session.calls]
            most = max(most, sum(start <= c.t_s < end for start, end in spans))
    assert found["blocks"] == {"kept": kept, "new": new}
    assert found["in_flight"]["max"] == most
    assert found["block_hit_by_window"][-1]["hit"] == pytest.approx(kept / (kept + new))


def test_an_end_comes_before_a_start_of_the_same_time() -> None:
    assert most_at_once([(0.0, 1.0), (1.0, 2.0), (1.5, 3.0)]) == 2


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30))
def test_busiest_share_is_a_count_over_bins(bins: list[int]) -> None:
    calls = sum(bins)
    if not calls:
        return
    wanted = []
    for level in (0.5, 0.9):
        full = sorted(bins, reverse=True)
        wanted.append(next(n for n in range(1, len(bins) + 1) if sum(full[:n]) >= level * calls - 1e-9) / len(bins))
    found = busiest_share(Counter(bins), len(bins))
    assert all(math.isclose(a, b) for a, b in zip(found, wanted, strict=True))
