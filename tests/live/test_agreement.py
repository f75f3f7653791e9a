"""Live and replay agree: one small trace through both gives the same placements, cache hits and times to first token.

The live run is slowed down to a quarter, so that what HTTP, Envoy and a busy test machine add is small in engine time.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness.experiment import Experiment
from harness.live.bench import run_bench
from harness.runner import run_experiment
from harness.trace.model import Session
from harness.trace.write import write_trace
from tests.live.running import experiment, running
from tests.trace.trace_builders import call

pytestmark = [pytest.mark.router, pytest.mark.slow]


def trace(path: Path) -> None:
    """Five conversations of three turns; each turn holds all before it, answers included."""
    sessions = []
    for number in range(5):
        first = 20 + 4 * number
        calls = [
            call(0, 0.0, first, output_tokens=30),
            call(1, 5.0, first + 12, 0, first, deps=(0,), gap_s=0.3, output_tokens=25),
            call(2, 9.0, first + 20, 1, first + 12, deps=(1,), gap_s=0.3, output_tokens=20),
        ]
        sessions.append(Session(id=f"s{number}", block_tokens=64, calls=calls))
    write_trace(path, sessions)


def test_live_equals_replay(router_v0100: Path, envoy_program: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    trace(file)
    base = experiment(2, router={"binary": str(router_v0100), "block_tokens": None}, live={"speed": 0.25})
    wanted = Experiment.model_validate(
        base.model_dump()
        | {"trace": {"path": str(file)}, "load": {"arrivals": "uniform", "sessions_per_hour_per_node": 3600}}
    )
    with running(wanted, tmp_path / "stack") as live:
        found = run_bench(wanted, live.url, tmp_path / "bench")
    replayed = run_experiment(wanted, tmp_path / "replay", show_progress=False)
    assert found.calls["outcome"].to_list() == ["completed"] * 15 == replayed.calls["outcome"].to_list()
    both = found.calls.join(replayed.calls, on="call_id", suffix="_replay")
    pairs = set(zip(both["endpoint"], both["endpoint_replay"], strict=True))
    assert len(pairs) == 2, "placements differ by more than the workers' names"
    assert both["gpu_tokens"].to_list() == both["gpu_tokens_replay"].to_list()
    assert both["output_tokens"].to_list() == both["output_tokens_replay"].to_list()
    live_ms = (both["first_token_ns"] - both["arrival_ns"]).to_numpy() / 1e6
    replay_ms = (both["first_token_ns_replay"] - both["arrival_ns_replay"]).to_numpy() / 1e6
    off = np.abs(live_ms - replay_ms) - np.maximum(20.0, 0.05 * replay_ms)
    # the median, as a busy machine may hold up any single request
    assert np.median(off) <= 0, list(zip(live_ms.round(1), replay_ms.round(1), strict=True))
    decode = (both["finish_ns"] - both["first_token_ns"]).to_numpy().sum()
    decode_replay = (both["finish_ns_replay"] - both["first_token_ns_replay"]).to_numpy().sum()
    assert decode == pytest.approx(decode_replay, rel=0.05)
    assert (tmp_path / "bench" / "report.html").is_file()
    assert found.summary["outcome"]["completed"] == 15
    assert not found.info.invalid


def test_a_gateway_that_is_not_there(tmp_path: Path) -> None:
    from harness.errors import ComponentError

    file = tmp_path / "trace.jsonl"
    trace(file)
    wanted = Experiment.model_validate(experiment(1).model_dump() | {"trace": {"path": str(file)}})
    with pytest.raises(ComponentError, match="does not answer"):
        run_bench(wanted, "http://127.0.0.1:9", tmp_path / "out")
