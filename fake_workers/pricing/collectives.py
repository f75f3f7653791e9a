"""Measured times of collectives between GPUs: one table per GPU type, looked up by operation, ranks and bytes.

`data/collectives.csv` ships NVIDIA's from the kernel database (NCCL) and AMD's as published (RCCL, MORI, the engines'
own kernels); a user gives a CSV of his own with the same columns. Bytes are those of NCCL's tests: all_reduce the
buffer of one rank, all_gather and reduce_scatter the whole vector, all_to_all what one rank sends to all; ep_dispatch
and ep_combine tokens x experts per token x hidden size x element size of one rank.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from fake_workers.errors import InputError
from fake_workers.pricing.interpolate import LogCurve

TABLE = Path(__file__).parent / "data" / "collectives.csv"
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ep_dispatch", "ep_combine")
COLUMNS = ("gpu", "op", "kernel", "ranks", "bytes", "time_us", "source")

GAPS: dict[tuple[str, str], str] = {
    ("mi300x", "all_gather"): "no size was found published",
    ("mi300x", "reduce_scatter"): "no size was found published",
    ("mi300x", "all_to_all"): "one size only, 64 MiB per pair of 8 GPUs",
    ("mi350x", "all_reduce"): "only bus bandwidths of two nodes were found published",
    ("mi350x", "all_gather"): "no size was found published",
    ("mi350x", "reduce_scatter"): "no size was found published",
    ("mi350x", "all_to_all"): "no size was found published",
    ("mi355x", "all_gather"): "below 64 MiB no size was found published",
    ("mi355x", "reduce_scatter"): "below 64 MiB no size was found published",
    ("mi355x", "all_to_all"): "128 and 1024 bytes only, and a bus bandwidth of unstated size",
}
"""What was looked for and not found (AMD)."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement."""

    gpu: str
    op: str
    kernel: str
    ranks: int
    nbytes: int
    time_us: float
    source: str


@dataclass(slots=True)
class _Curve:
    kernel: str
    low: int
    high: int
    line: LogCurve


@dataclass(eq=False)
class Collectives:
    """Times of one GPU type. `beyond` notes what was asked outside the measured sizes, with the farthest size."""

    gpu: str
    rows: list[Row] = field(repr=False)
    beyond: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        groups: dict[tuple[str, int, str], dict[int, int]] = {}
        for row in self.rows:
            points = groups.setdefault((row.op, row.ranks, row.kernel), {})
            points[row.nbytes] = max(1, round(row.time_us * 1e3))
        self._curves: dict[tuple[str, int], list[_Curve]] = {}
        for (op, ranks, kernel), points in sorted(groups.items()):
            if len(points) > 1:
                sizes = sorted(points)
                line = LogCurve(sizes, [points[s] for s in sizes])
                self._curves.setdefault((op, ranks), []).append(_Curve(kernel, sizes[0], sizes[-1], line))

    def measured(self) -> list[tuple[str, int, str, int, int]]:
        """(operation, ranks, kernel, smallest, largest bytes) of every curve."""
        return [
            (op, ranks, curve.kernel, curve.low, curve.high)
            for (op, ranks), curves in self._curves.items()
            for curve in curves
        ]

    def time_ns(self, op: str, ranks: int, nbytes: int) -> int:
        """Time of one collective in ns; 0 for one rank.

        Among kernels measured at that size the fastest is taken, as engines choose theirs; beyond all measured sizes
        the nearest curve is continued and the size noted. InputError where no curve is known.
        """
        if ranks == 1 or nbytes <= 0:
            return 0
        curves = self._curves.get((op, ranks))
        if not curves:
            reason = GAPS.get((self.gpu, op))
            known = sorted({r for o, r in self._curves if o == op})
            what = f"no measured {op} of {ranks} ranks"
            if reason:
                what += f": {reason}"
            elif known:
                what += f"; measured with {', '.join(map(str, known))}"
            raise InputError(f"collectives of {self.gpu}", what, f"give a CSV of your own ({', '.join(COLUMNS)})")
        inside = [curve for curve in curves if curve.low <= nbytes <= curve.high]
        if inside:
            return min(curve.line.at(nbytes) for curve in inside)
        self.beyond[f"{op} of {ranks} ranks"] = max(nbytes, self.beyond.get(f"{op} of {ranks} ranks", 0))
        nearest = min(curves, key=lambda c: min(abs(math.log(nbytes / c.low)), abs(math.log(nbytes / c.high))))
        # a message below the smallest measured one takes as long: launches bound it
        return nearest.line.at(max(nbytes, nearest.low))


def collective_gpus() -> list[str]:
    """GPU types in the shipped table."""
    return sorted({row.gpu for row in _read(TABLE)})


def load_collectives(gpu_or_path: str) -> Collectives:
    """The shipped table of a GPU type, or a CSV file of a user's own (one GPU type)."""
    if "/" in gpu_or_path or gpu_or_path.endswith(".csv"):
        rows = _read(Path(gpu_or_path))
        gpus = {row.gpu for row in rows}
        if len(gpus) != 1:
            raise InputError(gpu_or_path, f"holds {len(gpus)} GPU types", "give one GPU type per file")
        return Collectives(gpus.pop(), rows)
    rows = [row for row in _read(TABLE) if row.gpu == gpu_or_path]
    if not rows:
        raise InputError(
            f"collectives {gpu_or_path!r}",
            "no table of that GPU",
            f"known: {', '.join(collective_gpus())}; or the path of a CSV file ({', '.join(COLUMNS)})",
        )
    return Collectives(gpu_or_path, rows)


def _read(path: Path) -> list[Row]:
    where = str(path)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            header = [name.strip() for name in reader.fieldnames or ()]
            reader.fieldnames = header
            raw = [(reader.line_num, row) for row in reader]
    except FileNotFoundError:
        raise InputError(where, "no such file", "give the path of a CSV file") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(where, f"cannot be read ({error})", "save it as UTF-8 CSV") from None
    for name in COLUMNS:
        if name not in header:
            raise InputError(f"{where} line 1", f"column {name} is missing", f"columns: {', '.join(COLUMNS)}")
    if not raw:
        raise InputError(where, "holds no rows", "add measurements")
    return list(_rows(where, raw))


def _rows(where: str, raw: Iterable[tuple[int, dict[str, str]]]) -> Iterable[Row]:
    seen: set[tuple[str, str, str, int, int]] = set()
    for line, row in raw:
        place = f"{where} line {line}"
        op = row["op"]
        if op not in OPERATIONS:
            raise InputError(f"{place} column op", f"unknown operation {op!r}", f"use {', '.join(OPERATIONS)}")
        try:
            ranks, nbytes, time_us = int(row["ranks"]), int(row["bytes"]), float(row["time_us"])
        except (TypeError, ValueError):
            raise InputError(place, "ranks, bytes and time_us must be numbers", "correct the row") from None
        if ranks < 2 or nbytes < 1 or not 0.001 <= time_us < 1e9:
            raise InputError(place, "ranks >= 2, bytes >= 1 and a time above 0 are needed", "correct the row")
        key = (row["gpu"], op, row["kernel"], ranks, nbytes)
        if key in seen:
            raise InputError(place, "repeats a point", "keep one of the two")
        seen.add(key)
        yield Row(row["gpu"], op, row["kernel"], ranks, nbytes, time_us, row["source"])
