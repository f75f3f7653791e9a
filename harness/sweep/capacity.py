"""The highest load, in sessions per hour and node, at which a cluster meets a service level.

For each arm and each seed a bisection of its own. Common random numbers: a seed's sessions, their order and the random
numbers behind their arrivals are the same at every rate and for every arm (load.arrivals poisson draws gaps that scale
with the rate), so that differences are the rate's and the arm's. Measured is what ends between a warm-up and the last
session's arrival, where the run stops; or within the experiment's own load.warmup_s and load.until_s, the same stretch
of time at every rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from harness.errors import InputError
from harness.experiment import Experiment
from harness.load.arrivals import session_starts_ns
from harness.results.numbers import percentile
from harness.results.records import COMPLETED
from harness.results.store import load_run
from harness.results.summary import measured
from harness.results.summary import output_rates as rates_of
from harness.sweep.points import Point
from harness.sweep.pool import Ended
from harness.sweep.search import RateLadder, Search, interval, typical
from harness.sweep.slo import Drift, Reached, Slo, drift, overdue, reached
from harness.workload import Loaded

FEWEST_CALLS: Final = 100
"""Fewer calls in the window than this do not carry a percentile."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One point: an arm at a rate under a seed, and what it reached."""

    arm: str
    seed: int
    rate: float
    folder: str
    reached: tuple[Reached, ...]
    drift: Drift
    calls: int
    """Calls that ended in the window, and open ones that are late already."""
    user_speed_tok_s: float | None
    """Median output rate of a call, tokens/s."""
    output_tok_s_per_gpu: float
    """Output tokens of the window's completed calls per second and GPU."""
    valid: bool

    @property
    def enough(self) -> bool:
        """Whether at least three calls lie beyond every percentile asked for; else nothing can be said."""
        beyond = min(1 - (r.slo.percentile if r.slo.at_most else 100 - r.slo.percentile) / 100 for r in self.reached)
        return self.calls * beyond >= 3 - 1e-9

    @property
    def met(self) -> bool:
        """Whether every bar was met by a valid run."""
        return self.valid and all(r.met for r in self.reached)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "arm": self.arm,
            "seed": self.seed,
            "sessions_per_hour_per_node": self.rate,
            "met": self.met if self.enough else None,
            "valid": self.valid,
            **{r.slo.name: r.value for r in self.reached},
            "calls": self.calls,
            "stationary": self.drift.stationary,
            "in_system_first_fifth": self.drift.first,
            "in_system_last_fifth": self.drift.last,
            "output_rate_p50_tok_s": self.user_speed_tok_s,
            "output_tok_s_per_gpu": self.output_tok_s_per_gpu,
            "folder": self.folder,
        }


@dataclass(frozen=True, slots=True)
class Capacity:
    """An arm's answer over its seeds."""

    arm: str
    per_seed: dict[int, float | None]
    """Highest rate that met the service level; None: not even the lowest."""
    note: str = ""
    step: float = 0.0
    """Width of a step of the ladder of rates, as a share: the answer is up to so much too low."""

    @property
    def value(self) -> float | None:
        """Geometric mean over seeds; None where a seed has no answer."""
        values = [v for v in self.per_seed.values() if v is not None]
        return typical(values) if values and len(values) == len(self.per_seed) else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % confidence interval over seeds, and the step of the ladder above it."""
        values = [v for v in self.per_seed.values() if v is not None]
        return interval(values, self.step) if len(values) == len(self.per_seed) else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "arm": self.arm,
            "sessions_per_hour_per_node": self.value,
            "interval_95": self.interval,
            "per_seed": {str(seed): value for seed, value in self.per_seed.items()},
            "note": self.note,
        }


class TraceTooShort(InputError):
    """The trace's sessions have all arrived before the stretch that is to be measured is over."""


class CapacitySource:
    """Asks for the points that the searches need (harness.sweep.pool.Source)."""

    def __init__(
        self,
        arms: dict[str, Experiment],
        seeds: Sequence[int],
        slos: Sequence[Slo],
        ladder: RateLadder,
        warmup_share: float,
        loaded: Loaded,
    ) -> None:
        self.slos = tuple(slos)
        self.ladder = ladder
        self.warmup_share = warmup_share
        self.arms = arms
        self.seeds = tuple(seeds)
        self.probes: list[Probe] = []
        self.failures: list[Ended] = []
        self._loaded = loaded
        self._searches = {(arm, seed): Search(ladder) for arm in arms for seed in seeds}
        self._idle = list(self._searches)
        self._asked: dict[str, tuple[str, int]] = {}

    def next(self) -> Point | None:
        """See Source."""
        while self._idle:
            key = self._idle.pop(0)
            search = self._searches[key]
            assert search.rung is not None
            try:
                point = self._point(*key, self.ladder.rate(search.rung))
            except TraceTooShort:
                if search.met is None:
                    raise
                # the rates below have been answered, and those answers stand
                self._answer(key, None)
                continue
            self._asked[point.name] = key
            return point
        return None

    def ended(self, point: Point, folder: Path, result: Ended) -> None:
        """See Source."""
        key = self._asked.pop(point.name)
        if result.code:
            self.failures.append(result)
            return
        probe = self._judge(*key, point, folder)
        self.probes.append(probe)
        self._answer(key, probe.met if probe.enough else None)

    def _answer(self, key: tuple[str, int], met: bool | None) -> None:
        """Tells a search what its rate reached; it waits for its next one unless the end is found."""
        search = self._searches[key]
        search.answer(met)
        if search.rung is not None:
            self._idle.append(key)

    def _point(self, arm: str, seed: int, rate: float) -> Point:
        base = self.arms[arm]
        load = base.load.model_copy(update={"sessions_per_hour_per_node": rate})
        span_s = self._span_s(base.model_copy(update={"load": load, "seed": seed}))
        if not load.until_s:
            load = load.model_copy(update={"warmup_s": self.warmup_share * span_s, "until_s": span_s})
        elif load.until_s > span_s:
            raise TraceTooShort(
                f"load.until_s: {load.until_s:g}",
                f"at {rate:g} sessions per hour and node the trace's last session arrives at {span_s:.0f} s",
                "give a longer trace, a shorter history or an earlier end",
            )
        output = base.output.model_copy(update={"report": False})
        experiment = base.model_copy(update={"seed": seed, "load": load, "output": output})
        values = {"load.sessions_per_hour_per_node": f"{rate:g}", "seed": str(seed)}
        return Point(f"{arm},rate={rate:g},seed={seed}", values, experiment)

    def _span_s(self, experiment: Experiment) -> float:
        """Until the last session arrives; after that the load only falls."""
        starts = session_starts_ns(
            experiment.load, self._loaded.sessions, experiment.cluster.nodes, experiment.seed, "experiment"
        )
        if (span_s := max(starts) / 1e9) <= 0:
            rate = experiment.load.sessions_per_hour_per_node
            raise TraceTooShort(
                f"load.history_s: {experiment.load.history_s:g}",
                f"at {rate:g} sessions per hour and node the trace's last session arrives before the run begins",
                "give a longer trace or a shorter history",
            )
        return span_s

    def _judge(self, arm: str, seed: int, point: Point, folder: Path) -> Probe:
        run = load_run(folder)
        load = point.experiment.load
        assert load.until_s is not None and load.sessions_per_hour_per_node is not None
        start_ns, end_ns = round(load.warmup_s * 1e9), round(load.until_s * 1e9)
        window = measured(run.calls, run.info)
        done = window.filter(window["outcome"] == COMPLETED)
        gpus = point.experiment.cluster.nodes * point.experiment.cluster.gpus_per_node
        return Probe(
            arm=arm,
            seed=seed,
            rate=load.sessions_per_hour_per_node,
            folder=point.name,
            reached=tuple(reached(run.calls, start_ns, end_ns, self.slos)),
            drift=drift(run.calls, start_ns, end_ns),
            calls=len(window) + overdue(run.calls, end_ns, self.slos),
            user_speed_tok_s=percentile(rates_of(done), 50),
            output_tok_s_per_gpu=float(done["output_tokens"].sum()) / ((end_ns - start_ns) / 1e9) / gpus,
            valid=not run.info.invalid,
        )

    def capacities(self) -> list[Capacity]:
        """Answers so far, arm by arm."""
        found = []
        for arm in self.arms:
            searches = {seed: self._searches[arm, seed] for seed in self.seeds}
            notes = []
            ends = [search.at_the_end for search in searches.values()]
            if "above" in ends:
                notes.append(f"not reached at the highest rate tried ({self.ladder.rate(self.ladder.top):g})")
            if any(search.at_the_end == "below" and not search.blind for search in searches.values()):
                notes.append(f"missed even at the lowest rate tried ({self.ladder.rate(self.ladder.bottom):g})")
            if any(search.rung is not None for search in searches.values()):
                notes.append("the search did not end")
            blind = [search for search in searches.values() if search.blind]
            if blind:
                rate = min(self.ladder.rate(search.missed) for search in blind if search.missed is not None)
                notes.append(f"from {rate:g} on too few calls end in the window to judge: use a longer trace")
            edge = [p for p in self.probes if p.arm == arm and p.rate == searches[p.seed].capacity]
            thin = min((p.calls for p in edge), default=FEWEST_CALLS)
            if thin < FEWEST_CALLS:
                notes.append(f"it rests on {thin} calls: use a longer trace")
            load = self.arms[arm].load
            if load.history_s and load.order == "trace" and len(self.seeds) > 1:
                notes.append(
                    "all seeds replay the same sessions in the same order, each rate another part of them: "
                    "load.order=shuffled makes seeds independent"
                )
            if any(not p.drift.stationary for p in edge):
                notes.append("calls in the system still grew at the rate found: a longer trace would show less")
            per_seed = {seed: s.capacity for seed, s in searches.items()}
            found.append(Capacity(arm, per_seed, "; ".join(notes), self.ladder.tolerance))
        return found


def check(experiment: Experiment) -> None:
    """What a search over rates needs of an experiment."""
    if experiment.load.arrivals not in ("poisson", "uniform"):
        raise InputError(
            "load.arrivals", f"{experiment.load.arrivals} has no rate to search over", "use poisson or uniform"
        )
    warmup_s, until_s = experiment.load.warmup_s, experiment.load.until_s
    if warmup_s and not until_s:
        raise InputError(
            "load.warmup_s",
            "without load.until_s the search sets it from the arrivals",
            "give both or see --warmup-share",
        )
    if until_s and warmup_s >= until_s:
        raise InputError(
            f"load.warmup_s: {warmup_s:g}",
            f"the run ends at load.until_s, {until_s:g} s, before anything is measured",
            "give a shorter warm-up or a later end",
        )
