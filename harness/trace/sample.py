"""A smaller trace of the same kind: sessions drawn by strata, and how far each statistic moved.

The longest one percent of sessions holds a tenth of the calls, so drawing sessions blindly makes the sample's size a
matter of luck. Strata: calls of the session (below 50, 200, 1,000, more) times whether it has sub-agents. Each stratum
gets its share of the sample, rounded by largest remainders.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from harness.errors import InputError
from harness.trace.model import Session

CALL_BOUNDS = (50, 200, 1000)

Stratum = tuple[int, bool]


@dataclass(frozen=True, slots=True)
class Moved:
    """A statistic of the whole trace and of the sample; `change` is relative, None where the whole has 0 or nothing."""

    name: str
    whole: float | None
    sample: float | None
    change: float | None


def stratum(session: Session) -> Stratum:
    """(how many of CALL_BOUNDS the session's calls reach, whether it has sub-agents)."""
    calls = len(session.calls)
    return sum(calls >= bound for bound in CALL_BOUNDS), any("." in call.chain for call in session.calls)


class Strata:
    """Notes the stratum of each session that passes through."""

    def __init__(self) -> None:
        self.found: list[tuple[Stratum, int]] = []
        """(stratum, calls) of each session."""

    def watch(self, sessions: Iterable[Session]) -> Iterator[Session]:
        """The sessions, unchanged."""
        for session in sessions:
            self.found.append((stratum(session), len(session.calls)))
            yield session


def choose(found: list[tuple[Stratum, int]], count: int, seed: int) -> set[int]:
    """Numbers of the sessions to keep; the same seed keeps the same ones. `found`: (stratum, calls) of each.

    In a stratum sessions are drawn at equal distances in order of their calls, from a random first one on.
    """
    if not 1 <= count <= len(found):
        raise InputError(
            f"--sessions {count}", f"the trace has {len(found)} sessions", f"give a number from 1 to {len(found)}"
        )
    members: dict[Stratum, list[int]] = {}
    for number in sorted(range(len(found)), key=lambda number: found[number][1]):
        members.setdefault(found[number][0], []).append(number)
    rng = random.Random(seed)
    chosen: set[int] = set()
    for key, size in _sizes({key: len(numbers) for key, numbers in members.items()}, count).items():
        offset = rng.random()
        chosen.update(members[key][int((place + offset) * len(members[key]) / size)] for place in range(size))
    return chosen


def _sizes(strata: Mapping[Stratum, int], count: int) -> dict[Stratum, int]:
    total = sum(strata.values())
    sizes = {key: count * size // total for key, size in sorted(strata.items())}
    by_remainder = sorted(sizes, key=lambda key: (-(count * strata[key] % total), key))
    for key in by_remainder[: count - sum(sizes.values())]:
        sizes[key] += 1
    return sizes


def kept(sessions: Iterable[Session], chosen: set[int]) -> Iterator[Session]:
    """The sessions whose numbers were chosen."""
    return (session for number, session in enumerate(sessions) if number in chosen)


def moved(whole: Iterable[tuple[str, Any]], sample: Iterable[tuple[str, Any]]) -> list[Moved]:
    """Statistic by statistic, from (name, value) pairs in the same order."""
    found = []
    for (name, a), (_, b) in zip(whole, sample, strict=True):
        change = (b - a) / abs(a) if a and b is not None else None
        found.append(Moved(name, a, b, change))
    return found
