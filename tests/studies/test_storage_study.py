"""The storage tier on a fleet under load, next to llm-d's published runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.studies.storage import Outcome, closed_loop, load_case, run_arms, storage_study
from harness.studies.tables import markdown, render


def test_the_closed_loop_keeps_its_clients_busy_and_shares_what_groups_share() -> None:
    case = load_case()
    session = closed_loop(case, 50_000, 300, seed=1)
    assert len(session.calls) == 300 and len({call.chain for call in session.calls}) == case.concurrency
    assert all(call.deps == (call.index - 20,) for call in session.calls[20:])
    new = [call for call in session.calls if call.ref < 0]
    assert len(new) == case.workload.num_groups, "each group's prefix is new once"
    assert {call.keep_blocks for call in session.calls if call.ref >= 0} == {50_000 // 16}


def test_published_gains_of_the_storage_tier_stand_next_to_ours() -> None:
    case = load_case()
    values = {"ttft_mean_s": 25.38, "ttft_p90_s": 37.74, "e2e_mean_s": 56.21, "e2e_p90_s": 69.69, "input_tok_s": 18607}
    better = values | {"ttft_mean_s": 12.69}
    served = {"gpu": 0.5, "dram": 0.1, "shared": 0.0, "computed": 0.4}
    arms = [
        Outcome(50_000, "cpu", values, dict(values), served, "d", []),
        Outcome(50_000, "lustre", better, dict(values), served, "d", []),
    ]
    study = storage_study(case, arms, "cmd")
    assert study.answers == [
        "50,000 tokens, lustre below DRAM: mean TTFT -50%, input tok/s +0% (published: mean TTFT +0%, input tok/s +0%)."
    ]
    assert study.marked == {(1, 1)}
    assert "**25.38 / 12.69 / 0.50**" in markdown(study) and "| 50 / 10 / 0 / 40 |" in markdown(study)
    assert "plot-0" not in render(study), "one length makes no line"
    longer = [Outcome(70_000, one.tier, one.values, one.published, served, "d", []) for one in arms]
    assert "plot-0" in render(storage_study(case, [*arms, *longer], "cmd"))


@pytest.mark.slow
@pytest.mark.router
def test_a_storage_tier_raises_throughput_about_as_published(
    tmp_path: Path, lmcache: None, router_v071: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARNESS_ROUTER_V071", str(router_v071))
    cpu, lustre = run_arms(load_case(), "small", tmp_path, show_progress=False)
    assert not cpu.invalid and not lustre.invalid
    assert cpu.served["shared"] == 0 < lustre.served["shared"]
    assert lustre.values["input_tok_s"] > 1.1 * cpu.values["input_tok_s"]
    assert lustre.values["ttft_mean_s"] < 0.9 * cpu.values["ttft_mean_s"]
