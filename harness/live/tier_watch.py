"""What the page shows of cache tiers and links, read from the workers' `sim_*` metrics (tier_metrics.py)."""

from __future__ import annotations

import re
import time
from collections import deque
from contextlib import suppress
from typing import Any

from harness.fabric.topology import kind_of

WINDOW = 60
"""Looks over which hit rates are taken: half a minute."""
RATE_WINDOW = 10
"""Looks over which bytes per second are taken: five seconds."""

CLOCK = "sim_clock_seconds_total"
_LABEL = re.compile(r'(\w+)="([^"]*)"')
Sample = tuple[str, str]
"""Name and labels as they stand on the metrics page: the same for all workers of a process."""


def samples(page: str) -> dict[Sample, float]:
    """The page's samples of tiers and links."""
    found: dict[Sample, float] = {}
    for line in page.splitlines():
        if line.startswith("sim_"):
            sample, _, value = line.rpartition(" ")
            name, _, labels = sample.rstrip("}").partition("{")
            with suppress(ValueError):
                found[name, labels] = float(value)
    return found


class TierWatch:
    """The recent past of all tiers and links. `take` a worker's page, `remember` once all were taken."""

    def __init__(self) -> None:
        self._now: dict[Sample, float] = {}
        self._past: deque[tuple[float, dict[Sample, float]]] = deque(maxlen=WINDOW)

    def take(self, page: str) -> None:
        """A worker's metrics."""
        self._now.update(samples(page))

    def remember(self) -> None:
        """All workers have been asked."""
        now, self._now = self._now, {}
        if self._past and any(now.get(key, 0) < value for key, value in self._past[-1][1].items() if _counts(key)):
            self._past.clear()  # a process is gone, or began anew
        self._past.append((time.monotonic(), now))

    def view(self) -> dict[str, Any]:
        """Tiers, and the busiest link of each kind, for the page."""
        if not self._past:
            return {"tiers": [], "links": []}
        return {"tiers": self._tiers(), "links": self._links()}

    def _tiers(self) -> list[dict[str, Any]]:
        now = self._past[-1][1]
        found = []
        for name, labels in now:
            if name == "sim_tier_asked_tokens_total":
                place = dict(_LABEL.findall(labels))
                asked = self._grown("sim_tier_asked_tokens_total", labels, WINDOW)
                hit = self._grown("sim_tier_hit_tokens_total", labels, WINDOW)
                found.append(
                    {
                        "name": place.get("tier", ""),
                        "node": place.get("node", ""),
                        "resident": now.get(("sim_tier_resident_bytes", labels)),
                        "capacity": now.get(("sim_tier_capacity_bytes", labels)) or None,
                        "hit_rate": hit / asked if asked else None,
                        "evicted": now.get(("sim_tier_evicted_bytes_total", labels)),
                        "read_per_s": self._rate("sim_tier_read_bytes_total", labels),
                        "written_per_s": self._rate("sim_tier_written_bytes_total", labels),
                    }
                )
        return sorted(found, key=lambda tier: (tier["node"] == "", tier["name"], tier["node"]))

    def _links(self) -> list[dict[str, Any]]:
        now = self._past[-1][1]
        kinds: dict[str, list[dict[str, Any]]] = {}
        for name, labels in now:
            if name == "sim_link_bytes_total":
                link = dict(_LABEL.findall(labels)).get("link", "")
                capacity = now.get(("sim_link_capacity_bytes_per_second", labels), 0.0)
                rate = self._rate(name, labels)
                kinds.setdefault(kind_of(link), []).append(
                    {
                        "busiest": link,
                        "rate": rate,
                        "capacity": capacity,
                        "use": rate / capacity if capacity else 0.0,
                        "bytes": now[name, labels],
                    }
                )
        found = []
        for kind, links in sorted(kinds.items()):
            top = max(links, key=lambda link: (link["use"], link["bytes"]))
            total = {"rate_all": sum(link["rate"] for link in links), "bytes_all": sum(link["bytes"] for link in links)}
            found.append({"kind": kind, "links": len(links), **top, **total})
        return found

    def _grown(self, name: str, labels: str, window: int) -> float:
        key = name, labels
        first = self._past[max(0, len(self._past) - 1 - window)][1]
        return self._past[-1][1].get(key, 0.0) - first.get(key, 0.0)

    def _rate(self, name: str, labels: str) -> float:
        """Per second of the engines' time, in which links have their capacity."""
        clock = self._grown(CLOCK, "", RATE_WINDOW)
        return self._grown(name, labels, RATE_WINDOW) / clock if clock > 0 else 0.0


def _counts(key: Sample) -> bool:
    return key[0].endswith("_total")
