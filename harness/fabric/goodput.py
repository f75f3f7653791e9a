"""What a transfer costs beside the wires: set-up, a price per descriptor, and goodput by size as it was measured.

    time of a lone transfer = set-up + descriptors * per_descriptor + bytes / goodput(size)

`size` is that of one descriptor (a copy's block, an RDMA message) or of the whole transfer, as the table's measurement
has it. Tables that were measured end to end already hold their set-up; add none to them.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from harness import yaml_text
from harness.errors import InputError

TABLES = Path(__file__).parent / "tables"
"""The shipped tables; each names its source."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """Measured bytes per second by size in bytes, ascending. Between points log-linear in size; flat outside."""

    name: str
    by: Literal["descriptor", "transfer"]
    sizes: tuple[int, ...]
    bytes_per_s: tuple[int, ...]
    source: str
    nominal_bytes_per_s: int | None = None
    """Wire rate of the machine that was measured."""

    def at(self, size: float) -> int:
        """Goodput for one size, whole bytes per second."""
        sizes, rates = self.sizes, self.bytes_per_s
        if size <= sizes[0]:
            return rates[0]
        if size >= sizes[-1]:
            return rates[-1]
        i = bisect.bisect_right(sizes, size)
        share = math.log(size / sizes[i - 1]) / math.log(sizes[i] / sizes[i - 1])
        return round(rates[i - 1] + (rates[i] - rates[i - 1]) * share)

    def scaled(self, nominal_bytes_per_s: int) -> Goodput:
        """The same shape on a wire of another rate; needs the nominal rate of the measured one."""
        if self.nominal_bytes_per_s is None:
            raise InputError(f"goodput table {self.name}", "states no nominal rate to scale from", "use it unscaled")
        factor = nominal_bytes_per_s / self.nominal_bytes_per_s
        rates = tuple(max(1, round(rate * factor)) for rate in self.bytes_per_s)
        return Goodput(self.name, self.by, self.sizes, rates, self.source, nominal_bytes_per_s)


@dataclass(frozen=True, slots=True)
class TransferCost:
    """How transfers of one kind start and how fast one alone can be."""

    setup_ns: int = 0
    per_descriptor_ns: int = 0
    goodput: Goodput | None = None

    def start_ns(self, descriptors: int) -> int:
        """Time before the first byte moves, link latencies aside."""
        return self.setup_ns + descriptors * self.per_descriptor_ns

    def cap_bytes_per_s(self, nbytes: int, descriptors: int) -> int | None:
        """Most that one transfer reaches by itself; None: the links alone decide."""
        if self.goodput is None or not nbytes:
            return None
        size = nbytes / max(1, descriptors) if self.goodput.by == "descriptor" else nbytes
        return self.goodput.at(size)


def table_names() -> list[str]:
    """Names of the shipped tables."""
    return sorted(path.stem for path in TABLES.glob("*.yaml"))


@cache
def load_cost(name: str) -> TransferCost:
    """A shipped table by name, or one of the user's by path (ends in .yaml)."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else TABLES / f"{name}.yaml"
    try:
        document = yaml_text.read(path, "see docs/fabric.md for the form")
    except FileNotFoundError:
        known = ", ".join(table_names())
        raise InputError(
            f"transfer cost {name}", "no such table", f"use a path to a .yaml or one of: {known}"
        ) from None
    return parse_cost(document, str(path))


def parse_cost(document: Any, where: str) -> TransferCost:
    """The YAML form of a cost table (docs/fabric.md)."""
    keys = {"source", "by", "nominal_gbytes_per_s", "goodput_gbytes_per_s", "setup_us", "per_descriptor_us"}
    if not isinstance(document, dict) or not set(document) <= keys or not isinstance(document.get("source"), str):
        raise InputError(where, f"needs `source` and only {', '.join(sorted(keys))}", "see docs/fabric.md")
    numbers: list[Any] = [document.get("setup_us", 0), document.get("per_descriptor_us", 0)]
    if not all(isinstance(value, int | float) and value >= 0 for value in numbers):
        raise InputError(where, "setup_us and per_descriptor_us must be numbers >= 0", "see docs/fabric.md")
    setup_ns, per_descriptor_ns = (round(value * 1000) for value in numbers)
    points = document.get("goodput_gbytes_per_s")
    if points is None:
        return TransferCost(setup_ns, per_descriptor_ns)
    by = document.get("by")
    if by not in ("descriptor", "transfer"):
        raise InputError(where, f"by: {by!r}", "write `by: descriptor` or `by: transfer`")
    good = (
        isinstance(points, dict)
        and points
        and all(isinstance(s, int) and s > 0 and isinstance(r, int | float) and r > 0 for s, r in points.items())
    )
    if not good:
        raise InputError(where, "goodput_gbytes_per_s must map bytes to GB/s", "see docs/fabric.md")
    sizes = tuple(sorted(points))
    nominal = document.get("nominal_gbytes_per_s")
    curve = Goodput(
        name=where,
        by=by,
        sizes=sizes,
        bytes_per_s=tuple(round(points[size] * 1e9) for size in sizes),
        source=document["source"],
        nominal_bytes_per_s=None if nominal is None else round(nominal * 1e9),
    )
    return TransferCost(setup_ns, per_descriptor_ns, curve)
