"""Dispatch and combine between the GPUs of an expert-parallel group over several nodes, as DeepEP was measured.

The kernel database prices them by a formula (all-gather and reduce-scatter at the network's rate) outside its large-EP
deployments, which its engine interface does not offer. Its own rows of DeepEP on 2, 4 and 8 nodes (SGLang 0.5.6.post2;
hidden size 7168, FP8 dispatch, BF16 combine) are read here instead: the high-throughput kernels for steps with prefill
tokens, the low-latency ones for pure decode steps.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

VERSION = "0.5.6.post2"
SMS = 20  # of the high-throughput kernels: DeepEP's default and vLLM's (deepep_high_throughput)


class Exchange(NamedTuple):
    """Dispatch and combine of one step, all expert layers, in milliseconds over the tokens of each rank."""

    tokens: list[int]
    prefill_ms: list[float]
    decode_tokens: list[int]
    decode_ms: list[float]
    origin: str


class Experts(NamedTuple):
    """What of a model decides how much its tokens send: sizes from its own configuration."""

    hidden: int
    experts: int
    per_token: int
    layers: int


def experts_of(config: Path) -> Experts | None:
    """The routed experts of a model from its Hugging Face configuration; None for a dense model."""
    fields = json.loads(config.read_text(encoding="utf-8"))
    fields = fields.get("text_config", fields)
    experts = fields.get("n_routed_experts") or fields.get("num_local_experts") or fields.get("num_experts")
    if not experts:
        return None
    layers = fields["num_hidden_layers"] - fields.get("first_k_dense_replace", 0)
    return Experts(fields["hidden_size"], experts, fields["num_experts_per_tok"], layers)


def measured_exchange(system: Path, experts: Experts, nodes: int) -> Exchange | None:
    """DeepEP's rows of a system (its data folder) for a model's experts over `nodes` nodes; None: not measured.

    A row of another hidden size holds for as many tokens as make the same bytes, so that latencies stay what they are.
    """
    folder = system / "comm" / "sglang" / VERSION
    files = [folder / f"wideep_deepep_{name}_perf.parquet" for name in ("normal", "ll")]
    if not all(file.is_file() for file in files):
        return None
    pandas = import_module("pandas")
    normal, latency = (pandas.read_parquet(file) for file in files)
    normal = normal[(normal["dispatch_sms"] == SMS) & (normal["combine_sms"] == SMS)]
    curves: list[tuple[list[int], list[float]]] = []
    for rows, dispatch, combine in (
        (normal, "dispatch_transmit_us", "combine_transmit_us"),
        (latency, "dispatch_avg_t_us", "combine_avg_t_us"),
    ):
        rows = rows[
            (rows["node_num"] == nodes)
            & (rows["num_experts"] == experts.experts)
            & (rows["num_topk"] == experts.per_token)
        ].sort_values("num_token")
        if rows.empty:
            return None
        tokens = [round(n * h / experts.hidden) for n, h in zip(rows["num_token"], rows["hidden_size"], strict=True)]
        times = [experts.layers * (d + c) / 1e3 for d, c in zip(rows[dispatch], rows[combine], strict=True)]
        curves.append((tokens, times))
    return Exchange(*curves[0], *curves[1], f"DeepEP on {nodes} nodes, sglang {VERSION} rows, {SMS} SMs")
