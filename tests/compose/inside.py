"""Runs inside a network and mount namespace of its own: dockerd, images, the compose file as it is, clients, faults.

`python inside.py PLAN.json` prints one JSON document with what it saw. Nothing outside the namespace changes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.compose import asking, stand_in
from tests.compose.asking import get

PLAN = json.loads(Path(sys.argv[1]).read_text())
WORK, REPO = Path(PLAN["work"]), Path(PLAN["repo"])
SEEN: dict[str, Any] = {}


def run(*command: str, check: bool = True, timeout: float = 400) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", cwd=REPO, timeout=timeout)
    if check and done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout + done.stderr


def compose(*words: str, **more: Any) -> str:
    return run("docker", "compose", *words, **more)


def complete(port: int, prompt: str | list[int]) -> tuple[int, Any]:
    return asking.complete(f"http://127.0.0.1:{port}", prompt)


def until(condition: Any, limit_s: float = 60) -> bool:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        try:
            if condition():
                return True
        except OSError:
            pass
        time.sleep(0.3)
    return False


def images() -> None:
    programs = PLAN["programs"]
    stand_in.python_base(Path(PLAN["python"]))
    stand_in.program(Path(programs["router"]), "ghcr.io/llm-d/llm-d-router-endpoint-picker:v0.10.0", "/app/epp")
    stand_in.program(Path(programs["envoy"]), "docker.io/envoyproxy/envoy:distroless-v1.33.2", "/usr/local/bin/envoy")
    stand_in.program(Path(programs["prometheus"]), "docker.io/prom/prometheus:v3.5.0", "/bin/prometheus")
    if programs.get("old_router"):
        stand_in.program(Path(programs["old_router"]), "ghcr.io/llm-d/llm-d-inference-scheduler:v0.7.1", "/app/epp")
    if programs.get("sidecar"):
        name = "ghcr.io/llm-d/llm-d-router-disagg-sidecar:v0.10.0"
        stand_in.program(Path(programs["sidecar"]), name, "/app/pd-sidecar")
    if programs.get("lmcache"):
        mounts = stand_in.lmcache(Path(programs["lmcache"]), "docker.io/lmcache/standalone:v0.5.6")
        volumes = [f"{here}:{there}:ro" for here, there in mounts.items()]
        beside = WORK / "lmcache-packages.json"
        beside.write_text(json.dumps({"services": {"lmcache": {"volumes": volumes}}}))
        os.environ["COMPOSE_FILE"] = f"docker-compose.yml:{beside}"


CORE = ["worker-0", "worker-1", "worker-2", "worker-3", "router", "envoy", "page", "prometheus"]


def core() -> None:
    began = time.monotonic()
    compose("up", "-d", "--wait", "--wait-timeout", "150", *CORE)
    SEEN["up_s"] = round(time.monotonic() - began, 1)
    SEEN["services"] = sorted(
        (row["Service"], row["State"], row["Health"])
        for row in map(json.loads, compose("ps", "--format", "json").splitlines())
        if row.get("Service")
    )
    prefix = "one prefix for all, long enough for a few blocks of the cache. " * 40
    SEEN["first"] = complete(8080, prefix)[0]
    time.sleep(1)
    answers = [complete(8080, prefix + str(i)) for i in range(8)]
    SEEN["statuses"] = [status for status, _ in answers]
    SEEN["cached"] = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for s, a in answers if s == 200]
    state = json.loads(get("http://127.0.0.1:8090/state"))
    SEEN["page"] = "Live cluster" in get("http://127.0.0.1:8090/")
    SEEN["page_up"] = [w["up"] for w in state["workers"]]
    until(lambda: json.loads(get("http://127.0.0.1:8090/state"))["served"] >= 9)
    decision = next(
        r for r in json.loads(get("http://127.0.0.1:8090/state"))["recent"] if r["path"] == "/v1/completions"
    )
    SEEN["decision"] = {k: decision[k] for k in ("status", "worker", "scores")}
    wanted = "http://127.0.0.1:9091/api/v1/query?query=sum(vllm:request_success_total)"
    until(lambda: float(json.loads(get(wanted))["data"]["result"][0]["value"][1]) >= 9, 30)
    SEEN["prometheus_success"] = float(json.loads(get(wanted))["data"]["result"][0]["value"][1])
    targets = json.loads(get("http://127.0.0.1:9091/api/v1/targets?state=active"))["data"]["activeTargets"]
    SEEN["targets_up"] = sorted(t["scrapeUrl"] for t in targets if t["health"] == "up")
    SEEN["writable"] = run(
        "docker", "compose", "exec", "-T", "worker-0", "python", "-c", "open('/app/x','w')", check=False
    )[-200:]
    SEEN["user"] = run(
        "docker", "compose", "exec", "-T", "worker-0", "python", "-c", "import os; print(os.getuid())"
    ).strip()


def faults() -> None:
    compose("kill", "worker-1")
    time.sleep(3)
    SEEN["while_down"] = sorted({complete(8080, f"request {i} with one worker gone")[0] for i in range(20)})
    compose("up", "-d", "--wait", "--no-deps", "worker-1")
    SEEN["after"] = until(lambda: all(complete(8080, f"again {i}")[0] == 200 for i in range(6)), 30)
    compose("restart", "router")
    SEEN["router_back"] = until(lambda: complete(8080, "router restarted")[0] == 200, 30)


def bench() -> None:
    began = time.monotonic()
    text = compose("run", "--rm", "--no-deps", "bench", timeout=300)
    SEEN["bench"] = text[-2500:]
    SEEN["bench_s"] = round(time.monotonic() - began, 1)
    SEEN["bench_on_page"] = json.loads(get("http://127.0.0.1:8090/state"))["benches"]


def disaggregated() -> None:
    if not PLAN["programs"].get("sidecar"):
        return
    wanted = ["prefill-0", "prefill-1", "decode-0", "decode-1", "sidecar-0", "sidecar-1", "router-pd", "envoy-pd"]
    compose("--profile", "pd", "up", "-d", "--wait", "--wait-timeout", "120", *wanted)
    until(lambda: complete(8081, "hi")[0] == 200, 30)
    SEEN["pd"] = [complete(8081, f"a prompt for prefill number {i}: " + "word " * 1500)[0] for i in range(4)]
    fetched = computed = 0.0
    for address in ("10.77.0.31", "10.77.0.32"):
        for line in get(f"http://{address}:8200/metrics").splitlines():
            if line.startswith("vllm:prompt_tokens_by_source_total") and "external_kv_transfer" in line:
                fetched += float(line.rsplit(" ", 1)[1])
    for address in ("10.77.0.21", "10.77.0.22"):
        for line in get(f"http://{address}:8000/metrics").splitlines():
            if line.startswith("vllm:prompt_tokens_total"):
                computed += float(line.rsplit(" ", 1)[1])
    SEEN["pd_fetched"], SEEN["pd_prefilled"] = fetched, computed


def lmcache() -> None:
    """A prompt that the GPU had to give up comes back from LMCache's server, on either worker."""
    if not PLAN["programs"].get("lmcache"):
        return
    os.environ["CACHED_GPU_BLOCKS"] = "260"
    wanted = ["lmcache", "cached-0", "cached-1", "router-lmcache", "envoy-lmcache", "page-lmcache"]
    compose("--profile", "lmcache", "up", "-d", "--wait", "--wait-timeout", "200", *wanted)
    prompts = [[20 + (7 * i + 131 * seed) % 9973 for i in range(2100)] for seed in range(6)]
    SEEN["lmcache"] = [complete(8083, prompt)[0] for prompt in prompts]
    status, answer = complete(8083, prompts[0])
    SEEN["lmcache"].append(status)
    SEEN["lmcache_back"] = answer["usage"]["prompt_tokens_details"]["cached_tokens"] if status == 200 else answer
    hits = 0.0
    for address in ("10.77.0.81", "10.77.0.82"):
        for line in get(f"http://{address}:8000/metrics").splitlines():
            if line.startswith("vllm:external_prefix_cache_hits_total"):
                hits += float(line.rsplit(" ", 1)[1])
    SEEN["lmcache_hits"] = hits
    until(lambda: any(tier["hit_rate"] for tier in json.loads(get("http://127.0.0.1:8093/state"))["tiers"]))
    state = json.loads(get("http://127.0.0.1:8093/state"))
    SEEN["lmcache_tiers"], SEEN["lmcache_page_up"] = state["tiers"], [w["up"] for w in state["workers"]]


def kubernetes() -> None:
    if not PLAN["programs"].get("old_router"):
        return
    compose(
        "--profile",
        "kubernetes",
        "up",
        "-d",
        "--wait",
        "--wait-timeout",
        "120",
        "kube-api",
        "router-v071",
        "envoy-v071",
    )
    SEEN["kubernetes_up"] = until(lambda: complete(8082, "hi")[0] == 200, 40)
    SEEN["kubernetes"] = [complete(8082, f"old release {i}")[0] for i in range(4)]


def main() -> None:
    os.environ.update(
        DOCKER_HOST=f"unix://{WORK}/docker.sock",
        DOCKER_CONFIG=str(WORK / "config"),
        PIP_OPTIONS="--no-index --find-links /wheels",
    )
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    (WORK / "dockerd.json").write_text("{}")
    log = (WORK / "dockerd.log").open("w")
    daemon = subprocess.Popen(
        ["dockerd", "--config-file", WORK / "dockerd.json", "--data-root", WORK / "data", "--exec-root", WORK / "exec",
         "--pidfile", WORK / "dockerd.pid", "-H", os.environ["DOCKER_HOST"]], stdout=log, stderr=log
    )  # fmt: skip
    try:
        if not until(lambda: subprocess.run(["docker", "info"], capture_output=True).returncode == 0, 60):
            raise SystemExit("dockerd does not start: " + (WORK / "dockerd.log").read_text()[-2000:])
        began = time.monotonic()
        images()
        compose("build", "worker-0")
        SEEN["images_s"] = round(time.monotonic() - began, 1)
        try:
            for step in (core, faults, bench, disaggregated, lmcache, kubernetes):
                if step.__name__ in PLAN.get("steps", step.__name__):
                    began = time.monotonic()
                    step()
                    SEEN.setdefault("took_s", {})[step.__name__] = round(time.monotonic() - began, 1)
        except (SystemExit, Exception) as error:
            SEEN["failure"] = f"{type(error).__name__}: {error}"
            SEEN["states"] = compose("--profile", "*", "ps", "-a", check=False)
            services = compose("--profile", "*", "ps", "-a", "--services", check=False).split()
            SEEN["logs"] = {s: compose("logs", "--tail", "30", s, check=False)[-2500:] for s in services}
        SEEN["down"] = compose("--profile", "*", "down", "-v", check=False)[-2500:]
        SEEN["left"] = run("docker", "ps", "-aq").split() + run("docker", "volume", "ls", "-q").split()
    finally:
        daemon.terminate()
        daemon.wait(30)
    Path(PLAN["result"]).write_text(json.dumps(SEEN, indent=1))


main()
