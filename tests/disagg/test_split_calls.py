"""A prompt on one worker, its answer on another: known times to the microsecond, and what becomes of all else."""

from __future__ import annotations

import random
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_workers.engine.totals import gap_percentile_s
from fake_workers.pricing.steps import RankBatch
from harness.results.invariants import violations
from harness.results.records import COMPLETED, FAILED, REJECTED, TIMED_OUT, digest, to_frame
from harness.results.split import TTFT_PARTS, split_calls
from harness.trace.model import Session
from tests.disagg.bed import BYTES_PER_TOKEN, MS, WIRE, Bed, call
from tests.harness.simple_price import step_ns


def one(tokens: int = 60, outputs: int = 10) -> list[Session]:
    return [Session("a", 4, [call(0, tokens, outputs)])]


def test_time_to_first_token_is_the_sum_of_its_known_parts() -> None:
    bed = Bed(one(60, 10), router_latency_ns=2 * MS, kv={"sidecar_us": 300.0})
    (record,) = bed.run().records
    prefill = step_ns([RankBatch(((60, 0),), 0, 0)])
    transfer = 60 * BYTES_PER_TOKEN * 1_000_000_000 // WIRE
    first_step = step_ns([RankBatch((), 1, 60)])
    assert record.outcome == COMPLETED
    assert record.routed_ns == 2 * MS
    assert record.admitted_ns == 2 * MS
    assert record.prefill_done_ns == 2 * MS + prefill
    assert record.transfer_start_ns == record.prefill_done_ns + 300_000
    assert record.transfer_end_ns == record.transfer_start_ns + transfer
    assert record.decode_admitted_ns == record.transfer_end_ns
    assert record.first_token_ns == record.decode_admitted_ns + first_step
    # what the client sees, from its own two timestamps
    ttft_us = (record.first_token_ns - record.arrival_ns) / 1000
    assert ttft_us == (2 * MS + prefill + 300_000 + transfer + first_step) / 1000
    decode = [step_ns([RankBatch((), 1, 60 + i)]) for i in range(1, 10)]
    assert record.finish_ns == record.first_token_ns + sum(decode)


def test_the_record_says_where_and_how_much() -> None:
    bed = Bed(one(61, 3), prefill=2, decode=2)
    (record,) = bed.run().records
    assert (record.prefill_endpoint, record.prefill_node) == (0, 0)
    assert (record.endpoint, record.node) == (2, 2)
    assert record.transfer_tokens == 61 and record.decode_hit_tokens == 0
    assert record.transfer_bytes == 64 * BYTES_PER_TOKEN  # whole blocks
    assert record.gpu_tokens == 0 and record.computed_tokens == 61
    assert bed.kv.totals.transfers == 1 and bed.kv.totals.bytes == record.transfer_bytes
    assert bed.fabric.totals.finished_bytes == record.transfer_bytes
    assert bed.router.stats()["in_flight"] == 0


def test_what_the_decode_worker_has_is_not_moved_again() -> None:
    calls = [call(0, 60, 5), call(1, 100, 5, ref=0, keep_blocks=15, new_blocks=10, deps=(0,))]
    first, second = Bed([Session("a", 4, calls)]).run().records
    assert second.decode_hit_tokens == 60 and second.transfer_tokens == 40
    assert second.transfer_bytes == 40 * BYTES_PER_TOKEN
    assert second.gpu_tokens == 60, "the prefill worker had it too"
    assert first.transfer_bytes == 60 * BYTES_PER_TOKEN


def test_two_transfers_share_the_prefill_workers_nic() -> None:
    sessions = [Session(name, 4, [call(0, 32, 2)]) for name in "ab"]
    bed = Bed(sessions, decode=2)
    records = bed.run().records
    assert {r.endpoint for r in records} == {1, 2}
    alone = 32 * BYTES_PER_TOKEN * 1_000_000_000 // WIRE
    for record in records:  # both prompts end in one step, so both transfers begin together
        assert record.transfer_end_ns - record.transfer_start_ns == 2 * alone  # type: ignore[operator]


def test_prefill_blocks_stay_until_they_have_been_read() -> None:
    bed = Bed(one(60, 2))
    simulation = bed.simulation
    pool = simulation.groups[0].node.ranks[0].pool
    held: list[tuple[int, int]] = []
    while bed.clock.next_ns is not None:
        bed.clock.step()
        held.append((bed.clock.now_ns, pool.blocks - pool.free))
    (record,) = simulation.records
    assert record.transfer_end_ns is not None and record.prefill_done_ns is not None
    during = [n for t, n in held if record.prefill_done_ns <= t < record.transfer_end_ns]
    assert during and set(during) == {15}
    assert held[-1][1] == 0


def test_a_failed_transfer_ends_the_call_or_is_computed_anew() -> None:
    (failed,) = Bed(one(), kv={"failure_share": 1.0}).run().records
    assert failed.outcome == FAILED and "KV load" in failed.message
    bed = Bed(one(), kv={"failure_share": 1.0, "load_failure_policy": "recompute"})
    (record,) = bed.run().records
    assert record.outcome == COMPLETED and bed.kv.totals.failed == 1
    prompt = step_ns([RankBatch(((60, 0),), 0, 0)])
    assert record.first_token_ns == record.transfer_end_ns + prompt  # type: ignore[operator]
    assert bed.kv.totals.expired == 1, "nobody tells the prefill worker: its lease runs out"
    assert bed.clock.now_ns >= 30_000 * MS


def busy_decode() -> list[Session]:
    """A call that fills the decode worker for long, and one whose KV has to wait for it."""
    return [Session("a", 4, [call(0, 60, 300)]), Session("b", 4, [call(0, 480, 2)])]


FULL: dict[str, Any] = {"decode_blocks": 130, "blocks": 800, "starts_ns": [0, 0]}


def test_a_lease_is_renewed_by_a_decode_worker_that_has_no_room_yet() -> None:
    bed = Bed(busy_decode(), kv={"lease_s": 0.0005}, **FULL)
    assert [r.outcome for r in bed.run().records] == [COMPLETED, COMPLETED]
    assert bed.kv.totals.expired == 0


def test_a_lease_that_runs_out_loses_the_kv() -> None:
    bed = Bed(busy_decode(), kv={"lease_s": 0.0005, "heartbeat": False}, **FULL)
    a, b = sorted(bed.run().records, key=lambda r: r.session)
    assert a.outcome == COMPLETED
    assert b.outcome == FAILED and bed.kv.totals.expired == 1


@pytest.mark.parametrize("timeout_us", [1, 6, 9, 20, 40, 70, 90, 200])
def test_a_client_that_gives_up_leaves_nothing_behind(timeout_us: int) -> None:
    bed = Bed(one(60, 600), client_timeout_ns=timeout_us * 1000)
    (record,) = bed.run().records
    assert record.outcome == TIMED_OUT
    assert bed.router.stats()["in_flight"] == 0 and bed.kv.open == {}
    assert bed.clock.now_ns < 30_000 * MS, "nobody waits for a lease"


@pytest.mark.parametrize("timeout_us", range(30, 160, 10))
@pytest.mark.parametrize("protocol", ["nixlv2", "sglang"])
def test_a_client_that_gives_up_between_two_steps_leaves_nothing_behind(protocol: str, timeout_us: int) -> None:
    bed = Bed(busy_decode(), kv={"protocol": protocol}, client_timeout_ns=timeout_us * 1000, **FULL)
    assert {r.outcome for r in bed.run().records} == {TIMED_OUT}
    assert bed.kv.open == {} and bed.clock.now_ns < 30_000 * MS


@pytest.mark.parametrize("protocol", ["sglang", "offloading"])
def test_concurrent_protocols_allocate_first_and_send_when_the_prompt_is_done(protocol: str) -> None:
    bed = Bed(one(60, 3), kv={"protocol": protocol})
    (record,) = bed.run().records
    assert record.outcome == COMPLETED
    assert record.transfer_start_ns == record.prefill_done_ns
    decode = bed.simulation.groups[1].node
    assert decode.totals[0].scheduled_tokens == 3


def test_layer_by_layer_moves_while_the_prompt_is_computed() -> None:
    prefill = step_ns([RankBatch(((60, 0),), 0, 0)])
    wire = 60 * BYTES_PER_TOKEN * 1_000_000_000 // WIRE
    (whole,) = Bed(one(60, 3), kv={"protocol": "sglang"}, layers=10).run().records
    bed = Bed(one(60, 3), kv={"protocol": "sglang", "mode": "layerwise"}, layers=10)
    (layered,) = bed.run().records
    assert whole.transfer_end_ns == prefill + wire
    assert layered.transfer_start_ns == 0, "the decode worker had blocks at once"
    # the wire is slower than the prompt, so it is busy from the first layer on
    assert layered.transfer_end_ns == wire
    assert layered.transfer_bytes == bed.fabric.totals.finished_bytes == 60 * BYTES_PER_TOKEN


def test_layer_by_layer_never_ends_before_the_last_layer_is_computed() -> None:
    bed = Bed(one(240, 3), kv={"protocol": "sglang", "mode": "layerwise"}, layers=4, budget=16)
    bed.fabric._capacity.update(dict.fromkeys(bed.fabric._capacity, 1000 * WIRE))
    (record,) = bed.run().records
    assert record.transfer_end_ns is not None and record.prefill_done_ns is not None
    last_layer = 16 * BYTES_PER_TOKEN // 4 / 1000
    assert record.prefill_done_ns < record.transfer_end_ns <= record.prefill_done_ns + last_layer + 2


def many(seed: int, count: int = 8) -> list[Session]:
    rng = random.Random(seed)
    sessions = []
    for s in range(count):
        calls = []
        for i in range(rng.randrange(1, 5)):
            ref = rng.randrange(-1, i) if i else -1
            keep = rng.randrange(0, calls[ref].blocks + 1) if ref >= 0 else 0
            new = rng.randrange(0 if keep else 1, 40)
            tokens = (keep + new) * 4 + rng.randrange(4)
            shared: dict[str, Any] = {"ref": ref if keep else -1, "keep_blocks": keep, "new_blocks": new}
            calls.append(call(i, tokens, rng.randrange(1, 40), deps=(i - 1,) if i else (), gap_s=0.0001, **shared))
        sessions.append(Session(f"s{s}", 4, calls))
    return sessions


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from([120, 400]),
    st.booleans(),
    st.sampled_from([("nixlv2", "whole"), ("sglang", "whole"), ("offloading", "layerwise"), ("sglang", "layerwise")]),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([None, 400_000]),
)
def test_whatever_happens_all_calls_end_blocks_return_and_bytes_add_up(
    seed: int, blocks: int, is_async: bool, way: tuple[str, str], failures: float, timeout_ns: int | None
) -> None:
    wanted = {"protocol": way[0], "mode": way[1], "failure_share": failures, "lease_s": 0.01}

    def run(leaping: bool) -> Bed:
        bed = Bed(
            many(seed),
            2,
            2,
            starts_ns=[i * 20_000 for i in range(8)],
            blocks=blocks,
            is_async=is_async,
            kv={**wanted, "load_failure_policy": "recompute"},
            layers=3,
            client_timeout_ns=timeout_ns,
            leaping=leaping,
        )
        bed.run()
        return bed

    bed = run(True)
    records = bed.simulation.records
    assert {r.outcome for r in records} <= {COMPLETED, TIMED_OUT}
    for r in records:
        if r.outcome == COMPLETED:
            assert r.gpu_tokens + r.computed_tokens == r.input_tokens
            assert r.transfer_tokens is not None and r.decode_hit_tokens is not None
            assert r.transfer_tokens + r.decode_hit_tokens == r.input_tokens or r.preemptions
            times = [r.routed_ns, r.admitted_ns, r.prefill_done_ns, r.transfer_end_ns, r.first_token_ns, r.finish_ns]
            assert None not in times and times == sorted(times)  # type: ignore[type-var]
            assert r.transfer_start_ns <= r.transfer_end_ns <= r.decode_admitted_ns  # type: ignore[operator]
    assert bed.kv.totals.bytes == bed.fabric.totals.finished_bytes
    assert bed.kv.open == {}
    assert bed.router.stats()["in_flight"] == 0
    assert digest(run(False).simulation.records) == digest(records)


def test_the_parts_of_ttft_sum_to_it() -> None:
    bed = Bed(many(3), 2, 2, starts_ns=[i * 20_000 for i in range(8)], router_latency_ns=10_000)
    done = split_calls(to_frame(bed.run().records))
    assert len(done) == len(bed.simulation.records)
    parts = sum(done.select(part.alias("v"))["v"] for part in TTFT_PARTS.values())
    assert (parts == done["first_token_ns"] - done["arrival_ns"]).all()
    assert all((done.select(part.alias("v"))["v"] >= 0).all() for part in TTFT_PARTS.values())


def test_runs_hold_the_invariants_and_a_broken_record_is_found() -> None:
    frame = to_frame(Bed(many(5), 2, 2).run().records)
    assert violations(frame, len(frame), drained=True) == []
    late = frame.with_columns(pl.col("decode_admitted_ns") - 10_000_000)
    assert any(line.startswith("INV-2: decode_admitted_ns before") for line in violations(late))
    more = frame.with_columns(pl.col("transfer_tokens") + 1000)
    assert any(line.startswith("INV-4: more tokens moved") for line in violations(more))


def test_gaps_between_tokens_are_the_durations_of_steps() -> None:
    bed = Bed(one(60, 10), leaping=False)
    bed.run()
    gaps = bed.simulation.groups[1].node.totals[0]
    durations = [step_ns([RankBatch((), 1, 60 + i)]) for i in range(1, 10)]
    assert gaps.decode_steps == 9 and gaps.decode_ns == sum(durations) and gaps.mixed_steps == 0
    median_s = gap_percentile_s(gaps.gaps, 50)
    assert median_s is not None and abs(median_s * 1e9 / sorted(durations)[4] - 1) < 0.01
    assert gap_percentile_s({}, 50) is None


@pytest.mark.parametrize(
    ("longest", "decode_longest", "outcome"),
    [(60, 1000, REJECTED), (61, 1000, COMPLETED), (1000, 69, REJECTED), (1000, 70, COMPLETED), (69, 69, REJECTED)],
)
def test_each_pool_has_its_own_limit_of_length(longest: int, decode_longest: int, outcome: str) -> None:
    """60 tokens of prompt and 10 of output: the prefill request asks for one token, the decode request for all."""
    bed = Bed(one(60, 10), longest=longest, decode_longest=decode_longest)
    (record,) = bed.run().records
    assert record.outcome == outcome
    if outcome == REJECTED:
        assert "tokens exceed" in record.message
    assert bed.router.stats()["in_flight"] == 0
