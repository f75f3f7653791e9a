"""The native stack with the real router and the real Envoy: it serves, it places by prefix, it survives its parts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from harness.errors import ComponentError, InputError
from harness.live import envoy
from harness.live.stack import plan_stack
from harness.router import kubernetes_api
from tests.live.running import Running, experiment, running, until

pytestmark = [pytest.mark.router, pytest.mark.slow]

PREFIX = "a prefix that many requests share, long enough for several blocks. " * 40


def left_behind() -> list[str]:
    """Children of ours that a stack should have ended."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            words = " ".join(child.cmdline())
            if child.status() != psutil.STATUS_ZOMBIE and any(
                w in words for w in ("fake_workers", "envoy", "--pool-name")
            ):
                found.append(words)
    return found


def test_requests_follow_their_prefix(router_release: tuple[str, Path], envoy_program: Path, tmp_path: Path) -> None:
    release, binary = router_release
    wanted = experiment(3, release, router={"binary": str(binary)})
    with running(wanted, tmp_path / "run") as live:
        assert live.complete("the first request").status_code == 200
        until(lambda: live.watch.state()["router_metrics"].get("up") == 1)
        first = live.complete(PREFIX)
        assert first.status_code == 200, first.text
        time.sleep(0.5)  # KV events are on their way
        usages = [live.complete(PREFIX + str(i)).json()["usage"] for i in range(8)]
        assert all(u["prompt_tokens_details"]["cached_tokens"] > 0.9 * u["prompt_tokens"] for u in usages)
        assert len(set(live.picks(10)[1:])) == 1
        with httpx.stream(
            "POST",
            f"{live.url}/v1/chat/completions",
            json={"model": live.stack.model, "messages": [{"role": "user", "content": "hi"}], "stream": True,
                  "max_tokens": 6, "ignore_eos": True},
        ) as response:  # fmt: skip
            lines = [line for line in response.iter_lines() if line]
        assert lines[-1] == "data: [DONE]" and len(lines) == 8
        chat = {"model": live.stack.model, "messages": [{"role": "user", "content": PREFIX}], "max_tokens": 2}
        for _ in range(2):
            time.sleep(0.5)
            found = httpx.post(f"{live.url}/v1/chat/completions", json=chat, timeout=30).json()
        assert found["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        until(lambda: live.watch.state()["served"] == 13)
        state = live.watch.state()
        if release == "v0.10.0":
            scored = next(r for r in state["recent"] if r["path"] == "/v1/completions")
            assert set(scored["scores"]) == {"w0", "w1", "w2"}
            assert scored["worker"] == max(scored["scores"], key=scored["scores"].get)
        assert not state["problems"] and state["failed"] == 0
    assert not left_behind()


def test_nothing_is_said_before_the_router_knows_its_workers(
    router_v071: Path, envoy_program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router serves before it has learnt of its pods; here they come two seconds late."""
    late: list[threading.Timer] = []
    put = kubernetes_api.KubernetesApi.put

    def put_late(api: kubernetes_api.KubernetesApi, kind: Any, *given: Any) -> None:
        if kind is not kubernetes_api.PODS:
            return put(api, kind, *given)
        late.append(threading.Timer(2.0, put, (api, kind, *given)))
        late[-1].start()

    monkeypatch.setattr(kubernetes_api.KubernetesApi, "put", put_late)
    wanted = experiment(2, "v0.7.1", router={"binary": str(router_v071)})
    with running(wanted, tmp_path / "run") as live:
        assert live.complete("the first request").status_code == 200
        assert len(late) == 2 and not any(timer.is_alive() for timer in late)
        until(lambda: live.watch.state()["served"] == 1)


def test_records_metrics_and_gateway_agree(router_v0100: Path, envoy_program: Path, tmp_path: Path) -> None:
    wanted = experiment(2, config="load", router={"binary": str(router_v0100)})
    with running(wanted, tmp_path / "run") as live:
        usages = [live.complete(f"prompt {i} " * 20, tokens=4 + i).json()["usage"] for i in range(12)]
        until(lambda: len(live.access) == 12)
        pages = [httpx.get(f"{url}/metrics").text for url in live.stack.addresses.workers]
        generated = sum(
            float(line.rsplit(" ", 1)[1])
            for page in pages
            for line in page.splitlines()
            if line.startswith("vllm:generation_tokens_total")
        )
        assert generated == sum(u["completion_tokens"] for u in usages)
    records = [json.loads(line) for path in (tmp_path / "run").glob("*.jsonl") for line in path.open()]
    assert len(records) == 12
    assert sum(r["output_tokens"] for r in records) == generated
    assert sum(r["prompt_tokens"] for r in records) == sum(u["prompt_tokens"] for u in usages)
    by_worker = {e.name: f"{e.address}:{e.port}" for e in live.stack.endpoints}
    assert sorted(by_worker[r["worker"]] for r in records) == sorted(str(a["picked"]) for a in live.access)


def test_faults(router_v0100: Path, envoy_program: Path, tmp_path: Path) -> None:
    """A worker, the router and Envoy go away and come back; nothing hangs, nothing is counted twice."""
    wanted = experiment(2, router={"binary": str(router_v0100)})
    with running(wanted, tmp_path / "run") as live:
        for i in range(4):
            assert live.complete(PREFIX + str(i)).status_code == 200
        until(lambda: any(w["requests"] for w in live.watch.state()["workers"]))
        # a restart shows by counters that begin anew: it takes a worker that has served
        number, name = next((i, w["name"]) for i, w in enumerate(live.watch.state()["workers"]) if w["requests"])
        worker = live.stack.worker_of(name)
        worker.stop()
        until(lambda: live.watch.state()["problems"])
        codes = {live.complete(f"other {i}").status_code for i in range(12)}
        assert codes <= {200, 503} and 200 in codes
        worker.start()
        live.stack.wait_worker(name)
        until(lambda: not live.watch.state()["problems"])
        until(lambda: all(live.complete(f"again {i}").status_code == 200 for i in range(4)))
        assert live.stack.router is not None
        live.stack.router.stop()
        until(lambda: live.watch.state()["problems"] == ["the router has ended"])
        gone = live.complete("no router")
        assert gone.status_code in (500, 503)
        live.stack.router.start()
        until(lambda: live.complete("router is back").status_code == 200)
        assert live.stack.envoy is not None
        live.stack.envoy.stop()
        with pytest.raises(httpx.ConnectError):
            live.complete("no gateway")
        until(lambda: live.watch.state()["problems"] == ["Envoy has ended"])
        live.stack.start_envoy()
        assert live.complete("gateway is back").status_code == 200
        until(lambda: not live.watch.state()["problems"])
        until(lambda: live.watch.state()["workers"][number]["restarts"] == 1)
        until(lambda: all(w["running"] == w["waiting"] == 0 for w in live.watch.state()["workers"]))


def test_bad_clients(router_v0100: Path, envoy_program: Path, tmp_path: Path) -> None:
    wanted = experiment(1, config="load", router={"binary": str(router_v0100)})
    with running(wanted, tmp_path / "run") as live:
        post = lambda **kw: httpx.post(f"{live.url}/v1/completions", timeout=30, **kw)  # noqa: E731
        json_type = {"content-type": "application/json"}
        assert post(content=b"{broken", headers=json_type).status_code == 400
        unknown = post(json={"model": "unknown", "prompt": "x"})
        assert unknown.status_code == 404 and unknown.json()["error"]["type"] == "NotFoundError"
        large = post(json={"model": live.stack.model, "prompt": [5] * 50_000, "max_tokens": 1})
        assert large.status_code == 400 and "maximum context length" in large.json()["error"]["message"]
        assert live.complete("headers", tokens=1).status_code == 200
        body = {"model": live.stack.model, "prompt": "x", "max_tokens": 1}
        assert post(json=body, headers={"x-large": "a" * 10_000}).status_code == 200
        with contextlib.suppress(httpx.TransportError):  # the gateway may hang up before it has read it all
            assert post(json=body, headers={"x-large": "a" * 100_000}).status_code == 431
        assert live.complete("still there", tokens=1).status_code == 200
        host, port = live.url.removeprefix("http://").split(":")
        slow = socket.create_connection((host, int(port)))
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")  # and never the rest
        assert live.complete("others go on", tokens=1).status_code == 200
        slow.settimeout(15)
        assert b"408" in slow.recv(100)
        slow.close()


def test_a_client_that_hangs_up_frees_its_worker(router_v0100: Path, envoy_program: Path, tmp_path: Path) -> None:
    wanted = experiment(1, config="load", router={"binary": str(router_v0100)})
    with running(wanted, tmp_path / "run") as live:
        body = {"model": live.stack.model, "prompt": "x", "max_tokens": 30_000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{live.url}/v1/completions", json=body, timeout=30) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            until(lambda: busy(live) == 1)
        until(lambda: busy(live) == 0)


def busy(live: Running) -> float:
    return float(live.watch.state()["workers"][0]["running"])


def test_disaggregated_roles(router_v0100: Path, envoy_program: Path, tmp_path: Path) -> None:
    """Workers take their roles' labels to the router; a prefilled prompt is fetched, not computed."""
    pools = [{"role": "prefill", "replicas": 1}, {"role": "decode", "replicas": 1}]
    wanted = experiment(
        2, config="load", router={"binary": str(router_v0100)}, cluster={"pools": pools, "gpus_per_node": 2}
    )
    with running(wanted, tmp_path / "run") as live:
        first, second = live.stack.addresses.workers
        body = {"prompt": PREFIX, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        handed = httpx.post(f"{first}/v1/completions", json=body).json()["kv_transfer_params"]
        body = {"prompt": PREFIX, "max_tokens": 3, "kv_transfer_params": handed}
        httpx.post(f"{second}/v1/completions", json=body).raise_for_status()
        page = httpx.get(f"{second}/metrics").text
        fetched = next(x for x in page.splitlines() if 'source="external_kv_transfer"' in x and x.startswith("vllm"))
        assert float(fetched.rsplit(" ", 1)[1]) > 100
        assert (tmp_path / "run" / "logs" / "endpoints.yaml").read_text().count("llm-d.ai/role") == 2


def test_what_cannot_start_says_why(router_v0100: Path, envoy_program: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match="in use"):
            plan_stack(experiment(1, live={"gateway_port": port}), tmp_path / "a")
    with pytest.raises(InputError, match="vLLM.s scheduler"):
        plan_stack(experiment(1, cluster={"engine": {"kind": "vllm", "leaping": False}}), tmp_path / "d")
    router = {"binary": str(router_v0100)}
    no_envoy = experiment(1, live={"envoy": "/nowhere/envoy"}, router=router)
    with pytest.raises(InputError, match="no program"), running(no_envoy, tmp_path / "b"):
        pass
    stack = plan_stack(experiment(1, router=router), tmp_path / "c")
    endpoint = stack.endpoints[0]
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((endpoint.address, endpoint.port))
        taken.listen()
        with pytest.raises(ComponentError, match="cannot listen"):
            stack.start()
    assert not left_behind()


@pytest.mark.parametrize("field", ["gateway_port", "page_port"])
def test_a_port_that_is_taken_is_one_line(router_v0100: Path, envoy_program: Path, tmp_path: Path, field: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = subprocess.run(
            [*(sys.executable, "-m", "harness", "live", "examples/live.yaml", "--out", str(tmp_path / "out")),
             *("--set", f"router.binary={router_v0100}", "--set", "live.gateway_port=0", "--set", "live.page_port=0"),
             *("--set", f"live.{field}={taken.getsockname()[1]}")],
            cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60,
            env={**os.environ, "HARNESS_ENVOY": str(envoy_program)},
        )  # fmt: skip
    assert done.returncode == 2 and not done.stdout
    assert len(done.stderr.splitlines()) == 1 and f"live.{field}" in done.stderr and "Traceback" not in done.stderr
    assert not left_behind()


def test_envoy_configuration_is_valid(envoy_program: Path, tmp_path: Path) -> None:
    from harness.router.endpoints import loopback_endpoints

    path = tmp_path / "envoy.yaml"
    path.write_text(
        envoy.render(
            loopback_endpoints(2), host="127.0.0.1", port=8080, admin_port=19000, render_port=8001, router_port=9002
        )
    )
    done = subprocess.run([envoy_program, "--mode", "validate", "-c", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_command(router_v0100: Path, envoy_program: Path, tmp_path: Path) -> None:
    """`harness live` prints where everything is, serves, and leaves nothing behind after SIGTERM."""
    file = tmp_path / "live.yaml"
    file.write_text(
        f"name: cmd\ntrace: {{path: none}}\nmodel: {{profile: qwen3-32b-bf16-tp2-h100}}\n"
        f"cluster: {{nodes: 1, gpus_per_node: 4}}\nrouter: {{release: v0.10.0, config: load, binary: {router_v0100}}}\n"
        "live: {gateway_port: 0, page_port: 0}\n"
    )
    env = {**os.environ, "HARNESS_ENVOY": str(envoy_program)}
    command = [sys.executable, "-m", "harness", "live", str(file), "--out", str(tmp_path / "out")]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    try:
        assert child.stdout is not None
        lines: dict[str, str] = {}
        while "end" not in lines:
            line = child.stdout.readline()
            assert line, child.stderr.read() if child.stderr else ""
            name, _, rest = line.partition(" ")
            lines[name] = rest.strip()
        done = subprocess.run(lines["try"], shell=True, capture_output=True, text=True, timeout=30)
        assert "data: [DONE]" in done.stdout, done
        page = lines["page"]
        assert "Live cluster" in httpx.get(page).text
        assert httpx.post(f"{page}/switch/w0/kill").status_code == 403
        family = psutil.Process(child.pid).children(recursive=True)
        assert len(family) >= 4
        child.send_signal(signal.SIGTERM)
        assert child.wait(15) == 0
        until(lambda: not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE])
    finally:
        child.kill()
        child.wait()
