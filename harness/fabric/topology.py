"""Topologies as data: vertices joined by directed links, written once per kind and expanded by index.

    counts: {n: 8, g: 8}
    links:
      - {from: "gpu[n,g]", to: "host[n]", gbytes_per_s: 55, latency_us: 1}
      - {from: "host[n]", to: switch, gbytes_per_s: 50, latency_us: 2}

gives 64 + 8 connections, each as two directed links (`oneway: true` for one). `times: n` multiplies a rate by a count.
A path is the one with the fewest links; among equals the links written first win.
"""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import yaml_text
from harness.errors import InputError
from harness.fabric.flows import Link
from harness.fabric.share import Path as LinkPath

TOPOLOGIES = Path(__file__).parent / "topologies"
"""The shipped topologies; each says what it stands for."""
_PLACES = re.compile(r"\[[^]]*\]")
_VERTEX = re.compile(r"^([A-Za-z_]\w*)(?:\[([a-z0-9]+(?:,[a-z0-9]+)*)\])?$")
_LINK_KEYS = {"from", "to", "gbytes_per_s", "back_gbytes_per_s", "latency_us", "oneway", "times"}


def kind_of(link: str) -> str:
    """The kind of a link by its name: `host[3]>switch` is of the kind `host>switch`."""
    return _PLACES.sub("", link)


@dataclass(slots=True)
class Topology:
    """Links by number and who they join."""

    name: str
    about: str
    links: list[Link] = field(default_factory=list)
    ends: list[tuple[str, str]] = field(default_factory=list)
    """(from, to) of each link."""
    _out: dict[str, list[int]] = field(default_factory=dict)
    _paths: dict[tuple[str, str], LinkPath] = field(default_factory=dict)

    def add(self, source: str, target: str, bytes_per_s: int, latency_ns: int) -> int:
        """One directed link; returns its number."""
        number = len(self.links)
        self.links.append(Link(f"{source}>{target}", bytes_per_s, latency_ns))
        self.ends.append((source, target))
        self._out.setdefault(source, []).append(number)
        self._out.setdefault(target, [])
        self._paths.clear()
        return number

    @property
    def vertices(self) -> list[str]:
        """All vertices in the order of their first mention."""
        return list(self._out)

    def vertices_of(self, kind: str) -> list[str]:
        """All vertices named `kind` or `kind[...]`."""
        return [vertex for vertex in self._out if vertex.split("[", 1)[0] == kind]

    def path(self, source: str, target: str) -> LinkPath:
        """Link numbers from source to target; empty if they are the same vertex."""
        found = self._paths.get((source, target))
        if found is None:
            found = self._paths[source, target] = self._search(source, target)
        return found

    def number(self, name: str) -> int:
        """The number of the link `from>to`."""
        for number, link in enumerate(self.links):
            if link.name == name:
                return number
        raise InputError(f"topology {self.name}", f"no link {name}", "see its links section")

    def _search(self, source: str, target: str) -> LinkPath:
        for vertex in (source, target):
            if vertex not in self._out:
                raise InputError(f"topology {self.name}", f"no vertex {vertex}", f"it has {', '.join(self._kinds())}")
        came: dict[str, int] = {}
        queue = deque([source])
        while queue:
            at = queue.popleft()
            if at == target:
                path: list[int] = []
                while at != source:
                    path.append(came[at])
                    at = self.ends[came[at]][0]
                return tuple(reversed(path))
            for link in self._out[at]:
                after = self.ends[link][1]
                if after != source and after not in came:
                    came[after] = link
                    queue.append(after)
        raise InputError(f"topology {self.name}", f"no way from {source} to {target}", "add the missing links")

    def _kinds(self) -> list[str]:
        return list(dict.fromkeys(vertex.split("[", 1)[0] for vertex in self._out))


def topology_names() -> list[str]:
    """Names of the shipped topologies."""
    return sorted(path.stem for path in TOPOLOGIES.glob("*.yaml"))


def load_topology(
    name: str, counts: Mapping[str, int] | None = None, rates: Mapping[str, float] | None = None
) -> Topology:
    """A shipped topology by name or one of the user's by path (.yaml); `counts` and `rates` override the file's.

    rates: GB/s, both ways, of the links that lead to a vertex, by its name as the file writes it after `to`.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else TOPOLOGIES / f"{name}.yaml"
    try:
        document = yaml_text.read(path, "see docs/fabric.md for the form")
    except FileNotFoundError:
        known = ", ".join(topology_names())
        raise InputError(f"topology {name}", "no such topology", f"use a path to a .yaml or one of: {known}") from None
    return parse_topology(document, path.stem, counts, rates)


def parse_topology(
    document: Any, name: str, counts: Mapping[str, int] | None = None, rates: Mapping[str, float] | None = None
) -> Topology:
    """The YAML form of a topology (docs/fabric.md)."""
    where = f"topology {name}"
    if not isinstance(document, dict) or not set(document) <= {"about", "counts", "links"}:
        raise InputError(where, "must hold about, counts and links, nothing else", "see docs/fabric.md")
    sizes = {**(document.get("counts") or {}), **(counts or {})}
    for index, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise InputError(where, f"count {index}: {size!r}", "give a whole number of at least 1")
    links = document.get("links")
    if not isinstance(links, list) or not links:
        raise InputError(where, "has no links", "see docs/fabric.md")
    topology = Topology(name, str(document.get("about", "")))
    rates = rates or {}
    for entry in links:
        _expand(topology, entry, sizes, rates, where)
    ends = list(dict.fromkeys(entry["to"] for entry in links))
    for end in rates:
        if end not in ends:
            raise InputError(where, f"no link leads to {end}", f"give a rate for one of: {', '.join(ends)}")
    return topology


def _expand(topology: Topology, entry: Any, sizes: Mapping[str, int], rates: Mapping[str, float], where: str) -> None:
    if not isinstance(entry, dict) or not set(entry) <= _LINK_KEYS or not {"from", "to", "gbytes_per_s"} <= set(entry):
        raise InputError(where, f"link {entry!r}", f"give from, to, gbytes_per_s; may have {', '.join(_LINK_KEYS)}")
    ends = [_vertex(entry[key], sizes, where) for key in ("from", "to")]
    rate: Any = rates.get(entry["to"], entry["gbytes_per_s"])
    latency: Any = entry.get("latency_us", 0)
    back: Any = rates.get(entry["to"], entry.get("back_gbytes_per_s", rate))
    if not all(isinstance(v, int | float) and v > 0 for v in (rate, back)) or not isinstance(latency, int | float):
        raise InputError(where, f"link {entry!r}", "rates must be positive numbers in GB/s")
    times = entry.get("times")
    if times is not None and (not isinstance(times, str) or times not in sizes):
        raise InputError(where, f"link {entry!r}: times {times}", f"name one of the counts: {', '.join(sizes)}")
    factor = 1e9 * (1 if times is None else sizes[times])
    letters = list(dict.fromkeys(part for _, parts in ends for part in parts if part.isalpha()))
    for values in itertools.product(*(range(sizes[letter]) for letter in letters)):
        chosen = dict(zip(letters, map(str, values), strict=True))
        source, target = (
            kind + (f"[{','.join(chosen.get(part, part) for part in parts)}]" if parts else "") for kind, parts in ends
        )
        latency_ns = round(latency * 1000)
        topology.add(source, target, round(rate * factor), latency_ns)
        if not entry.get("oneway", False):
            topology.add(target, source, round(back * factor), latency_ns)


def _vertex(text: Any, sizes: Mapping[str, int], where: str) -> tuple[str, list[str]]:
    match = _VERTEX.match(text) if isinstance(text, str) else None
    if match is None:
        raise InputError(where, f"vertex {text!r}", 'write "kind" or "kind[n]" or "kind[n,g]"')
    parts = match.group(2).split(",") if match.group(2) else []
    for part in parts:
        if part.isalpha() and part not in sizes:
            raise InputError(where, f"vertex {text}: no count for index {part}", "add it under counts")
    return match.group(1), parts
