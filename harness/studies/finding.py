"""A published finding as data: one experiment, its arms, what was published, and which way the numbers must go.

The files are in data/findings; a user's own has the same fields. Figures name a number of summary.json by its dotted
path; `derived` adds what a reader counts per call or in other units.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from harness.arms import vary
from harness.cache.base import NODE_DRAM
from harness.errors import InputError
from harness.experiment import Experiment, resolve_paths, resolved_setting, validated
from harness.router.select import CONFIGS
from harness.studies.files import Strict, checked, path_of, read_document
from harness.studies.finding_check import check_finding

DATA = Path(__file__).parent / "data" / "findings"
ROUTER_CONFIGS = Path(__file__).parent / "data" / "router"
"""Router configs of the studies, by release; an arm may name one as it names those of deploy/router/configs."""
Summary = dict[str, Any]
_ROUNDING = 1e-12
MOST_SESSIONS = 1_000_000
Scale = Literal["small", "medium", "full"]
"""small: a few sessions, for directions; medium: the published cluster and load for fewer hours; full: all of it."""
SCALES: tuple[Scale, ...] = get_args(Scale)


class GeneratedTrace(Strict):
    """The load: made by `harness trace generate`, so that a study needs no file."""

    profile: str = Field("claude-code", description="profile of the generator")
    seed: int = Field(1, ge=0)
    sessions: Annotated[int, Field(ge=1, le=MOST_SESSIONS)] = 393


class Variant(Strict):
    """One arm: fields of the experiment that it sets."""

    name: str = Field(pattern=r"^[\w.,+ -]+$")
    set: dict[str, Any] = Field(default_factory=dict)
    rungs: list[float] | None = Field(None, min_length=1, description="only at these values of the ladder")


class LoadLadder(Strict):
    """A field of the experiment that every arm takes through some values, such as the load."""

    field: str
    title: str = Field(description="what the field is, with its unit, for axes and tables")
    values: Annotated[list[float], Field(min_length=1)]

    @model_validator(mode="after")
    def _rising(self) -> LoadLadder:
        if self.values != sorted(set(self.values)):
            raise ValueError("the values must rise")
        return self


class FindingScale(Strict):
    """What a scale changes: the trace's size, fields of the experiment, and how far the ladder goes."""

    sessions: Annotated[int, Field(ge=1, le=MOST_SESSIONS)] | None = None
    set: dict[str, Any] = Field(default_factory=dict)
    arms: list[str] | None = Field(None, description="only these arms")
    rungs: Annotated[list[float], Field(min_length=1)] | None = Field(
        None, description="only these values of the ladder"
    )


class Figure(Strict):
    """A published number beside ours: the number at `path` of an arm, alone or against another arm."""

    name: str
    path: str
    arm: str
    at: float | None = Field(None, description="value of the ladder at which it is taken; where there is one")
    over: str | None = Field(None, description="divide by the number of this arm")
    minus: str | None = Field(None, description="subtract the number of this arm")
    scale: float = Field(1.0, description="factor on the result, for its unit")
    unit: str = ""
    published: float | tuple[float, float] | None = Field(None, description="a number, or a published range")
    because: str = Field("", description="why ours differs, in a plain sentence, by evidence")


class Check(Strict):
    """A direction that must come out at any scale: the number rises (or falls) along these arms, at every rung."""

    path: str
    rising: list[str] | None = None
    falling: list[str] | None = None
    says: str


class Finding(Strict):
    """One study."""

    name: str = Field(pattern=r"^[\w.+-]+$")
    title: str
    question: str
    source: str
    trace: GeneratedTrace = Field(default_factory=lambda: GeneratedTrace())
    experiment: dict[str, Any]
    scales: dict[Scale, FindingScale]
    arms: list[Variant]
    ladder: LoadLadder | None = Field(None, description="every arm runs at each of these values")
    figures: list[Figure] = Field(default_factory=list)
    shown: dict[str, str] = Field(description="columns of the table of all arms: title with unit -> path")
    checks: list[Check]
    notes: list[str] = Field(default_factory=list)

    def experiment_of(
        self, arm: Variant, scale: Scale, trace: Path, seed: int, rung: float | None = None
    ) -> Experiment:
        """The arm's experiment at a scale and a value of the ladder."""
        document = {"trace": {}, **self.experiment, "name": self.name, "seed": seed}
        if isinstance(document["trace"], dict):  # else the experiment's own check says what is wrong
            document["trace"] = {**document["trace"], "path": str(trace)}
        where = f"study {self.name}, arm {arm.name}"
        step = {self.ladder.field: rung} if self.ladder and rung is not None else {}
        return _with_study_config(
            vary(validated(document, where), {**self.scales[scale].set, **step, **arm.set}, where)
        )

    def arms_at(self, scale: Scale) -> list[Variant]:
        """The arms that run at a scale."""
        wanted = self.scales[scale].arms
        return [arm for arm in self.arms if wanted is None or arm.name in wanted]

    def rungs_at(self, scale: Scale, arm: Variant | None = None) -> list[float] | list[None]:
        """The ladder's values at a scale, for an arm only those that it takes; [None] without a ladder."""
        if self.ladder is None:
            return [None]
        values = self.scales[scale].rungs or self.ladder.values
        own = arm.rungs if arm is not None else None
        return [value for value in values if own is None or value in own]


def only(finding: Finding, scale: Scale, arms: Sequence[str], rungs: Sequence[float]) -> Finding:
    """The finding with these arms and values of the ladder at a scale (none given: all of that scale's).

    InputError names the option that asks for what the scale does not have.
    """
    size = finding.scales[scale]
    known_arms = [arm.name for arm in finding.arms_at(scale)]
    known_rungs = [] if finding.ladder is None else [rung for rung in finding.rungs_at(scale) if rung is not None]
    for option, given, known in (("--arm", arms, known_arms), ("--rung", rungs, known_rungs)):
        for value in given:
            if value not in known:
                names = [name if isinstance(name, str) else f"{name:g}" for name in known]
                remedy = f"choose from: {', '.join(names)}" if names else f"{finding.name} has no ladder"
                said = value if isinstance(value, str) else f"{value:g}"
                raise InputError(f"{option} {said}", f"not in study {finding.name} at scale {scale}", remedy)

    def runs(arm: Variant) -> bool:
        at = set(finding.rungs_at(scale, arm))
        return (not arms or arm.name in arms) and bool(at & set(rungs or at))

    run = [arm.name for arm in finding.arms_at(scale) if runs(arm)]
    if not run:
        raise _nobody_runs(finding, scale, arms, rungs)
    chosen = size.model_copy(update={"arms": run, "rungs": list(rungs) or size.rungs})
    return finding.model_copy(update={"scales": {**finding.scales, scale: chosen}})


def _nobody_runs(finding: Finding, scale: Scale, arms: Sequence[str], rungs: Sequence[float]) -> InputError:
    """That none of these arms (none given: of all) runs at any of the rungs; the remedy says which rungs they have."""
    who = f"arm {' or '.join(arms)}" if arms else "any arm"
    asked = [arm for arm in finding.arms_at(scale) if not arms or arm.name in arms]
    has = sorted({rung for arm in asked for rung in finding.rungs_at(scale, arm) if rung is not None})
    remedy = f"choose from: {', '.join(f'{rung:g}' for rung in has)}" if has else "give another scale"
    if not rungs:
        return InputError(f"--scale {scale}", f"no value of the ladder there for {who}", remedy)
    where = f"--rung {', '.join(f'{rung:g}' for rung in rungs)}"
    return InputError(where, f"not a value of the ladder at which {who} runs at scale {scale}", remedy)


def label(arm: str, rung: float | None) -> str:
    """What a run of an arm is called in results: with the ladder's value, where there is one."""
    return arm if rung is None else f"{arm} at {rung:g}"


def _with_study_config(experiment: Experiment) -> Experiment:
    """A router config that ships with the studies only, by its path."""
    router = experiment.router
    own = ROUTER_CONFIGS / router.release / f"{router.config}.yaml"
    if (CONFIGS / router.release / own.name).is_file() or not own.is_file():
        return experiment
    return experiment.model_copy(update={"router": router.model_copy(update={"config": str(own)})})


def finding_names() -> list[str]:
    """Studies that ship."""
    return sorted(path.stem for path in DATA.glob("*.yaml") if not path.stem.startswith("_"))


def load_finding(name_or_path: str) -> Finding:
    """A shipped study by name, or a user's own by path; `base: FILE` in it names a file whose fields it takes over."""
    path = path_of(name_or_path, DATA)
    try:
        document = _read(path)
    except FileNotFoundError:
        known = ", ".join(finding_names())
        ships = path.stem in finding_names() and path.suffix == ""
        remedy = f"it ships: harness study {path.stem}" if ships else f"choose one of: {known}; or give a file"
        raise InputError(str(path), "no such file" if ships else "no such study", remedy) from None
    base = document.pop("base", None)
    if base is not None:
        document = _over(_base(path, base), document)
    finding = checked(Finding, document, path, "see docs/studies/findings.md")
    check_finding(finding, path)
    return finding


def _base(path: Path, name: Any) -> dict[str, Any]:
    """The file that `base` names, relative to the one that says so."""
    if not isinstance(name, str) or not name:
        raise InputError(str(path), "field base: is no file's name", "name a finding's file")
    file = path.parent / name
    try:
        document = _read(file)
    except FileNotFoundError:
        raise InputError(str(path), f"field base: there is no file {file}", "give its path from this file") from None
    if "base" in document:
        raise InputError(str(path), f"field base: {file} has a base, too", "name a file that has none")
    return document


def _read(path: Path) -> dict[str, Any]:
    """The file's document, with the paths in its experiment, arms and scales relative to it."""
    document = read_document(path)
    if not isinstance(document, dict):
        raise InputError(str(path), "holds no mapping", "see docs/studies/findings.md")
    base = path.resolve().parent
    if isinstance(document.get("experiment"), dict):
        resolve_paths(document["experiment"], base)
    scales, arms = document.get("scales"), document.get("arms")
    sections = [*(scales.values() if isinstance(scales, dict) else ()), *(arms if isinstance(arms, list) else ())]
    for section in sections:
        if isinstance(section, dict) and isinstance(section.get("set"), dict):
            settings = section["set"].items()
            section["set"] = {name: resolved_setting(name, value, base, str(path)) for name, value in settings}
    return document


def _over(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """`more` laid over `base`, section by section."""
    merged = dict(base)
    for key, value in more.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _over(merged[key], value) if both else value
    return merged


def derived(summary: Summary, nodes: int) -> Summary:
    """The summary with `derived`: numbers per call, per node and in other units (None where there are none)."""
    sources = summary["tokens_by_source"]
    calls = summary["measured"]["calls"]
    total = sum(sources.values())
    restored = sources["dram"] + sources["shared"] + sources["peer"]
    tier = summary.get("tier") or {}
    below = [entry["peak_bytes"] for entry in tier.get("tiers", []) if entry["name"] != NODE_DRAM]
    demand = tier.get("read_bytes_per_s_mean")
    restore_bytes = (tier.get("restores") or {}).get("bytes") or {}
    numbers = {
        "computed_tokens_per_call": sources["computed"] / calls if calls else None,
        "restored_share": restored / total if total else None,
        "shared_share": sources["shared"] / total if total else None,
        "dram_share": sources["dram"] / total if total else None,
        "gpu_share": sources["gpu"] / total if total else None,
        "shared_share_of_restored": sources["shared"] / restored if restored else None,
        "restored_gb_mean": _scaled(restore_bytes.get("mean"), 1e-9),
        "restored_gb_p90": _scaled(restore_bytes.get("p90"), 1e-9),
        "read_gbytes_per_s_per_node_mean": _scaled(demand, 1e-9 / nodes),
        "shared_tib_per_node_max": sum(below) / 2**40 / nodes if below else None,
    }
    return {**summary, "derived": numbers}


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def number_at(summary: Summary, path: str) -> float | None:
    """The number at a dotted path; None where it does not apply."""
    value: Any = summary
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def ours(figure: Figure, summaries: dict[str, Summary]) -> float | None:
    """The figure from the arms' summaries; None where an arm has not run or has no such number."""

    def at(arm: str) -> float | None:
        found = summaries.get(label(arm, figure.at))
        return None if found is None else number_at(found, figure.path)

    result = at(figure.arm)
    if figure.over is not None:
        divisor = at(figure.over)
        result = result / divisor if result is not None and divisor else None
    if figure.minus is not None:
        less = at(figure.minus)
        result = result - less if result is not None and less is not None else None
    return None if result is None else result * figure.scale


Rungs = Sequence[float] | Sequence[None]
"""Values of a ladder, or the one None of a study that has none."""


def judged(check: Check, summaries: dict[str, Summary], rungs: Rungs = (None,)) -> bool:
    """Whether at least two of a direction's arms have run at one of the rungs; else nothing can be said of it."""
    names = check.rising or check.falling or []
    return any(sum(label(name, rung) in summaries for name in names) >= 2 for rung in rungs)


def broken(check: Check, summaries: dict[str, Summary], rungs: Rungs = (None,)) -> str | None:
    """What is wrong with a direction, or None: along the arms no step goes the other way, and the ends differ.

    At every rung; None also where it cannot be judged, see `judged`.
    """
    return next((wrong for rung in rungs if (wrong := _broken_at(check, summaries, rung)) is not None), None)


def _broken_at(check: Check, summaries: dict[str, Summary], rung: float | None) -> str | None:
    names = [label(name, rung) for name in check.rising or check.falling or []]
    known = [name for name in names if name in summaries]
    values = [number_at(summaries[name], check.path) for name in known]
    if len(known) < 2:
        return None
    told = ", ".join(f"{name} {value}" for name, value in zip(known, values, strict=True))
    if any(value is None for value in values):
        return f"{check.says}: no number at {check.path} ({told})"
    sign = 1.0 if check.rising else -1.0
    steps = [sign * ((b or 0.0) - (a or 0.0)) for a, b in pairwise(values)]
    if min(steps) < -_ROUNDING or sum(steps) <= _ROUNDING:
        return f"{check.says}: not so ({check.path}: {told})"
    return None
