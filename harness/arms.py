"""Arms of a comparison: variants of one experiment, each known by the settings in which it differs.

`vary` makes one variant of an experiment and is all that a sweep needs; the rest makes lists of arms for
`harness compare`: from the experiment's own `arms`, from `--arm` on the command line, or one per router config.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from harness import yaml_text
from harness.errors import InputError
from harness.experiment import ARM_NAME, Experiment, names_file, put_field, validated
from harness.router.baselines import BASELINES
from harness.router.select import CONFIGS, config_path

SAME_LOAD = ("trace", "load", "seed")
"""What all arms of a comparison share: arms that did not get the same load cannot be compared."""
_OWN = ("name", "output", "arms")
"""Fields that say nothing of what is simulated."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One run of a comparison. `name` is its label and its folder; `settings` are the fields that make it."""

    name: str
    experiment: Experiment
    settings: dict[str, Any] = field(default_factory=dict)


def vary(experiment: Experiment, settings: Mapping[str, Any], where: str) -> Experiment:
    """The experiment with some fields set otherwise (`a.b`, `a.list.0.c`; a section as value replaces the section).

    Raises InputError that names `where` and the field if the result is no valid experiment.
    """
    # what nobody has set stays unset: a default may depend on what an arm sets
    document = experiment.model_dump(mode="json", exclude_unset=True)
    for name, value in settings.items():
        put_field(document, name, value, where)
    return validated(document, where)


def arms_of(experiment: Experiment, wanted: Sequence[str] | None = None) -> list[Arm]:
    """The arms of a comparison: those of the experiment file, or those that `wanted` (texts of --arm) names or defines.

    Empty if there are none. Every arm is a valid experiment with the load of the others.
    """
    specs = {spec.name: dict(spec.set) for spec in experiment.arms or []}
    if wanted:
        specs = _wanted(specs, wanted)
    base = experiment.model_copy(update={"arms": None})
    return [_arm(base, name, settings) for name, settings in specs.items()]


def _wanted(known: Mapping[str, dict[str, Any]], texts: Iterable[str]) -> dict[str, dict[str, Any]]:
    chosen: dict[str, dict[str, Any]] = {}
    for text in texts:
        name, settings = parse_arm(text)
        if settings is None:
            if name not in known:
                listed = f"choose from: {', '.join(known)}; or define" if known else "define"
                raise InputError(f"--arm {text}", "no such arm in the experiment", f"{listed} it as NAME:a.b=value")
            settings = known[name]
        if name in chosen:
            raise InputError(f"--arm {text}", "two arms have the same name", "name them apart")
        chosen[name] = settings
    return chosen


def _arm(base: Experiment, name: str, settings: dict[str, Any]) -> Arm:
    where = f"arm {name}"
    for path in settings:
        section = path.split(".")[0].strip()
        if section in (*SAME_LOAD, *_OWN):
            what = "all arms share it" if section in SAME_LOAD else "it does not belong into an arm"
            raise InputError(f"{where}: field {path}", what, "set it in the experiment itself, or run arms one by one")
    return Arm(name, vary(base, settings, where), settings)


def parse_arm(text: str) -> tuple[str, dict[str, Any] | None]:
    """`NAME:a.b=v,c.d=w` as name and settings; `NAME` alone has None for settings, `NAME:` has no settings.

    Values are YAML; commas inside brackets, braces and quotes belong to the value.
    """
    name, colon, rest = text.partition(":")
    name = name.strip()
    if not re.fullmatch(ARM_NAME, name) or not name.strip("."):
        raise InputError(f"--arm {text}", f"{name!r} is no name", "use letters, digits and . _ + - before the colon")
    if not colon:
        return name, None
    settings: dict[str, Any] = {}
    for part in split_values(rest):
        field_name, sign, raw = part.partition("=")
        if not sign or not field_name.strip():
            raise InputError(
                f"--arm {text}", f"{part.strip()!r} is not of the form a.b=value", "see harness compare -h"
            )
        try:
            settings[field_name.strip()] = yaml_text.parse(raw)
        except yaml.YAMLError:
            raise InputError(f"--arm {text}", f"the value of {field_name.strip()} is not YAML", "quote it") from None
    return name, settings


def split_values(text: str) -> list[str]:
    """At commas that stand outside brackets, braces and quotes."""
    parts, depth, quote, escaped = [""], 0, "", False
    for char in text:
        if quote:
            quote = "" if char == quote and not escaped else quote
            escaped = char == "\\" and quote == '"' and not escaped
        elif char in "'\"":
            quote = char
        elif char in "[{":
            depth += 1
        elif char in "]}":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append("")
            continue
        parts[-1] += char
    return [part for part in parts if part.strip()]


def router_choices(experiment: Experiment, wanted: list[str] | None) -> list[str]:
    """The configs and baselines to compare, each once, checked before anything runs."""
    release = experiment.router.release
    if not wanted:
        cluster = experiment.cluster
        split = cluster.disaggregation is not None or any(pool.role == "prefill" for pool in cluster.pools)
        names = sorted(path.stem for path in (CONFIGS / release).glob("*.yaml"))
        shipped = [name for name in names if name.startswith("pd-") == split]
        if not experiment.cache.publishes_events:  # then these decide as the ones without
            shipped = [name for name in shipped if not name.endswith("-tiers")]
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
    config = str(Path(choice).resolve()) if names_file(choice) else choice
    update = {"kind": choice} if choice in BASELINES else {"kind": "llm-d", "config": config}
    return experiment.model_copy(update={"router": experiment.router.model_copy(update=update)})


def router_arms(experiment: Experiment, choices: Sequence[str]) -> list[Arm]:
    """One arm per router config or baseline, named after it."""
    base = experiment.model_copy(update={"arms": None})
    return [Arm(_label(choice, choices), with_router(base, choice)) for choice in choices]


def _label(choice: str, choices: Sequence[str]) -> str:
    """A short name for a config, unique among the choices."""
    stems = [Path(c).stem if c not in BASELINES else c for c in choices]
    stem = stems[choices.index(choice)]
    return stem if stems.count(stem) == 1 else f"{stem}-{choices.index(choice) + 1}"


def differences(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """For each arm the values of all fields that any arm sets and in which arms differ, `a.b: value`.

    Sections are taken apart into their fields; a field that an arm's experiment does not have is left out there.
    """
    flat = [_leaves(arm.experiment.model_dump(mode="json")) for arm in arms]
    paths = dict.fromkeys(leaf for arm in arms for leaf in _set_leaves(arm))
    told = [path for path in paths if len({repr(leaves.get(path, _ABSENT)) for leaves in flat}) > 1]
    return [{path: leaves[path] for path in told if path in leaves} for leaves in flat]


_ABSENT = object()


def _set_leaves(arm: Arm) -> list[str]:
    """Fields that an arm sets, its sections taken apart, as far as its experiment has them."""
    document: dict[str, Any] = {}
    for name, value in arm.settings.items():
        put_field(document, name, value, arm.name)
    return list(_leaves(document))


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Fields by their full names; lists of sections are taken apart as well."""
    if isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
        value = dict(enumerate(value))
    if not isinstance(value, dict) or not value:
        return {path: value} if path else {}
    leaves: dict[str, Any] = {}
    for key, inner in value.items():
        leaves.update(_leaves(inner, f"{path}.{key}" if path else str(key)))
    return leaves
