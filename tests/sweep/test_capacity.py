"""Points that a capacity search asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import InputError
from harness.experiment import load_experiment
from harness.sweep.capacity import CapacitySource
from harness.sweep.search import RateLadder
from harness.sweep.slo import parse_slo
from harness.workload import load_sessions
from tests.harness.test_cli import EXPERIMENT
from tests.harness.test_runner import TRACE


@pytest.mark.parametrize(("history_s", "span_s"), [(0, 10), (4, 6)])
def test_a_point_ends_with_the_last_arrival(tmp_path: Path, history_s: int, span_s: float) -> None:
    source = _source(tmp_path, history_s)
    point = source.next()
    assert point is not None
    load = point.experiment.load
    assert (load.until_s, load.warmup_s) == (span_s, span_s / 4)


def test_a_history_longer_than_the_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"load\.history_s: 60: at 360 sessions per hour and node the trace's last"):
        _source(tmp_path, 60).next()


def _source(folder: Path, history_s: int) -> CapacitySource:
    """Two sessions, ten seconds apart at the ladder's first rate."""
    (folder / "trace.jsonl").write_text(TRACE + TRACE.replace('"session":"a"', '"session":"b"'))
    (folder / "e.yaml").write_text(EXPERIMENT)
    changes = ["load.arrivals=uniform", "cluster.nodes=1", f"load.history_s={history_s}"]
    experiment = load_experiment(folder / "e.yaml", changes)
    loaded = load_sessions(experiment)
    assert len(loaded.sessions) == 2
    return CapacitySource(
        {"a": experiment}, [1], [parse_slo("e2e_p90_s=300")], RateLadder(360, 0.05, 1, 1000), 0.25, loaded
    )
