"""Puts one experiment together, runs it and writes its results. All commands that run something end here."""

from __future__ import annotations

import platform
import resource
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import psutil

from fake_workers.engine.scheduler import SchedulerConfig
from fake_workers.pricing.calibration import Calibration
from fake_workers.pricing.node_price import ProfilePrice
from fake_workers.pricing.profile import StepProfile
from fake_workers.pricing.registry import load_profile
from harness.cache import upstream
from harness.cache.base import NODE_DRAM
from harness.cache.build import CacheCluster, build_fabric
from harness.clock import VirtualClock, to_ns
from harness.errors import ComponentError, HarnessError, InputError
from harness.experiment import Engine, Experiment, resolved_yaml
from harness.load.arrivals import in_order, session_starts_ns
from harness.progress import Progress
from harness.results.records import COMPLETED, IN_FLIGHT
from harness.results.runinfo import LoadFacts, Prices, RunInfo
from harness.results.store import Run, write_comparison, write_run
from harness.results.summary import percentile_with_failures
from harness.router.base import Endpoint, Router
from harness.router.baselines import BASELINES
from harness.router.endpoints import loopback_endpoints
from harness.router.select import CONFIGS, config_path, make_router
from harness.simulation import Simulation, SimulationConfig
from harness.trace.model import Session
from harness.trace.read import read_trace

MOST_ENDPOINTS = 10_000
_LIGHT_LOAD = 0.05
"""Below this GPU-busy share a run says that it tests no overload."""
_PACKAGES = ("grpcio", "xds-protos", "pyzmq", "msgspec", "numpy", "polars", "plotly")


class Interrupted(HarnessError):
    """Ctrl-C: what was done so far has been written."""

    exit_code = 130


@dataclass(slots=True)
class Loaded:
    """A trace in memory, in order of arrival."""

    sessions: list[Session]
    path: str

    @property
    def calls(self) -> int:
        return sum(len(s.calls) for s in self.sessions)

    def sent(self, max_call_tokens: int | None) -> int:
        """Calls that are not left out for their length."""
        return sum(
            max_call_tokens is None or call.input_tokens + max(1, call.output_tokens) <= max_call_tokens
            for session in self.sessions
            for call in session.calls
        )


def load_sessions(experiment: Experiment) -> Loaded:
    """Read the experiment's trace."""
    sessions: list[Session] = []
    for session in read_trace(experiment.trace.path, blocks=experiment.trace.blocks):
        if experiment.trace.sessions is not None and len(sessions) == experiment.trace.sessions:
            break
        sessions.append(session)
    loaded = Loaded(in_order(experiment.load, sessions, experiment.seed), experiment.trace.path)
    seen: set[str] = set()
    for session in sessions:
        if session.id in seen:
            raise InputError(
                experiment.trace.path,
                f"two sessions are called {session.id}",
                "rename one, or replay the files one by one",
            )
        seen.add(session.id)
    longest = experiment.trace.max_call_tokens
    if longest is not None and loaded.calls and not loaded.sent(longest):
        raise InputError(
            experiment.trace.path,
            f"all {loaded.calls} calls are longer than trace.max_call_tokens ({longest:,})",
            "raise it or set it to null, and choose a profile whose KV cache can hold them (`harness profile list`)",
        )
    return loaded


def run_experiment(
    experiment: Experiment,
    out: Path,
    *,
    loaded: Loaded | None = None,
    label: str = "",
    command: str = "",
    position: str = "",
    show_progress: bool = True,
) -> Run:
    """Run one experiment and write its folder. A failure or Ctrl-C keeps the records made so far and then raises."""
    loaded = loaded or load_sessions(experiment)
    profile = _profile(experiment)
    engine = engine_config(experiment.cluster.engine, profile, experiment.model.profile)
    groups = place_endpoints(experiment, profile)
    endpoints = [endpoint for group in groups for endpoint in group]
    model = experiment.model.name or profile.model
    clock = VirtualClock()
    tiers = _tiers(experiment, clock, profile, engine, model)
    router = make_router(experiment, endpoints, model, engine, out / "logs")
    starts_ns = session_starts_ns(
        experiment.load, loaded.sessions, experiment.cluster.nodes, experiment.seed, "experiment"
    )
    expected = loaded.sent(experiment.trace.max_call_tokens)
    title = position + (label or str(router.identity().get("config")))
    progress = Progress(title, expected) if show_progress else None
    began, cpu_before = time.monotonic(), _cpu_s()
    failure: BaseException | None = None
    simulation = Simulation(
        SimulationConfig(
            engine=engine,
            model=model,
            scrape_interval_ns=to_ns(experiment.cluster.scrape_interval_ms / 1e3),
            router_latency_ns=to_ns(experiment.router.latency_ms / 1e3),
            client_timeout_ns=_optional_ns(experiment.load.client_timeout_s),
            gap_cap_s=experiment.load.gap_cap_s,
            until_ns=_optional_ns(experiment.load.until_s),
            max_call_tokens=experiment.trace.max_call_tokens,
            leaping=experiment.cluster.engine.leaping,
        ),
        ProfilePrice(profile),
        groups,
        router,
        loaded.sessions,
        starts_ns,
        progress.update if progress else None,
        clock,
        tiers.nodes if tiers else None,
    )
    usage = _Usage()
    stats: dict[str, Any] = {}
    try:
        router.start()
        simulation.run()
        simulation.settle()
        stats = router.stats()
    except (Exception, KeyboardInterrupt) as error:
        # whatever ended the run, the calls that it has simulated are kept
        failure = error
        stats = _quietly(router.stats) or {}
    with _undisturbed():
        usage.read()
        router.stop()
        tier_facts = _tier_facts(tiers, simulation) if tiers else None
        if tiers:
            tiers.close()
        if failure is not None and not simulation.records:
            raise failure
        if progress:
            progress.close(_ending(failure))
        info = _info(experiment, loaded, profile, engine, endpoints, simulation, router, stats)
        info.label, info.command = label, command
        if tiers and tier_facts:
            identity = tiers.nodes[0].identity()
            info.cache = {"kind": "lmcache", "release": identity["version"], **identity}
            info.tier = tier_facts
        info.wall_s = time.monotonic() - began
        info.cpu_s = _cpu_s() - cpu_before
        info.peak_rss_bytes = usage.peak_rss_bytes
        if failure is not None:
            info.interrupted = True
            first = str(failure).splitlines()[0] if str(failure) else _ending(failure)
            info.invalid.insert(0, f"the run did not end: {first}")
        run = _write(out, simulation, info, complete=failure is None and experiment.load.until_s is None)
    if isinstance(failure, KeyboardInterrupt):
        raise Interrupted(f"interrupted after {simulation.counts.ended} of {expected} calls; kept in {out}")
    if failure is not None:
        failure.args = (f"{failure}\nkept: {len(simulation.records)} calls in {out}",)
        raise failure
    return run


def _ending(failure: BaseException | None) -> str:
    if failure is None:
        return ""
    return "interrupted" if isinstance(failure, KeyboardInterrupt) else "failed"


def _write(out: Path, simulation: Simulation, info: RunInfo, complete: bool) -> Run:
    """The run's folder; a full or broken disk is a failed component, not a traceback."""
    timeline = simulation.timeline.finish(simulation.clock.now_ns)
    try:
        return write_run(
            out,
            simulation.records,
            info,
            timeline,
            arrived=simulation.counts.arrived,
            drained=complete,
            report=bool(info.experiment["output"]["report"]),
        )
    except (OSError, pl.exceptions.PolarsError) as error:
        raise ComponentError(
            "results", f"{out} could not be written ({error})", "free space there or give --out"
        ) from None


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C and SIGTERM are not heard while a run is wound up and written."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def engine_config(engine: Engine, profile: StepProfile, where: str) -> SchedulerConfig:
    """vLLM's engine arguments resolved against the profile, refused where vLLM would refuse to start."""
    block = engine.block_size or profile.block_tokens
    blocks = engine.num_gpu_blocks or profile.kv_capacity_tokens // block
    if blocks < 2:
        raise InputError(
            f"profile {where}",
            "its KV cache does not fit this GPU's memory",
            "choose another layout or set cluster.engine.num_gpu_blocks",
        )
    max_len = engine.max_model_len or profile.max_model_len
    if engine.max_model_len is None and (blocks - 1) * block < max_len:
        # what vLLM's --max-model-len auto does: as long as the KV cache can hold one request
        max_len = (blocks - 1) * block
    if (blocks - 1) * block < max_len:
        raise InputError(
            "cluster.engine.max_model_len",
            f"{max_len} tokens do not fit {blocks - 1} KV blocks of {block} tokens (vLLM refuses to start)",
            f"set it to {(blocks - 1) * block} or less, or raise num_gpu_blocks",
        )
    return SchedulerConfig(
        num_gpu_blocks=blocks,
        block_tokens=block,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_seqs=engine.max_num_seqs,
        max_model_len=max_len,
        async_scheduling=engine.async_scheduling,
        enable_prefix_caching=engine.enable_prefix_caching,
        watermark=engine.watermark,
        long_prefill_token_threshold=engine.long_prefill_token_threshold,
        policy=engine.scheduling_policy,
    )


def place_endpoints(experiment: Experiment, profile: StepProfile) -> list[list[Endpoint]]:
    """Lock-step groups of endpoints: as many replicas per node as its GPUs allow, one endpoint per rank of each."""
    layout = profile.layout
    gpus = experiment.cluster.gpus_per_node
    replicas = gpus // layout.gpus
    if replicas < 1:
        raise InputError(
            "cluster.gpus_per_node",
            f"{gpus} GPUs do not hold one replica of {profile.name}, which needs {layout.gpus}",
            "raise it or choose a smaller layout",
        )
    count = experiment.cluster.nodes * replicas * layout.dp
    if count > MOST_ENDPOINTS:
        raise InputError("cluster", f"{count:,} endpoints", f"at most {MOST_ENDPOINTS:,} loopback addresses are used")
    endpoints = loopback_endpoints(count, ranks_per_node=replicas * layout.dp)
    return [endpoints[i : i + layout.dp] for i in range(0, count, layout.dp)]


def _profile(experiment: Experiment) -> StepProfile:
    profile = load_profile(experiment.model.profile)
    wanted = experiment.model.calibration
    if wanted is None:
        return profile
    return profile.calibrated(
        Calibration.of(
            wanted.scale_prefill,
            wanted.scale_decode,
            round(wanted.per_step_ms * 1e6),
            round(wanted.per_seq_ms * 1e6),
        )
    )


def _info(
    experiment: Experiment,
    loaded: Loaded,
    profile: StepProfile,
    engine: SchedulerConfig,
    endpoints: list[Endpoint],
    simulation: Simulation,
    router: Router,
    stats: dict[str, Any],
) -> RunInfo:
    load = experiment.load
    longest = experiment.trace.max_call_tokens
    calls = [
        call
        for session in loaded.sessions
        for call in session.calls
        if longest is None or call.input_tokens + max(1, call.output_tokens) <= longest
    ]
    rated = load.arrivals in ("poisson", "uniform")
    invalid, notes = _judge(experiment, loaded, profile, simulation, router, stats)
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
        },
        profile=_profile_facts(profile),
        prices=Prices(**experiment.prices.model_dump()) if experiment.prices else None,
        decisions=stats.get("decisions"),
        events=simulation.counts.clock_events + simulation.counts.engine_events,
        steps=simulation.counts.steps,
        invalid=invalid,
        notes=notes,
        versions={"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
    )


def _tiers(
    experiment: Experiment, clock: VirtualClock, profile: StepProfile, engine: SchedulerConfig, model: str
) -> CacheCluster | None:
    """The real LMCache below every node, if the experiment wants it."""
    config = experiment.cache.lmcache
    if config is None:
        return None
    if not upstream.available():
        raise InputError("cache.kind", "LMCache is not installed", "pip install '.[lmcache]' (docs/cache.md)")
    if config.kv_events:
        raise InputError("cache.lmcache.kv_events", "events of lower tiers do not reach the router yet", "leave it out")
    cluster = experiment.cluster
    fabric, topology = build_fabric(clock, experiment.fabric, cluster.nodes, cluster.gpus_per_node)
    return CacheCluster(
        clock,
        config,
        nodes=cluster.nodes,
        ranks_per_node=cluster.gpus_per_node // profile.layout.tp,
        block_tokens=engine.block_tokens,
        kv_bytes_per_token=profile.kv_bytes_per_token,
        model_name=model,
        fabric=fabric,
        topology=topology,
        seed=experiment.seed,
    )


def _tier_facts(tiers: CacheCluster, simulation: Simulation) -> dict[str, Any]:
    """Reads, writes and residency of each tier; node tiers summed over nodes."""
    seconds = max(simulation.clock.now_ns / 1e9, 1e-9)
    per_node = [node.stats() for node in tiers.nodes]
    by_name: dict[str, dict[str, Any]] = {}
    for stats in per_node:
        for tier in stats:
            entry = by_name.setdefault(tier.name, asdict(tier) | {"capacity_bytes": tier.capacity_bytes})
            if tier.name == NODE_DRAM and tier is not per_node[0][0]:
                for key, value in asdict(tier).items():
                    if isinstance(value, int) and key != "capacity_bytes":
                        entry[key] += value
    shared_reads = sum(t["read_bytes"] for name, t in by_name.items() if name != NODE_DRAM)
    return {
        "read_bytes_per_s_mean": shared_reads / seconds,
        "read_bytes_per_s_p99": None,
        "resident_bytes_per_node_max": max(stats[0].peak_bytes for stats in per_node),
        "tiers": list(by_name.values()),
    }


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
    profile: StepProfile,
    simulation: Simulation,
    router: Router,
    stats: dict[str, Any],
) -> tuple[list[str], list[str]]:
    """Reasons why the numbers must not be used, and what a reader has to know to use them."""
    invalid: list[str] = []
    notes: list[str] = []
    if stats.get("fallbacks"):
        invalid.append(f"the router fell back silently in {stats['fallbacks']} decisions (see logs/router.log)")
    if (experiment.load.until_s is None and stats.get("router_in_flight")) or stats.get("in_flight"):
        left = stats.get("router_in_flight") or stats.get("in_flight")
        invalid.append(f"INV-8: the router still counts {left} calls in flight at the end")
    if simulation.counts.ended == simulation.counts.arrived:
        invalid.extend(simulation.leftovers())
    if simulation.counts.left_out:
        notes.append(left_out_note(experiment, loaded))
    busy = sum(total.busy_ns for group in simulation.groups for total in group.node.totals)
    share = busy / max(1, len(simulation.endpoints) * simulation.clock.now_ns)
    if simulation.counts.arrived and share < _LIGHT_LOAD:
        notes.append(
            f"lightly loaded: GPUs were busy {share:.1%} of the run's virtual time; raise "
            "load.sessions_per_hour_per_node to see configs under pressure"
        )
    notes.extend(_service_level(experiment, simulation))
    notes.append(
        "step times are the kernel tables' own, which hold no host time: against measured serving they are too fast, "
        "by 5 to 17 % per output token where that could be checked (docs/fidelity.md)"
    )
    if experiment.load.gap_cap_s is not None:
        notes.append(f"gaps between calls are capped at {experiment.load.gap_cap_s:g} s")
    if experiment.load.until_s is not None:
        notes.append(f"the run was ended at {experiment.load.until_s:g} s of virtual time")
    if experiment.model.calibration is not None:
        notes.append("step times are calibrated by the experiment, not the tables' own")
    if profile.out_of_grid:
        beyond = ", ".join(f"{what} up to {value:,}" for what, value in profile.out_of_grid.items())
        notes.append(f"step times outside the measured grid of the profile were extrapolated: {beyond}")
    identity = router.identity()
    notes.extend(f"not simulated: {what}" for what in identity.get("not_simulated", []))
    if identity.get("provenance_note"):
        notes.append(f"router: {identity['provenance_note']}")
    return invalid, notes


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
    calls = [call for session in loaded.sessions for call in session.calls]
    out = [call for call in calls if call.input_tokens + max(1, call.output_tokens) > longest]
    share = sum(c.input_tokens for c in out) / max(1, sum(c.input_tokens for c in calls))
    return (
        f"{len(out):,} of {len(calls):,} calls, with {share:.0%} of the trace's input tokens, are longer than "
        f"{longest:,} tokens and were left out (trace.max_call_tokens)"
    )


class _Usage:
    """Peak memory of this process and its children, summed over processes (an upper bound of the joint peak)."""

    def __init__(self) -> None:
        self.peak_rss_bytes = 0

    def read(self) -> None:
        """Read the children's peaks; call while they still run."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        for child in _children():
            peak += _peak_bytes(child.pid)
        self.peak_rss_bytes = peak


def _children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _peak_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def _cpu_s() -> float:
    """CPU seconds of this process and of the children that have ended."""
    own, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime


def _optional_ns(seconds: float | None) -> int | None:
    return None if seconds is None else to_ns(seconds)


def _quietly(call: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    try:
        return call()
    except Exception:  # the component is gone; its own error is already on the way to the user
        return None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def router_choices(experiment: Experiment, wanted: list[str] | None) -> list[str]:
    """The configs and baselines to compare, each once, checked before anything runs."""
    release = experiment.router.release
    if not wanted:
        shipped = sorted(path.stem for path in (CONFIGS / release).glob("*.yaml"))
        if not shipped:
            raise InputError("router.release", f"no configs ship for {release}", "name files with --router-config")
        return [*shipped, "round_robin", "least_loaded"]
    choices = list(dict.fromkeys(name.strip() for text in wanted for name in text.split(",") if name.strip()))
    if not choices:
        raise InputError("--router-config", "names nothing", "give a file, a shipped config or a baseline")
    for choice in choices:
        if choice not in BASELINES:
            config_path(choice, release)
    return choices


def with_router(experiment: Experiment, choice: str) -> Experiment:
    """The same experiment under another router config: a baseline's name, a config's name or a file."""
    update = {"kind": choice} if choice in BASELINES else {"kind": "llm-d", "config": choice}
    return experiment.model_copy(update={"router": experiment.router.model_copy(update=update)})


def compare(experiment: Experiment, choices: list[str], out: Path, *, command: str = "") -> list[Run]:
    """Run the same load under each choice, one after the other, and write the comparison's page.

    An interruption or a failing component keeps the runs that have ended, with their page, and then raises.
    """
    loaded = load_sessions(experiment)
    quiet = experiment.output.model_copy(update={"report": False})
    runs: list[Run] = []
    try:
        for number, choice in enumerate(choices, start=1):
            one = with_router(experiment, choice).model_copy(update={"output": quiet})
            label = _label(choice, choices)
            position = f"{number}/{len(choices)} "
            runs.append(
                run_experiment(one, out / label, loaded=loaded, label=label, command=command, position=position)
            )
    except (Exception, KeyboardInterrupt) as error:
        if runs:
            done = ", ".join(run.info.title for run in runs)
            error.args = (f"{error}\nthe comparison so far ({done}): {write_comparison(out, runs)}",)
        raise
    write_comparison(out, runs)
    return runs


def _label(choice: str, choices: list[str]) -> str:
    """A short name for a config, unique among the choices; also its folder."""
    stems = [Path(c).stem if c not in BASELINES else c for c in choices]
    stem = stems[choices.index(choice)]
    return stem if stems.count(stem) == 1 else f"{stem}-{choices.index(choice) + 1}"


def command_line(*words: str) -> str:
    """A command as a user would type it."""
    return shlex.join(words)
