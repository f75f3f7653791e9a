"""Retention by time: drop what was not used for a window; each use restarts it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Generic, TypeVar

from harness.bins import LevelBins

Key = TypeVar("Key")


class Retention(Generic[Key]):
    """Last use of everything that a tier holds, oldest first. Times are virtual ns and never go back."""

    def __init__(self, window_ns: int) -> None:
        self.window_ns = window_ns
        self._used: OrderedDict[Key, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._used)

    def add(self, keys: Iterable[Key], now_ns: int) -> None:
        """Keys were stored or used now."""
        used = self._used
        for key in keys:
            used[key] = now_ns
            used.move_to_end(key)

    def touch(self, keys: Iterable[Key], now_ns: int) -> None:
        """Those of the keys that are held were used now."""
        used = self._used
        for key in keys:
            if key in used:
                used[key] = now_ns
                used.move_to_end(key)

    def forget(self, keys: Iterable[Key]) -> None:
        """Keys are gone for another reason."""
        for key in keys:
            self._used.pop(key, None)

    def expired(self, now_ns: int) -> list[Key]:
        """Keys whose last use is a whole window ago; they stay on the books until they are forgotten."""
        out: list[Key] = []
        limit = now_ns - self.window_ns
        for key, used_ns in self._used.items():
            if used_ns > limit:
                break
            out.append(key)
        return out

    def leave(self, level: LevelBins, keys: Iterable[Key], now_ns: int) -> None:
        """Take expired keys off a level, each at the end of its window, however late that was noticed."""
        ends = Counter(min(now_ns, self._used.get(key, now_ns) + self.window_ns) for key in keys)
        for t_ns in sorted(ends):
            level.change(t_ns, -ends[t_ns])

    def next_ns(self) -> int | None:
        """When the oldest key expires if nothing is used until then."""
        for used_ns in self._used.values():
            return used_ns + self.window_ns
        return None
