"""summary.json: the contract's keys, every definition on a case small enough to work out by hand."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.results.numbers import percentile
from harness.results.records import CallRecord, digest, to_frame
from harness.results.runinfo import Prices
from harness.results.summary import percentile_with_failures, summarise, to_json
from harness.results.timeline import TimelineRecorder
from tests.results.synthetic import SHAPES, S, make_info, make_records

CONTRACT: dict[str, set[str]] = {
    "router": {"kind", "release", "sha256", "config", "unmodified"},
    "cache": {"kind", "release", "mode"},
    "load": {"sessions", "calls", "input_tokens", "output_tokens", "sessions_per_hour_per_node"},
    "outcome": {"completed", "timed_out", "failed"},
    "ttft_s": {"mean", "p50", "p90", "p99"},
    "e2e_s": {"mean", "p50", "p90", "p99"},
    "queue_s": {"mean", "p50", "p90", "p99"},
    "restore_s": {"mean", "p50", "p90", "p99"},
    "itl_s": {"mean", "p50", "p90", "p99"},
    "output_rate_tok_s": {"p10", "p50", "mean"},
    "hit_rate": {"token", "request"},
    "tokens_by_source": {"gpu", "dram", "shared", "peer", "computed"},
    "load_balance": {"busiest_over_mean"},
    "tier": {"read_bytes_per_s_mean", "read_bytes_per_s_p99", "resident_bytes_per_node_max"},
    "router_truth_gap": {"mean", "p99"},
    "cost": {"per_million_input", "per_session", "priced_with"},
}
SCALARS = ("schema", "experiment", "digest", "batch_mean", "gpu_busy", "virtual_s", "wall_s", "cpu_s")
SCALARS += ("peak_rss_bytes", "decisions", "events", "steps")


def _call(index: int, arrival_s: float, **changes: Any) -> CallRecord:
    """A completed call: 1 s in the queue, 2 s of prefill, 10 s for 11 tokens, 60 of 100 input tokens
    reused.
    """
    at = int(arrival_s * S)
    fields: dict[str, Any] = {
        "call_id": f"s/{index}",
        "session": "s",
        "index": index,
        "chain": "main",
        "arrival_ns": at,
        "input_tokens": 100,
        "requested_output_tokens": 11,
        "outcome": "completed",
        "endpoint": 0,
        "node": 0,
        "routed_ns": at,
        "admitted_ns": at + S,
        "first_token_ns": at + 3 * S,
        "finish_ns": at + 13 * S,
        "output_tokens": 11,
        "gpu_tokens": 60,
        "computed_tokens": 40,
        "router_status": 200,
    }
    return CallRecord(**(fields | changes))


def _summary(records: list[CallRecord], **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"window_ns": (0, None), "prices": None, "virtual_ns": 100 * S, "busy_ns": None}
    info = make_info(SHAPES[0], records, nodes=2, per_node=1, **(base | changes))
    return summarise(to_frame(records), info, None, digest(records))


def test_every_key_of_the_contract_is_there() -> None:
    for records in ([], make_records(SHAPES[0], 200)):
        summary = _summary(records)
        for key, inner in CONTRACT.items():
            assert inner <= set(summary[key]), key
        assert all(key in summary for key in SCALARS)
        assert json.loads(to_json(summary)) == summary


def test_nothing_arrived_gives_nulls_and_zeros() -> None:
    summary = _summary([])
    assert summary["ttft_s"] == {"mean": None, "p50": None, "p90": None, "p99": None}
    assert summary["outcome"]["completed"] == 0
    assert summary["hit_rate"] == {"token": None, "request": None}
    assert summary["load_balance"]["busiest_over_mean"] is None
    assert summary["router_truth_gap"]["mean"] is None


def test_times_of_one_call() -> None:
    summary = _summary([_call(0, 5)])
    assert summary["ttft_s"]["p50"] == 3.0
    assert summary["e2e_s"]["p90"] == 13.0
    assert summary["queue_s"]["mean"] == 1.0
    assert summary["prefill_s"]["mean"] == 2.0
    assert summary["itl_s"]["p99"] == 1.0
    assert summary["output_rate_tok_s"]["p10"] == pytest.approx(1.1)
    assert summary["restore_s"]["mean"] is None, "no cache, so restoring does not apply"


def test_waiting_for_a_restore_is_not_queueing_and_the_parts_add_up() -> None:
    record = _call(0, 0, restore_ns=S // 4)
    summary = _summary([record], cache={"kind": "lmcache", "release": "0.5.6", "mode": "mp"})
    assert (summary["queue_s"]["mean"], summary["restore_s"]["mean"]) == (0.75, 0.25)
    parts = sum(summary[key]["mean"] for key in ("queue_s", "restore_s", "prefill_s"))
    assert parts == pytest.approx(summary["ttft_s"]["mean"])


def test_one_token_has_a_latency_but_no_rate() -> None:
    one = _call(0, 0, output_tokens=1, requested_output_tokens=1, finish_ns=3 * S)
    summary = _summary([one])
    assert summary["ttft_s"]["p50"] == 3.0
    assert summary["itl_s"]["mean"] is None
    assert summary["output_rate_tok_s"] == {"p10": None, "p50": None, "mean": None}


def test_time_outs_are_failures_not_latencies() -> None:
    late = _call(1, 0, outcome="timed_out", finish_ns=90 * S, output_tokens=5)
    nowhere = {"endpoint": None, "node": None, "admitted_ns": None, "first_token_ns": None, "finish_ns": 1}
    nothing = {"output_tokens": 0, "gpu_tokens": 0, "computed_tokens": 0}
    rejected = _call(2, 0, outcome="rejected", router_status=429, **nowhere, **nothing)
    summary = _summary([_call(0, 0), late, rejected])
    assert summary["e2e_s"]["p99"] == 13.0
    assert summary["outcome"] == {
        "arrived": 3, "completed": 1, "timed_out": 1, "failed": 1, "rejected": 1, "in_flight": 0,
    }  # fmt: skip
    assert summary["ttft_with_failures_s"] == {"p50": None, "p90": None, "p99": None}
    assert summary["hit_rate"] == {"token": 0.6, "request": 1.0}, "the rejected call was never looked up"


def test_the_window_counts_calls_by_their_end() -> None:
    records = [_call(i, 10 * i) for i in range(5)]  # they end at 13, 23, 33, 43, 53 s
    summary = _summary(records, window_ns=(20 * S, 45 * S))
    assert summary["measured"]["calls"] == 3
    assert summary["outcome"]["completed"] == 5
    assert summary["throughput"]["calls_per_s"] == pytest.approx(3 / 25)


def test_calls_in_flight_are_arrived_but_not_measured() -> None:
    open_call = _call(1, 50, outcome="in_flight", finish_ns=None)
    summary = _summary([_call(0, 0), open_call])
    assert (summary["outcome"]["in_flight"], summary["measured"]["calls"]) == (1, 1)


def test_busiest_node_over_the_mean_counts_idle_nodes() -> None:
    summary = _summary([_call(0, 0)], busy_ns=[30 * S, 10 * S])
    assert summary["load_balance"]["busiest_over_mean"] == 1.5
    assert summary["load_balance"]["busiest_over_mean_calls"] == 2.0
    assert summary["gpu_busy"] == pytest.approx(0.2)


def test_batch_and_busy_time_come_from_the_timeline() -> None:
    recorder = TimelineRecorder([0, 1])
    recorder.level(0, 0, 4, 1, 0.5)
    recorder.busy(0, 0, 10 * S)
    recorder.level(0, 10 * S, 0, 0, 0.0)
    recorder.busy(1, 0, 10 * S)
    recorder.level(1, 0, 2, 0, 0.5)
    recorder.level(1, 10 * S, 0, 0, 0.0)
    records = [_call(0, 0)]
    info = make_info(SHAPES[0], records, nodes=2, per_node=1, virtual_ns=20 * S)
    summary = summarise(to_frame(records), info, recorder.finish(20 * S), "")
    assert summary["batch_mean"] == 3.0
    assert summary["gpu_busy"] == 0.5
    assert summary["load_balance"]["busiest_over_mean"] == 1.0


def test_truth_gap_is_absolute_and_only_where_both_sides_are_known() -> None:
    records = [
        _call(0, 0, believed_share=0.9, held_share=0.6),
        _call(1, 1, believed_share=0.5, held_share=0.6),
        _call(2, 2, held_share=0.6),
    ]
    gap = _summary(records)["router_truth_gap"]
    assert gap["decisions"] == 2
    assert gap["mean"] == pytest.approx(0.2)
    assert gap["signed_mean"] == pytest.approx(0.1)


def test_endpoints_without_a_call_are_not_used() -> None:
    assert _summary([_call(0, 0), _call(1, 1), _call(2, 2, endpoint=1)])["load_balance"]["endpoints_used"] == 2
    assert _summary([_call(0, 0, endpoint=None, node=None)])["load_balance"]["endpoints_used"] == 0


def test_cost_follows_the_prices_and_is_null_without() -> None:
    assert _summary([_call(0, 0)])["cost"]["per_session"] is None
    summary = _summary([_call(0, 0)], prices=Prices("list", input_uncached=3.0, input_cached=0.5, output=15.0))
    paid_input = (40 * 3.0 + 60 * 0.5) / 1e6
    assert summary["cost"]["per_million_input"] == pytest.approx(paid_input / 100 * 1e6)
    assert summary["cost"]["per_session"] == pytest.approx(paid_input + 11 * 15.0 / 1e6)
    assert summary["cost"]["priced_with"] == "list"


def test_a_session_s_cost_counts_sessions_with_calls_or_in_a_steady_state_those_that_arrive() -> None:
    prices = Prices("list", input_uncached=3.0, input_cached=0.5, output=15.0)
    records = [_call(0, 0), _call(1, 1), _call(2, 2, session="t")]
    one = _summary(records[:1], prices=prices)["cost"]["per_session"]
    assert _summary(records, prices=prices)["cost"]["per_session"] == pytest.approx(one * 3 / 2)
    info = make_info(SHAPES[0], records, nodes=2, per_node=1, window_ns=(0, None), prices=prices, virtual_ns=7200 * S)
    info.load.sessions_per_hour_per_node = 4.0
    info.experiment = {"load": {"history_s": 60.0}}
    steady = summarise(to_frame(records), info, None, digest(records))["cost"]["per_session"]
    assert steady == pytest.approx(one * 3 / (4.0 * 2 * 2)), "4 per hour on each of 2 nodes for 2 hours"


def test_an_invalid_or_interrupted_run_says_why() -> None:
    validity = _summary([], invalid=["the router fell back"], interrupted=True)["validity"]
    assert validity["valid"] is False
    assert validity["reasons"] == ["the router fell back", "the run was interrupted"]


def test_numbers_that_json_cannot_carry_are_refused() -> None:
    with pytest.raises(ValueError):
        to_json({"x": math.inf})


_values = st.lists(st.floats(0, 1e6), max_size=40).map(np.array)


@given(_values.filter(len), st.floats(0, 100))
def test_percentile_lies_between_its_neighbours(values: np.ndarray, q: float) -> None:
    """Linear interpolation between order statistics, stated independently of numpy's own implementation."""
    ordered = sorted(values)
    rank = (len(values) - 1) * q / 100
    low, high = ordered[math.floor(rank)], ordered[math.ceil(rank)]
    found = percentile(values, q)
    assert found is not None
    assert found == pytest.approx(low + (high - low) * (rank - math.floor(rank)), rel=1e-9, abs=1e-9)


@given(_values, st.integers(0, 20), st.sampled_from([0.0, 50.0, 90.0, 99.0, 100.0]))
def test_failures_count_as_infinite(values: np.ndarray, failures: int, q: float) -> None:
    found = percentile_with_failures(values, failures, q)
    padded = np.concatenate([values, np.full(failures, 1e18)])
    if found is None:
        assert not len(padded) or np.percentile(padded, q) > 1e6
    else:
        assert found == pytest.approx(np.percentile(padded, q))
        if not failures:
            assert found == pytest.approx(percentile(values, q))
