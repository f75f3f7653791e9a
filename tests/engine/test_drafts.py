"""Speculative decoding: accepted shares, steps saved, blocks and counts under pressure, what a step costs."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_workers.engine.drafts import accepted, chances
from fake_workers.engine.node import Node
from fake_workers.engine.request import EngineRequest
from fake_workers.engine.scheduler import SchedulerConfig
from fake_workers.pricing.node_price import DraftingPrice, ProfilePrice
from fake_workers.pricing.registry import load_profile
from fake_workers.pricing.steps import RankBatch
from tests.harness.simple_price import SimplePrice


@given(st.integers(1, 8), st.floats(0.01, 0.99))
def test_chances_give_back_the_share(count: int, share: float) -> None:
    found = chances(count, share)
    assert abs(sum(found) / count - share) < 1e-9
    assert list(found) == sorted(found, reverse=True)


def test_llmds_acceptance_gives_its_tokens_per_step() -> None:
    thresholds = chances(3, 0.65)
    draws = [accepted(origin, position, 3, thresholds) for origin in range(40) for position in range(500)]
    assert abs(1 + sum(draws) / len(draws) - 2.95) < 0.02
    assert accepted(7, 9, 3, thresholds) == accepted(7, 9, 3, thresholds)
    assert accepted(7, 9, 0, thresholds) == 0


def run(requests: list[EngineRequest], drafts: int, share: float, is_async: bool, blocks: int = 4000) -> Node:
    config = SchedulerConfig(
        num_gpu_blocks=blocks,
        block_tokens=4,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        max_model_len=2000,
        async_scheduling=is_async,
        num_speculative_tokens=drafts,
        draft_acceptance_share=share,
    )
    node = Node(SimplePrice(), config, leaping=drafts == 0)
    for request in requests:
        node.submit(0, request)
    node.advance(1 << 60)
    return node


def request(name: str, origin: int, prompt: int, outputs: int) -> EngineRequest:
    return EngineRequest(name, origin, [(origin, 0, prompt // 4)], prompt, outputs, 0)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("drafts, share, decode_steps", [(0, 0.0, 60), (3, 0.0, 60), (3, 1.0, 15), (1, 1.0, 30)])
def test_accepted_drafts_save_steps(is_async: bool, drafts: int, share: float, decode_steps: int) -> None:
    only = request("a", 1, 30, 61)
    node = run([only], drafts, share, is_async)
    assert only.finished and only.outputs == 61
    # an asynchronous engine has one more step under way when the last tokens come
    assert decode_steps <= node.totals[0].decode_steps <= decode_steps + (1 if is_async and share else 0)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.booleans(), st.integers(1, 4), st.floats(0, 1), st.sampled_from([60, 90, 400]))
def test_under_pressure_all_end_with_what_was_asked(
    seed: int, is_async: bool, drafts: int, share: float, blocks: int
) -> None:
    rng = random.Random(seed)
    requests = [request(f"r{i}", i, rng.randrange(1, 90), rng.randrange(1, 60)) for i in range(8)]
    node = run(requests, drafts, share, is_async, blocks)
    assert all(r.finished and r.outputs == r.output_tokens for r in requests)
    pool = node.ranks[0].pool
    assert pool.free == pool.blocks
    for r in requests:
        assert r.placeholders >= 0 and r.first_token_ns is not None and r.finish_ns is not None


def test_a_verifying_step_costs_its_tokens_and_the_drafting() -> None:
    profile = load_profile("glm-5.2-fp8-tp8ep8-h200")
    plain, drafting = ProfilePrice(profile), DraftingPrice(profile, 3, 78)
    one = [RankBatch((), 8, 8 * 50_000)]
    verified = [RankBatch((), 8, 8 * 50_000, 24)]
    dense = profile.dense_ns(32, True) - profile.dense_ns(8, True)
    moe = profile.moe_ns(32, True) - profile.moe_ns(8, True)
    assert plain.step_ns(verified) - plain.step_ns(one) == dense + moe
    assert drafting.step_ns(verified) == plain.step_ns(verified) + plain.step_ns(one) * 3 // 78
    assert plain.step_ns(one) < drafting.step_ns(verified) < 2 * plain.step_ns(one)
