"""The profile lmcache of docker-compose.yml: its commands, configurations and health checks, with the real programs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVICES = ["lmcache", "cached-0", "cached-1", "router-lmcache", "envoy-lmcache", "page-lmcache"]


@pytest.mark.slow
@pytest.mark.router
@pytest.mark.timeout(600)
def test_prompts_come_back_from_lmcaches_server(
    router_v0100: Path, envoy_program: Path, lmcache: None, tmp_path: Path
) -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("namespaces of one's own need root, unshare and ip (Debian: iproute2)")
    program = Path(sys.executable).with_name("lmcache")
    if not program.exists():
        pytest.skip("LMCache's command line is not beside this Python")
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "ip", "link", "add", "x", "type", "bridge"], capture_output=True
    )
    if tried.returncode:
        pytest.skip(f"no bridge in a namespace here: {tried.stderr.decode().strip()}")
    result = tmp_path / "result.json"
    plan = {
        "work": str(tmp_path),
        "repo": str(ROOT),
        "services": SERVICES,
        "variables": {"CACHED_GPU_BLOCKS": "260", "HOME": str(tmp_path)},
        "patience_s": 300,  # far above what it takes: a busy machine is not a fault
        "programs": {
            "docker.io/lmcache/": [str(program)],
            "llm-cluster/sim": [sys.executable, "-m"],
            "ghcr.io/llm-d/llm-d-router-endpoint-picker": [str(router_v0100)],
            "docker.io/envoyproxy/envoy": [str(envoy_program)],
        },
        "result": str(result),
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    command = [
        *("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
        *(sys.executable, "-m", "tests.compose.without_engine", str(tmp_path / "plan.json")),
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=550)
    assert result.is_file(), done.stdout[-3000:] + done.stderr[-3000:]
    seen = json.loads(result.read_text())
    print(json.dumps(seen, indent=1))
    assert "failure" not in seen, seen["failure"]
    assert seen["statuses"] == [200] * 7 == seen["decisions"]
    assert seen["cached"][:6] == [0] * 6 and seen["cached"][6] == 2048 == seen["external"]
    assert [t["name"] for t in seen["tiers"]] == ["lmcache", "lmcache"] and all(seen["up"])
