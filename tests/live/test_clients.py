"""Independent load generators against the stack, each in an environment of its own; and a real Prometheus.

Skipped, visibly, where a tool is not installed: HARNESS_INFERENCE_PERF and HARNESS_AIPERF name their programs
(`pip install inference-perf==0.7.0`, `pip install aiperf==0.13.0` into venvs of Python 3.12). guidellm (5.9 GB) was
tried by hand only (docs/live.md).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from harness.live.dashboard import PANELS
from harness.live.deploy_files import ROOT
from harness.live.watch import sums
from harness.router.process import free_ports
from tests.api.test_tokenizer import make_hf_tokenizer
from tests.live.running import Running, experiment, running, until

pytestmark = [pytest.mark.router, pytest.mark.slow]

COUNTERS = {
    "requests": "vllm:request_success_total",
    "prompt": "vllm:prompt_tokens_total",
    "generated": "vllm:generation_tokens_total",
    "ttft_sum": "vllm:time_to_first_token_seconds_sum",
    "ttft_count": "vllm:time_to_first_token_seconds_count",
}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A tokenizer that clients and workers share."""
    pytest.importorskip("tokenizers")
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    make_hf_tokenizer(folder, None)
    return folder


@pytest.fixture
def live(router_v0100: Path, envoy_program: Path, tokenizer: Path, tmp_path: Path) -> Iterator[Running]:
    wanted = experiment(
        2, config="load", router={"binary": str(router_v0100)}, live={"speed": 1.0, "tokenizer": str(tokenizer)}
    )
    with running(wanted, tmp_path / "run") as found:
        yield found


def totals(live: Running) -> dict[str, float]:
    """Over all workers."""
    pages = [sums(httpx.get(f"{url}/metrics").text, COUNTERS) for url in live.stack.addresses.workers]
    return {key: sum(page[key] for page in pages) for key in COUNTERS}


def program(variable: str, name: str) -> str:
    found = os.environ.get(variable) or shutil.which(name)
    if not found:
        pytest.skip(f"{name} is not installed ({variable})")
    return found


def test_inference_perf(live: Running, tokenizer: Path, tmp_path: Path) -> None:
    tool = program("HARNESS_INFERENCE_PERF", "inference-perf")
    config = {
        "load": {"type": "constant", "stages": [{"rate": 4, "duration": 8}], "num_workers": 1},
        "api": {"type": "completion", "streaming": True},
        "server": {"type": "vllm", "model_name": live.stack.model, "base_url": live.url, "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": str(tokenizer)},
        "data": {
            "type": "random",
            "input_distribution": {"min": 60, "max": 60, "mean": 60, "std_dev": 0, "total_count": 40},
            "output_distribution": {"min": 12, "max": 12, "mean": 12, "std_dev": 0, "total_count": 40},
        },
        "report": {"request_lifecycle": {"summary": True, "per_stage": True, "per_request": True}},
        "storage": {"local_storage": {"path": str(tmp_path / "ip")}},
    }
    file = tmp_path / "ip.yml"
    file.write_text(yaml.safe_dump(config))
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([tool, "-c", str(file)], capture_output=True, text=True, env=env, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    summary = json.loads(next((tmp_path / "ip").rglob("summary_lifecycle_metrics.json")).read_text())
    counted = totals(live)
    successes = summary["successes"]["count"]
    assert summary["failures"]["count"] == 0 and successes == counted["requests"] == 32
    assert counted["generated"] == 32 * 12
    assert summary["successes"]["output_tokens"]["total"] == counted["generated"]
    assert summary["successes"]["prompt_tokens"]["total"] == counted["prompt"]
    assert summary["successes"]["token_count_mismatches"] == 0
    server_ttft_s = counted["ttft_sum"] / counted["ttft_count"]
    assert summary["successes"]["latency"]["time_to_first_token"]["mean"] >= server_ttft_s
    files = list((tmp_path / "run").glob("*.jsonl"))
    until(lambda: sum(1 for path in files for _ in path.open()) == 32)
    records = [json.loads(line) for path in files for line in path.open()]
    assert sum(r["output_tokens"] for r in records) == counted["generated"]


def test_aiperf(live: Running, tokenizer: Path, tmp_path: Path) -> None:
    tool = program("HARNESS_AIPERF", "aiperf")
    command = [
        tool, "profile", "--model", live.stack.model, "--url", live.url, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", str(tokenizer), "--synthetic-input-tokens-mean", "40", "--output-tokens-mean", "8",
        "--extra-inputs", "ignore_eos:true", "--concurrency", "2", "--request-count", "20", "--artifact-dir",
        str(tmp_path / "out"), "--ui", "none",
    ]  # fmt: skip
    env = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(next((tmp_path / "out").rglob("profile_export_aiperf.json")).read_text())
    counted = totals(live)
    assert found["request_count"]["avg"] == 20 and counted["requests"] >= 20
    assert found["output_sequence_length"]["avg"] == pytest.approx(8, abs=0.5)
    server_ttft_ms = 1e3 * counted["ttft_sum"] / counted["ttft_count"]
    assert found["time_to_first_token"]["avg"] >= server_ttft_ms


def test_prometheus_and_every_panel(live: Running, tmp_path: Path) -> None:
    """A real Prometheus scrapes workers, router and Envoy; every query of the dashboard returns data."""
    prometheus, promtool = program("HARNESS_PROMETHEUS", "prometheus"), program("HARNESS_PROMTOOL", "promtool")
    config = yaml.safe_load((ROOT / "compose" / "prometheus.yml").read_text())
    places = live.stack.addresses
    targets = {
        "vllm": [u.removeprefix("http://") for u in places.workers],
        "router": [places.router_metrics.removeprefix("http://").split("/")[0]],
        "envoy": [places.envoy_admin.removeprefix("http://")],
    }
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": targets[job["job_name"]]}]
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(ROOT / "compose" / "alerts.yml", tmp_path)
    subprocess.run([promtool, "check", "config", tmp_path / "prometheus.yml"], check=True, capture_output=True)
    page = httpx.get(f"{places.workers[0]}/metrics").text
    lint = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, text=True)
    complaints = [x for x in lint.stderr.splitlines() if "parsing" in x or "error while" in x]
    assert not complaints, lint.stderr
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    child = subprocess.Popen(
        [prometheus, f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'tsdb'}",
         f"--web.listen-address=127.0.0.1:{port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )  # fmt: skip
    try:
        end = time.monotonic() + 8
        number = 0
        while time.monotonic() < end:
            live.complete("panel " * 80 + str(number % 3), tokens=8)
            number += 1

        def value(query: str) -> list[float]:
            answer = httpx.get(f"{url}/api/v1/query", params={"query": query}, timeout=10).json()
            return [float(r["value"][1]) for r in answer.get("data", {}).get("result", [])]

        def up() -> bool:
            try:
                return value("sum(up)") == [4.0]
            except (httpx.HTTPError, ValueError):
                return False

        until(up)
        until(lambda: value("sum(vllm:request_success_total)") == [float(number)])
        empty = [query for _, _, _, queries in PANELS for query, _ in queries if not value(query)]
        assert not empty, empty
        assert value("sum(vllm:generation_tokens_total)") == [totals(live)["generated"]]
        assert 0 < value(PANELS[3][3][0][0])[0] <= 1
    finally:
        child.terminate()
        child.wait(10)
