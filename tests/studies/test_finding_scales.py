"""Every finding that ships, at small scale with the real router and the real LMCache: its directions come out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.studies.finding import finding_names, load_finding
from tests.harness.test_cli import _environment

pytestmark = [pytest.mark.slow, pytest.mark.router]


@pytest.mark.parametrize("name", finding_names())
def test_directions_come_out_at_small_scale(
    name: str, tmp_path: Path, request: pytest.FixtureRequest, lmcache: None
) -> None:
    finding = load_finding(name)
    arms = finding.arms_at("small")
    releases = {finding.experiment_of(arm, "small", tmp_path / "t", 1).router.release for arm in arms}
    for release in releases:
        request.getfixturevalue("router_v071" if release == "v0.7.1" else "router_v0100")
    command = [sys.executable, "-m", "harness", "study", name, "--out", str(tmp_path / "o"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=_environment(), cwd=tmp_path, timeout=550)
    assert done.returncode == 0, done.stderr
    study = json.loads(done.stdout)
    assert study["directions"] and all(direction["holds"] for direction in study["directions"]), study["directions"]
    assert all(run["valid"] for run in study["runs"]), study["runs"]
    assert {run["arm"] for run in study["runs"]} == set(study["arms"])
    assert str(tmp_path) not in done.stdout and study["command"] == f"harness study {name} --scale small"
    assert len(done.stdout) < 60_000 and study["date"] and study["versions"]
    text = (tmp_path / "o" / "study.md").read_text()
    assert all(check.says in text for check in finding.checks)
