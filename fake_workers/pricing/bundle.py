"""LLMServingSim's profile bundles into a folder of CSV tables that `csv.py` reads.

A bundle (its docs: profiler, output bundle) times single layers of one model on one GPU: `attention.csv` per layer,
`dense.csv` per layer name over tokens, `per_sequence.csv` over sequences. Here times are those of the whole model:
blocks counted, collectives of tensor parallelism added from a measured table (a bundle has none).

What is changed on the way, and nothing else:
- a prefill chunk's row that misses some prefixes of the others is filled linearly along its own prefixes;
- decode attention that falls with the context by up to 5 % (noise) is raised to what a shorter context takes; beyond
  that the bundle is refused;
- of rows with a chunk and decodes at once those on no cached prefix are kept (large batches of decodes add the
  same to others within a tenth, small ones up to a launch more);
- steps with prefill take the head (`lm_head`, `sampler`) of one sequence: how many sequences a step holds is no axis of
  a table over tokens. 128 sequences instead take 3 % of the head longer, 0.06 ms a step (Llama-8B, RTX PRO 6000).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import yaml

from fake_workers.errors import InputError
from fake_workers.pricing.collectives import Collectives

ONCE = ("embedding", "final_layernorm")
PER_BLOCK = ("qkv_proj", "qk_norm", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj")
TWICE_PER_BLOCK = ("layernorm",)
HEAD = ("lm_head", "sampler")
_NOISE = 0.05
_ALL_REDUCES_PER_BLOCK = 2
_KV_BYTES = 2
_ACTIVATION_BYTES = 2


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a Hugging Face config.json is needed."""

    blocks: int
    hidden: int
    kv_heads: int
    head_dim: int
    max_model_len: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers in 16 bits."""
        return 2 * self.blocks * self.kv_heads * self.head_dim * _KV_BYTES


def read_shape(path: Path) -> ModelShape:
    """Read a dense model's config.json; experts are refused (their bundle has an axis that no table here has)."""
    where = str(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(where, "no such file", "give the model's config.json") from None
    except (OSError, ValueError) as error:
        raise InputError(where, f"not a readable JSON file ({error})", "give the model's config.json") from None
    if not isinstance(data, dict):
        raise InputError(where, "is not a JSON object", "give the model's config.json")
    if data.get("num_experts") or data.get("num_local_experts"):
        what = "a model with experts: a bundle prices them by activated experts, tables here by tokens"
        raise InputError(where, what, "write moe.csv yourself, see docs/fidelity.md")

    def number(key: str) -> int:
        value = data.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(where, f"field {key} must be a whole number of at least 1", "correct it")
        return value

    hidden = number("hidden_size")
    dim = number("head_dim") if data.get("head_dim") is not None else hidden // number("num_attention_heads")
    return ModelShape(
        number("num_hidden_layers"), hidden, number("num_key_value_heads"), dim, number("max_position_embeddings")
    )


def import_bundle(
    folder: Path,
    shape: ModelShape,
    out: Path,
    *,
    name: str,
    kv_capacity_tokens: int = 0,
    max_model_len: int | None = None,
    collectives: Collectives | None = None,
) -> None:
    """Write the tables of a bundle's `tp<N>` folder to `out`; InputError names file and line of what is wrong."""
    tp = _tensor_parallel(folder)
    if tp > 1 and collectives is None:
        raise InputError(str(folder), "tensor parallel, and a bundle holds no collectives", "give --collectives")
    meta = _read_meta(folder.parent / "meta.yaml")
    attention = _attention(folder / "attention.csv", shape.blocks)
    dense = _dense(folder, shape, tp, collectives)
    out.mkdir(parents=True, exist_ok=True)
    _write(out / "attention.csv", ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"), attention)
    _write(out / "dense.csv", ("tokens", "time_us", "decode_only"), dense)
    source = f"LLMServingSim profile bundle: {meta['gpu']}, vLLM {meta['vllm_version']}, {meta['profiled_at']}"
    if collectives is not None and tp > 1:
        source += f"; all-reduce: measured table of {collectives.gpu}"
    document = {
        "name": name,
        "gpu": meta["gpu"],
        "model": meta["model"],
        "source": source,
        "tp": tp,
        "kv_bytes_per_token": shape.kv_bytes_per_token,
        "kv_capacity_tokens": kv_capacity_tokens,
        "max_model_len": max_model_len or shape.max_model_len,
    }
    (out / "profile.yaml").write_text(yaml.safe_dump(document, sort_keys=False, width=1000), encoding="utf-8")


def _tensor_parallel(folder: Path) -> int:
    digits = folder.name.removeprefix("tp")
    if not folder.name.startswith("tp") or not digits.isdigit() or int(digits) < 1:
        raise InputError(str(folder), "is no tp<N> folder of a bundle", "name the folder that holds attention.csv")
    return int(digits)


def _read_meta(path: Path) -> Mapping[str, str]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(str(path), "missing", "it stands beside the tp<N> folder of a bundle") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(str(path), f"not valid YAML ({error})", "correct the file") from None
    for key in ("gpu", "model", "vllm_version", "profiled_at"):
        if not isinstance(data, dict) or data.get(key) is None:
            raise InputError(str(path), f"field {key} is missing", f"add `{key}: ...`")
    return {key: str(data[key]) for key in ("gpu", "model", "vllm_version", "profiled_at")}


def _rows(path: Path, names: tuple[str, ...]) -> Iterable[tuple[int, dict[str, str]]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if tuple(reader.fieldnames or ()) != names:
                raise InputError(f"{path} line 1", "is no table of a bundle", f"columns: {','.join(names)}")
            rows = [(reader.line_num, row) for row in reader]
    except FileNotFoundError:
        raise InputError(str(path), "missing", "a bundle's tp<N> folder holds it") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(str(path), f"not a CSV text file ({error})", "save it as UTF-8 CSV") from None
    if not rows:
        raise InputError(str(path), "holds no rows", "profile again")
    return rows


def _number(path: Path, line: int, row: Mapping[str, str], name: str) -> float:
    try:
        value = float(row[name])
    except (TypeError, ValueError):
        raise InputError(f"{path} line {line} column {name}", f"{row[name]!r} is not a number", "correct it") from None
    if not 0 <= value < 1e12:
        raise InputError(f"{path} line {line} column {name}", f"{value:g} is out of range", "correct it")
    return value


_Point = tuple[int, int, int, int]


def _attention(path: Path, blocks: int) -> list[tuple[float, ...]]:
    columns = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    points: dict[_Point, float] = {}
    for line, row in _rows(path, (*columns, "time_us")):
        c, k, n, d = (int(_number(path, line, row, name)) for name in columns)
        points[c, k, n, d] = _number(path, line, row, "time_us")
    chunks, cached = _axes((c, k) for c, k, n, _ in points if n == 0)
    batches, contexts = _axes((n, d) for c, _, n, d in points if c == 0)
    out: list[tuple[float, ...]] = []
    for chunk in chunks:
        known = {k: t for (c, k, n, _), t in points.items() if c == chunk and n == 0}
        out += [(chunk, k, 0, 0, blocks * _between(path, chunk, known, k)) for k in cached]
    for batch in batches:
        floor = 0.0
        for context in contexts:
            time = points.get((0, 0, batch, context))
            if time is None:
                raise InputError(str(path), f"no row of {batch} decodes of {context} tokens", "profile the full grid")
            if time < floor * (1 - _NOISE):
                what = f"{batch} decodes of {context} tokens take {1 - time / floor:.0%} less than of fewer"
                raise InputError(str(path), what, "profile again: decode attention must not fall with the context")
            floor = max(floor, time)
            out.append((0, 0, batch, context, blocks * floor))
    mixed = sorted(p for p in points if p[0] and p[2] and p[1] == 0 and p[3] in contexts and (p[0], 0, 0, 0) in points)
    return out + [(*point, blocks * points[point]) for point in mixed]


def _axes(points: Iterable[tuple[int, int]]) -> tuple[list[int], list[int]]:
    found = list(points)
    return sorted({x for x, _ in found}), sorted({y for _, y in found})


def _between(path: Path, chunk: int, known: Mapping[int, float], cached: int) -> float:
    if cached in known:
        return known[cached]
    axis = sorted(known)
    for low, high in pairwise(axis):
        if low < cached < high:
            return known[low] + (known[high] - known[low]) * (cached - low) / (high - low)
    raise InputError(
        str(path),
        f"a chunk of {chunk} tokens has no prefix to both sides of {cached}",
        "profile the corners of the grid",
    )


def _dense(folder: Path, shape: ModelShape, tp: int, collectives: Collectives | None) -> list[tuple[float, ...]]:
    path, head_path = folder / "dense.csv", folder / "per_sequence.csv"
    layers = _curves(path, "tokens", (*ONCE, *PER_BLOCK, *TWICE_PER_BLOCK), optional=("qk_norm",))
    head = _curves(head_path, "sequences", HEAD)
    tokens = sorted(next(iter(layers.values())))
    for layer, curve in layers.items():
        if sorted(curve) != tokens:
            raise InputError(str(path), f"layer {layer} has other token counts than the first", "profile again")
    sequences = sorted(set.intersection(*(set(curve) for curve in head.values())))

    def total(count: int) -> float:
        time = sum(curve[count] for layer, curve in layers.items() if layer in ONCE)
        per_block = sum(curve[count] for layer, curve in layers.items() if layer in PER_BLOCK)
        per_block += sum(2 * curve[count] for layer, curve in layers.items() if layer in TWICE_PER_BLOCK)
        if tp > 1 and collectives is not None:
            nbytes = count * shape.hidden * _ACTIVATION_BYTES
            per_block += _ALL_REDUCES_PER_BLOCK * collectives.time_ns("all_reduce", tp, nbytes) / 1e3
        return time + shape.blocks * per_block

    one = sum(curve[sequences[0]] for curve in head.values())
    rows: list[tuple[float, ...]] = [(count, total(count) + one, 0) for count in tokens]
    both = [count for count in tokens if count in sequences]
    if not both:
        raise InputError(str(head_path), "shares no count with dense.csv", "profile both at the same counts")
    return rows + [(count, total(count) + sum(curve[count] for curve in head.values()), 1) for count in both]


def _curves(
    path: Path, axis: str, layers: tuple[str, ...], optional: tuple[str, ...] = ()
) -> dict[str, dict[int, float]]:
    curves: dict[str, dict[int, float]] = {}
    for line, row in _rows(path, ("layer", axis, "time_us")):
        if row["layer"] not in layers:
            what = f"unknown layer {row['layer']}: how often a step runs it is not known"
            raise InputError(f"{path} line {line} column layer", what, f"known: {', '.join(layers)}")
        count = int(_number(path, line, row, axis))
        curves.setdefault(row["layer"], {})[count] = _number(path, line, row, "time_us")
    for layer in layers:
        if layer not in curves and layer not in optional:
            raise InputError(str(path), f"layer {layer} is missing", "profile again")
    return curves


def _write(path: Path, columns: tuple[str, ...], rows: Iterable[tuple[float, ...]]) -> None:
    where = columns.index("time_us")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for row in rows:
            writer.writerow([f"{value:.1f}" if i == where else int(value) for i, value in enumerate(row)])
