"""Pools: notation, sizes, nodes, labels, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.disagg.config import parse_notation
from harness.errors import InputError
from harness.experiment import Experiment
from harness.placement import ROLE_LABEL, PoolPlan, plan_pools, with_nodes

PROFILE = "qwen3-32b-bf16-tp2-h100"


def experiment(**cluster: Any) -> Experiment:
    return Experiment.model_validate(
        {"name": "t", "trace": {"path": "x"}, "cluster": cluster, "model": {"profile": PROFILE}}
    )


def shape(plans: list[PoolPlan]) -> list[tuple[str, int, int, list[int]]]:
    return [(p.role, len(p.groups), p.gpus, sorted({e.node for e in p.endpoints})) for p in plans]


@given(st.integers(1, 999), st.integers(1, 999))
def test_both_notations_are_read(prefill: int, decode: int) -> None:
    assert parse_notation(f"{prefill}P{decode}D") == (prefill, decode, True)
    assert parse_notation(f"{prefill}:{decode}") == (prefill, decode, False)


@pytest.mark.parametrize("text", ["8P", "P2D", "0P1D", "3:0", "3:1:1", "three", ""])
def test_what_is_no_notation_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_notation(text)


def test_replicas_fill_nodes_of_their_own() -> None:
    plans = plan_pools(experiment(disaggregation="5P2D", gpus_per_node=8))
    assert shape(plans) == [("prefill", 5, 10, [0, 1]), ("decode", 2, 4, [2])]
    assert [e.node for e in plans[0].endpoints] == [0, 0, 0, 0, 1]
    assert {e.labels[ROLE_LABEL] for e in plans[0].endpoints} == {"prefill"}
    assert {e.labels[ROLE_LABEL] for e in plans[1].endpoints} == {"decode"}
    names = [e.name for plan in plans for e in plan.endpoints]
    assert names == [f"w{i}" for i in range(7)]


def test_shares_divide_the_nodes() -> None:
    wanted = experiment(disaggregation="3:1", nodes=4, gpus_per_node=4)
    assert shape(plan_pools(wanted)) == [("prefill", 6, 12, [0, 1, 2]), ("decode", 2, 4, [3])]
    with pytest.raises(InputError, match="6 nodes cannot be divided 3:1"):
        plan_pools(experiment(disaggregation="3:1", nodes=6))


def test_pools_have_profiles_and_engines_of_their_own() -> None:
    pools = [
        {"role": "prefill", "replicas": 1, "engine": {"max_num_batched_tokens": 16384}},
        {"role": "decode", "replicas": 1, "profile": "qwen3-32b-bf16-tp2-h200", "engine": {"max_num_seqs": 64}},
    ]
    wanted = experiment(pools=pools, engine={"block_size": 32, "max_num_seqs": 128})
    prefill, decode = plan_pools(wanted)
    assert (prefill.engine.max_num_batched_tokens, prefill.engine.max_num_seqs) == (16384, 128)
    assert (decode.engine.max_num_batched_tokens, decode.engine.max_num_seqs) == (8192, 64)
    assert prefill.engine.block_tokens == decode.engine.block_tokens == 32
    assert decode.profile.gpu != prefill.profile.gpu
    assert with_nodes(wanted, [prefill, decode]).cluster.nodes == 2


def test_a_replica_may_span_nodes() -> None:
    pools = [{"role": "both", "replicas": 2, "profile": "glm-5.2-fp8-dp8ep8-b200", "gpus_per_node": 4}]
    (plan,) = plan_pools(experiment(pools=pools))
    assert [[e.node for e in group] for group in plan.groups] == [[0] * 4 + [1] * 4, [2] * 4 + [3] * 4]


def test_no_pools_is_one_pool_without_a_role() -> None:
    (plan,) = plan_pools(experiment(nodes=2, gpus_per_node=4))
    assert plan.role == "" and len(plan.groups) == 4
    assert all(not e.labels for e in plan.endpoints)


@pytest.mark.parametrize(
    "cluster, words",
    [
        ({"pools": [{"role": "prefill"}]}, "needs replicas"),
        ({"disaggregation": "2P1D", "pools": [{"role": "both"}]}, "one of prefill and one of decode"),
        ({"disaggregation": "2P1D", "pools": [{"role": "prefill", "replicas": 1}, {"role": "decode"}]}, "how many"),
        ({"disaggregation": "two"}, "neither of the form"),
    ],
)
def test_contradictions_are_refused_by_the_schema(cluster: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        experiment(**cluster)


def test_pools_that_cannot_exchange_kv_are_refused() -> None:
    other = {"role": "decode", "replicas": 1, "profile": "llama-3.3-70b-fp8-tp8-h100"}
    with pytest.raises(InputError, match="same KV"):
        plan_pools(experiment(pools=[{"role": "prefill", "replicas": 1}, other]))
    blocks = {"role": "decode", "replicas": 1, "engine": {"block_size": 64}}
    with pytest.raises(InputError, match="blocks of 16 and of 64"):
        plan_pools(experiment(pools=[{"role": "prefill", "replicas": 1}, blocks]))
    with pytest.raises(InputError, match="nobody decodes"):
        plan_pools(experiment(pools=[{"role": "prefill", "replicas": 1}]))
