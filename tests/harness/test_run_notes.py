"""Notes of a run that follow from its experiment alone."""

from __future__ import annotations

from typing import Any

from harness.experiment import Experiment
from harness.run_facts import wire_notes


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
