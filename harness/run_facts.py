"""What is known of a run beside its calls: conditions for the report, verdicts, and what a reader has to know."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from fake_workers.pricing.profile import StepProfile
from harness.clock import to_ns
from harness.experiment import Experiment, resolved_yaml
from harness.identity import harness_code, harness_version, package_version
from harness.placement import PoolPlan
from harness.results.records import COMPLETED, IN_FLIGHT
from harness.results.runinfo import LoadFacts, Prices, RunInfo
from harness.results.split import WorkerFacts
from harness.results.summary import percentile_with_failures
from harness.router.base import Router
from harness.simulation import Simulation
from harness.workload import Loaded

_PACKAGES = ("grpcio", "h2", "xds-protos", "pyzmq", "msgspec", "numpy", "polars", "plotly")
_LIGHT_LOAD = 0.05
"""Below this GPU-busy share a run says that it tests no overload."""


def run_info(
    experiment: Experiment,
    loaded: Loaded,
    pools: list[PoolPlan],
    simulation: Simulation,
    router: Router,
    stats: dict[str, Any],
) -> RunInfo:
    profile, engine = pools[0].profile, pools[0].engine
    endpoints = [endpoint for pool in pools for endpoint in pool.endpoints]
    load = experiment.load
    calls = loaded.sent(experiment.trace.max_call_tokens)
    rated = load.arrivals in ("poisson", "uniform")
    invalid, notes = _judge(experiment, loaded, pools, simulation, router, stats)
    return RunInfo(
        experiment=experiment.model_dump(mode="json"),
        experiment_yaml=resolved_yaml(experiment),
        router=router.identity(),
        load=LoadFacts(
            sessions=len(loaded.sessions),
            calls=len(calls),
            input_tokens=sum(call.input_tokens for call in calls),
            output_tokens=sum(call.output_tokens for call in calls),
            sessions_per_hour_per_node=load.sessions_per_hour_per_node if rated else None,
        ),
        endpoint_nodes=[endpoint.node for endpoint in endpoints],
        virtual_ns=simulation.clock.now_ns,
        name=experiment.name,
        seed=experiment.seed,
        window_ns=(to_ns(load.warmup_s), None),
        router_stats=stats,
        workload={
            "trace": Path(loaded.path).name,
            "sessions": len(loaded.sessions),
            "calls": len(calls),
            "arrivals": load.arrivals,
            "longest gap": "as recorded" if load.gap_cap_s is None else f"capped at {load.gap_cap_s:g} s",
            "client time-out": "none" if load.client_timeout_s is None else f"{load.client_timeout_s:g} s",
        },
        cluster={
            "nodes": experiment.cluster.nodes,
            "GPUs per node": experiment.cluster.gpus_per_node,
            "GPU": profile.gpu,
            "model": profile.model,
            "layout": f"TP{profile.layout.tp} DP{profile.layout.dp} EP{profile.layout.ep}",
            "endpoints": len(endpoints),
            "KV blocks per endpoint": f"{engine.num_gpu_blocks - 1} x {engine.block_tokens} tokens",
            "max_model_len": engine.max_model_len,
            "max_num_batched_tokens": engine.max_num_batched_tokens,
            "max_num_seqs": engine.max_num_seqs,
            "scheduling": "asynchronous" if engine.async_scheduling else "synchronous",
            **_pool_facts(experiment, pools),
        },
        profile=_profile_facts(profile),
        front_end=experiment.front_end.facts(),
        workers=_workers(simulation, pools),
        kv_transfer=_kv_transfer(simulation),
        prices=prices_of(experiment),
        decisions=stats.get("decisions"),
        events=simulation.counts.clock_events + simulation.counts.engine_events,
        steps=simulation.counts.steps,
        invalid=invalid,
        notes=notes,
        versions={
            "harness": harness_version(),
            "harness code": harness_code(),
            "python": platform.python_version(),
            **{name: package_version(name) for name in _PACKAGES},
        },
    )


def prices_of(experiment: Experiment) -> Prices | None:
    """What the experiment's tokens cost, as results keep it."""
    return Prices(**experiment.prices.model_dump()) if experiment.prices else None


def _pool_facts(experiment: Experiment, pools: list[PoolPlan]) -> dict[str, str]:
    """Pools of workers by role, and how KV moves between them; nothing where all workers do both."""
    if all(not pool.role for pool in pools):
        return {}
    facts = {}
    for pool in pools:
        layout = pool.profile.layout
        facts[f"pool {pool.role}"] = (
            f"{len(pool.groups)} x {pool.profile.name} (TP{layout.tp} DP{layout.dp} EP{layout.ep}) on "
            f"{len(pool.nodes)} nodes of {pool.gpus_per_node} GPUs, {pool.engine.num_gpu_blocks - 1} KV blocks per "
            f"endpoint, step budget {pool.engine.max_num_batched_tokens}"
        )
    wire = experiment.kv_transfer
    facts["KV transfer"] = f"{wire.protocol}, {wire.mode}, cost {wire.cost}, topology {experiment.fabric.topology}"
    return facts


def _workers(simulation: Simulation, pools: list[PoolPlan]) -> list[WorkerFacts]:
    kinds = [pool for pool in pools for _ in pool.groups]
    return [
        WorkerFacts(pool.role, pool.profile.layout.tp, **asdict(total))
        for pool, group in zip(kinds, simulation.groups, strict=True)
        for total in group.node.totals
    ]


def _kv_transfer(simulation: Simulation) -> dict[str, Any] | None:
    shared = simulation.disaggregation
    return None if shared is None else {"protocol": shared.protocol, **asdict(shared.kv.totals)}


def _profile_facts(profile: StepProfile) -> dict[str, Any]:
    """Where step times come from, in lines for the report (`harness profile show NAME` has everything)."""
    origin = profile.provenance
    keys = ("package", "package_version", "system", "backend", "backend_version", "built", "licence")
    errors = origin.get("interpolation_error", {})
    return {
        "name": profile.name,
        **{key.replace("_", " "): origin[key] for key in keys if key in origin},
        **{
            f"error of interpolating the tables, {kind.replace('_', ' ')}": (
                f"{errors[kind]['mean']:.2%} mean, {errors[kind]['p95']:.2%} p95"
            )
            for kind in ("prefill_step", "decode_step")
            if kind in errors
        },
        "KV bytes per token": profile.kv_bytes_per_token,
        "asked beyond its grid": ", ".join(f"{k}: {v:,}" for k, v in profile.out_of_grid.items()) or "nothing",
    }


def _judge(
    experiment: Experiment,
    loaded: Loaded,
    pools: list[PoolPlan],
    simulation: Simulation,
    router: Router,
    stats: dict[str, Any],
) -> tuple[list[str], list[str]]:
    """Reasons why the numbers must not be used, and what a reader has to know to use them."""
    invalid: list[str] = []
    notes: list[str] = []
    if stats.get("fallbacks"):
        which = ", ".join(f"{meaning}: {count:,}" for meaning, count in stats["fallbacks"].items())
        invalid.append(
            f"the router fell back silently ({which}; {stats['decisions']:,} decisions; see logs/router.log)"
        )
    left = stats.get("router_in_flight") or stats.get("in_flight")
    if left and experiment.load.until_s is None:
        invalid.append(f"INV-8: the router still counts {left} calls in flight at the end")
    if simulation.counts.ended == simulation.counts.arrived:
        invalid.extend(simulation.leftovers())
    longest = experiment.trace.max_call_tokens
    if longest is not None and len(loaded.sent(longest)) < loaded.calls:
        notes.append(left_out_note(experiment, loaded))
    warmup_ns = to_ns(experiment.load.warmup_s)
    if not any(r.outcome == COMPLETED and (r.finish_ns or 0) >= warmup_ns for r in simulation.records):
        notes.append(
            "no call was completed in the measured window, so there are no times: see load.warmup_s and until_s"
        )
    busy = sum(total.busy_ns for group in simulation.groups for total in group.node.totals)
    share = busy / max(1, len(simulation.endpoints) * simulation.clock.now_ns)
    if simulation.counts.arrived and share < _LIGHT_LOAD:
        notes.append(
            f"lightly loaded: GPUs were busy {share:.1%} of the run's virtual time; raise "
            "load.sessions_per_hour_per_node to see configs under pressure"
        )
    notes.extend(_service_level(experiment, simulation))
    notes.extend(dict.fromkeys(_step_time_note(pool.profile) for pool in pools))
    notes.extend(dict.fromkeys(capacity_notes(pools)))
    notes.extend(wire_notes(experiment))
    if stats.get("skipped_blocks"):
        notes.append(
            f"the router did not take in {stats['skipped_blocks']:,} KV blocks that tiers held, as it did not know the "
            "block before them (docs/cache.md); what it believed accounts for that"
        )
    if experiment.load.gap_cap_s is not None:
        notes.append(f"gaps between calls are capped at {experiment.load.gap_cap_s:g} s")
    if experiment.load.history_s:
        notes.append(
            f"sessions had been arriving for {experiment.load.history_s:g} s when the run began; what they sent before "
            "was in no cache"
        )
    if experiment.load.until_s is not None:
        notes.append(f"the run was ended at {experiment.load.until_s:g} s of virtual time")
    if experiment.model.calibration is not None:
        notes.append("step times are calibrated by the experiment, not the tables' own")
    notes.extend(grid_notes([pool.profile for pool in pools]))
    notes.extend(_split_notes(simulation))
    identity = router.identity()
    notes.extend(f"not simulated: {what}" for what in identity.get("not_simulated", []))
    if identity.get("provenance_note"):
        notes.append(f"router: {identity['provenance_note']}")
    return invalid, notes


def _split_notes(simulation: Simulation) -> list[str]:
    """What to know of a run with prefill workers."""
    shared = simulation.disaggregation
    if shared is None:
        return []
    notes = []
    totals = shared.kv.totals
    if totals.expired:
        notes.append(f"{totals.expired} prompts' KV was dropped by prefill workers before anybody had read it")
    if not any(record.prefill_endpoint is not None for record in simulation.records):
        notes.append(
            "no call was split: the router config has no disaggregation handler, or its decider never chose it"
        )
    return notes


def capacity_notes(pools: Sequence[PoolPlan]) -> list[str]:
    """One note per pool whose KV capacity is the one that its profile takes from somebody's statement."""
    return [
        f"KV capacity of {pool.profile.name} is stated, not computed ({source}); set num_gpu_blocks for another"
        for pool in pools
        if (source := pool.profile.capacity_stated_by)
        and pool.engine.num_gpu_blocks == pool.profile.kv_capacity_tokens // pool.engine.block_tokens
    ]


def _step_time_note(profile: StepProfile) -> str:
    """What a reader must know of where step times come from."""
    origin = profile.provenance
    if origin.get("kind") == "roofline":
        return (
            "STEP TIMES ARE A ROOFLINE ESTIMATE from peak rates, not measurements: compare configs with it, take no "
            "absolute time from it (docs/fidelity.md, own hardware)"
        )
    if origin["package"] == "user tables":
        return f"step times are the user's own tables ({origin['backend']})"
    return (
        "step times are the kernel tables' own, which hold no host time: against measured serving they are too fast, "
        "by 5 to 17 % per output token where that could be checked (docs/fidelity.md)"
    )


def grid_notes(profiles: Sequence[StepProfile]) -> list[str]:
    """One note on what was asked beyond measured grids, by profile where there are several; none where nothing was."""
    beyond: dict[str, dict[str, int]] = {}
    for profile in profiles:
        for what, value in profile.out_of_grid.items():
            most = beyond.setdefault(profile.name, {})
            most[what] = max(value, most.get(what, 0))
    if not beyond:
        return []
    several = len({profile.name for profile in profiles}) > 1
    texts = [
        (f"{name}: " if several else "") + ", ".join(f"{what} up to {value:,}" for what, value in most.items())
        for name, most in beyond.items()
    ]
    return [f"step times outside the measured grid of the profile were extrapolated: {'; '.join(texts)}"]


def wire_notes(experiment: Experiment) -> list[str]:
    """What to know where loads from shared tiers have no measured price; nothing where all have one."""
    section = experiment.cache.lmcache
    names = [tier.name for tier in section.l2_adapters if tier.load.cost == "wire"] if section else []
    if not names:
        return []
    return [
        f"loads from {', '.join(names)} cost the wire alone (load: cost: wire): where that could be checked, "
        "published pulls between nodes took 2.4 to 8 times as long (docs/studies/restore.md); give a measured table "
        "(load: {cost: ...}, docs/fabric.md) before concluding that a shared tier pays"
    ]


def _service_level(experiment: Experiment, simulation: Simulation) -> list[str]:
    """Verdict on the experiment's service level, calls that never ended well counted as infinitely late."""
    slo = experiment.slo
    if slo is None:
        return []
    lines = []
    for name, limit_s, end in (("e2e", slo.e2e_p90_s, "finish_ns"), ("TTFT", slo.ttft_p90_s, "first_token_ns")):
        if limit_s is None:
            continue
        good = [
            (getattr(r, end) - r.arrival_ns) / 1e9
            for r in simulation.records
            if r.outcome == COMPLETED and getattr(r, end)
        ]
        lost = sum(r.outcome not in (COMPLETED, IN_FLIGHT) for r in simulation.records)
        reached = percentile_with_failures(np.array(good), lost, 90)
        met = reached is not None and reached <= limit_s
        value = "not defined, as more than one call in ten was lost" if reached is None else f"{reached:.3g} s"
        lines.append(f"service level p90 {name} <= {limit_s:g} s: {'met' if met else 'MISSED'} ({value})")
    return lines


def left_out_note(experiment: Experiment, loaded: Loaded) -> str:
    """How much of the trace `trace.max_call_tokens` leaves out."""
    longest = experiment.trace.max_call_tokens
    assert longest is not None
    calls = loaded.sent(None)
    out = [call for call in calls if call.sequence_tokens > longest]
    share = sum(c.input_tokens for c in out) / max(1, sum(c.input_tokens for c in calls))
    return (
        f"{len(out):,} of {len(calls):,} calls, with {share:.0%} of the trace's input tokens, are longer than "
        f"{longest:,} tokens and were left out (trace.max_call_tokens)"
    )
