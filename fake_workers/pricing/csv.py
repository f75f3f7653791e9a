"""A step-time profile from a user's own measurements: a folder of CSV tables.

The layout follows LLMServingSim's profiles (`harness profile import` makes such a folder of one of its bundles):

    attention.csv  prefill_chunk,kv_prefill,n_decode,kv_decode,time_us
                   attention of one step: either one prefill chunk of prefill_chunk tokens on kv_prefill
                   cached ones (n_decode 0), or n_decode decodes of kv_decode context tokens each
                   (prefill_chunk 0). Rows of each kind form a full grid. Optional rows with both parts at once,
                   at every point of the decode grid or its smaller batches: decodes beside a chunk are priced at
                   the median of what they add to the chunk's own row; without them parts are added
    dense.csv      tokens,time_us[,decode_only]
                   everything else of one rank for a batch of `tokens` tokens, collectives included;
                   decode_only 1 for steps without prefill (CUDA graphs), 0 otherwise; without the column rows
                   serve both
    moe.csv        same columns, tokens of all ranks together; only for models with experts
    profile.yaml   name, gpu, model, tp, dp, ep, kv_bytes_per_token, kv_bytes_per_token_rank,
                   kv_capacity_tokens, block_tokens, max_model_len, source (free text: how it was measured)

Times are microseconds for the whole model (all layers).
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from fake_workers.errors import InputError
from fake_workers.pricing.profile import Layout, Limits, StepProfile, Tables, check_tables

_ATTENTION = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
_CURVE = ("tokens", "time_us")
_NUMBERS: Mapping[str, int | None] = {
    "tp": 1, "dp": 1, "ep": 1, "kv_bytes_per_token": None, "kv_bytes_per_token_rank": 0,
    "kv_capacity_tokens": 0, "block_tokens": 16, "max_model_len": None,
}  # fmt: skip
_TEXTS = ("name", "gpu", "model", "source")
_Grid = tuple[list[int], list[int], list[list[int]]]


def read_csv_profile(folder: Path) -> StepProfile:
    """Read and check a folder of tables; the first thing wrong is reported with file, line and column."""
    meta = _read_meta(folder / "profile.yaml")
    context, decode, mixed_ns = _read_attention(folder / "attention.csv")
    dense, dense_decode = _read_curves(folder / "dense.csv")
    moe_path = folder / "moe.csv"
    nothing: tuple[list[int], list[int]] = ([], [])
    moe, moe_decode = _read_curves(moe_path) if moe_path.exists() else (nothing, nothing)
    new, cached, context_ns = context
    batches, contexts, decode_ns = decode
    tables = Tables(
        new, cached, context_ns, [], *dense, *dense_decode, *moe, *moe_decode, batches, contexts, decode_ns, mixed_ns
    )
    check_tables(tables, str(folder), "correct the measurements in that table")
    return StepProfile(
        name=meta["name"],
        gpu=meta["gpu"],
        model=meta["model"],
        layout=Layout(meta["tp"], meta["dp"], meta["ep"]),
        kv_bytes_per_token=meta["kv_bytes_per_token"],
        kv_bytes_per_token_rank=meta["kv_bytes_per_token_rank"] or -(-meta["kv_bytes_per_token"] // meta["tp"]),
        kv_capacity_tokens=meta["kv_capacity_tokens"],
        block_tokens=meta["block_tokens"],
        max_model_len=meta["max_model_len"],
        limits=Limits(new[-1], cached[-1], contexts[-1], batches[-1], dense[0][-1], moe[0][-1] if moe[0] else 0),
        tables=tables,
        provenance={
            "package": "user tables",
            "package_version": "-",
            "system": meta["gpu"],
            "backend": meta["source"],
            "backend_version": "-",
            "notes": [f"read from the CSV tables of folder {folder.name}"],
        },
    )


def _read_meta(path: Path) -> dict[str, Any]:
    where = str(path)
    try:
        data = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise InputError(where, "missing", "write the profile's description, see docs/fidelity.md") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(where, f"not valid YAML ({error})", "correct the file") from None
    if not isinstance(data, dict):
        raise InputError(where, "is not a mapping of names to values", "write `name: value` lines")
    unknown = sorted(str(key) for key in set(data) - set(_NUMBERS) - set(_TEXTS))
    if unknown:
        raise InputError(where, f"unknown field {unknown[0]}", f"known: {', '.join((*_TEXTS, *_NUMBERS))}")
    meta: dict[str, Any] = {}
    for key in _TEXTS:
        if not isinstance(data.get(key), str):
            raise InputError(where, f"field {key} is missing or not a text", f"add `{key}: ...`")
        meta[key] = data[key]
    for key, default in _NUMBERS.items():
        value = data.get(key, default)
        least = 0 if default == 0 else 1
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InputError(where, f"field {key} must be a whole number of at least {least}", f"correct `{key}`")
        meta[key] = value
    return meta


def _rows(path: Path, columns: tuple[str, ...], optional: tuple[str, ...] = ()) -> list[tuple[int, dict[str, float]]]:
    """(line number, values) of every row; all values are numbers, all columns known."""
    where = str(path)
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            header = [name.strip() for name in reader.fieldnames or ()]
            reader.fieldnames = header
            raw = [(reader.line_num, row) for row in reader]
    except FileNotFoundError:
        raise InputError(where, "missing", "add the table, see docs/fidelity.md") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(where, f"not a CSV text file ({error})", "save it as UTF-8 CSV") from None
    for name in columns:
        if name not in header:
            raise InputError(f"{where} line 1", f"column {name} is missing", f"columns: {', '.join(columns)}")
    for name in header:
        if name not in columns + optional:
            raise InputError(f"{where} line 1", f"unknown column {name}", f"columns: {', '.join(columns + optional)}")
    if not raw:
        raise InputError(where, "holds no rows", "add measurements")
    out = []
    for line, row in raw:
        values: dict[str, float] = {}
        for name in header:
            text = row.get(name)
            place = f"{where} line {line} column {name}"
            try:
                value = float(text if text is not None else "")
            except (TypeError, ValueError):
                raise InputError(place, f"{text!r} is not a number", "correct the value") from None
            if not math.isfinite(value) or value < 0:
                raise InputError(place, f"{text} is not a finite number of at least 0", "correct the value")
            if name == "time_us":
                if value * 1000 < 1:
                    raise InputError(place, f"{text} us is below one nanosecond", "correct the value")
            elif value != int(value):
                raise InputError(place, f"{text} is not a whole number", "correct the value")
            values[name] = value
        if None in row:
            raise InputError(f"{where} line {line}", "more values than columns", "remove the surplus")
        out.append((line, values))
    return out


def _read_attention(path: Path) -> tuple[_Grid, _Grid, list[list[int]]]:
    """(new, cached, ns) of the prefill rows, (batch, context, ns) of the decode rows, ns of decodes beside a chunk."""
    prefill: dict[tuple[int, int], tuple[int, int]] = {}
    decode: dict[tuple[int, int], tuple[int, int]] = {}
    mixed: dict[tuple[int, int, int, int], tuple[int, int]] = {}
    for line, row in _rows(path, _ATTENTION):
        chunk, batch = int(row["prefill_chunk"]), int(row["n_decode"])
        cached, context = int(row["kv_prefill"]), int(row["kv_decode"])
        place = f"{path} line {line}"
        if not chunk and not batch:
            raise InputError(
                f"{place} column prefill_chunk", "neither a chunk nor decodes", "set prefill_chunk or n_decode"
            )
        if batch and context < 1:
            raise InputError(f"{place} column kv_decode", "a decode has a context of at least 1 token", "correct it")
        value = (line, round(row["time_us"] * 1000))
        before: tuple[int, int] | None
        if chunk and batch:
            before = mixed.get((chunk, cached, batch, context))
            mixed[chunk, cached, batch, context] = value
        else:
            table, key = (prefill, (chunk, cached)) if chunk else (decode, (batch, context))
            before = table.get(key)
            table[key] = value
        if before is not None:
            raise InputError(place, f"repeats the point of line {before[0]}", "keep one of the two")
    new, decodes = _grid(path, prefill, "prefill_chunk", "kv_prefill"), _grid(path, decode, "n_decode", "kv_decode")
    return new, decodes, _beside_a_chunk(path, prefill, decodes, mixed)


def _beside_a_chunk(
    path: Path,
    prefill: Mapping[tuple[int, int], tuple[int, int]],
    decodes: _Grid,
    mixed: Mapping[tuple[int, int, int, int], tuple[int, int]],
) -> list[list[int]]:
    """What decodes add to a chunk's attention, on the decode grid; empty without measurements.

    Attention kernels that take chunks and decodes in one launch do not add up: decodes get the chunk's tiling. The
    addition depends little on the chunk (at 128 decodes a tenth from 16 to 512 tokens, half more at 2,048),
    so its median is taken, held so that it never falls with the context. A batch that no mixed row has
    (it would not fit a step) keeps the ratio of the largest one that has.
    """
    if not mixed:
        return []
    found: dict[tuple[int, int], list[int]] = {}
    for (chunk, cached, batch, context), (line, time_ns) in mixed.items():
        if (chunk, cached) not in prefill:
            what = f"no row of the chunk {chunk} on {cached} alone"
            raise InputError(f"{path} line {line}", what, "add it: decodes beside it are priced by the difference")
        found.setdefault((batch, context), []).append(time_ns - prefill[chunk, cached][1])
    batches, contexts, alone = decodes
    rows: list[list[int]] = []
    for i, batch in enumerate(batches):
        have = [context for context in contexts if (batch, context) in found]
        if have and have != contexts:
            missing = next(context for context in contexts if context not in have)
            raise InputError(f"{path} columns n_decode, kv_decode", f"no mixed row for {batch}, {missing}",
                             "measure the mixed rows at every point of the decode grid")  # fmt: skip
        if not have and not rows:
            raise InputError(f"{path} column n_decode", f"no mixed row for {batch}", "begin with the smallest batch")
        row, floor = [], 1
        for j, context in enumerate(contexts):
            added = statistics.median_low(found[batch, context]) if have else 0
            if not have:
                added = alone[i][j] * rows[-1][j] // alone[i - 1][j]
            floor = max(floor, added)
            row.append(floor)
        rows.append(row)
    return rows


def _grid(path: Path, points: dict[tuple[int, int], tuple[int, int]], outer: str, inner: str) -> _Grid:
    xs, ys = sorted({x for x, _ in points}), sorted({y for _, y in points})
    if len(xs) < 2 or len(ys) < 2:
        raise InputError(
            f"{path} columns {outer}, {inner}",
            f"{len(xs)} x {len(ys)} different values",
            "measure at least 2 x 2",
        )
    for x in xs:
        for y in ys:
            if (x, y) not in points:
                raise InputError(f"{path} columns {outer}, {inner}", f"no row for {x}, {y}", "measure the full grid")
    for x in xs:
        for a, b in pairwise(ys):
            if outer == "n_decode" and points[x, b][1] < points[x, a][1]:
                raise InputError(
                    f"{path} line {points[x, b][0]} column time_us",
                    f"{x} decodes of {b} tokens take less than of {a} tokens (line {points[x, a][0]})",
                    "measure again: decode attention must not fall with the context",
                )
    return xs, ys, [[points[x, y][1] for y in ys] for x in xs]


_Curve = tuple[list[int], list[int]]


def _read_curves(path: Path) -> tuple[_Curve, _Curve]:
    """(tokens, ns) for steps with prefill and for pure decode steps."""
    curves: dict[int, dict[int, tuple[int, int]]] = {0: {}, 1: {}}
    rows = _rows(path, _CURVE, ("decode_only",))
    for line, row in rows:
        tokens, place = int(row["tokens"]), f"{path} line {line}"
        flag = row.get("decode_only")
        if tokens < 1:
            raise InputError(f"{place} column tokens", "must be at least 1", "correct the value")
        if flag not in (None, 0, 1):
            raise InputError(f"{place} column decode_only", f"{flag:g} is neither 0 nor 1", "correct the value")
        for which in (0, 1) if flag is None else (int(flag),):
            if tokens in curves[which]:
                raise InputError(place, f"repeats the point of line {curves[which][tokens][0]}", "keep one of the two")
            curves[which][tokens] = (line, round(row["time_us"] * 1000))
    for which in (0, 1):
        if not curves[which]:
            raise InputError(f"{path} column decode_only", f"no row with {which}", "measure both kinds of steps")
    first, second = ([(n, points[n][1]) for n in sorted(points)] for points in (curves[0], curves[1]))
    return ([n for n, _ in first], [t for _, t in first]), ([n for n, _ in second], [t for _, t in second])
