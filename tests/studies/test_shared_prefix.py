"""The load of a ladder: inference-perf's counts, times and prompts, and stages that wait for each other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.studies.ladder import Load, SharedPrefix, Stage
from harness.studies.shared_prefix import LEAD_S, lengths, offsets_s, staged_load
from harness.trace.model import Session
from harness.trace.runs import SessionRuns

WORKLOAD = SharedPrefix(
    num_groups=3,
    num_prompts_per_group=2,
    system_prompt_len=640,
    question_len=128,
    output_len=10,
    observed_input_len=960,
)


def _load(stages: list[tuple[float, float]], kind: str = "poisson") -> Load:
    return Load.model_validate({"type": kind, "interval_s": 30, "stages": stages, "small": stages})


def _session(stages: list[tuple[float, float]], seed: int = 1, observed: bool = False) -> tuple[Session, list[int]]:
    load = _load(stages)
    staged = staged_load(WORKLOAD, load, load.at("full"), seed, 64, observed)
    return staged.session, staged.stage_of


@given(st.sampled_from(["poisson", "constant"]), st.floats(0.2, 30), st.floats(1, 20), st.integers(0, 1000))
def test_a_stage_sends_the_requests_that_inference_perf_counts_in_order(
    kind: str, rate: float, duration: float, seed: int
) -> None:
    stage = Stage(rate=rate, duration=duration)
    times = offsets_s(kind, stage, np.random.default_rng(seed))
    assert len(times) == int(rate * duration)
    assert times == sorted(times)
    assert all(t > 0 for t in times)
    if kind == "constant" and times:
        assert times[-1] == pytest.approx(duration)


def test_poisson_seconds_are_filled_to_their_end() -> None:
    times = offsets_s("poisson", Stage(rate=8, duration=50), np.random.default_rng(3))
    ends = [t for t in times if abs(t - round(t)) < 1e-9]
    assert len(ends) >= 40  # the last request of each second falls on its end
    assert np.mean(np.bincount(np.ceil(np.array(times) - 1e-9).astype(int))[1:-1]) == pytest.approx(8, rel=0.2)


def test_every_stage_begins_with_the_first_prompt_and_prompts_share_their_groups_prefix() -> None:
    session, stage_of = _session([(3, 4), (2, 3)])
    assert stage_of == [0] * 12 + [1] * 6
    runs = SessionRuns(session.calls)
    prompts = [runs.runs(i) for i in range(len(session.calls))]
    assert prompts[:6] == prompts[6:12] == prompts[12:18]
    assert len({tuple(p) for p in prompts[:6]}) == 6
    firsts = {p[0] for p in prompts[:6]}
    assert len({origin for origin, _, _ in firsts}) == 3
    for prompt in prompts:
        assert prompt[-1][2] == (640 + 128) // 64
    assert any(len(p) == 2 and p[0][2] == 10 for p in prompts[:6]), "the second prompt of a group keeps 640 tokens"


def test_a_stage_waits_until_the_one_before_has_drained() -> None:
    session, stage_of = _session([(3, 4), (2, 3)])
    head = stage_of.index(1)
    first = session.calls[head]
    assert first.deps == tuple(range(head)) and first.on_start is None
    assert first.gap_s == pytest.approx(30 + LEAD_S + first.t_s)
    assert session.calls[0].deps == () and session.calls[0].gap_s == pytest.approx(LEAD_S + session.calls[0].t_s)
    for call in session.calls[head + 1 :]:
        assert call.on_start == head and call.deps == ()
        assert call.gap_s == pytest.approx(call.t_s - first.t_s)


def test_seeds_change_arrivals_and_order_and_nothing_else() -> None:
    one, again, other = _session([(3, 4)])[0], _session([(3, 4)])[0], _session([(3, 4)], seed=2)[0]
    assert one == again
    assert [c.t_s for c in one.calls] != [c.t_s for c in other.calls]
    assert {c.input_tokens for c in one.calls} == {c.input_tokens for c in other.calls} == {768}


def test_observed_lengths_scale_both_parts_and_not_the_answer() -> None:
    size = lengths(WORKLOAD, observed=True)
    assert (size.system_tokens, size.question_tokens, size.output_tokens) == (800, 160, 10)
    assert lengths(WORKLOAD, observed=False).system_tokens == 640
