"""What stands around the GPU: when calls reach the router, the engine and the client again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from harness.front_end import MEASURED, FrontEnd, FrontEndConfig, FrontEndTimes, scheduler_ns


def front_end(endpoints: int = 2, **parts: float) -> FrontEnd:
    times = FrontEndTimes.of(FrontEndConfig.model_validate(parts))
    assert times is not None
    return FrontEnd(times, endpoints)


def test_nothing_given_is_nothing_added() -> None:
    assert FrontEndTimes.of(FrontEndConfig()) is None
    assert FrontEndTimes.of(FrontEndConfig(tokenise_workers=3)) is None


def test_every_part_is_a_field_with_a_source() -> None:
    assert set(MEASURED) == set(FrontEndConfig.model_fields) - {"parts"}
    for name, part in MEASURED.items():
        assert part.source
        assert FrontEndConfig(parts="measured").value(name) == part.value
        assert FrontEndConfig(parts="measured", **{name: 7}).value(name) == 7.0
        assert FrontEndConfig().value(name) == 0.0


def test_a_part_below_zero_or_unknown_is_refused() -> None:
    for wrong in ({"client_ms": -1}, {"tokenise_us_per_token": float("inf")}, {"coffee_ms": 1}, {"parts": "all"}):
        with pytest.raises(ValidationError):
            FrontEndConfig.model_validate(wrong)


def test_the_way_in_is_the_sum_of_its_parts() -> None:
    way = front_end(client_ms=1, gateway_ms=2, router_ms=3, router_us_per_token=1, router_tokenise_us_per_token=2)
    assert way.reaches_router_ns(1000, 5000) == 1000 + 6_000_000 + 5000 * 3000
    way = front_end(api_server_ms=1, tokenise_us_per_token=2, engine_input_ms=0.5, engine_input_us_per_token=0.25)
    assert way.reaches_engine_ns(0, 0, 4000) == 1_500_000 + 4000 * 2250


def test_one_tokenizer_thread_per_endpoint_makes_calls_wait() -> None:
    way = front_end(tokenise_us_per_token=10, tokenise_workers=1)
    assert [way.reaches_engine_ns(0, 0, 1000) for _ in range(3)] == [10_000_000, 20_000_000, 30_000_000]
    assert way.reaches_engine_ns(0, 1, 1000) == 10_000_000  # the other endpoint has its own
    assert way.reaches_engine_ns(100_000_000, 0, 1000) == 110_000_000  # idle again
    free = front_end(tokenise_us_per_token=10)
    assert [free.reaches_engine_ns(0, 0, 1000) for _ in range(3)] == [10_000_000] * 3


def test_the_router_tokenizer_is_shared_by_all() -> None:
    way = front_end(router_tokenise_us_per_token=10, router_tokenise_workers=2)
    assert [way.reaches_router_ns(0, 1000) for _ in range(4)] == [10_000_000, 10_000_000, 20_000_000, 20_000_000]


def test_a_token_waits_for_half_of_the_steps_other_chunks() -> None:
    way = front_end(output_ms=1, detokenise_us_per_token=1, stream_us_per_token=19)
    assert way.reaches_client_ns(0, 1) == 1_020_000
    assert way.reaches_client_ns(0, 99) == 1_000_000 + 50 * 20_000


@given(
    st.lists(st.tuples(st.integers(0, 10**9), st.integers(1, 10**6)), min_size=1, max_size=30),
    st.integers(1, 4),
)
def test_a_pool_never_works_on_more_jobs_than_it_has_workers(jobs: list[tuple[int, int]], workers: int) -> None:
    way = front_end(1, tokenise_us_per_token=1, tokenise_workers=workers)
    spans = []
    for at, tokens in sorted(jobs):
        done = way.reaches_engine_ns(at, 0, tokens)
        spans.append((done - tokens * 1000, done))
        assert done >= at + tokens * 1000
    for begin, _ in spans:
        assert sum(b <= begin < e for b, e in spans) <= workers


def test_the_scheduler_costs_steps_only_where_it_does_not_overlap() -> None:
    assert scheduler_ns(FrontEndConfig(parts="measured"), async_scheduling=True) == (0, 0)
    assert scheduler_ns(FrontEndConfig(parts="measured"), async_scheduling=False) == (11_000, 17_000)
    assert scheduler_ns(FrontEndConfig(), async_scheduling=False) == (0, 0)


def test_facts_name_the_source_or_the_user() -> None:
    facts = FrontEndConfig(parts="measured", gateway_ms=3).facts()
    assert facts["gateway ms"] == "3 (set by the experiment)"
    assert "vLLM" in facts["api server ms"]
    assert "all parts" in FrontEndConfig().facts()
