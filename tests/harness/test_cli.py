"""The command line from outside: exit codes, one clear line for bad input, nothing but results on standard output."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.test_runner import TRACE

EXPERIMENT = """\
name: cli
trace: {path: trace.jsonl}
cluster: {nodes: 1}
load: {arrivals: at_once}
model: {profile: glm-5.2-fp8-dp8ep8-b200}
router: {kind: round_robin}
"""


def _harness(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "harness", *words]
    # far above what any command takes here: a busy machine is not a fault
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=400, env=_environment())


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "e.yaml").write_text(EXPERIMENT)
    (tmp_path / "trace.jsonl").write_text(TRACE)
    return tmp_path


def test_run_prints_json_and_only_json_on_request(folder: Path) -> None:
    done = _harness("run", "e.yaml", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outcome"]["completed"] == 2


def test_compare_prints_the_table_and_the_page(folder: Path) -> None:
    done = _harness("compare", "e.yaml", "--router-config", "round_robin,random", "--out", "o", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "round_robin (ours)" in done.stdout and "report: o/report.html" in done.stdout
    again = _harness("compare", "e.yaml", "--router-config", "random", "--out", "o", cwd=folder)
    assert "report: o-2/report.html" in again.stdout, "results are never overwritten"
    assert _harness("report", "o", "--out", "page.html", cwd=folder).returncode == 0
    assert (folder / "page.html").exists()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["run", "none.yaml"], "none.yaml: no such experiment file"),
        (["run", "e.yaml", "--trace", "none.jsonl"], "none.jsonl"),
        (["run", "e.yaml", "--trace", "broken.jsonl"], "broken.jsonl"),
        (["run", "e.yaml", "--trace", "junk.jsonl.gz"], "junk.jsonl.gz"),
        (["run", "e.yaml", "--set", "cluster.nodes=0"], "cluster.nodes"),
        (["run", "e.yaml", "--set", "model.profile=nope"], "nope"),
        (["run", "e.yaml", "--set", "router.kind=llm-d", "--set", "router.release=v9"], "v9"),
        (["run", "e.yaml", "--set", "router.kind=llm-d", "--set", "router.config=nope"], "nope"),
        (["compare", "e.yaml", "--router-config", "nope"], "nope"),
        (["report", "nowhere"], "nowhere"),
        (["run", "e.yaml", "--out", "trace.jsonl"], "is a file"),
        (["run", "e.yaml", "--set", "load.client_timeout_s=.inf"], "client_timeout_s"),
        (["run", "e.yaml", "--set", "router.kind=llm-d", "--set", "router.config=odd.yaml"], "odd.yaml"),
        (["trace", "convert", "trace.jsonl", "/dev/null"], "not a regular file"),
        (["run", "e.yaml", "--set", "\x1b[31mevil=1"], "evil"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(folder: Path, words: list[str], complaint: str) -> None:
    (folder / "broken.jsonl").write_text(TRACE.replace('"keep":31', '"keep":99'))
    (folder / "odd.yaml").write_text(
        "apiVersion: inference.networking.x-k8s.io/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n"
        "- {type: queue-scorer}\n- {type: max-score-picker}\n- {type: single-profile-handler}\n"
        "schedulingProfiles:\n- {name: default, plugins: [{pluginRef: queue-scorer, weight: [1]}]}\n"
    )
    (folder / "junk.jsonl.gz").write_bytes(b"\x1f\x8bjunk")
    done = _harness(*words, cwd=folder)
    assert done.returncode == 2, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and complaint in lines[0]
    assert done.stdout == "" and "\x1b" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_keeps_its_records_and_exits_130(
    folder: Path, number: signal.Signals, heard_interrupts: None
) -> None:
    calls = "".join(
        f'{{"i":{i},"t":{i},"chain":"main","in":64000,"out":4000,"ref":-1,"keep":0,"new":1000,"deps":[{i - 1}]}}\n'
        for i in range(1, 30000)
    )
    (folder / "long.jsonl").write_text("\n".join(TRACE.splitlines()[:2]) + "\n" + calls)
    command = [sys.executable, "-m", "harness", "run", "e.yaml", "--trace", "long.jsonl", "--out", "o"]
    child = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, env=_environment())
    assert child.stderr is not None
    first = child.stderr.readline()  # the first line of progress: the run is under way
    assert "calls" in first, first
    child.send_signal(number)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 130, errors
    assert "kept in o" in errors
    summary = json.loads((folder / "o/summary.json").read_text())
    assert summary["outcome"]["completed"] > 0 and not summary["validity"]["valid"]


def test_the_schema_is_json(folder: Path) -> None:
    assert json.loads(_harness("schema", cwd=folder).stdout)["title"] == "Experiment"


def test_profiles_are_listed(folder: Path) -> None:
    names = [row["name"] for row in json.loads(_harness("profile", "list", "--json", cwd=folder).stdout)]
    assert "glm-5.2-fp8-dp8ep8-b200" in names and "llama-3.3-70b-fp8-tp8-h200" in names


def test_help_names_the_extra_that_profiles_need(folder: Path) -> None:
    """In square brackets it would be taken for markup and vanish."""
    assert "the extra `profile`" in " ".join(_harness("profile", "build", "--help", cwd=folder).stdout.split())


def test_two_commands_at_once_do_not_share_a_folder(folder: Path) -> None:
    command = [sys.executable, "-m", "harness", "run", "e.yaml", "--out", "o", "--json"]
    children = [
        subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True, env=_environment()) for _ in range(3)
    ]
    digests = {json.loads(child.communicate(timeout=100)[0])["digest"] for child in children}
    assert len(digests) == 1 and {child.returncode for child in children} == {0}
    assert sorted(path.name for path in folder.glob("o*")) == ["o", "o-2", "o-3"]
