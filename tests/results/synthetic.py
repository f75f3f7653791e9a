"""Made-up runs with realistic shapes (log-normal times, long prompts) for the tests of the results; nothing
is simulated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from harness.results.records import CallRecord
from harness.results.runinfo import LoadFacts, Prices, RunInfo
from harness.results.tier_data import LINK_COLUMNS, RESTORE_COLUMNS, SERIES_COLUMNS, TierData
from harness.results.timeline import Timeline, TimelineRecorder

S = 1_000_000_000


@dataclass(frozen=True)
class Shape:
    """How a made-up router config behaves."""

    label: str
    kind: str = "llm-d"
    hit: float = 0.8
    queue_s: float = 0.4
    skew: float = 0.2
    gap: float = 0.02
    scores_prefix: bool = True
    slow: float = 1.0


SHAPES = (
    Shape("precise-prefix", hit=0.93, queue_s=0.25, skew=0.35, gap=0.004),
    Shape("approximate-prefix", hit=0.86, queue_s=0.5, skew=0.5, gap=0.09),
    Shape("session-affinity", hit=0.9, queue_s=0.7, skew=0.9, scores_prefix=False, slow=1.1),
    Shape("load-only", hit=0.34, queue_s=2.5, skew=0.08, scores_prefix=False, slow=1.35),
    Shape("round-robin", kind="baseline", hit=0.3, queue_s=3.0, skew=0.12, scores_prefix=False, slow=1.4),
)

CONFIG_TEXT = """\
apiVersion: inference.networking.x-k8s.io/v1alpha1
kind: EndpointPickerConfig
plugins:
  - type: queue-scorer
  - type: kv-cache-utilization-scorer
  - type: max-score-picker
schedulingProfiles:
  - name: default
    plugins:
      - pluginRef: queue-scorer
        weight: 2
"""


def make_records(
    shape: Shape, calls: int = 1000, seed: int = 1, nodes: int = 8, per_node: int = 8, hours: float = 1.0
) -> list[CallRecord]:
    """`calls` records over that many hours of arrivals on nodes * per_node endpoints; ~1.5 % time out."""
    rng, load = (
        np.random.default_rng([seed, 7]),
        np.random.default_rng(seed),
    )  # the load is common to all shapes
    arrivals = np.sort(load.uniform(0, hours * 3600, calls))
    inputs = np.minimum(load.lognormal(11.2, 1.0, calls), 600_000).astype(int) + 1
    outputs = np.minimum(load.lognormal(5.5, 1.1, calls), 16_000).astype(int) + 1
    sessions = load.integers(0, max(2, calls // 70), calls)
    weights = rng.lognormal(0, shape.skew, nodes * per_node)
    endpoints = rng.choice(nodes * per_node, calls, p=weights / weights.sum())
    seen: dict[int, int] = {}
    records = []
    for i in range(calls):
        session = int(sessions[i])
        index = seen[session] = seen.get(session, -1) + 1
        held = (
            0.0
            if index == 0 or rng.random() > shape.hit + 0.05
            else float(min(0.999, rng.beta(9, 9 * (1 - shape.hit))))
        )
        gpu = int(inputs[i] * held)
        record = CallRecord(
            call_id=f"s{session:03d}/{index}",
            session=f"s{session:03d}",
            index=index,
            chain="main" if i % 5 else "sub-1",
            arrival_ns=int(arrivals[i] * S),
            input_tokens=int(inputs[i]),
            requested_output_tokens=int(outputs[i]),
            router_status=200,
            endpoint=int(endpoints[i]),
            node=int(endpoints[i]) // per_node,
            gpu_tokens=gpu,
            computed_tokens=int(inputs[i]) - gpu,
        )
        record.held_share = gpu / record.input_tokens
        if shape.scores_prefix:
            wrong = rng.exponential(shape.gap) * (1 if rng.random() < 0.7 else -1) if rng.random() < 0.2 else 0.0
            record.believed_share = float(np.clip(record.held_share + wrong, 0, 1))
        hot = weights[endpoints[i]] / weights.mean()
        record.routed_ns = record.arrival_ns
        record.admitted_ns = record.routed_ns + int(rng.lognormal(np.log(shape.queue_s * hot), 1.1) * S)
        prefill_s = 0.02 + record.computed_tokens / 22_000 * shape.slow * rng.lognormal(0, 0.2)
        record.first_token_ns = record.admitted_ns + int(prefill_s * S)
        record.output_tokens = record.requested_output_tokens
        per_token_s = 0.016 * shape.slow * hot**0.5 * rng.lognormal(0, 0.25)
        record.finish_ns = record.first_token_ns + int(per_token_s * S) * (record.output_tokens - 1)
        record.outcome = "completed"
        if record.finish_ns - record.arrival_ns > 300 * S:
            record.finish_ns = record.arrival_ns + 300 * S
            record.outcome, record.output_tokens = "timed_out", record.output_tokens // 2
            if record.first_token_ns > record.finish_ns:
                record.first_token_ns, record.output_tokens = None, 0
            if record.admitted_ns > record.finish_ns:
                record.admitted_ns, record.gpu_tokens, record.computed_tokens = None, 0, 0
        records.append(record)
    return records


def make_timeline(records: list[CallRecord], nodes: list[int], max_bins: int = 400) -> Timeline:
    """Running and waiting counts that fit the records, kept through the recorder."""
    recorder = TimelineRecorder(nodes, max_bins=max_bins)
    changes: list[tuple[int, int, int, int]] = []
    for r in records:
        assert r.endpoint is not None and r.routed_ns is not None and r.finish_ns is not None
        changes.append((r.routed_ns, r.endpoint, 0, 1))
        changes.append((r.admitted_ns or r.finish_ns, r.endpoint, 1 if r.admitted_ns else 0, -1))
        if r.admitted_ns:
            changes.append((r.finish_ns, r.endpoint, -1, 0))
    state = {e: [0, 0, 0] for e in range(len(nodes))}
    for t, e, run, wait in sorted(changes):
        running, waiting, since = state[e]
        if running:
            recorder.busy(e, since, t, computed_tokens=(t - since) // 100_000, output_tokens=(t - since) // S)
        state[e] = [running + run, waiting + wait, t]
        recorder.level(e, t, running + run, waiting + wait, min(1.0, (running + run) / 12))
    return recorder.finish(max(r.finish_ns or 0 for r in records))


def make_info(shape: Shape, records: list[CallRecord], nodes: int = 8, per_node: int = 8, **changes: Any) -> RunInfo:
    """A complete RunInfo for made-up records."""
    router: dict[str, Any] = {
        "kind": shape.kind,
        "release": "v0.10.0" if shape.kind == "llm-d" else None,
        "sha256": "9f" * 32 if shape.kind == "llm-d" else None,
        "config": shape.label,
        "config_text": CONFIG_TEXT if shape.kind == "llm-d" else None,
        "added": {"plugins": ["file-discovery"], "metrics": "push source"},
        "unmodified": True if shape.kind == "llm-d" else None,
    }
    fields: dict[str, Any] = {
        "name": "agentic",
        "seed": 1,
        "experiment": {"name": "agentic", "seed": 1, "cluster": {"nodes": nodes}},
        "experiment_yaml": f"name: agentic\nseed: 1\ncluster:\n  nodes: {nodes}\n",
        "router": router,
        "router_stats": {
            "decisions": len(records),
            "push_s": 0.0006,
            "barrier_s": 0.0021,
            "ext_proc_s": 0.0011,
        },
        "load": LoadFacts(
            sessions=len({r.session for r in records}),
            calls=len(records),
            input_tokens=sum(r.input_tokens for r in records),
            output_tokens=sum(r.requested_output_tokens for r in records),
            sessions_per_hour_per_node=17.5,
        ),
        "endpoint_nodes": [e // per_node for e in range(nodes * per_node)],
        "virtual_ns": max((r.finish_ns or r.arrival_ns for r in records), default=S),
        "window_ns": (300 * S, None),
        "workload": {
            "trace": "traces/agentic.jsonl.gz",
            "trace sha256": "ab" * 32,
            "sub-agents": "beside parent",
        },
        "cluster": {"nodes": nodes, "GPUs per node": 8, "endpoints": nodes * per_node, "GPU": "H200"},
        "profile": {
            "model": "GLM-5.2 FP8, DP8",
            "source": "aiconfigurator-core 0.12",
            "steps outside the grid": "0.4 %",
        },
        "prices": Prices("list price", 3.0, 0.3, 15.0),
        "wall_s": 214.2,
        "cpu_s": 390.1,
        "peak_rss_bytes": 1_400_000_000,
        "decisions": len(records),
        "events": 12 * len(records),
        "steps": 300 * len(records),
        "notes": ["0.4 % of steps lay outside the profile's grid and were extrapolated"],
        "command": f"harness compare examples/agentic.yaml --router-config {shape.label} --set seed=1",
        "versions": {"harness": "0.1.0", "python": "3.11.7", "polars": "2.1.0"},
    }
    return RunInfo(**(fields | changes))


def with_tier_tokens(records: list[CallRecord]) -> list[CallRecord]:
    """Moves half of what the GPU held to node DRAM and a quarter to a shared tier."""
    for record in records:
        record.dram_tokens, record.shared_tokens = record.gpu_tokens // 2, record.gpu_tokens // 4
        record.gpu_tokens -= record.dram_tokens + record.shared_tokens
        record.restore_ns = 0
    return records


def make_tiers(
    records: list[CallRecord], nodes: int = 8, busy: float = 0.6, seed: int = 1
) -> tuple[dict[str, Any], TierData]:
    """Facts and tables of a run with node DRAM and one shared tier; `busy`: use of the store's link."""
    rng = np.random.default_rng([seed, 3])
    end_ns = max((r.finish_ns or 0 for r in records), default=S)
    bins = 300
    width = -(-end_ns // bins)
    starts = [b * width for b in range(bins)]
    capacity = 100 * 10**9
    rows: list[tuple[Any, ...]] = []

    def add(kind: str, name: str, values: Any, highs: Any = None) -> None:
        for b, start in enumerate(starts):
            rows.append((kind, name, start, width, int(values[b]), None if highs is None else int(highs[b])))

    flow = busy * capacity * rng.uniform(0.4, 1.2, bins).clip(0, 1 / max(busy, 0.01)) * width / S
    for name, share in (("dram", 1.6), ("store", 1.0)):
        add("read", name, flow * share)
        add("write", name, flow * share / 10)
    add("link", "store>switch", flow)
    level = 400 * 2**30 * (1 - np.exp(-np.linspace(0, 6, bins)))
    for node in range(nodes):
        add("resident", f"dram/{node}", level * rng.uniform(0.8, 1), level)
    add("resident", "store", level * nodes, level * nodes)
    kinds = (("host>gpu", 63, 64, 0.2), ("switch>host", 50, nodes, 0.5), ("store>switch", 100, 1, 1.0))
    links = []
    for kind, gbytes, count, share in kinds:
        use = busy * share
        values = (kind, gbytes * 10**9, int(use * gbytes * end_ns), use, min(1.0, use * 1.4), use, max(0.0, use - 0.5))
        busiest = dict(zip([c for c in LINK_COLUMNS if c != "kind"], values, strict=True))
        links.append({"kind": kind, "links": count, "bytes": count * values[2], "busiest": busiest})
    restored = [r for r in records if r.dram_tokens and r.admitted_ns]
    took = rng.lognormal(-3, 1, (2, len(restored)))
    table = pl.DataFrame(
        {
            "call_id": [r.call_id for r in restored],
            "node": [r.node for r in restored],
            "outcome": [
                "failed" if i % 97 == 5 else "cancelled" if i % 97 == 6 else "loaded" for i in range(len(restored))
            ],
            "tier": ["store" if i % 3 else "dram" for i in range(len(restored))],
            "bytes": [r.dram_tokens * 50_000 for r in restored],
            "asked_ns": [r.arrival_ns for r in restored],
            "answered_ns": [r.arrival_ns + (int(took[0][i] * S) if i % 3 else 0) for i, r in enumerate(restored)],
            "started_ns": [r.admitted_ns for r in restored],
            "ended_ns": [(r.admitted_ns or 0) + int(took[1][i] * S) for i, r in enumerate(restored)],
            "dram_tokens": [r.dram_tokens for r in restored],
            "store_tokens": [r.shared_tokens if i % 3 else 0 for i, r in enumerate(restored)],
        },
        schema=RESTORE_COLUMNS | {"dram_tokens": pl.Int64, "store_tokens": pl.Int64},
    )
    rates = {f"{way}_bytes_per_s_{what}": busy * 6e10 for way in ("read", "write") for what in ("mean", "p99")}
    account = {
        "resident_bytes": 10**12,
        "read_bytes": 10**14,
        "written_bytes": 9 * 10**12,
        "promoted_bytes": 0,
        "evicted_bytes": 3 * 10**12,
        "evicted_unread_bytes": 2 * 10**12,
        "expired_bytes": 10**12,
        "skipped_bytes": 10**12,
        "lookups": len(records),
        "asked_tokens": 10**9,
        "hit_tokens": 5 * 10**8,
        "resident_bytes_mean": 3e11,
        **rates,
    }
    facts = {
        **rates,
        "resident_bytes_per_node_max": 400 * 2**30,
        "interval_s": 1.0,
        "kv_bytes_per_token": 50_000,
        "computed_again_tokens": sum(r.input_tokens for r in records) // 20,
        "tiers": [
            {"name": "dram", "kind": "node", "capacity_bytes": 512 * 2**30, "peak_bytes": 400 * 2**30, **account},
            {"name": "store", "kind": "shared", "capacity_bytes": None, "peak_bytes": 3200 * 2**30, **account},
        ],
        "links": links,
    }
    frames = (pl.DataFrame(rows, schema=SERIES_COLUMNS, orient="row"), pl.DataFrame(schema=LINK_COLUMNS))
    return facts, TierData(frames[0], frames[1], table)
