"""One rule of the connector after the other, on a node whose steps take a nanosecond each."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from fake_workers.engine.connected import ConnectedRank
from fake_workers.engine.connector import ConnectorOptions
from fake_workers.engine.events import Stored
from fake_workers.engine.node import EngineStuckError, Node, Outcome
from fake_workers.engine.request import EngineRequest
from fake_workers.engine.scheduler import SchedulerConfig
from tests.engine.timed import RandomPrice
from tests.engine.workload import UnitPrice

CONFIG = SchedulerConfig(num_gpu_blocks=101, block_tokens=4, max_model_len=300, async_scheduling=False)


@dataclass
class Hand:
    """A connector that answers as the test says: tokens of the prompt found below the engine, None for later."""

    reach: dict[str, int | None] = field(default_factory=dict)
    keep: set[str] = field(default_factory=set)
    """Requests whose blocks are still read after their end."""
    loads: list[tuple[str, int, int]] = field(default_factory=list)
    saves: list[tuple[str, int]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    def lookup(self, rank: int, request: EngineRequest, local_hit_tokens: int) -> tuple[int, bool] | None:
        self.asked.append(request.request_id)
        reach = self.reach.get(request.request_id, 0)
        return None if reach is None else (max(0, reach - local_hit_tokens), True)

    def start_load(self, rank: int, request: EngineRequest, local_hit_tokens: int, external_tokens: int) -> None:
        if external_tokens:
            self.loads.append((request.request_id, local_hit_tokens, external_tokens))

    def save(self, rank: int, request: EngineRequest, computed_tokens: int) -> None:
        self.saves.append((request.request_id, computed_tokens))

    def preempted(self, rank: int, request: EngineRequest) -> None:
        self.ended.append(f"{request.request_id} preempted")

    def finish(self, rank: int, request: EngineRequest) -> bool:
        self.ended.append(request.request_id)
        return request.request_id in self.keep


def request(index: int, prompt: int, outputs: int) -> EngineRequest:
    return EngineRequest(f"r{index}", index, [(index, 0, prompt // 4)] if prompt >= 4 else [], prompt, outputs, 0)


def node(hand: Hand, policy: str = "fail", ranks: int = 1, **options: object) -> Node:
    config = replace(CONFIG, **options)  # type: ignore[arg-type]
    return Node(
        UnitPrice(),
        config,
        ranks,
        leaping=False,
        keep_events=True,
        connector=hand,
        connector_options=ConnectorOptions(kv_load_failure_policy=policy),
    )


def first_tokens(outcomes: list[Outcome]) -> dict[str, int]:
    return {o.request.request_id: o.t_ns for o in outcomes if o.first}


def free(engine: Node) -> int:
    return engine.ranks[0].pool.free


@pytest.mark.parametrize("is_async", [False, True])
def test_a_load_holds_its_blocks_and_its_request(is_async: bool) -> None:
    hand = Hand({"r0": 32})
    engine = node(hand, async_scheduling=is_async)
    held, other = request(0, 40, 3), request(1, 8, 100)
    engine.submit(0, held)
    engine.submit(0, other)
    assert first_tokens(engine.advance(20)) == {"r1": 1}, "overtaken"
    assert hand.loads == [("r0", 0, 32)]
    stored = [e for e in engine.take_events(0) if isinstance(e, Stored)]
    assert {e.origin for e in stored} == {1}, "what is being loaded has no identity yet"
    assert held.blocks == 8 and free(engine) == 100 - 8 - other.blocks
    gauges = engine.gauges(0, 20)
    assert (gauges.running, gauges.waiting, engine.connected[0].deferred_count) == (1, 1, 1)
    engine.load_ended(0, held, by_tier={"dram": 32})
    seen = engine.advance(30)
    step = 3 if is_async else 2
    assert first_tokens(seen) == {"r0": 20 + step}
    stored = [e for e in engine.take_events(0) if isinstance(e, Stored) and e.origin == 0]
    assert stored == [Stored(22, 0, 0, 8, None), Stored(22, 0, 8, 2, (0, 7))], "in the step that lets it in"
    assert (held.hit_tokens, held.external_tokens, held.restore_ns) == (0, 32, 20)
    assert held.external_by_tier == {"dram": 32}


def test_a_full_hit_computes_one_token() -> None:
    hand = Hand({"r0": 40})
    seen: list[tuple[int, ...]] = []
    engine = Node(UnitPrice(), CONFIG, leaping=False, connector=hand, observer=lambda *spans: seen.append(spans))
    whole = request(0, 40, 2)
    engine.submit(0, whole)
    engine.advance(5)
    engine.load_ended(0, whole)
    engine.advance(20)
    assert whole.finish_ns == 7 and engine.totals[0].scheduled_tokens == 2
    assert [outputs for *_, outputs in seen] == [1, 1]


def test_the_local_hit_comes_first_and_only_the_rest_is_loaded() -> None:
    hand = Hand()
    engine = node(hand)
    engine.submit(0, request(0, 20, 1))
    engine.advance(10)
    later = EngineRequest("r1", 1, [(0, 0, 5), (1, 5, 10)], 40, 1, 10)
    hand.reach["r1"] = 36
    engine.submit(0, later)
    engine.advance(10)
    assert hand.loads == [("r1", 20, 16)]
    engine.load_ended(0, later)
    engine.advance(20)
    assert (later.hit_tokens, later.external_tokens, later.finish_ns) == (20, 16, 11)


@pytest.mark.parametrize("is_async", [False, True])
def test_an_idle_node_with_a_load_sleeps(is_async: bool) -> None:
    hand = Hand({"r0": 32})
    engine = node(hand, async_scheduling=is_async)
    held = request(0, 40, 1)
    engine.submit(0, held)
    engine.advance(0)
    before = engine.boundaries_taken
    assert engine.wake_ns() is None and not engine.busy and engine.held
    assert engine.gauges(0, 0).kv_usage == pytest.approx(8 / 100)
    assert engine.advance(1_000_000) == [] and engine.boundaries_taken == before
    engine.load_ended(0, held)
    assert engine.wake_ns() == 1_000_000
    assert first_tokens(engine.advance(2_000_000)) == {"r0": 1_000_001}
    assert not engine.held and held.restore_ns == 1_000_000


def test_a_late_answer_lets_others_pass_and_keeps_its_place() -> None:
    hand = Hand({"r0": None})
    engine = node(hand, max_num_seqs=2)
    engine.submit(0, request(0, 40, 1))
    engine.submit(0, request(1, 8, 10))
    engine.submit(0, request(2, 8, 10))
    engine.submit(0, request(3, 8, 10))
    assert first_tokens(engine.advance(3)) == {"r1": 1, "r2": 1}
    assert [r.request_id for r in engine.ranks[0].waiting] == ["r0", "r3"]
    hand.reach["r0"] = 0
    engine.lookup_ready()
    assert first_tokens(engine.advance(13)) == {"r0": 11, "r3": 11}


def test_an_idle_node_sleeps_until_a_lookup_is_answered() -> None:
    hand = Hand({"r0": None})
    engine = node(hand)
    engine.submit(0, request(0, 40, 1))
    assert engine.advance(100) == [] and engine.wake_ns() is None
    asked = len(hand.asked)
    engine.advance(200)
    assert len(hand.asked) == asked
    hand.reach["r0"] = 0
    engine.lookup_ready()
    assert first_tokens(engine.advance(300)) == {"r0": 201}


@pytest.mark.parametrize("is_async", [False, True])
def test_an_aborted_load_keeps_its_blocks_until_it_has_ended(is_async: bool) -> None:
    hand = Hand({"r0": 32})
    engine = node(hand, async_scheduling=is_async)
    gone = request(0, 40, 3)
    engine.submit(0, gone)
    engine.advance(5)
    engine.abort(0, gone)
    engine.advance(6)
    assert gone.finished and free(engine) == 92 and engine.held and hand.ended == ["r0"]
    assert engine.gauges(0, 6).waiting == 0
    engine.load_ended(0, gone)
    engine.advance(7)
    assert free(engine) == 100 and not engine.held and not engine.busy


def test_a_failed_load_is_an_error() -> None:
    hand = Hand({"r0": 32})
    engine = node(hand)
    lost = request(0, 40, 3)
    engine.submit(0, lost)
    engine.advance(5)
    engine.load_ended(0, lost, 8, failed=True)
    (outcome,) = engine.advance(6)
    assert outcome == Outcome(5, 0, lost, False, True) and lost.failed and lost.finish_ns == 5
    assert free(engine) == 100 and not engine.ranks[0].unfinished


@pytest.mark.parametrize(("arrived", "computed"), [(10, 40 - 8), (None, 40)])
def test_a_failed_load_is_computed(arrived: int | None, computed: int) -> None:
    """Whole blocks before the first one that is missing are kept."""
    hand = Hand({"r0": 32})
    engine = node(hand, policy="recompute")
    half = request(0, 40, 1)
    engine.submit(0, half)
    engine.advance(5)
    hand.reach.clear()
    engine.load_ended(0, half, arrived, failed=True)
    engine.advance(10)
    assert half.finish_ns == 6 and not half.failed and engine.totals[0].scheduled_tokens == computed
    assert half.external_tokens == (arrived or 0)


def test_blocks_that_are_being_saved_come_back_later() -> None:
    hand = Hand(keep={"r0"})
    engine = node(hand)
    done = request(0, 40, 2)
    engine.submit(0, done)
    engine.advance(10)
    assert done.finish_ns == 2 and free(engine) == 89 and engine.held and not engine.busy
    engine.blocks_released(0, done)
    engine.advance(11)
    assert free(engine) == 100


def test_saves_are_told_chunk_by_chunk_and_not_for_decodes() -> None:
    hand = Hand()
    engine = node(hand, max_num_batched_tokens=16)
    engine.submit(0, request(0, 40, 5))
    engine.advance(30)
    assert hand.saves == [("r0", 16), ("r0", 32), ("r0", 40)] and hand.ended == ["r0"]


def test_a_load_does_not_take_what_a_prefill_still_needs() -> None:
    """C4: 10 blocks; r0 has 4 of its 8 when r1 wants 4 for a load."""
    hand = Hand({"r1": 16})
    engine = node(hand, num_gpu_blocks=11, max_num_batched_tokens=17, scheduler_reserve_full_isl=False)
    engine.submit(0, request(0, 31, 1))
    engine.submit(0, request(1, 17, 1))
    engine.advance(1)
    assert hand.loads == []
    engine.advance(2)
    assert hand.loads == [("r1", 0, 16)]


@pytest.mark.parametrize("role", ["kv_both", "kv_producer"])
def test_with_overlapping_steps_a_consumer_frees_one_step_later(role: str) -> None:
    """C8: a request that is aborted while a step that writes to its blocks is under way."""
    engine = Node(
        UnitPrice(),
        replace(CONFIG, async_scheduling=True),
        leaping=False,
        connector=Hand(),
        connector_options=ConnectorOptions(kv_role=role),
    )
    gone = request(0, 40, 50)
    engine.submit(0, gone)
    engine.submit(0, request(1, 8, 50))
    engine.advance(4)
    engine.abort(0, gone)
    engine.advance(5)
    blocks = 100 - 5 + 1
    assert (free(engine) > blocks - 5) == (role == "kv_producer")
    engine.advance(7)
    assert free(engine) > blocks - 5


def test_a_rank_that_only_loads_does_not_slow_its_neighbours_down_or_stop_leaps() -> None:
    hand = Hand({"r0": 32})
    engine = Node(RandomPrice(1), CONFIG, 2, connector=hand)
    held = request(0, 40, 2)
    engine.submit(0, held)
    engine.submit(1, request(1, 8, 200))
    engine.advance(1 << 40)
    assert engine.steps == 200 and engine.boundaries_taken < 10
    engine.load_ended(0, held)
    assert first_tokens(engine.advance(1 << 41)).keys() == {"r0"}


def test_a_request_that_never_fits_is_still_an_error() -> None:
    engine = node(Hand(), num_gpu_blocks=6)
    engine.submit(0, request(0, 40, 1))
    with pytest.raises(EngineStuckError, match="r0"):
        engine.advance(10)


def test_without_a_connector_the_engine_is_the_plain_one() -> None:
    engine = Node(UnitPrice(), CONFIG, leaping=False)
    assert not engine.connected and not engine.held
    assert not any(isinstance(rank, ConnectedRank) for rank in engine.ranks)
    plain = request(0, 8, 1)
    engine.submit(0, plain)
    engine.advance(5)
    assert plain.transfer is None and plain.restore_ns == 0
