"""Notes of a run that follow from its experiment alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fake_workers.pricing.registry import load_profile
from harness.experiment import Engine, Experiment
from harness.placement import PoolPlan, engine_config
from harness.run_facts import capacity_notes, grid_notes, wire_notes


def _experiment(*tiers: dict[str, Any]) -> Experiment:
    return Experiment.model_validate(
        {
            "name": "t",
            "trace": {"path": "trace.jsonl"},
            "cluster": {"nodes": 2, "gpus_per_node": 8},
            "load": {"arrivals": "uniform", "sessions_per_hour_per_node": 30},
            "model": {"profile": "glm-5.2-fp8-dp8ep8-b200"},
            "router": {"kind": "round_robin"},
            "cache": {"kind": "lmcache", "lmcache": {"l1_size_gb": 64, "l2_adapters": list(tiers)}},
        }
    )


def test_shared_tiers_whose_loads_cost_the_wire_alone_are_named() -> None:
    measured = {"name": "peer", "load": {"cost": "rdma-mooncake-8x200g"}}
    (note,) = wire_notes(_experiment({"name": "store"}, measured))
    assert note.startswith("loads from store cost the wire alone")
    assert "2.4 to 8 times" in note and "docs/fabric.md" in note


def test_no_such_note_without_shared_tiers_or_with_measured_loads() -> None:
    assert wire_notes(_experiment()) == []
    assert wire_notes(_experiment({"name": "store", "load": {"cost": "rdma-mooncake-8x200g"}})) == []


def test_what_was_asked_beyond_the_grids_is_one_note_for_all_pools() -> None:
    small = replace(load_profile("llama-3.1-8b-bf16-tp1-h100"), name="small", out_of_grid={"context": 9000})
    again = replace(small, out_of_grid={"context": 131072, "batch": 700})
    large = replace(small, name="large", out_of_grid={"context": 70000})
    assert grid_notes([replace(small, out_of_grid={})]) == []
    (note,) = grid_notes([small, again])
    assert note.endswith("extrapolated: context up to 131,072, batch up to 700")
    (note,) = grid_notes([small, large])
    assert note.endswith("extrapolated: small: context up to 9,000; large: context up to 70,000")


def test_a_capacity_that_somebody_states_is_named_unless_the_experiment_sets_its_own() -> None:
    def notes(name: str, engine: Engine) -> list[str]:
        profile = load_profile(name)
        return capacity_notes([PoolPlan("", profile, engine_config(engine, profile, "p"), 8, range(1))])

    (note,) = notes("glm-5.2-fp8-dp8ep8-h200", Engine())
    assert note.startswith("KV capacity of glm-5.2-fp8-dp8ep8-h200 is stated, not computed (llm-d blog")
    assert notes("glm-5.2-fp8-dp8ep8-h200", Engine(num_gpu_blocks=3437)) == []
    assert notes("glm-5.2-fp8-dp8ep8-b200", Engine()) == []
