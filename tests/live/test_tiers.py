"""Cache tiers below live workers: LMCache and vLLM's own tier decide, the wall's time passes, and a replay agrees."""

from __future__ import annotations

import itertools
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest
import zmq

from fake_workers.pricing.registry import load_profile
from harness.errors import InputError
from harness.experiment import Experiment
from harness.live.bench import run_bench
from harness.live.stack import plan_stack
from harness.live.tiers import LiveTiers
from harness.runner import run_experiment
from harness.trace.model import Session
from harness.trace.write import write_trace
from tests.api.live_server import samples, serving, spec
from tests.live.running import PROFILE, experiment, running, until
from tests.trace.trace_builders import call

pytestmark = pytest.mark.slow

SHARED = {"name": "store", "at": "store"}
PCIE_BYTES_PER_S = 63_000_000_000
KV_BYTES_PER_TOKEN = load_profile(PROFILE).kv_bytes_per_token
OFFLOADING = {"kind": "offloading", "offloading": {"cpu_bytes_to_use": 8 << 30}}


def lmcache_section(**more: Any) -> dict[str, Any]:
    return {"kind": "lmcache", "lmcache": {"chunk_size": 256, "l1_size_gb": 8, "kv_events": True, **more}}


def prompt(seed: int, tokens: int) -> list[int]:
    return [20 + (7 * i + 131 * seed) % 9973 for i in range(tokens)]


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in folder.glob("workers-*.jsonl") for line in path.open()]


# ---------------------------------------------------------------------- with the real router


def trace(path: Path) -> None:
    """Conversations that together outgrow the GPU: each comes back when others have taken its place."""
    sessions = []
    for number in range(5):
        first = 18 + 2 * number
        calls = [
            call(0, 0.0, first, output_tokens=6),
            call(1, 5.0, first + 4, 0, first, deps=(0,), gap_s=2.2, output_tokens=6),
        ]
        sessions.append(Session(id=f"s{number}", block_tokens=64, calls=calls))
    write_trace(path, sessions)


@pytest.mark.router
def test_live_equals_replay(router_v0100: Path, envoy_program: Path, lmcache: None, tmp_path: Path) -> None:
    """The same tokens from GPU, DRAM and computing for each call; the engine's times to the millisecond."""
    file = tmp_path / "trace.jsonl"
    trace(file)
    base = experiment(
        1,
        config="precise-tiers",
        router={"binary": str(router_v0100), "block_tokens": None},
        cluster={"engine": {"num_gpu_blocks": 164}},
        cache=lmcache_section(),
        live={"speed": 0.5},
    )
    load = {"arrivals": "uniform", "sessions_per_hour_per_node": 7200}
    wanted = Experiment.model_validate(base.model_dump() | {"trace": {"path": str(file)}, "load": load})
    with running(wanted, tmp_path / "stack") as live:
        found = run_bench(wanted, live.url, tmp_path / "bench")
    replayed = run_experiment(wanted, tmp_path / "replay", show_progress=False)
    assert found.calls["outcome"].to_list() == ["completed"] * 10 == replayed.calls["outcome"].to_list()
    both = found.calls.join(replayed.calls, on="call_id", suffix="_replay")
    for source in ("gpu", "dram", "computed"):
        assert both[f"{source}_tokens"].to_list() == both[f"{source}_tokens_replay"].to_list()
    assert both["output_tokens"].to_list() == both["output_tokens_replay"].to_list()
    # what stands before the engine is test_agreement's; here its own times are held, which no busy machine moves
    replay_ms = (both["first_token_ns_replay"] - both["arrival_ns_replay"]).to_numpy() / 1e6
    engine = {str(r["id"]).removeprefix("0_cmpl-").rsplit("-", 2)[0]: r for r in records(tmp_path / "stack")}
    assert sorted(engine) == sorted(both["call_id"])
    for name, gpu, dram, took_ms in zip(
        both["call_id"], both["gpu_tokens_replay"], both["dram_tokens_replay"], replay_ms, strict=True
    ):
        seen = engine[name]
        assert (seen["cached_tokens"], seen["external_tokens"]) == (gpu, dram), name
        assert (seen["first_token_ns"] - seen["arrival_ns"]) / 1e6 == pytest.approx(took_ms, abs=1.0), name
    assert sum(r["external_tokens"] for r in engine.values()) > 3000
    account = json.loads((tmp_path / "stack" / "tiers" / "workers-all-0" / "tiers.json").read_text())
    kept = replayed.summary["tier"]["tiers"][0]
    assert account["tiers"][0]["read_bytes"] == kept["read_bytes"] > 0
    assert account["tiers"][0]["written_bytes"] == kept["written_bytes"]
    assert account["identity"]["component"] == "lmcache" and account["identity"]["unmodified"]
    told, known = found.summary["tier"], replayed.summary["tier"]
    assert told["bytes_by_source"] == known["bytes_by_source"] and told["bytes_by_source"]["dram"] > 0
    assert told["restores"]["loaded"] == known["restores"]["loaded"]
    assert told["restores"]["s"]["mean"] == pytest.approx(known["restores"]["s"]["mean"], rel=0.02)
    assert "Cache tiers below the GPU" in (tmp_path / "bench" / "report.html").read_text()
    assert not found.info.invalid, found.info.invalid


# ---------------------------------------------------------------------- the workers alone


def ask(url: str, ids: list[int]) -> int:
    """One token; returns the cached tokens of the prompt."""
    body = {"prompt": ids, "max_tokens": 1, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def alone(nodes: int, cache: dict[str, Any], **live: Any) -> Experiment:
    """Two workers per node, without a gateway; a GPU holds 4,100 tokens."""
    cluster = {"nodes": nodes, "gpus_per_node": 4, "engine": {"num_gpu_blocks": 260}}
    return experiment(2, cluster=cluster, cache=cache, live={"gateway": "none", "processes": None, **live})


def test_a_prompt_comes_back_from_every_tier(lmcache: None, tmp_path: Path) -> None:
    """Evicted on the GPU: from node DRAM; on a neighbour: from the node's DRAM; on another node: from the store."""
    first = prompt(1, 2100)
    section = lmcache_section(l2_adapters=[SHARED], l2_prefetch_policy="retain")
    with running(alone(2, section), tmp_path / "run") as live:
        assert len(live.stack.workers) == 1, "nodes that share a tier live in one process"
        one, two, three, _ = live.stack.addresses.workers
        with zmq.Context() as context, context.socket(zmq.SUB) as events:
            events.setsockopt(zmq.SUBSCRIBE, b"")
            events.setsockopt(zmq.RCVTIMEO, 10_000)
            events.connect(f"tcp://{one.rsplit(':', 1)[0].removeprefix('http://')}:{live.stack.addresses.events_port}")
            others = itertools.count(100)
            until(lambda: ask(one, prompt(next(others), 20)) or events.poll(100))  # the subscription has arrived
            assert ask(one, first) == 0
            assert ask(one, first) == 2096
            for seed in (2, 3):
                assert ask(one, prompt(seed, 2100)) == 0
            assert ask(one, first) == 2048
            cpu = [event for event in heard(events) if event["medium"] == "CPU"]
        stored = [event for event in cpu if event["type"] == "BlockStored"]
        assert {event["block_size"] for event in stored} == {256}
        told = sorted((event["token_ids"] for event in stored), key=lambda ids: ids != first[: len(ids)])
        assert told[0] == first[:2048]
        assert ask(two, first) == 2048
        assert ask(three, first) == 2048
        pages = [samples(httpx.get(f"{url}/metrics").text) for url in live.stack.addresses.workers]
        assert [page["vllm:external_prefix_cache_hits_total"] for page in pages] == [2048, 2048, 2048, 0]
        assert pages[1]["vllm:external_prefix_cache_queries_total"] == 2100
        assert pages[1]["vllm:prompt_tokens_cached_by_source_total{source=external_unspecified}"] == 2048
        until(lambda: live.watch.state()["tiers"] and live.watch.state()["links"])
        until(lambda: any(t["name"] == "store" and t["hit_rate"] for t in live.watch.state()["tiers"]))
        state = live.watch.state()
        assert [(t["name"], t["node"]) for t in state["tiers"]] == [("dram", "0"), ("dram", "1"), ("store", "")]
        assert state["tiers"][0]["resident"] > state["tiers"][1]["resident"] > 0
        assert state["tiers"][0]["capacity"] == 8 << 30 and state["tiers"][2]["capacity"] is None
        assert {"gpu>host", "host>gpu", "host>switch", "store>switch"} <= {link["kind"] for link in state["links"]}
    found = records(tmp_path / "run")
    loads = {r["worker"]: r for r in found if r["external_tokens"]}
    assert [loads[w]["external_by_tier"] for w in ("w0", "w1", "w2")] == [{"dram": 2048}] * 2 + [{"store": 2048}]
    copy_ns = 2048 * KV_BYTES_PER_TOKEN / 2 / PCIE_BYTES_PER_S * 1e9  # each of the two GPUs over its own PCIe
    for worker in ("w0", "w1"):
        waited_ns = loads[worker]["admitted_ns"] - loads[worker]["arrival_ns"]
        assert copy_ns <= waited_ns <= copy_ns + 20_000, "held for as long as the copy takes"
    assert loads["w2"]["admitted_ns"] - loads["w2"]["arrival_ns"] > 2 * copy_ns
    account = json.loads((tmp_path / "run" / "tiers" / "workers-all-0" / "tiers.json").read_text())
    assert [tier["name"] for tier in account["tiers"]] == ["dram", "store"]
    assert account["tiers"][0]["promoted_bytes"] == account["tiers"][1]["read_bytes"] == 2048 * KV_BYTES_PER_TOKEN


def heard(events: zmq.Socket[bytes]) -> list[dict[str, Any]]:
    """All events, until none comes any more."""
    found: list[dict[str, Any]] = []
    while events.poll(1500):
        found += msgpack.unpackb(events.recv_multipart()[2])[1]
    return found


def test_vllms_own_tier(tmp_path: Path) -> None:
    """kind: offloading, each worker's tier its own; nodes in two processes."""
    first = prompt(1, 2100)
    with running(alone(2, OFFLOADING, processes=2), tmp_path / "run") as live:
        assert len(live.stack.workers) == 2
        one, two, three, _ = live.stack.addresses.workers
        for url in (one, three):
            assert [ask(url, prompt(seed, 2100)) for seed in (1, 2, 3)] == [0, 0, 0]
            assert ask(url, first) == 2096
        assert ask(two, first) == 0
        page = samples(httpx.get(f"{three}/metrics").text)
        assert page["vllm:prompt_tokens_cached_by_source_total{source=host}"] > 0
        until(lambda: len(live.watch.state()["tiers"]) == 2)
        assert [t["node"] for t in live.watch.state()["tiers"]] == ["0", "1"]
        process = live.stack.worker_of("w2")
        process.stop()
        until(lambda: [t["node"] for t in live.watch.state()["tiers"]] == ["0"])
        process.start()
        live.stack.wait_worker("w2")
        assert ask(three, first) == 0, "a node's memory goes with its process"
        assert ask(one, first) == 2096
        until(lambda: [t["resident"] > 0 for t in live.watch.state()["tiers"]] == [True, True])
    assert {p.name for p in (tmp_path / "run" / "tiers").iterdir()} == {"workers-all-0", "workers-all-1"}


def test_a_paused_engine_takes_up_its_load_when_it_goes_on() -> None:
    """A load goes on while its engine stands still; both agree on the time again afterwards."""
    wanted = alone(1, OFFLOADING)
    with serving(spec(1, blocks=260, speed=1.0), lambda clock: LiveTiers(clock, wanted, [0], "sim/model")) as live:
        url, first = live.urls[0], prompt(1, 2100)
        assert [ask(url, prompt(seed, 2100)) for seed in (1, 2, 3)] == [0, 0, 0]
        httpx.post(f"{url}/pause?mode=keep&clear_cache=false").raise_for_status()
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(ask, url, first)
            time.sleep(0.5)
            assert not waiting.done()
            httpx.post(f"{url}/resume").raise_for_status()
            assert waiting.result(10) == 2096
        assert ask(url, prompt(4, 2100)) == 0
        assert ask(url, first) == 2096
        page = samples(httpx.get(f"{url}/metrics").text)
        assert page["vllm:prompt_tokens_cached_by_source_total{source=host}"] > 2000
        assert page["vllm:time_to_first_token_seconds_sum"] < page["vllm:time_to_first_token_seconds_count"] * 0.4


def test_what_cannot_share_a_process_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"live.processes: 2, but nodes that share a tier"):
        plan_stack(alone(2, lmcache_section(l2_adapters=[SHARED]), processes=2), tmp_path / "a")
    pools = [{"role": "prefill", "replicas": 1}, {"role": "decode", "replicas": 1}]
    with pytest.raises(InputError, match="run in replays only"):
        plan_stack(experiment(2, cache=OFFLOADING, cluster={"pools": pools}, live={"gateway": "none"}), tmp_path / "b")
    with pytest.raises(InputError, match=r"cache.chunk_size: 250"):
        plan_stack(alone(1, lmcache_section() | {"lmcache": {"chunk_size": 250, "l1_size_gb": 8}}), tmp_path / "c")
