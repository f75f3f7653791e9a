"""`harness sweep` and `harness capacity` from outside: results, resumption, failures, no orphans."""

from __future__ import annotations

import csv
import fcntl
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from harness.errors import ComponentError, InputError
from harness.sweep.pool import Ended, _lock, claim, complain, finished
from harness.sweep.worker import POINT
from tests.harness.test_cli import EXPERIMENT, _environment, _harness
from tests.harness.test_runner import TRACE

pytestmark = pytest.mark.slow

MANY = "".join(TRACE.replace('"a"', f'"s{n}"') for n in range(40))
"""40 sessions of two calls."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "e.yaml").write_text(EXPERIMENT)
    (tmp_path / "trace.jsonl").write_text(MANY)
    return tmp_path


def test_sweep_writes_every_point_a_table_and_a_page(folder: Path) -> None:
    words = ("sweep", "e.yaml", "--over", "cluster.nodes=1,2", "--over", "router.kind=random,round_robin")
    done = _harness(*words, "--out", "o", cwd=folder)
    assert done.returncode == 0, done.stderr
    with (folder / "o" / "points.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["cluster.nodes"], r["router.kind"]) for r in rows] == [
        ("1", "random"),
        ("1", "round_robin"),
        ("2", "random"),
        ("2", "round_robin"),
    ]
    assert {r["summary.outcome.completed"] for r in rows} == {"80"}
    alone = _harness(
        *("run", "e.yaml", "--set", "cluster.nodes=2", "--set", "router.kind=random", "--out", "alone", "--json"),
        cwd=folder,
    )
    assert rows[2]["summary.digest"] == json.loads(alone.stdout)["digest"], "a point is the same run as one by hand"
    assert "nodes=1,kind=random/report.html" in (folder / "o" / "report.html").read_text()
    assert (folder / "o" / "nodes=1,kind=random" / "report.html").exists()


def test_a_finished_point_is_not_run_again_and_an_unfinished_one_is(folder: Path) -> None:
    words = ("sweep", "e.yaml", "--over", "seed=1,2,3", "--out", "o")
    assert _harness(*words, cwd=folder).returncode == 0
    kept = folder / "o" / "seed=1" / "summary.json"
    before = kept.stat().st_mtime_ns
    (folder / "o" / "seed=2" / "summary.json").unlink()
    assert _harness(*words, cwd=folder).returncode == 0
    assert kept.stat().st_mtime_ns == before
    assert (folder / "o" / "seed=2" / "summary.json").exists()


def test_shards_share_a_folder(folder: Path) -> None:
    words = ("sweep", "e.yaml", "--over", "seed=1,2,3", "--out", "o")
    assert _harness(*words, "--shard", "1/2", cwd=folder).returncode == 0
    assert sorted(p.name for p in (folder / "o").glob("seed=*")) == ["seed=2"]
    done = _harness(*words, "--shard", "0/2", "--json", cwd=folder)
    assert all(row["summary"] for row in json.loads(done.stdout))


def test_a_point_that_another_command_runs_is_left_alone(folder: Path) -> None:
    (folder / "o").mkdir()
    words = ("sweep", "e.yaml", "--over", "seed=1", "--out", "o")
    assert _harness(*words, cwd=folder).returncode == 0
    (folder / "o" / "seed=1" / "summary.json").unlink()
    with (folder / "o" / ".seed=1.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = _harness(*words, cwd=folder)
    assert done.returncode == 2 and "another command" in done.stderr
    assert (folder / "o" / "seed=1" / "calls.parquet").exists(), "what the other has is not touched"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--over", "cluster.nodes=1,0"), "cluster.nodes"),
        (("--over", "cluster.nodes"), "a.b=v1,v2"),
        (("--over", "seed=1", "--shard", "2/2"), "--shard"),
        (("--over", "seed=1", "--out", "e.yaml"), "--out"),
    ],
)
def test_bad_input_is_one_line_and_nothing_runs(folder: Path, words: tuple[str, ...], complaint: str) -> None:
    done = _harness("sweep", "e.yaml", *words, cwd=folder)
    assert done.returncode == 2
    assert complaint in done.stderr and len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--low", "100", "--high", "1"), "wrong way round"),
        (("--low", "nan"), "--low nan"),
        (("--start", "3", "--low", "10"), "--start: 3 is not within --low 10"),
        (("--trace", "empty.jsonl"), "empty.jsonl: holds no call"),
    ],
)
def test_bad_bounds_of_a_search_are_one_line(folder: Path, words: tuple[str, ...], complaint: str) -> None:
    (folder / "empty.jsonl").write_text("")
    rated = ("--set", "load.arrivals=poisson", "--set", "load.sessions_per_hour_per_node=20")
    done = _harness("capacity", "e.yaml", "--slo", "e2e_p90_s=1", *rated, *words, "--out", "o", cwd=folder)
    assert done.returncode == 2, done.stderr
    assert complaint in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert not (folder / "o").exists()


def test_another_sweep_s_folder_is_refused(folder: Path) -> None:
    assert _harness("sweep", "e.yaml", "--over", "seed=1", "--out", "o", cwd=folder).returncode == 0
    done = _harness("sweep", "e.yaml", "--over", "seed=2", "--out", "o", cwd=folder)
    assert done.returncode == 2 and "another" in done.stderr


def test_a_failing_point_does_not_stop_the_others(folder: Path) -> None:
    done = _harness("sweep", "e.yaml", "--over", "router.kind=round_robin,llm-d", "--over", "seed=1,2", "--out", "o",
                    "--set", "router.binary=/nowhere/epp", cwd=folder)  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "2 of 4 runs failed" in done.stderr and "/nowhere/epp" in done.stderr
    assert (folder / "o" / "kind=round_robin,seed=2" / "summary.json").exists()
    assert "no result" in (folder / "o" / "report.html").read_text()


def test_interrupted_it_leaves_no_process_and_goes_on_later(folder: Path, heard_interrupts: None) -> None:
    words = ["sweep", "e.yaml", "--over", "seed=1,2", "--over", "cluster.nodes=1,2", "--jobs", "1", "--out", "o"]
    child = subprocess.Popen(
        [sys.executable, "-m", "harness", *words],
        cwd=folder,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not list(folder.glob("o/*/summary.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    workers = psutil.Process(child.pid).children(recursive=True)
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 130 and "goes on from there" in said
    assert not [p for p in workers if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert len(list(folder.glob("o/*/summary.json"))) < 4
    assert _harness(*words, cwd=folder).returncode == 0
    assert len(list(folder.glob("o/*/summary.json"))) == 4


def test_a_killed_command_leaves_no_process_and_its_runs_keep_what_they_have(folder: Path) -> None:
    calls = "".join(
        f'{{"i":{i},"t":{i},"chain":"main","in":64000,"out":4000,"ref":-1,"keep":0,"new":1000,"deps":[{i - 1}]}}\n'
        for i in range(1, 30000)
    )
    (folder / "trace.jsonl").write_text("\n".join(TRACE.splitlines()[:2]) + "\n" + calls)
    words = ["sweep", "e.yaml", "--over", "seed=1", "--jobs", "1", "--out", "o"]
    command = [sys.executable, "-m", "harness", *words]
    child = subprocess.Popen(command, cwd=folder, env=_environment(), stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    while ": 0 calls" in (line := child.stderr.readline()):  # until calls are done
        pass
    assert "calls" in line, line
    (worker,) = psutil.Process(child.pid).children()
    child.kill()
    child.communicate()
    worker.wait(60)
    summary = json.loads((folder / "o/seed=1/summary.json").read_text())
    assert summary["outcome"]["completed"] > 0 and not finished(folder / "o/seed=1")


def test_a_run_that_has_outlived_its_command_is_left_alone(tmp_path: Path) -> None:
    place = tmp_path / "o" / "x"
    place.mkdir(parents=True)
    (place / POINT).write_text("name: x\n")
    with (place / POINT).open("rb") as worker:
        fcntl.flock(worker, fcntl.LOCK_SH)
        with pytest.raises(InputError, match="another command"):
            _lock(place)
    _lock(place).close()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"digest": "a", "validity": null}', "\x00\x00"])
def test_a_summary_that_was_cut_off_or_edited_is_no_finished_run(tmp_path: Path, text: str) -> None:
    (tmp_path / "summary.json").write_text(text)
    assert not finished(tmp_path)
    (tmp_path / "summary.json").write_text('{"digest": "a", "validity": {"reasons": []}}')
    assert finished(tmp_path)


def test_a_claim_writes_into_its_folder_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder may be a mount of its own, and the one above it read-only."""
    linked: list[Path] = []
    real = os.link
    monkeypatch.setattr(os, "link", lambda a, b: (linked.extend([Path(a), Path(b)]), real(a, b)))
    (tmp_path / "o").mkdir()
    (tmp_path / "o/.sweep.json.host.7").write_text("of another shard that begins now")
    claim(tmp_path / "o", {"a": 1}, "sweep.json")
    assert {path.parent for path in linked} == {tmp_path / "o"}
    claim(tmp_path / "o", {"a": 1}, "sweep.json")
    with pytest.raises(InputError, match="another one"):
        claim(tmp_path / "o", {"a": 2}, "sweep.json")
    assert sorted(p.name for p in (tmp_path / "o").iterdir()) == [".sweep.json.host.7", "sweep.json"]


def test_ray_gives_the_same_results_as_processes(folder: Path) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install '.[ray]'")
    words = ("sweep", "e.yaml", "--over", "seed=1,2,3,4", "--json")
    local = _harness(*words, "--out", "a", cwd=folder)
    ray = _harness(*words, "--out", "b", "--ray", "local", "--jobs", "2", cwd=folder)
    assert ray.returncode == 0, ray.stderr
    digests = [[row["summary"]["digest"] for row in json.loads(done.stdout)] for done in (local, ray)]
    assert digests[0] == digests[1]
    assert (folder / "b" / "seed=4" / "calls.parquet").exists()


def test_capacity_brackets_the_answer_and_keeps_its_points(folder: Path) -> None:
    (folder / "e.yaml").write_text(EXPERIMENT.replace("at_once", "poisson, sessions_per_hour_per_node: 100"))
    words = (
        "capacity",
        "e.yaml",
        "--slo",
        "ttft_p90_s=0.2",
        "--seeds",
        "1",
        "--tolerance",
        "1",
        "--low",
        "20",
        "--high",
        "1000",
    )
    arms = ("--arm", "one:", "--arm", "two:cluster.engine.max_num_batched_tokens=512")
    done = _harness(*words, *arms, "--json", "--out", "o", cwd=folder)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [c["arm"] for c in document["capacity"]] == ["one", "two"]
    for found in document["capacity"]:
        for seed, capacity in found["per_seed"].items():
            points = [p for p in document["points"] if (p["arm"], p["seed"]) == (found["arm"], int(seed))]
            met = [p["sessions_per_hour_per_node"] for p in points if p["met"]]
            missed = [p["sessions_per_hour_per_node"] for p in points if not p["met"]]
            assert capacity == (max(met) if met else None)
            if capacity is None:
                continue
            assert not missed or min(missed) <= capacity * 2 * 1.001
    again = _harness(*words, *arms, "--json", "--out", "o", cwd=folder)
    assert json.loads(again.stdout)["capacity"] == document["capacity"]
    assert "runs done" not in again.stderr, "nothing was run again"
    assert (folder / "o" / "report.html").exists()


def test_capacity_needs_a_rate_to_search_over(folder: Path) -> None:
    done = _harness("capacity", "e.yaml", "--slo", "e2e_p90_s=300", cwd=folder)
    assert done.returncode == 2 and "load.arrivals" in done.stderr
    assert os.listdir(folder) and not (folder / "runs").exists()


def test_runs_that_failed_for_bad_input_are_bad_input(tmp_path: Path) -> None:
    bad = [Ended(f"p{n}", 2, "x: wrong; correct it") for n in range(12)]
    complain([Ended("fine", 0)], tmp_path, "study s")
    with pytest.raises(
        InputError, match=r"(?s)^study s: 12 of 12 runs failed:\np0: x: wrong.*p9: .*\nand 2 more; "
    ) as told:
        complain(bad, tmp_path, "study s")
    assert "the others" not in str(told.value) and "p10" not in str(told.value)
    with pytest.raises(InputError, match=f"1 of 2 runs failed; the others are in {tmp_path}:"):
        complain([Ended("fine", 0), bad[0]], tmp_path, "sweep")
    with pytest.raises(ComponentError, match="2 of 2 runs failed"):
        complain([bad[0], Ended("dead", 3, "router: died")], tmp_path, "sweep")
