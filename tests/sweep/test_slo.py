"""Service levels: what counts as missed, and whether a load has settled."""

from __future__ import annotations

import numpy as np
import pytest

from harness.errors import InputError
from harness.results.records import COMPLETED, IN_FLIGHT, TIMED_OUT, CallRecord, to_frame
from harness.sweep.slo import drift, in_system, parse_slo, reached

S = 1_000_000_000


def _call(number: int, arrival_s: float, e2e_s: float | None, outcome: str = COMPLETED) -> CallRecord:
    arrival = round(arrival_s * S)
    return CallRecord(
        call_id=str(number),
        session="s",
        index=number,
        chain="main",
        arrival_ns=arrival,
        input_tokens=10,
        requested_output_tokens=11,
        output_tokens=11,
        outcome=outcome,
        first_token_ns=None if e2e_s is None else arrival + round(e2e_s * S / 2),
        finish_ns=None if e2e_s is None else arrival + round(e2e_s * S),
    )


def _p50(records: list[CallRecord], text: str) -> float | None:
    return reached(to_frame(records), 0, 100 * S, [parse_slo(text)])[0].value


def test_names_and_limits() -> None:
    slo = parse_slo("e2e_p90_s=300")
    assert (slo.metric, slo.percentile, slo.limit, slo.at_most) == ("e2e", 90, 300.0, True)
    assert not parse_slo("output_rate_p10_tok_s=8").at_most
    for text in ("e2e_p90=3", "e2e_p90_s", "e2e_p90_s=-1", "e2e_p90_s=nan", "e2e_p90_s=1e300", "speed=3"):
        with pytest.raises(InputError):
            parse_slo(text)


def test_calls_outside_the_window_do_not_count() -> None:
    records = [_call(0, 10, 2), _call(1, 20, 4), _call(2, 30, 6), _call(3, 99, 50)]
    assert _p50(records, "e2e_p50_s=5") == 4.0
    assert _p50(records, "ttft_p50_s=5") == 2.0
    assert _p50(records, "output_rate_p50_tok_s=5") == pytest.approx(11 / 2.0)


def test_lost_calls_and_open_ones_that_are_late_already_count_as_missed() -> None:
    good = [_call(0, 10, 2), _call(1, 20, 4)]
    assert _p50(good, "e2e_p50_s=5") == 3.0
    lost = _call(2, 30, 6, TIMED_OUT)
    assert _p50([*good, lost], "e2e_p50_s=5") == 4.0
    late, young = _call(3, 94, None, IN_FLIGHT), _call(4, 96, None, IN_FLIGHT)
    assert _p50([*good, young], "e2e_p50_s=5") == 3.0, "an open call may still be in time"
    assert _p50([*good, late], "e2e_p50_s=5") == 4.0
    assert _p50([*good, late, lost], "e2e_p50_s=5") is None
    assert not reached(to_frame([*good, late, lost]), 0, 100 * S, [parse_slo("e2e_p50_s=5")])[0].met
    assert _p50([*good, lost], "output_rate_p10_tok_s=1") == pytest.approx(1.1), "a lost call has rate 0"


def test_calls_in_the_system_are_counted_by_time() -> None:
    frame = to_frame([_call(0, 0, 5), _call(1, 5, 10), _call(2, 10, None, IN_FLIGHT)])
    found = in_system(frame, np.array([0, 10, 20], dtype=np.float64) * S)
    assert found.tolist() == [1.0, 1.5]


def test_a_growing_backlog_is_told_from_a_settled_load() -> None:
    rng = np.random.default_rng(1)
    arrivals = np.sort(rng.uniform(0, 1000, 2000))
    settled = to_frame([_call(i, t, float(rng.exponential(5))) for i, t in enumerate(arrivals)])
    assert drift(settled, 100 * S, 1000 * S).stationary
    # each call takes longer than the one before it: the server falls behind
    growing = to_frame([_call(i, t, t / 10) for i, t in enumerate(arrivals)])
    assert not drift(growing, 100 * S, 1000 * S).stationary
