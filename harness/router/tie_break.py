"""Seeded order among endpoints that the router scores equally.

The router breaks ties by a shuffle that nobody can seed. Instead every worker exports a rank as a metric, and
a scorer of negligible weight prefers the lower one. Ranks are a random permutation that keeps moving: before
each decision the last winner and a random partner, together with all workers whose gauges are pushed anyway,
get their ranks dealt anew. With all endpoints tied the next winner is therefore uniform and independent of
the last; a fixed order would send every tie to the same worker. Among a few tied endpoints that were not
dealt anew the order may repeat for a while: each of them is still equally likely, but successive ties are not
independent.
"""

from __future__ import annotations

import random
from collections.abc import Iterable


class TieBreak:
    """The ranks 0..count-1 of `count` endpoints."""

    def __init__(self, count: int, seed: int) -> None:
        self._random = random.Random(f"tie-break:{seed}")
        self.ranks = list(range(count))
        self._random.shuffle(self.ranks)
        self._winner: int | None = None

    def chosen(self, index: int) -> None:
        """The router has picked this endpoint."""
        self._winner = index

    def deal(self, pushed: Iterable[int]) -> list[int]:
        """New ranks before a decision; returns the endpoints whose rank may have changed (all of `pushed`
        included).
        """
        hands = set(pushed)
        winner, self._winner = self._winner, None
        won = self.ranks[winner] if winner is not None else None
        if winner is not None:
            hands.add(winner)
        order = sorted(hands)
        ranks = [self.ranks[i] for i in order]
        self._random.shuffle(ranks)
        for index, rank in zip(order, ranks, strict=True):
            self.ranks[index] = rank
        if won is not None:  # the rank that won goes to anyone with equal chance, pushed or not
            holder, partner = self.ranks.index(won), self._random.randrange(len(self.ranks))
            self.ranks[holder], self.ranks[partner] = self.ranks[partner], self.ranks[holder]
            if partner not in hands:
                order.append(partner)
        return order
