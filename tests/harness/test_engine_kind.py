"""`cluster.engine.kind: vllm`: vLLM's own scheduler under the whole harness gives the same run."""

from __future__ import annotations

from pathlib import Path

import pytest

from fake_workers.vllm_engine.install import interpreter
from harness.errors import InputError
from harness.experiment import Experiment, load_experiment
from harness.runner import check_experiment, run_experiment

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "traces" / "demo.jsonl.gz"


def _experiment(kind: str, *more: str, trace: Path = DEMO) -> Experiment:
    settings = [f"cluster.engine.kind={kind}", "cluster.nodes=1", "router.config=precise", "output.report=false", *more]
    return load_experiment(ROOT / "examples" / "compare.yaml", settings, str(trace))


@pytest.mark.slow
@pytest.mark.router
def test_the_same_run_to_the_last_byte(
    router_v071: Path, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real session through the real router, precise scoring on KV events: equal records, equal digest."""
    if interpreter() is None:
        pytest.skip("vLLM's scheduler is not installed: harness engine install")
    trace = shared / "traces" / "weka" / "trace_0297.json.gz"
    monkeypatch.setenv("HARNESS_ROUTER_V071", str(router_v071))
    runs = {
        kind: run_experiment(_experiment(kind, trace=trace), tmp_path / kind, show_progress=False)
        for kind in ("builtin", "vllm")
    }
    assert runs["vllm"].calls.equals(runs["builtin"].calls)
    assert runs["vllm"].summary["digest"] == runs["builtin"].summary["digest"]
    assert runs["vllm"].summary["outcome"]["completed"] == 5
    assert runs["vllm"].summary["steps"] == runs["builtin"].summary["steps"]


def test_what_does_not_combine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _experiment("vllm").cluster.engine.leaping
    with pytest.raises(InputError, match="leaping: true and kind: vllm do not go together"):
        _experiment("vllm", "cluster.engine.leaping=true")
    tiers = load_experiment(ROOT / "examples" / "cache.yaml", ["cluster.engine.kind=vllm"], str(DEMO))
    with pytest.raises(InputError, match="does not go with cache tiers"):
        check_experiment(tiers, tmp_path)
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path))
    monkeypatch.delenv("HARNESS_VLLM_PYTHON", raising=False)
    with pytest.raises(InputError, match="harness engine install"):
        check_experiment(_experiment("vllm", "router.kind=round_robin"), tmp_path)
