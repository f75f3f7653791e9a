"""The real router, both releases: what is told to it decides, and nothing else does."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from fake_workers.engine.events import Cleared, KvEvent, Removed, Stored
from fake_workers.engine.gauges import Gauges
from harness.errors import ComponentError, InputError
from harness.router.llmd import LlmdRouter

from .support import BLOCK, CONFIGS, call, complete, make, running

ROOT = Path(__file__).parents[2]
Release = tuple[str, Path]
pytestmark = pytest.mark.timeout(120)


def decide_once(
    router: LlmdRouter, runs: list[tuple[int, int, int]], **more: object
) -> tuple[int | None, float | None]:
    """A decision that is taken back."""
    request = call(runs, **more)  # type: ignore[arg-type]
    decision = router.decide(request)
    router.abort(request.request_id)
    return decision.endpoint, decision.believed_share


def test_gauges_steer(router_release: Release, tmp_path: Path) -> None:
    with running(router_release, "load", tmp_path, 8) as router:
        for k in range(40):
            idle = (3 * k) % 8
            router.push_gauges({i: Gauges(4, 0 if i == idle else 2 + i, 0.5) for i in range(8)})
            assert decide_once(router, [(k, 0, 10)])[0] == idle
        for k in range(40):
            free = (5 * k) % 8
            router.push_gauges({i: Gauges(4, 1, 0.5 if i == free else 0.501) for i in range(8)})
            assert decide_once(router, [(k, 0, 10)])[0] == free


@pytest.mark.parametrize("events_wire", ["map", "array"])
def test_kv_events_steer(router_release: Release, tmp_path: Path, events_wire: str) -> None:
    """Store, extend by parent, remove the tail, clear; the share believed is the share published."""
    with running(router_release, "precise", tmp_path, events_wire=events_wire) as router:
        prompt = [(1, 0, 40), (2, 40, 100)]
        assert decide_once(router, prompt)[1] == 0.0
        router.publish_kv_events({2: [Stored(0, 1, 0, 40, None)]})
        assert decide_once(router, prompt) == (2, 0.4)
        router.publish_kv_events({3: [Stored(0, 1, 0, 40, None), Stored(1, 2, 40, 50, (1, 39))]})
        assert decide_once(router, prompt) == (3, 0.9)
        assert decide_once(router, [(1, 0, 40), (9, 40, 100)])[1] == 0.4
        router.publish_kv_events({3: [Removed(2, 2, 60, 30)]})
        assert decide_once(router, prompt) == (3, 0.6)
        router.publish_kv_events({3: [Removed(3, 2, 40, 20), Removed(3, 1, 20, 20)]})
        assert decide_once(router, prompt) == (2, 0.4)
        router.publish_kv_events({2: [Cleared(4)]})
        assert decide_once(router, prompt) == (3, 0.2)
        assert decide_once(router, [(5, 0, 3)], tail_tokens=7)[1] == 0.0
        assert router.stats()["fallbacks"] == {}


def test_router_takes_every_event_in_before_the_next_decision(router_release: Release, tmp_path: Path) -> None:
    """Random stores and removals, many and large enough to be still on their way without a barrier."""
    rng = random.Random(4)
    held: list[dict[int, int]] = [{} for _ in range(4)]
    with running(router_release, "precise", tmp_path) as router:
        for k in range(60):
            events: dict[int, list[KvEvent]] = {}
            for i in rng.sample(range(4), 2):
                for _ in range(rng.randrange(1, 4)):
                    origin = rng.randrange(6)
                    have = held[i].get(origin, 0)
                    if have and rng.random() < 0.4:
                        gone = rng.randrange(1, have + 1)
                        events.setdefault(i, []).append(Removed(k, origin, have - gone, gone))
                        held[i][origin] = have - gone
                    else:
                        more = rng.randrange(1, 150)
                        parent = (origin, have - 1) if have else None
                        events.setdefault(i, []).append(Stored(k, origin, have, more, parent))
                        held[i][origin] = have + more
            router.publish_kv_events(events)
            origin = rng.randrange(6)
            size = max(1, max(h.get(origin, 0) for h in held) + 10)
            best = max(range(4), key=lambda i: held[i].get(origin, 0))
            endpoint, share = decide_once(router, [(origin, 0, size)])
            assert endpoint is not None
            assert share == held[endpoint].get(origin, 0) / size
            assert held[endpoint].get(origin, 0) == held[best].get(origin, 0)


def test_router_blocks_of_four_engine_blocks(router_release: Release, tmp_path: Path) -> None:
    with running(router_release, "precise", tmp_path, router_block_tokens=4 * BLOCK) as router:
        router.publish_kv_events({1: [Stored(0, 1, 0, 30, None)]})
        router.publish_kv_events({1: [Stored(1, 2, 30, 12, (1, 29))]})
        assert decide_once(router, [(1, 0, 30), (2, 30, 80)]) == (1, 10 / 20)
        router.publish_kv_events({1: [Removed(2, 2, 41, 1), Removed(2, 2, 36, 5)]})
        assert decide_once(router, [(1, 0, 30), (2, 30, 80)]) == (1, 9 / 20)
        assert decide_once(router, [(1, 0, 3)])[1] == 0.0, "shorter than a router block"


def test_approximate_prefix_follows_the_last_choice(router_release: Release, tmp_path: Path) -> None:
    """Every decision is in the index before the next one, whatever its size."""
    with running(router_release, "approximate", tmp_path, 8) as router:
        for session in range(12):
            blocks = 400 + 250 * session
            first, share = decide_once(router, [(session, 0, blocks)])
            assert share == 0.0
            assert decide_once(router, [(session, 0, blocks)]) == (first, 1.0)
            again, share = decide_once(router, [(session, 0, blocks), (100 + session, blocks, 2 * blocks)])
            assert again == first
            assert share == pytest.approx(0.5, abs=4 / blocks)
        assert router.stats()["fallbacks"] == {}
        assert router.stats()["beliefs_unknown"] == 0


def test_what_the_approximate_index_believes_with_blocks_as_large_as_the_engines(
    router_v0100: Path, tmp_path: Path
) -> None:
    """A last part of a block is a block of its own, and nothing beyond the index's reach counts."""
    release = ("v0.10.0", router_v0100)
    with running(release, "approximate", tmp_path, block_tokens=64) as router:
        for runs, tail, share in (([(1, 0, 30)], 0, 1.0), ([(2, 0, 30)], 10, 30 / 31), ([(3, 0, 3000)], 10, 1.0)):
            asked = [decide_once(router, runs, tail_tokens=tail, block=64) for _ in range(2)]
            assert asked[1] == (asked[0][0], pytest.approx(share))
        assert router.stats()["beliefs_unknown"] == 0


def test_session_token_steers(router_release: Release, tmp_path: Path) -> None:
    with running(router_release, "session", tmp_path, 8) as router:
        homes = {}
        for session in "abcd":
            request = call([(0, 0, 5)], session=session)
            homes[session] = router.decide(request).endpoint
            assert "x-session-token" in complete(router, request)
        for session in "dacb":
            router.push_gauges({i: Gauges(1, 1, 0.1 if i != homes[session] else 0.6) for i in range(8)})
            assert decide_once(router, [(0, 0, 5)], session=session)[0] == homes[session]
        assert decide_once(router, [(0, 0, 5)], session="new")[0] not in (None, homes["b"])


@pytest.mark.parametrize("config", ["session", "precise"])
def test_answers_told_are_answers_passed_through(router_release: Release, tmp_path: Path, config: str) -> None:
    """Told answers wait for the next decision, many at once; the router then decides as if each had been awaited."""

    def play(folder: Path, told: bool) -> tuple[list[int | None], dict[str, object]]:
        rng = random.Random(7)
        chosen, open_calls, streaming = [], [], set()
        with running(router_release, config, folder, 8) as router:
            for k in range(60):
                request = call([(k % 9, 0, 20)], session=f"s{k % 9}")
                router.push_gauges({i: Gauges(rng.randrange(4), rng.randrange(3), rng.random()) for i in range(8)})
                decision = router.decide(request)
                chosen.append(decision.endpoint)
                open_calls.append(request)
                for request in rng.sample(open_calls, rng.randrange(len(open_calls) + 1)):
                    if request.request_id not in streaming and rng.random() < 0.7:
                        streaming.add(request.request_id)
                        (router.tell_first_token if told else router.first_token)(request.request_id)
                    if rng.random() < 0.6:
                        open_calls.remove(request)
                        end = (request.request_id, request.prompt_tokens, 0, 3)
                        if rng.random() < 0.2:
                            router.abort(request.request_id)
                        elif told:
                            router.tell_end(*end)
                        else:
                            router.finish(*end)
            router.settle()
            stats = router.stats()
            assert stats["router_in_flight"] == len(open_calls) == stats["open_requests"]
            for request in open_calls:
                router.abort(request.request_id)
        return chosen, {name: stats[name] for name in ("decisions", "fallbacks", "refusals")}

    assert play(tmp_path / "a", True) == play(tmp_path / "b", False)


def test_fresh_runs_decide_alike(router_release: Release, tmp_path: Path) -> None:
    """200 decisions with ties, twice from scratch; another seed decides otherwise."""

    def play(name: str, seed: int) -> list[int | None]:
        rng = random.Random(9)
        chosen, open_requests = [], []
        with running(router_release, name, tmp_path, 8, seed=seed) as router:
            for k in range(200):
                request = call([(rng.randrange(30), 0, rng.randrange(1, 60))], session=f"s{k % 7}")
                chosen.append(router.decide(request).endpoint)
                open_requests.append(request)
                if len(open_requests) > 5:
                    ended = open_requests.pop(rng.randrange(5))
                    complete(router, ended)
                    i = rng.randrange(8)
                    router.push_gauges({i: Gauges(rng.randrange(4), rng.randrange(3), rng.randrange(4) / 4)})
            assert router.stats()["decisions"] == 200
        return chosen

    for name in ("load", "approximate"):
        first = play(name, 1)
        assert play(name, 1) == first
        assert play(name, 2) != first


def test_idle_workers_are_chosen_alike(router_release: Release, tmp_path: Path) -> None:
    """400 ties among 8 idle workers: chi-square with 7 degrees of freedom, one in a million above 42."""
    with running(router_release, "load", tmp_path, 8) as router:
        picks = Counter(decide_once(router, [(k, 0, 1)])[0] for k in range(400))
    assert sum((picks[i] - 50) ** 2 / 50 for i in range(8)) < 42


def test_in_flight_counts_return_to_zero(router_release: Release, tmp_path: Path) -> None:
    config = tmp_path / "active.yaml"
    text = (CONFIGS / router_release[0] / "load.yaml").read_text()
    text = text.replace("- type: queue-scorer\n", "- type: active-request-scorer\n  parameters: {maxBusyScore: 1.0}\n")
    config.write_text(text.replace("pluginRef: queue-scorer", "pluginRef: active-request-scorer"))
    with running(router_release, config, tmp_path, 4) as router:
        requests = [call([(k, 0, 4)]) for k in range(12)]
        spread = Counter(router.decide(r).endpoint for r in requests)
        assert set(spread.values()) == {3}, "the router counts what is in flight"
        assert router.stats()["router_in_flight"] == 12
        for r in requests[:4]:
            router.abort(r.request_id)
        for r in requests[4:8]:
            complete(router, r)
        for r in requests[8:]:
            router.first_token(r.request_id)
        assert router.stats()["router_in_flight"] == 4
        for r in requests[8:10]:
            router.abort(r.request_id)
        for r in requests[10:]:
            router.finish(r.request_id, r.prompt_tokens, 0, 1)
        assert router.stats()["router_in_flight"] == 0
        assert Counter(router.decide(call([(k, 0, 4)])).endpoint for k in range(4)) == Counter(range(4))
    assert router.stats()["open_requests"] == 4


def test_many_endpoints(router_release: Release, tmp_path: Path) -> None:
    with running(router_release, "load", tmp_path, 64) as router:
        for k in range(8):
            router.push_gauges({i: Gauges(1, 0 if i == 7 * k else 3, 0.2) for i in range(64)})
            assert decide_once(router, [(k, 0, 4)])[0] == 7 * k


def test_record_of_the_run(router_release: Release, tmp_path: Path) -> None:
    with running(router_release, "precise", tmp_path) as router:
        decide_once(router, [(1, 0, 4)])
        identity, stats = router.identity(), router.stats()
        kept = next(tmp_path.glob("run*/router.log")).read_text()
    assert identity["release"] == router_release[0] and len(identity["sha256"]) == 64
    assert identity["config"] == "precise" and identity["config_text"].startswith("#")
    assert any("tie-break" in line for line in identity["added"]) and identity["not_simulated"] == []
    assert stats["decisions"] == 1 and stats["fallbacks"] == {} and stats["router_rss_bytes"] > 1 << 20
    assert "ext-proc" in kept and "debug" not in kept
    assert router.stats()["router_cpu_s"] > 0


def test_config_that_the_router_refuses(router_release: Release, tmp_path: Path) -> None:
    config = tmp_path / "broken.yaml"
    config.write_text((CONFIGS / router_release[0] / "load.yaml").read_text().replace("queue-scorer", "quue-scorer"))
    router = make(router_release, config, tmp_path)
    with pytest.raises(InputError, match="quue-scorer") as caught:
        router.start()
    assert str(config) in caught.value.where and router_release[0] in caught.value.what


def test_router_that_is_killed(router_release: Release, tmp_path: Path) -> None:
    with running(router_release, "precise", tmp_path) as router:
        request = call([(1, 0, 4)])
        router.decide(request)
        os.kill(router.pid, signal.SIGKILL)
        with pytest.raises(ComponentError, match="died") as caught:
            router.first_token(request.request_id)
        assert "ext-proc" in caught.value.kept
        with pytest.raises(ComponentError, match="died"):
            router.decide(call([(2, 0, 4)]))
        with pytest.raises(ComponentError, match="died"):
            router.publish_kv_events({0: [Stored(0, 1, 0, 4, None)]})
            router.decide(call([(3, 0, 4)]))
    start_s = time.monotonic()
    router.stop()
    assert time.monotonic() - start_s < 1


def test_router_that_stands_still_is_waited_for_once(
    router_release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.router.ext_proc.GIVE_UP_S", 1.0)
    with running(router_release, "precise", tmp_path) as router:
        request = call([(1, 0, 4)])
        router.decide(request)
        os.kill(router.pid, signal.SIGSTOP)
        os.waitpid(router.pid, os.WUNTRACED)  # it stands still, all threads
        with pytest.raises(ComponentError, match="no answer within 1 s"):
            router.first_token(request.request_id)
        start_s = time.monotonic()
        assert router.stats()["router_in_flight"] is None
        router.stop()
        assert time.monotonic() - start_s < 5, "nobody asks it again, for up to 30 s"


def test_who_interrupts_a_router_that_stands_still_is_not_kept_waiting(
    router_release: Release, tmp_path: Path, heard_interrupts: None
) -> None:
    with running(router_release, "precise", tmp_path) as router:
        request = call([(1, 0, 4)])
        router.decide(request)
        os.kill(router.pid, signal.SIGSTOP)
        os.waitpid(router.pid, os.WUNTRACED)
        start_s = time.monotonic()
        for after_s in (0.2, 0.4):
            threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            router.first_token(request.request_id)
        assert router.stats()["router_in_flight"] is None
        router.stop()
        assert time.monotonic() - start_s < 10, "it is asked for its numbers once, and not for 30 s"


def test_stop_is_quick_and_frees_the_addresses(router_release: Release, tmp_path: Path) -> None:
    router = make(router_release, "load", tmp_path)
    router.start()
    for k in range(20):
        router.decide(call([(k, 0, 4)]))
    pid, endpoint = router.pid, router._endpoints[0]
    start_s = time.monotonic()
    router.stop()
    assert time.monotonic() - start_s < 2
    router.stop()
    assert not Path(f"/proc/{pid}").exists()
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind((endpoint.address, endpoint.port))


def test_worker_port_in_use(router_v071: Path, tmp_path: Path) -> None:
    router = make(("v0.7.1", router_v071), "load", tmp_path)
    endpoint = router._endpoints[1]
    with socket.socket() as s:
        s.bind((endpoint.address, endpoint.port))
        s.listen()
        with pytest.raises(InputError, match="w1"):
            router.start()


def test_router_dies_with_a_killed_harness(router_release: Release, tmp_path: Path) -> None:
    release, binary = router_release
    code = f"""
import time
from pathlib import Path
from tests.router.support import make
router = make(({release!r}, Path({str(binary)!r})), "load", Path({str(tmp_path)!r}))
router.start()
print(router.pid, flush=True)
time.sleep(100)
"""
    harness = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert harness.stdout is not None
    pid = int(harness.stdout.readline())
    assert Path(f"/proc/{pid}").exists()
    harness.kill()
    harness.wait()
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}/exe").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}/exe").exists()


def test_v0100_over_the_kubernetes_api(router_v0100: Path, tmp_path: Path) -> None:
    with running(("v0.10.0", router_v0100), "precise", tmp_path, discovery="kubernetes") as router:
        router.publish_kv_events({2: [Stored(0, 1, 0, 40, None)]})
        assert decide_once(router, [(1, 0, 50)]) == (2, 0.8)
        assert router.identity()["discovery"] == "kubernetes"


def test_unknown_release_and_discovery(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"v0\.9\.0"):
        make(("v0.9.0", tmp_path), CONFIGS / "v0.7.1" / "load.yaml", tmp_path)
    with pytest.raises(InputError, match="file discovery"):
        make(("v0.7.1", tmp_path), "load", tmp_path, discovery="file")


@pytest.mark.parametrize("version", ["v0.7.1", "v0.10.0"])
def test_objectives_and_model_rewrites(version: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Saturated endpoints refuse what has a negative priority; another name for the model finds the same blocks."""
    binary = request.getfixturevalue("router_" + version.replace(".", ""))
    header = {"v0.7.1": "x-gateway-inference-objective", "v0.10.0": "x-llm-d-inference-objective"}[version]
    more = {"discovery": "kubernetes", "objectives": {"bulk": -1}, "rewrites": {"alias": "m"}}
    with running((version, binary), "precise", tmp_path, **more) as router:
        router.publish_kv_events({3: [Stored(0, 1, 0, 8, None)]})
        other = call([(1, 0, 10)])
        other.model = "alias"
        assert router.decide(other).endpoint == 3
        router.push_gauges({i: Gauges(9, 50, 0.99) for i in range(4)})
        refused = router.decide(call([(2, 0, 4)], headers={header: "bulk"}))
        assert (refused.endpoint, refused.status) == (None, 429)
        assert router.decide(call([(2, 0, 4)])).status == 200
        assert router.stats()["refusals"] == 1


def test_objectives_need_the_kubernetes_api(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="kubernetes"):
        make(("v0.10.0", tmp_path), "load", tmp_path, objectives={"bulk": -1})
