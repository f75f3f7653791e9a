"""llm-d's own configs that the study `scorers` compares: in lock-step, alike in every run, and what they do."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from fake_workers.engine.events import Stored
from fake_workers.engine.gauges import Gauges
from harness.router.base import RouteRequest
from harness.router.llmd import LlmdRouter
from harness.studies.ladder import DATA

from .support import call, running

pytestmark = [pytest.mark.router, pytest.mark.timeout(180)]
ENDPOINTS = 8
CONFIGS = [
    ("v0.10.0", "affinity-tokens"),
    ("v0.10.0", "affinity-requests"),
    ("v0.10.0", "affinity-tokens-precise"),
    ("v0.10.0", "match-length"),
    ("v0.10.0", "approximate-nohit"),
    ("v0.10.0", "precise-nohit"),
    ("v0.7.1", "approximate-nohit"),
]


def config(release: str, name: str) -> Path:
    return DATA / "router" / release / f"{name}.yaml"


@pytest.fixture
def programs(request: pytest.FixtureRequest) -> dict[str, Path]:
    """Only what the test's parameters name is asked for, so that a release that is not at hand skips its own cases."""
    release = request.getfixturevalue("release")
    return {release: request.getfixturevalue("router_v071" if release == "v0.7.1" else "router_v0100")}


def play(router: LlmdRouter) -> list[int | None]:
    """120 calls of 20 sessions whose prompts grow, answers overlapping, with events and gauges as engines send them."""
    rng = random.Random(3)
    chosen: list[int | None] = []
    length = dict.fromkeys(range(20), 0)
    flying: list[RouteRequest] = []
    streaming: set[str] = set()
    for _ in range(120):
        session = rng.randrange(20)
        before, length[session] = length[session], length[session] + rng.randrange(4, 60)
        request = call([(session, 0, length[session])], session=f"s{session}")
        decision = router.decide(request)
        chosen.append(decision.endpoint)
        assert decision.endpoint is not None and decision.believed_share is not None
        flying.append(request)
        if rng.random() < 0.7:
            parent = (session, before - 1) if before else None
            if before == 0 or decision.believed_share > 0:
                stored = Stored(0, session, before, length[session] - before, parent)
                router.publish_kv_events({decision.endpoint: [stored]})
        for one in rng.sample(flying, rng.randrange(min(3, len(flying)) + 1)):
            if one.request_id not in streaming:
                streaming.add(one.request_id)
                router.tell_first_token(one.request_id)
            elif rng.random() < 0.6:
                flying.remove(one)
                router.tell_end(one.request_id, one.prompt_tokens, 0, 5)
            elif rng.random() < 0.2:
                flying.remove(one)
                router.abort(one.request_id)
        i = rng.randrange(ENDPOINTS)
        router.push_gauges({i: Gauges(rng.randrange(4), rng.randrange(3), rng.randrange(4) / 4)})
    return chosen


@pytest.mark.parametrize(("release", "name"), CONFIGS)
def test_two_runs_decide_alike(programs: dict[str, Path], release: str, name: str, tmp_path: Path) -> None:
    chosen = []
    for seed in (1, 1, 2):
        path = config(release, name)
        with running((release, programs[release]), path, tmp_path, ENDPOINTS, seed=seed) as router:
            chosen.append(play(router))
            assert router.stats()["fallbacks"] == {} and router.identity()["not_simulated"] == []
    assert chosen[0] == chosen[1]
    assert chosen[0] != chosen[2], "ties, and the order of cold endpoints, follow the seed"
