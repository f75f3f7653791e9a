"""Profiles of the trace generator: every parameter in one YAML file, checked field by field."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import NormalDist
from typing import Annotated, Protocol, TypeVar

import msgspec
from msgspec import Meta, Struct

from harness import yaml_text
from harness.errors import InputError

Share = Annotated[float, Meta(ge=0, le=1)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Tokens = Annotated[int, Meta(ge=1, le=10**9)]
FOLDER = Path(__file__).parent / "profiles"
_NORMAL = NormalDist()


class Strict(Struct, forbid_unknown_fields=True, kw_only=True):
    """Base: a key that no parameter has is an error."""


class LogNormal(Strict, kw_only=True):
    """shift + median * exp(sigma * standard normal), clipped to [min, max]."""

    shift: NotNegative = 0.0
    median: Positive
    sigma: NotNegative
    min: NotNegative = 0.0
    max: Positive = 1e18

    def at(self, u: float) -> float:
        """The value at quantile `u` (0..1)."""
        z = _NORMAL.inv_cdf(min(max(u, 1e-12), 1 - 1e-12))
        value: float = min(max(self.shift + self.median * math.exp(self.sigma * z), self.min), self.max)
        return value

    def draw(self, rng: Random) -> float:
        """One value; exactly one number of `rng` is used."""
        return self.at(rng.random())


class Part(LogNormal, kw_only=True):
    """A component of a mixture."""

    share: Share
    kind: str = ""


Mixture = Annotated[list[Part], Meta(min_length=1)]


class _HasShare(Protocol):
    share: float


Option = TypeVar("Option", bound=_HasShare)


def by_share(options: Sequence[Option], u: float) -> Option:
    """The option at `u` (0..1) when options are laid side by side by their shares; the last takes what is
    left.
    """
    for option in options[:-1]:
        u -= option.share
        if u < 0:
            return option
    return options[-1]


def pick(options: Sequence[Option], rng: Random) -> Option:
    """One of the options, by their shares; exactly one number of `rng` is used."""
    return by_share(options, rng.random())


class Window(Strict):
    """A context limit and the share of sessions that have it."""

    share: Share
    tokens: Tokens


class Growth(Strict):
    """Scale of what a turn adds: (session's turns / turns) ** exponent, clipped."""

    turns: Positive
    exponent: float
    min: Positive
    max: Positive

    def of(self, turns: int) -> float:
        """The scale for a session of so many turns."""
        scale: float = (turns / self.turns) ** self.exponent
        return min(max(scale, self.min), self.max)


class SessionPart(Strict):
    """What is drawn once per session."""

    turns: LogNormal
    min_calls: Annotated[int, Meta(ge=1)]
    window_tokens: Annotated[list[Window], Meta(min_length=1)]
    growth: Growth


class PrefixPart(Strict):
    """A prefix that sessions share."""

    key: str
    tokens: Tokens


class SharedPart(Strict):
    """The prefixes of main conversations and of sub-agents."""

    enabled: bool
    main: PrefixPart
    sub_agent: PrefixPart | None = None


class Compaction(Strict):
    """When a context is cut (share of the window) and to what."""

    at_min: Share
    at_max: Share
    to_tokens: LogNormal


class Rewind(Strict):
    """How often a turn goes back to an earlier one, and how far at most."""

    share: Share
    turns_max: Annotated[int, Meta(ge=1)]


class MainPart(Strict):
    """The main conversation."""

    first_tokens: LogNormal
    added_tokens: Mixture
    output_tokens: LogNormal
    compaction: Compaction
    rewind: Rewind
    breaks_per_session: NotNegative
    gap_s: Mixture


class Span(Strict):
    """A uniform draw."""

    min: NotNegative
    max: NotNegative


class SidePart(Strict):
    """Unlabelled chains beside the main conversation."""

    session_share: Share
    per_turn: NotNegative
    at_first_turn: Annotated[int, Meta(ge=0)]
    calls: LogNormal
    fork_share: Share
    fresh_tokens: LogNormal
    added_tokens: Mixture
    joined_share: Share
    start: Span
    gap_s: Mixture


class SubShare(Strict):
    """Share of sessions with sub-agents: base + per_150_turns * min(1, turns / 150), at most max."""

    base: Share
    per_150_turns: NotNegative
    max: Share

    def of(self, turns: int) -> float:
        """The probability for a session of so many turns."""
        return min(self.max, self.base + self.per_150_turns * min(1.0, turns / 150))


class GroupsByTurns(Strict):
    """Scale of the number of groups: base + per_120_turns * min(turns, turns_max) / 120."""

    base: NotNegative
    per_120_turns: NotNegative
    turns_max: Positive

    def of(self, turns: int) -> float:
        """The scale for a session of so many turns."""
        return self.base + self.per_120_turns * min(turns, self.turns_max) / 120


class SubPart(Strict):
    """Labelled sub-agent groups."""

    session_share: SubShare
    groups: LogNormal
    groups_by_turns: GroupsByTurns
    batch: Annotated[list[Annotated[int, Meta(ge=1)]], Meta(min_length=1)]
    at_once_max: Annotated[int, Meta(ge=1)]
    batch_calls_max: Annotated[int, Meta(ge=1)]
    start_gap_s: LogNormal
    joined_share: Share
    calls: LogNormal
    fork_share: Share
    own_share: Annotated[float, Meta(gt=0, le=1)]
    lane_calls_mean: Annotated[float, Meta(ge=1)]
    lane_together_share: Share
    lane_joined_share: Share
    lane_fork_share: Share
    lane_gap_s: LogNormal
    first_tokens: LogNormal
    added_tokens: Mixture
    output_tokens: LogNormal
    gap_s: Mixture


class Service(Strict):
    """Duration of a call on the recorded service."""

    base_s: NotNegative
    per_output_token_s: NotNegative
    per_input_token_s: NotNegative
    noise_sigma: NotNegative


class Model(Strict):
    """A model: its name, its share, and how long its calls take against the service's formula."""

    name: str
    share: Share
    duration: Positive


class Models(Strict):
    """Models of sessions, and the fast one of some sub-agents."""

    session: Annotated[list[Model], Meta(min_length=1)]
    sub_agent_fast: Model | None = None


class Profile(Strict, kw_only=True):
    """All parameters of a generator profile. Without `side_chains` or `sub_agents` there are none."""

    name: str
    block_tokens: Annotated[int, Meta(ge=1, le=2**20)]
    session: SessionPart
    shared_prefix: SharedPart
    main: MainPart
    side_chains: SidePart | None = None
    sub_agents: SubPart | None = None
    service: Service
    models: Models


def profile_names() -> list[str]:
    """Names of the profiles that come with the project."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml") if not path.stem.endswith(".targets"))


def load_profile(name: str | Path) -> Profile:
    """A profile by its name, or from a YAML file of the user's."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        path = FOLDER / f"{name}.yaml"
        if not path.is_file():
            known = ", ".join(profile_names())
            raise InputError(f"profile {name}", "no such profile", f"the profiles are {known}; or give a .yaml file")
    try:
        data = yaml_text.read(path, "give a readable profile file")
    except FileNotFoundError:
        raise InputError(str(path), "no such file", "give an existing profile file") from None
    try:
        profile = msgspec.convert(data, Profile)
    except msgspec.ValidationError as error:
        what, _, at = str(error).partition(" - at ")
        where = f"{path}: field {at.strip('`$.')}" if at else str(path)
        raise InputError(
            where, what.replace("`", "").lower(), "correct the profile (docs/trace-synthesis.md)"
        ) from None
    if profile.sub_agents is not None and profile.shared_prefix.sub_agent is None:
        raise InputError(
            f"{path}: field shared_prefix.sub_agent", "is missing", "say what the sub_agents of the profile begin with"
        )
    return profile


def without_shared_prefix(profile: Profile) -> Profile:
    """The profile with sessions that have nothing in common; nothing else changes."""
    return msgspec.structs.replace(profile, shared_prefix=msgspec.structs.replace(profile.shared_prefix, enabled=False))
