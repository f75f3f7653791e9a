"""Max-min fair shares by progressive filling (Bertsekas and Gallager, Data Networks, section 6.5.2)."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Path = tuple[int, ...]
"""Links by number, in order from the sender; no link twice."""


def max_min_rates(
    paths: Sequence[Path],
    caps: Sequence[int | None],
    capacity: Mapping[int, Any],
    divide: Callable[[Any, int], Any] = operator.floordiv,
    flows: Sequence[int] | None = None,
) -> list[Any]:
    """One rate per entry, in the unit of `capacity` and `caps` (None: no limit of its own).

    An entry is one flow, or as many alike as `flows` says, each of which gets the rate. All flows grow alike; where a
    link is full, its flows stop, and so does a flow that reaches its cap. With floor division a share is rounded down
    to whole units, so a link with n flows may leave fewer than n units unused; exact division (fractions) makes the
    result exact. A flow without links and without a cap is an error.
    """
    rates: list[Any] = [None] * len(paths)
    alike = [1] * len(paths) if flows is None else flows
    users: dict[int, list[int]] = {}
    for entry, path in enumerate(paths):
        if not path and caps[entry] is None:
            raise ValueError("a flow needs a link or a cap")
        for link in path:
            users.setdefault(link, []).append(entry)
    left = {link: capacity[link] for link in users}
    count = {link: sum([alike[entry] for entry in entries]) for link, entries in users.items()}
    # a link's share never falls while flows stop at or below it, so stale heap entries are lower bounds
    levels = [(divide(left[link], count[link]), link) for link in users]
    heapq.heapify(levels)
    limited = sorted((cap, entry) for entry, cap in enumerate(caps) if cap is not None)
    next_cap = 0

    def stop(entry: int, rate: Any) -> None:
        rates[entry] = rate
        number = alike[entry]
        for link in paths[entry]:
            left[link] -= rate * number
            count[link] -= number

    while True:
        while levels:
            share, link = levels[0]
            if not count[link]:
                heapq.heappop(levels)
                continue
            now = divide(left[link], count[link])
            if now == share:
                break
            heapq.heapreplace(levels, (now, link))
        while next_cap < len(limited) and rates[limited[next_cap][1]] is not None:
            next_cap += 1
        if next_cap < len(limited) and (not levels or limited[next_cap][0] <= levels[0][0]):
            cap, entry = limited[next_cap]
            stop(entry, cap)
        elif levels:
            share, link = heapq.heappop(levels)
            for entry in users[link]:
                if rates[entry] is None:
                    stop(entry, share)
        else:
            return rates
