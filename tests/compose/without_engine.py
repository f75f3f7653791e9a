"""Services of docker-compose.yml without a container engine: each in a network namespace of its own, with the command,
address, files and health check that the file gives it. What only an engine does (users, read-only roots) is not there.

`python without_engine.py PLAN.json`, itself in a namespace that nothing outlives, writes what it saw.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from tests.compose.asking import complete, get

PLAN = json.loads(Path(sys.argv[1]).read_text())
REPO, WORK = Path(PLAN["repo"]), Path(PLAN["work"])
PROGRAMS: dict[str, list[str]] = PLAN["programs"]
"""By the start of an image's name: what stands for its entry point."""
_DEFAULT = re.compile(r"\$\{(\w+):-([^}]*)\}")


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def filled(text: str) -> str:
    """Variables as compose fills them in."""
    return _DEFAULT.sub(lambda found: PLAN["variables"].get(found[1], found[2]), text)


class Service:
    """One service of the file."""

    def __init__(self, name: str, given: dict[str, Any]) -> None:
        self.name, self.given = name, given
        image = filled(given["image"])
        self.entry = next(words for start, words in PROGRAMS.items() if image.startswith(start))
        self.log = WORK / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Its namespace on the bridge, its files where they are mounted, its command."""
        address = self.given["networks"]["sim"]["ipv4_address"]
        wire = f"v{address.rsplit('.', 1)[1]}"
        run("ip", "netns", "add", self.name)
        run("ip", "link", "add", wire, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        run("ip", "link", "set", wire, "master", "sim", "up")
        run("ip", "-n", self.name, "addr", "add", f"{address}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            run("ip", "-n", self.name, "link", "set", device, "up")
        for volume in self.given.get("volumes", ()):
            source, target, *_ = volume.split(":")
            place = Path(target)
            if (REPO / source).is_dir():
                place.mkdir(parents=True, exist_ok=True)
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.touch()
            run("mount", "--bind", str(REPO / source), target)
        command = [*self.entry, *map(filled, self.given["command"])]
        environment = {**os.environ, **{k: str(v) for k, v in self.given.get("environment", {}).items()}}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command], cwd=REPO, env=environment, stdout=log, stderr=log
            )

    def wait(self) -> None:
        """Until its health check, where it has one, is content."""
        check = self.given.get("healthcheck")
        deadline = time.monotonic() + PLAN["patience_s"]
        while True:
            assert self.process is not None
            if self.process.poll() is not None:
                raise SystemExit(f"{self.name} ended: {self.log.read_text()[-2000:]}")
            command = [sys.executable, *check["test"][2:]] if check else ["true"]
            done = subprocess.run(["ip", "netns", "exec", self.name, *command], capture_output=True)
            if done.returncode == 0:
                return
            if time.monotonic() > deadline:
                raise SystemExit(f"{self.name} is not healthy: {self.log.read_text()[-2000:]}")
            time.sleep(0.5)


def lmcache(seen: dict[str, Any], gateway: str, page: str, workers: list[str]) -> None:
    """Prompts that the GPUs had to give up come back from LMCache's server."""
    prompts = [[20 + (7 * i + 131 * seed) % 9973 for i in range(2100)] for seed in range(6)]
    answers = [complete(gateway, prompt) for prompt in [*prompts, prompts[0]]]
    seen["statuses"] = [status for status, _ in answers]
    seen["cached"] = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for s, a in answers if s == 200]
    seen["external"] = sum(
        float(line.rsplit(" ", 1)[1])
        for worker in workers
        for line in get(f"{worker}/metrics").splitlines()
        if line.startswith("vllm:external_prefix_cache_hits_total")
    )
    end = time.monotonic() + 20
    state = json.loads(get(f"{page}/state"))
    while (len(state["tiers"]) < 2 or len(_decisions(state)) < len(answers)) and time.monotonic() < end:
        time.sleep(0.5)
        state = json.loads(get(f"{page}/state"))
    seen["tiers"], seen["up"] = state["tiers"], [w["up"] for w in state["workers"]]
    seen["decisions"] = _decisions(state)


def _decisions(state: dict[str, Any]) -> list[int]:
    return [recent["status"] for recent in state["recent"] if recent["path"] == "/v1/completions"]


def main() -> None:
    run("ip", "link", "set", "lo", "up")
    run("mount", "-t", "tmpfs", "tmpfs", "/run")
    layers = WORK / "etc"
    for name in ("upper", "work"):
        (layers / name).mkdir(parents=True)
    options = f"lowerdir=/etc,upperdir={layers}/upper,workdir={layers}/work"
    run("mount", "-t", "overlay", "overlay", "-o", options, "/etc")
    run("ip", "link", "add", "sim", "type", "bridge")
    run("ip", "addr", "add", "10.77.0.1/24", "dev", "sim")
    run("ip", "link", "set", "sim", "up")
    document = yaml.safe_load((REPO / "docker-compose.yml").read_text())["services"]
    services = [Service(name, document[name]) for name in PLAN["services"]]
    seen: dict[str, Any] = {}
    try:
        for service in services:
            service.start()
            service.wait()
        address = {s.name: s.given["networks"]["sim"]["ipv4_address"] for s in services}
        workers = [f"http://{address[name]}:8000" for name in address if name.startswith("cached")]
        lmcache(seen, f"http://{address['envoy-lmcache']}:8080", f"http://{address['page-lmcache']}:8090", workers)
    except (SystemExit, Exception) as error:
        seen["failure"] = f"{type(error).__name__}: {error}"
        seen["logs"] = {s.name: s.log.read_text()[-1500:] for s in services if s.log.exists()}
    finally:
        for service in reversed(services):
            if service.process is not None:
                service.process.terminate()
        for service in services:
            if service.process is not None:
                service.process.wait(30)
    Path(PLAN["result"]).write_text(json.dumps(seen, indent=1))


main()
