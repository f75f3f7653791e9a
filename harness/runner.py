"""Puts one experiment together, runs it and writes its results. All commands that run something end here."""

from __future__ import annotations

import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fake_workers.engine.scheduler import RankScheduler
from fake_workers.vllm_engine.install import interpreter as vllm_interpreter
from fake_workers.vllm_engine.rank import VllmChildError, VllmProcess
from harness.arms import Arm, differences
from harness.cache.build import CacheCluster, build_fabric
from harness.cache.offload_build import OffloadCluster, connector_options
from harness.clock import VirtualClock, to_ns
from harness.collector import RareCollections
from harness.disagg.build import build_disaggregation, is_split, sides
from harness.disagg.handoff import Side
from harness.disagg.replay import Disaggregation
from harness.errors import ComponentError, HarnessError, InputError
from harness.experiment import Experiment
from harness.folders import writing
from harness.front_end import FrontEndTimes
from harness.identity import harness_code
from harness.placement import PoolPlan, plan_pools, price_of, with_nodes
from harness.progress import Progress, ProgressSink
from harness.results.runinfo import RunInfo
from harness.results.store import COMPARISON, REPORT, SUMMARY, Run, load_run, write_comparison, write_run
from harness.results.tier_data import TierData
from harness.router.select import make_router
from harness.run_facts import run_info
from harness.simulation import GroupKind, Simulation, SimulationConfig
from harness.tier_facts import tier_facts
from harness.tiers import build_tiers
from harness.usage import Usage, cpu_s
from harness.workload import Loaded, as_sent, load_sessions


class Interrupted(HarnessError):
    """Ctrl-C: what was done so far has been written."""

    exit_code = 130


def run_experiment(
    experiment: Experiment,
    out: Path,
    *,
    loaded: Loaded | None = None,
    label: str = "",
    settings: Mapping[str, Any] | None = None,
    command: str = "",
    position: str = "",
    show_progress: bool = True,
    make_progress: Callable[[str, int, float | None], ProgressSink] = Progress,
) -> Run:
    """Run one experiment and write its folder. A failure or Ctrl-C keeps the records made so far and then raises.

    `loaded` saves reading the trace again; `label` and `settings` say how results call this run and in what it differs
    from those beside it.
    """
    harness_code()  # that which runs: its files may be edited meanwhile
    loaded = loaded or load_sessions(experiment)
    pools = plan_pools(experiment)
    experiment = with_nodes(experiment, pools)
    profile, engine = pools[0].profile, pools[0].engine
    groups = [group for pool in pools for group in pool.groups]
    endpoints = [endpoint for group in groups for endpoint in group]
    model = experiment.model.name or profile.model
    clock = VirtualClock()
    tiers, split, ranks = _below(experiment, pools, clock, model)
    router = make_router(experiment, endpoints, model, engine, out / "logs", _gpu_blocks(pools))
    loaded, starts_ns = as_sent(experiment, loaded)
    expected = len(loaded.sent(experiment.trace.max_call_tokens))
    title = position + (label or str(router.identity().get("config")))
    progress = make_progress(title, expected, experiment.load.until_s) if show_progress else None
    began, cpu_before = time.monotonic(), cpu_s()
    failure: BaseException | None = None
    vllm = VllmProcess(out / "logs" / "vllm-scheduler.log") if engine_kind(experiment) == "vllm" else None
    collector = RareCollections()

    def on_progress(ended: int, t_ns: int) -> None:
        collector.look()
        if progress is not None:
            progress.update(ended, t_ns)

    simulation = Simulation(
        SimulationConfig(
            engine=engine,
            model=model,
            scrape_interval_ns=to_ns(experiment.cluster.scrape_interval_ms / 1e3),
            router_latency_ns=to_ns(experiment.router.latency_ms / 1e3),
            front_end=FrontEndTimes.of(experiment.front_end),
            client_timeout_ns=_optional_ns(experiment.load.client_timeout_s),
            gap_cap_s=experiment.load.gap_cap_s,
            until_ns=_optional_ns(experiment.load.until_s),
            max_call_tokens=experiment.trace.max_call_tokens,
            leaping=experiment.cluster.engine.leaping,
            tier_events=experiment.cache.publishes_events,
            connector=connector_options(offloading) if (offloading := experiment.cache.offloading) else None,
            peer_tiers=tiers.peers if tiers else frozenset(),
        ),
        price_of(pools[0]),
        groups,
        router,
        loaded.sessions,
        starts_ns,
        on_progress,
        clock,
        tiers.nodes if tiers else None,
        [GroupKind(price_of(pool), pool.engine, pool.cached) for pool in pools for _ in pool.groups],
        split,
        ranks,
        vllm.rank if vllm else RankScheduler,
    )
    usage = Usage()
    stats: dict[str, Any] = {}
    try:
        router.start()
        with collector:
            simulation.run()
            simulation.settle()
        stats = router.stats()
    except (Exception, KeyboardInterrupt) as error:
        # whatever ended the run, the calls that it has simulated are kept
        failure = error
        if isinstance(error, VllmChildError):
            failure = ComponentError("vLLM's scheduler", str(error), f"see {out / 'logs'}")
    with undisturbed():
        usage.read()
        if failure is not None:
            stats = _quietly(router.stats) or {}
        router.stop()
        if vllm:
            vllm.close()
        tier_account = None
        if tiers:
            try:
                tier_account = tier_facts(tiers, simulation.ledger)
            except Exception as error:  # LMCache's own code runs here, too: the calls are kept all the same
                failure = failure or error
            tiers.close()
        if failure is not None and not simulation.records:
            if progress:
                progress.cancel()
            raise failure
        if progress:
            progress.close(_ending(failure))
        info = run_info(experiment, loaded, pools, simulation, router, stats)
        info.label, info.command, info.settings = label, command, dict(settings or {})
        tier_data = None
        if tiers and tier_account:
            identity = tiers.nodes[0].identity()
            info.cache = {"kind": "lmcache", "release": identity["version"], **identity}
            info.tier, tier_data = tier_account
        info.wall_s = time.monotonic() - began
        info.cpu_s = cpu_s() - cpu_before
        info.peak_rss_bytes = usage.peak_rss_bytes
        if failure is not None:
            info.interrupted = True
            first = str(failure).splitlines()[0] if str(failure) else _ending(failure)
            info.invalid.insert(0, f"the run did not end: {first}")
        complete = failure is None and experiment.load.until_s is None
        run = _write(out, simulation, info, tier_data, complete)
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


def _write(out: Path, simulation: Simulation, info: RunInfo, tiers: TierData | None, complete: bool) -> Run:
    """The run's folder."""
    timeline = simulation.timeline.finish(simulation.clock.now_ns)
    with writing(out):
        return write_run(
            out,
            simulation.records,
            info,
            timeline,
            arrived=simulation.counts.arrived,
            drained=complete,
            report=bool(info.experiment["output"]["report"]),
            tiers=tiers,
        )


def hear_signals() -> None:
    """From now on SIGTERM and SIGHUP end a command as Ctrl-C does: with what it has."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


@contextmanager
def undisturbed() -> Iterator[None]:
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


def _below(
    experiment: Experiment, pools: list[PoolPlan], clock: VirtualClock, model: str
) -> tuple[CacheCluster | OffloadCluster | None, Disaggregation | None, list[list[Side]] | None]:
    """What lies below the engines on one fabric: cache tiers, the exchange of KV between pools, the groups' GPUs."""
    split = is_split(pools)
    if experiment.cache.kind == "none" and not split:
        return None, None, None
    gpus = max(pool.gpus_per_node for pool in pools)
    fabric, topology = build_fabric(clock, experiment.fabric, experiment.cluster.nodes, gpus)
    exchange = build_disaggregation(experiment, pools, clock, fabric, topology) if split else None
    ranks = sides(pools, topology) if split else None
    return build_tiers(experiment, clock, pools, model, (fabric, topology)), exchange, ranks


def _gpu_blocks(pools: list[PoolPlan]) -> list[int]:
    return [pool.engine.num_gpu_blocks for pool in pools for _ in pool.endpoints]


def engine_kind(experiment: Experiment) -> str:
    """Whose scheduler runs, checked: vLLM's own must be installed and has neither cache tiers nor roles here."""
    kind = experiment.cluster.engine.kind
    if kind == "vllm":
        if experiment.cache.kind != "none":
            raise InputError("cluster.engine.kind: vllm", "does not go with cache tiers", "set cache.kind: none")
        if experiment.cluster.pools or experiment.cluster.disaggregation:
            raise InputError("cluster.engine.kind: vllm", "does not go with pools of roles", "leave the pools out")
        if experiment.cluster.engine.num_speculative_tokens:
            raise InputError("cluster.engine.kind: vllm", "has no draft model here", "set num_speculative_tokens: 0")
        if vllm_interpreter() is None:
            raise InputError("cluster.engine.kind: vllm", "vLLM is not here", "run `harness engine install`")
    return kind


def _optional_ns(seconds: float | None) -> int | None:
    return None if seconds is None else to_ns(seconds)


def _quietly(call: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    try:
        return call()
    except Exception:  # the component is gone; its own error is already on the way to the user
        return None


def check_experiment(experiment: Experiment, workdir: Path) -> None:
    """Everything that can be found wrong before a run: puts all parts together and starts none of them.

    Raises InputError for what the user has to correct, ComponentError if the router's program cannot be had.
    """
    pools = plan_pools(experiment)
    experiment = with_nodes(experiment, pools)
    engine_kind(experiment)
    profile, engine = pools[0].profile, pools[0].engine
    model = experiment.model.name or profile.model
    tiers, _, _ = _below(experiment, pools, VirtualClock(), model)
    if tiers:
        tiers.close()
    endpoints = [endpoint for pool in pools for endpoint in pool.endpoints]
    make_router(experiment, endpoints, model, engine, workdir, _gpu_blocks(pools))


def compare(arms: Sequence[Arm], out: Path, *, command: str = "") -> list[Run]:
    """Run the same load under each arm, one after the other, and write the comparison's page.

    All arms are checked before the first one runs; InputError names the arm. An interruption or a failing component
    keeps the runs that have ended and what there is of the one under way, with their page, and then raises.
    """
    for arm in arms:
        if arm.name in (REPORT, COMPARISON, "logs"):
            raise InputError(f"arm {arm.name}", "is what a comparison calls a part of its own", "name it otherwise")
        try:
            check_experiment(arm.experiment, out / arm.name / "logs")
        except InputError as error:
            if not arm.settings:
                raise
            raise InputError(f"arm {arm.name}: {error.where}", error.what, error.remedy) from None
    loaded = load_sessions(arms[0].experiment)
    runs: list[Run] = []
    try:
        for number, (arm, differs) in enumerate(zip(arms, differences(arms), strict=True), start=1):
            quiet = arm.experiment.output.model_copy(update={"report": False})
            runs.append(
                run_experiment(
                    arm.experiment.model_copy(update={"output": quiet}),
                    out / arm.name,
                    loaded=loaded,
                    label=arm.name,
                    settings=differs,
                    command=command,
                    position=f"{number}/{len(arms)} ",
                )
            )
    except (Exception, KeyboardInterrupt) as error:
        with undisturbed():
            begun = arms[len(runs)].name
            missing = [arm.name for arm in arms[len(runs) + 1 :]]
            if (out / begun / SUMMARY).exists():
                runs.append(load_run(out / begun))
            else:
                missing.insert(0, begun)
            if runs:
                done = ", ".join(run.info.title for run in runs)
                error.args = (f"{error}\nthe comparison so far ({done}): {write_comparison(out, runs, missing)}",)
        raise
    write_comparison(out, runs)
    return runs


def command_line(*words: str) -> str:
    """A command as a user would type it."""
    return shlex.join(words)
