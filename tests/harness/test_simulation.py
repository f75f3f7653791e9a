"""The whole path with a baseline in place of the router: conservation, times, time-outs, leaps, determinism."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_workers.engine.events import KvEvent
from fake_workers.engine.gauges import Gauges
from fake_workers.engine.scheduler import SchedulerConfig
from harness.errors import NoProgressError
from harness.front_end import FrontEndConfig, FrontEndTimes
from harness.results.records import COMPLETED, FAILED, IN_FLIGHT, REJECTED, TIMED_OUT, CallRecord, digest
from harness.router.base import Decision, Endpoint, RouteRequest
from harness.router.baselines import BASELINES, BaselineRouter
from harness.simulation import Simulation, SimulationConfig
from harness.trace.model import Call, Session
from tests.harness.simple_price import SimplePrice

MS = 1_000_000


def _groups(groups: int, ranks: int) -> list[list[Endpoint]]:
    return [
        [Endpoint(g * ranks + r, f"w{g * ranks + r}", f"127.0.0.{g * ranks + r + 1}", 8000, g) for r in range(ranks)]
        for g in range(groups)
    ]


def _config(**changes: Any) -> SimulationConfig:
    engine = SchedulerConfig(
        num_gpu_blocks=changes.pop("blocks", 400),
        block_tokens=4,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        max_model_len=changes.pop("max_model_len", 1000),
        async_scheduling=changes.pop("async_scheduling", True),
    )
    interval_ns = changes.pop("scrape_interval_ns", 50 * MS)
    return SimulationConfig(engine, "m", scrape_interval_ns=interval_ns, **changes)


def _sessions(seed: int, count: int = 6) -> list[Session]:
    rng = random.Random(seed)
    sessions = []
    for s in range(count):
        calls: list[Call] = []
        for i in range(rng.randrange(1, 7)):
            ref = rng.randrange(-1, i) if i else -1
            keep = rng.randrange(0, calls[ref].blocks + 1) if ref >= 0 else 0
            new = rng.randrange(0 if keep else 1, 40)
            outputs = rng.randrange(1, 60)
            deps = (i - 1,) if i else ()
            tokens = (keep + new) * 4 + rng.randrange(4)
            gap_s = rng.choice([0.0, 0.0002, 0.003])
            calls.append(Call(i, 0.0, None, "main", tokens, outputs, ref if keep else -1, keep, new, deps, None, gap_s))
        sessions.append(Session(f"s{s}", 4, calls))
    return sessions


class Recorder(BaselineRouter):
    """A baseline that reads everything, as a real router does, and keeps what it was told."""

    reads_kv_events = True
    reads_gauges = True

    def __init__(self, endpoints: list[Endpoint]) -> None:
        super().__init__("random", endpoints, 1)
        self.told: list[Any] = []
        self.ended: list[str] = []

    def push_gauges(self, updates: dict[int, Gauges]) -> None:
        self.told.append(dict(updates))

    def publish_kv_events(self, events: dict[int, list[KvEvent]]) -> None:
        self.told.append({e: list(news) for e, news in events.items()})

    def decide(self, request: RouteRequest) -> Decision:
        self.told.append(request.request_id)
        return super().decide(request)


def _run(sessions: list[Session], router: Any = None, ranks: int = 2, **changes: Any) -> Simulation:
    groups = _groups(2, ranks)
    router = router or BaselineRouter("least_loaded", [e for g in groups for e in g], 1)
    starts = [i * MS // 2 for i in range(len(sessions))]
    simulation = Simulation(_config(**changes), SimplePrice(), groups, router, sessions, starts)
    simulation.run()
    return simulation


def _one(input_tokens: int, output_tokens: int) -> list[Session]:
    blocks = input_tokens // 4
    return [Session("a", 4, [Call(0, 0.0, None, "main", input_tokens, output_tokens, -1, 0, blocks)])]


@pytest.mark.parametrize("kind", BASELINES)
def test_every_call_ends_once_and_sources_add_up(kind: str) -> None:
    sessions = _sessions(1)
    groups = _groups(2, 2)
    router = BaselineRouter(kind, [e for g in groups for e in g], 1)
    simulation = _run(sessions, router)
    assert len(simulation.records) == sum(len(s.calls) for s in sessions)
    for record in simulation.records:
        assert record.outcome == COMPLETED
        assert record.gpu_tokens + record.computed_tokens == record.input_tokens
        assert record.output_tokens == record.requested_output_tokens
        times = [record.arrival_ns, record.routed_ns, record.admitted_ns, record.first_token_ns, record.finish_ns]
        assert None not in times and times == sorted(times)  # type: ignore[type-var]
    assert router.stats()["in_flight"] == 0


FRONT_END = FrontEndTimes.of(
    FrontEndConfig(
        client_ms=0.01, router_ms=0.02, router_tokenise_us_per_token=0.05, router_tokenise_workers=1,
        api_server_ms=0.03, tokenise_us_per_token=0.1, tokenise_workers=1, engine_input_ms=0.01,
        stream_us_per_token=4, output_ms=0.02,
    )
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.booleans(), st.sampled_from([60, 400]), st.sampled_from([None, FRONT_END]))
def test_leaping_gives_the_records_and_the_news_of_stepping(
    seed: int, is_async: bool, blocks: int, front_end: FrontEndTimes | None
) -> None:
    sessions = _sessions(seed)
    seen = []
    for leaping in (True, False):
        router = Recorder([e for g in _groups(2, 2) for e in g])
        simulation = _run(
            sessions, router, leaping=leaping, async_scheduling=is_async, blocks=blocks, max_model_len=230,
            client_timeout_ns=3 * MS, front_end=front_end,
        )  # fmt: skip
        seen.append((digest(simulation.records), router.told, simulation.timeline.finish(10**9).busy_by_node_ns()))
    assert seen[0][0] == seen[1][0]
    assert seen[0][1] == seen[1][1]
    assert seen[0][2] == seen[1][2]


def test_the_front_end_moves_what_the_client_sees_and_nothing_else() -> None:
    parts = {"client_ms": 1, "gateway_ms": 2, "router_ms": 3, "api_server_ms": 4, "tokenise_us_per_token": 5,
             "tokenise_workers": 1, "engine_input_ms": 6, "stream_us_per_token": 7, "output_ms": 8}  # fmt: skip
    times = FrontEndTimes.of(FrontEndConfig.model_validate(parts))
    plain, moved = _run(_one(400, 50)).records[0], _run(_one(400, 50), front_end=times).records[0]
    way_in = (1 + 2 + 3 + 4 + 6) * MS + 400 * 5000
    way_out = 8 * MS + 7000
    assert moved.arrival_ns == plain.arrival_ns
    assert moved.routed_ns == plain.routed_ns + 6 * MS  # type: ignore[operator]
    assert moved.admitted_ns == plain.admitted_ns + way_in  # type: ignore[operator]
    assert moved.first_token_ns == plain.first_token_ns + way_in + way_out  # type: ignore[operator]
    assert moved.finish_ns == plain.finish_ns + way_in + way_out  # type: ignore[operator]


def test_the_front_end_delays_the_calls_that_wait_for_an_answer() -> None:
    calls = [Call(0, 0.0, None, "main", 40, 5, -1, 0, 10), Call(1, 0.0, None, "main", 40, 5, 0, 10, 0, (0,), None, 0.0)]
    first, second = _run([Session("a", 4, calls)], front_end=FRONT_END).records
    assert first.finish_ns == second.arrival_ns


def test_with_a_front_end_every_call_ends_once() -> None:
    for timeout_ns in (None, 3 * MS):
        router = Recorder([e for g in _groups(2, 2) for e in g])
        simulation = _run(_sessions(1), router, front_end=FRONT_END, client_timeout_ns=timeout_ns)
        assert len(simulation.records) == sum(len(s.calls) for s in _sessions(1))
        for record in simulation.records:
            assert record.outcome in (COMPLETED, TIMED_OUT)
            if record.outcome == COMPLETED:
                times = [
                    record.arrival_ns,
                    record.routed_ns,
                    record.admitted_ns,
                    record.first_token_ns,
                    record.finish_ns,
                ]
                assert None not in times and times == sorted(times)  # type: ignore[type-var]
        assert router.stats()["in_flight"] == 0 and not simulation.leftovers()


def test_equal_seeds_give_equal_digests_and_others_do_not() -> None:
    digests = {seed: digest(_run(_sessions(seed)).records) for seed in (1, 2)}
    assert digests[1] == digest(_run(_sessions(1)).records)
    assert digests[1] != digests[2]


def test_a_call_past_the_clients_patience_is_cancelled_everywhere() -> None:
    sessions = _sessions(3) + _one(400, 500)
    router = Recorder([e for g in _groups(2, 2) for e in g])
    simulation = _run(sessions, router, client_timeout_ns=2 * MS)
    outcomes = {record.outcome for record in simulation.records}
    assert outcomes == {COMPLETED, TIMED_OUT}
    for record in simulation.records:
        assert record.finish_ns is not None
        assert record.finish_ns - record.arrival_ns <= 2 * MS
        if record.outcome == TIMED_OUT:
            assert record.finish_ns - record.arrival_ns == 2 * MS
    assert router.stats()["in_flight"] == 0
    pools = [rank.pool for group in simulation.groups for rank in group.node.ranks]
    assert all(pool.free == pool.blocks for pool in pools), "a cancelled call still holds blocks"


def test_what_vllm_refuses_is_rejected_and_the_session_goes_on() -> None:
    calls = [
        Call(0, 0.0, None, "main", 2000, 10, -1, 0, 500),
        Call(1, 0.0, None, "main", 0, 10, -1, 0, 0, (0,)),
        Call(2, 0.0, None, "main", 40, 0, -1, 0, 10, (1,)),
    ]
    records = _run([Session("a", 4, calls)]).records
    assert [r.outcome for r in records] == [REJECTED, REJECTED, COMPLETED]
    assert "exceed 1000" in records[0].message and records[1].message == "empty prompt"
    assert records[2].output_tokens == 1, "an engine generates at least one token"


def test_a_refusal_of_the_router_is_a_failure() -> None:
    class Full(Recorder):
        def decide(self, request: RouteRequest) -> Decision:
            return Decision(None, status=429, message="no capacity")

    record = _run(_one(40, 5), Full([e for g in _groups(2, 2) for e in g])).records[0]
    assert (record.outcome, record.router_status, record.message) == (FAILED, 429, "router: 429 no capacity")


def test_no_sessions_is_a_run_of_nothing() -> None:
    simulation = _run([])
    assert simulation.records == [] and simulation.clock.now_ns == 0


def test_a_run_can_be_ended_at_a_given_time() -> None:
    simulation = _run(_one(400, 500), until_ns=MS)
    record = simulation.records[0]
    assert record.outcome == IN_FLIGHT and record.finish_ns is None
    assert 0 < record.output_tokens < 500
    assert simulation.clock.now_ns == MS


def test_a_hit_is_seen_in_the_record_and_in_the_truth() -> None:
    calls = [
        Call(0, 0.0, None, "main", 400, 5, -1, 0, 100),
        Call(1, 0.0, None, "main", 440, 5, 0, 100, 10, (0,), None, 0.01),
    ]
    groups = _groups(1, 1)
    simulation = Simulation(
        _config(), SimplePrice(), groups, BaselineRouter("round_robin", groups[0], 1), [Session("a", 4, calls)], [0]
    )
    simulation.run()
    first, second = simulation.records
    assert (first.gpu_tokens, first.held_share) == (0, 0.0)
    assert second.gpu_tokens == 400
    assert second.held_share == pytest.approx(100 / 110)


def test_the_router_sees_gauges_as_old_as_the_scrape_tick() -> None:
    """Before the first tick after a step ended, the router still believes that the worker is idle."""
    calls = [
        Call(0, 0.0, None, "main", 40, 400, -1, 0, 10),
        Call(1, 0.0, None, "main", 40, 5, -1, 0, 10, (), None, 0.0004),
        Call(2, 0.0, None, "main", 40, 5, -1, 0, 10, (), None, 0.0013),
    ]
    groups = _groups(1, 1)
    router = Recorder(groups[0])
    config = _config(scrape_interval_ns=MS)
    Simulation(config, SimplePrice(), groups, router, [Session("a", 4, calls)], [0]).run()
    told = [t if isinstance(t, str) else t[0] for t in router.told]
    gauges = [t for t in told if isinstance(t, str | Gauges)]
    assert gauges[:2] == ["a/0", "a/1"], "0.4 ms into the first call no scrape has seen it yet"
    assert isinstance(gauges[2], Gauges) and gauges[2].running == 1
    assert gauges[3] == "a/2"


def test_open_calls_without_a_future_end_the_run_with_a_message() -> None:
    """A request that can never be scheduled: the engine says so instead of spinning."""
    groups = _groups(1, 1)
    engine = SchedulerConfig(num_gpu_blocks=10, block_tokens=4, max_model_len=1000)
    config = SimulationConfig(engine, "m", 50 * MS)
    router = BaselineRouter("random", groups[0], 1)
    simulation = Simulation(config, SimplePrice(), groups, router, _one(400, 5), [0])
    with pytest.raises(NoProgressError, match="1 waiting"):
        simulation.run()
    assert isinstance(simulation.records[0], CallRecord)


def test_calls_over_the_longest_length_are_left_out_and_the_session_goes_on() -> None:
    calls = [
        Call(0, 0.0, None, "main", 400, 10, -1, 0, 100),
        Call(1, 0.0, None, "main", 40, 10, -1, 0, 10, (0,), None, 0.001),
    ]
    simulation = _run([Session("a", 4, calls)], max_call_tokens=100)
    assert [r.call_id for r in simulation.records] == ["a/1"]
    assert simulation.counts.arrived == 1
    assert simulation.records[0].arrival_ns == MS


def test_calls_in_flight_at_the_end_are_recorded_alike_leaping_or_not() -> None:
    digests = set()
    for leaping in (True, False):
        router = Recorder([e for g in _groups(2, 2) for e in g])
        simulation = _run(_sessions(5) + _one(400, 500), router, until_ns=MS, leaping=leaping)
        assert any(record.outcome == IN_FLIGHT for record in simulation.records)
        digests.add(digest(simulation.records))
    assert len(digests) == 1
