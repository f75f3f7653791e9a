"""docker-compose.yml itself, unedited, with a container engine in a network namespace of its own.

Skipped, visibly, where no engine can run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from harness.live import deploy_files
from harness.router.binaries import find
from tests.compose import install

ROOT = Path(__file__).parents[2]


def test_generated_files_are_up_to_date() -> None:
    for name, text in deploy_files.files().items():
        assert (deploy_files.ROOT / name).read_text() == text, f"{name}: run python -m harness.live.deploy_files"


def test_the_file_is_hardened_and_its_addresses_agree() -> None:
    document = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    every = [*deploy_files.workers(), *deploy_files.pd_workers(), *deploy_files.lmcache_workers()]
    places = {e.name: e.address for e in every}
    for name, service in document["services"].items():
        assert service["read_only"] and service["cap_drop"] == ["ALL"], name
        assert service["user"] == "65532:65532" and service["security_opt"] == ["no-new-privileges:true"], name
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), f"{name} listens beyond loopback"
        if name in places:
            assert service["networks"]["sim"]["ipv4_address"] == places[name]
            assert f"--address={places[name]}" in service["command"] and f"--name={name}" in service["command"]
            assert "--served-model-name=" + deploy_files.MODEL in service["command"]
    fixed = {"router": deploy_files.ROUTER, "envoy": deploy_files.ENVOY, "page": deploy_files.PAGE}
    fixed |= {"router-lmcache": deploy_files.LMCACHE_ROUTER, "envoy-lmcache": deploy_files.LMCACHE_ENVOY}
    fixed |= {"page-lmcache": deploy_files.LMCACHE_PAGE}
    for name, address in fixed.items():
        assert document["services"][name]["networks"]["sim"]["ipv4_address"] == address


def needed(router: Path, envoy: Path) -> dict[str, str]:
    """The programs; skips where one is missing."""
    if os.geteuid() != 0:
        pytest.skip("a container engine in a namespace of its own needs root")
    for name in ("docker", "dockerd", "containerd", "unshare", "ip", "iptables", "prometheus"):
        if shutil.which(name) is None:
            pytest.skip(f"no {name} on this machine (Debian: docker.io iptables iproute2 prometheus)")
    if not install.plugin().is_file():
        pytest.skip("no compose plugin (python -m tests.compose.install)")
    if install.python312() is None or not install.wheels().is_dir():
        pytest.skip("no Python 3.12 with wheels for the image (python -m tests.compose.install)")
    tried = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no namespaces here: {tried.stderr.strip()}")
    prometheus = shutil.which("prometheus")
    assert prometheus is not None
    programs = {"router": str(router), "envoy": str(envoy), "prometheus": prometheus}
    sidecar = os.environ.get("HARNESS_PD_SIDECAR")
    if sidecar:
        programs["sidecar"] = sidecar
    if Path(sys.executable).with_name("lmcache").exists():
        programs["lmcache"] = sys.executable
    old = find("v0.7.1")
    if old is not None:
        programs["old_router"] = str(old.path)
    return programs


@pytest.mark.slow
@pytest.mark.router
@pytest.mark.timeout(1000)
def test_compose(router_v0100: Path, envoy_program: Path, tmp_path: Path) -> None:
    programs = needed(router_v0100, envoy_program)
    repo = tmp_path / "repo"
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if name.startswith(("harness/", "fake_workers/", "deploy/", "traces/")) or "/" not in name:
            (repo / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, repo / name)
    for wheel in install.wheels().iterdir():
        shutil.copy(wheel, repo / "deploy" / "wheels")
    (tmp_path / "config" / "cli-plugins").mkdir(parents=True)
    (tmp_path / "config" / "cli-plugins" / "docker-compose").symlink_to(install.plugin())
    result = tmp_path / "result.json"
    plan = {
        "work": str(tmp_path),
        "repo": str(repo),
        "python": str(install.python312()),
        "programs": programs,
        "result": str(result),
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    command = [
        "unshare",
        "--net",
        "--mount",
        "--fork",
        "--kill-child=SIGINT",  # whatever ends this test, what it started ends in order
        sys.executable,
        "-m",
        "tests.compose.inside",
        str(tmp_path / "plan.json"),
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    shutil.rmtree(tmp_path / "data", ignore_errors=True)
    assert result.is_file(), done.stdout[-3000:] + done.stderr[-3000:]
    seen = json.loads(result.read_text())
    print(json.dumps(seen, indent=1))
    assert "failure" not in seen, seen["failure"]
    assert seen["up_s"] < (60 if os.getloadavg()[0] < 4 else 150)
    assert all(state == "running" for _, state, _ in seen["services"])
    assert seen["first"] == 200 and seen["statuses"] == [200] * 8
    assert min(seen["cached"]) > 0
    assert seen["page"] and all(seen["page_up"])
    assert seen["decision"]["status"] == 200 and len(seen["decision"]["scores"]) == 4
    assert seen["prometheus_success"] >= 9
    assert len([t for t in seen["targets_up"] if ":8000/metrics" in t]) == 4
    assert "Read-only file system" in seen["writable"] and seen["user"] == "65532"
    assert 200 in seen["while_down"] and set(seen["while_down"]) <= {200, 503}
    assert seen["after"] and seen["router_back"]
    assert "report:" in seen["bench"] and seen["bench_on_page"][0]["report"]
    if "sidecar" in programs:
        assert seen["pd"] == [200] * 4
        assert seen["pd_fetched"] > 0 and seen["pd_prefilled"] > 0
    if "lmcache" in programs:
        assert seen["lmcache"] == [200] * len(seen["lmcache"])
        assert seen["lmcache_back"] > 1500 and seen["lmcache_hits"] > 1500
        assert [t["name"] for t in seen["lmcache_tiers"]] == ["lmcache"] * 2
        assert any(t["hit_rate"] for t in seen["lmcache_tiers"])
        assert all(seen["lmcache_page_up"])
    if "old_router" in programs:
        assert seen["kubernetes_up"] and seen["kubernetes"] == [200] * 4
    assert seen["left"] == []
