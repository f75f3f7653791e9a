"""Step prices and leaps: a leap is the sum of its steps to the last nanosecond."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_workers.pricing.calibration import Calibration
from fake_workers.pricing.profile import StepProfile, Tables
from fake_workers.pricing.registry import load_profile, profile_names
from fake_workers.pricing.steps import DecodeLeap, RankBatch, step_ns
from tests.pricing.synthetic import calibrations, decoding_ranks, make_profile, tables


def grown(ranks: Sequence[RankBatch], steps: int) -> list[RankBatch]:
    """The same batches after `steps` decode steps."""
    return [RankBatch((), rank.decodes, rank.decode_context_tokens + steps * rank.decodes) for rank in ranks]


def stepped(profile: StepProfile, ranks: Sequence[RankBatch], steps: int) -> list[int]:
    """Cumulative durations after 0 .. steps steps, one step at a time."""
    return [0, *accumulate(step_ns(profile, grown(ranks, i)) for i in range(steps))]


@settings(deadline=None, max_examples=300)
@given(tables(), calibrations(), decoding_ranks(), st.integers(1, 400), st.data())
def test_leap_equals_steps(
    table: Tables, calibration: Calibration, ranks: list[RankBatch], steps: int, data: st.DataObject
) -> None:
    profile = make_profile(table, len(ranks), calibration)
    sums = stepped(profile, ranks, steps)
    leap = DecodeLeap(profile, ranks)
    for k in data.draw(st.lists(st.integers(0, steps), max_size=6)):
        assert leap.cumulative_ns(k) == sums[k]
    for i in data.draw(st.lists(st.integers(1, steps), max_size=3)):
        assert leap.step_ns(i) == sums[i] - sums[i - 1]
    assert DecodeLeap(profile, ranks).cumulative_ns(steps) == sums[-1]


@settings(deadline=None, max_examples=300)
@given(tables(), calibrations(), decoding_ranks(), st.integers(1, 300), st.data())
def test_steps_until_counts_whole_steps(
    table: Tables, calibration: Calibration, ranks: list[RankBatch], steps: int, data: st.DataObject
) -> None:
    profile = make_profile(table, len(ranks), calibration)
    sums = stepped(profile, ranks, steps)
    leap = DecodeLeap(profile, ranks)
    edges = st.sampled_from(sums).flatmap(lambda t: st.sampled_from((t - 1, t, t + 1)))
    for t in data.draw(st.lists(st.one_of(edges, st.integers(0, sums[-1])), min_size=1, max_size=8)):
        if t >= sums[-1]:
            continue
        whole = max(0, bisect_right(sums, t) - 1)
        assert leap.steps_until(t) == whole
        assert leap.cumulative_ns(whole) == sums[whole]
        limit = data.draw(st.integers(0, steps))
        assert leap.steps_until(t, limit) == min(whole, limit)


@pytest.mark.parametrize("name", profile_names())
def test_leap_equals_steps_on_shipped_profiles(name: str) -> None:
    # 3000 steps from a short context cross several grid cells; ranks of different slope overtake each other.
    profile = load_profile(name)
    shapes = [(3, 200), (1, 60_000), (0, 0), (40, 900), (7, 3000), (200, 30), (2, 45_000), (5, 8000)]
    ranks = [RankBatch((), b, b * c) for b, c in shapes[: profile.layout.dp]]
    sums = stepped(profile, ranks, 3000)
    leap = DecodeLeap(profile, ranks)
    assert [leap.cumulative_ns(k) for k in range(0, 3001, 7)] == sums[::7]
    assert [leap.steps_until(sums[k] - 1) for k in range(1, 3001, 11)] == list(range(0, 3000, 11))


def test_far_future_is_reached_without_stepping() -> None:
    profile = load_profile("llama-3.3-70b-fp8-tp8-h200")
    leap = DecodeLeap(profile, [RankBatch((), 8, 80_000)])
    century_ns = 100 * 365 * 86_400 * 10**9
    k = leap.steps_until(century_ns)
    assert leap.cumulative_ns(k) <= century_ns < leap.cumulative_ns(k + 1)
    assert leap.steps_until(century_ns, 5000) == 5000
    assert leap.steps_until(-1) == 0


def test_leap_refuses_prefill_and_empty_nodes() -> None:
    profile = load_profile("qwen3-32b-bf16-tp2-h100")
    with pytest.raises(ValueError, match="prefill"):
        DecodeLeap(profile, [RankBatch(((10, 0),), 1, 100)])
    with pytest.raises(ValueError, match="at least one"):
        DecodeLeap(profile, [RankBatch(), RankBatch()])


def test_parts_of_a_node_step() -> None:
    # max over ranks of (attention + dense), plus MoE over the tokens of all ranks.
    profile = load_profile("glm-5.2-fp8-dp8ep8-b200")
    prefill = RankBatch(((4096, 100_000), (500, 0)), 3, 30_000)
    decode = RankBatch((), 64, 64 * 150_000)
    first = (
        profile.context_attention_sum_ns(prefill.prefills)
        + profile.decode_row(3).price_ns(30_000)
        + profile.dense_ns(4096 + 500 + 3, False)
    )
    second = profile.decode_row(64).price_ns(64 * 150_000) + profile.dense_ns(64, True)
    shared = profile.moe_ns(4096 + 500 + 3 + 64, False)
    assert step_ns(profile, [prefill, decode, RankBatch()]) == max(first, second) + shared
    assert step_ns(profile, [decode]) == second + profile.moe_ns(64, True)
    assert step_ns(profile, [RankBatch(), RankBatch()]) == 0


def test_dispatch_over_nodes_is_that_of_the_fullest_rank() -> None:
    profile = load_profile("glm-5.2-fp8-dp16ep16-h200")
    busy, idle = RankBatch(((8192, 0),)), RankBatch()
    own = profile.context_attention_ns(8192, 0) + profile.dense_ns(8192, False) + profile.exchange_ns(8192, False)
    assert step_ns(profile, [busy] + [idle] * 15) == own + profile.moe_ns(8192, False)
    assert step_ns(profile, [busy] * 16) == own + profile.moe_ns(16 * 8192, False)
    small, large = RankBatch((), 1, 50_000), RankBatch((), 30, 30 * 50_000)
    slowest = profile.decode_row(30).price_ns(30 * 50_000) + profile.dense_ns(30, True)
    expected = slowest + profile.moe_ns(31, True) + profile.exchange_ns(30, True)
    assert step_ns(profile, [small, large]) == DecodeLeap(profile, [small, large]).step_ns(1) == expected
    # one-node groups hold dispatch and combine in the experts' rows
    assert load_profile("glm-5.2-fp8-dp8ep8-b200").exchange_ns(8192, False) == 0


def test_one_busy_rank_costs_less_than_eight() -> None:
    profile = load_profile("glm-5.2-fp8-dp8ep8-b200")
    busy = RankBatch(((8192, 100_000),))
    assert step_ns(profile, [busy] + [RankBatch()] * 7) < 0.6 * step_ns(profile, [busy] * 8)


def test_calibration_scales_and_adds() -> None:
    raw = load_profile("llama-3.3-70b-fp8-tp8-h200")
    tuned = raw.calibrated(Calibration.of("1.5", 2, per_step_ns=1000, per_seq_ns=10))
    prefill = [RankBatch(((4096, 0),))]
    assert step_ns(tuned, prefill) == pytest.approx(1.5 * step_ns(raw, prefill) + 1010, abs=3)
    # Decode parts in a step with prefill: attention by the decode scale, dense by the prefill scale.
    decode = [RankBatch((), 4, 4096)]
    assert step_ns(tuned, decode) == pytest.approx(2 * step_ns(raw, decode) + 1040, abs=3)
    assert raw.calibration == Calibration()
    with pytest.raises(ValueError, match="positive"):
        Calibration.of(0)


def test_several_chunks_share_launch_time_but_not_work() -> None:
    profile = load_profile("glm-5.2-fp8-dp8ep8-b200")
    small, large = (64, 0), (4096, 100_000)
    one_small, one_large = profile.context_attention_ns(*small), profile.context_attention_ns(*large)
    assert profile.context_attention_sum_ns([small] * 4) < 1.1 * one_small
    assert profile.context_attention_sum_ns([large] * 2) > 1.8 * one_large
    both = profile.context_attention_sum_ns([small, large])
    assert one_large <= both < one_large + one_small
