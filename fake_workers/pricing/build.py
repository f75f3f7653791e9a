"""Tabulate a profile from the kernel database: grids, classes, monotonicity gate, provenance, error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fake_workers.errors import InputError
from fake_workers.pricing.accuracy import measure_accuracy
from fake_workers.pricing.grid import geometric, monotone, thin, token_samples
from fake_workers.pricing.known import KNOWN, KnownProfile, known_profile, nearest, why_unavailable
from fake_workers.pricing.profile import StepProfile, Tables, check_tables, save_profile
from fake_workers.pricing.source import NODE_GPUS, PACKAGE, KernelSource

MAX_STEP_TOKENS = 33_792
MAX_CHUNK_TOKENS = 32_768
MAX_CONTEXT_TOKENS = 1 << 20
MAX_BATCH = 1024
# A chunk's share of a full step is taken from a step of up to 8 such chunks, as many as one token budget
# holds.
WORK_CHUNKS = 8
WORK_TOKENS = 8192
# Log-log interpolation gives every sampled point of a curve back within this.
CURVE_TOLERANCE = 0.001
# A decode time this much (relative) above that of a larger batch or a longer context is not noise.
SPIKE = 0.1
# Rows that lie on average more than this away from any never-falling row are polluted: refuse them.
MAX_MEAN_FALL = 0.05


_INTER_NODE_NOTE = (
    "The group spans nodes: dispatch and combine are the database's formula for an all-gather and reduce-scatter at "
    "the network's rate, not measurements. Expert-parallel libraries that send a token only to its experts are faster."
)
_EXCHANGE_NOTE = (
    "The group spans nodes: dispatch and combine are {}, priced by the tokens of the fullest rank; a row of another "
    "hidden size holds for the tokens that make the same bytes."
)


class _Gate:
    """Measures by how much a table falls where it should rise, and refuses it where that is not noise."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._changes: dict[str, list[float]] = {}

    def keep(self, table: str, values_ms: Sequence[float]) -> list[int]:
        """The values in ns as measured: small dips over tokens are real (tile sizes, choice of kernels)."""
        self._compare(table, values_ms, monotone(values_ms))
        return _ns(values_ms)

    def cap(self, table: str, values_ms: Sequence[float], rising: bool = False) -> list[int]:
        """The values in ns, those far above a later one lowered to it; with `rising` also never falling.

        For decode steps: a smaller batch can be padded to a larger one (CUDA graphs are) and a shorter
        context costs no more than a longer one, so a value far above a later one is a disturbed measurement.
        """
        fixed = list(values_ms)
        lowest = fixed[-1]
        for i in range(len(fixed) - 2, -1, -1):
            lowest = min(lowest, fixed[i])
            if fixed[i] > lowest * (1 + SPIKE):
                fixed[i] = lowest
        if rising:
            fixed = monotone(fixed)
        self._compare(table, values_ms, fixed)
        return _ns(fixed)

    def _compare(self, table: str, values: Sequence[float], fixed: Sequence[float]) -> None:
        changes = self._changes.setdefault(table, [])
        changes += [abs(f / v - 1) for f, v in zip(fixed, values, strict=True)]

    def result(self) -> dict[str, dict[str, float]]:
        """Mean and largest relative distance from a never-falling table; raises where the mean is large."""
        out: dict[str, dict[str, float]] = {}
        for table, changes in self._changes.items():
            mean = sum(changes) / len(changes)
            out[table] = {"mean": round(mean, 5), "max": round(max(changes), 5)}
            if mean > MAX_MEAN_FALL:
                raise InputError(
                    self.name,
                    f"rows of {table} fall where they must rise (by {mean:.1%} on average)",
                    "the measurements are disturbed: use another backend's rows",
                )
        return out


def _ns(values_ms: Sequence[float]) -> list[int]:
    return [max(1, round(v * 1e6)) for v in values_ms]


def build_profile(known: KnownProfile, log: Callable[[str], None] = lambda _: None) -> StepProfile:
    """Tabulate one known profile and measure its interpolation error against the database."""
    source = KernelSource(known)
    gate = _Gate(known.name)
    tables = _tabulate(source, gate)
    falls = gate.result()
    check_tables(tables, known.name)
    memory = source.memory()
    if known.stated is not None:
        memory |= {"tokens": known.stated.tokens, "stated_by": known.stated.source}
    model = known.source
    spans = ""
    if source.exchange is not None:
        spans = _EXCHANGE_NOTE.format(source.exchange.origin)
    elif known.layout.gpus > NODE_GPUS:
        spans = _INTER_NODE_NOTE
    provenance: dict[str, Any] = {
        "package": PACKAGE,
        "package_version": source.package_version,
        "licence": "Apache-2.0",
        "system": known.system,
        "backend": model.backend,
        "backend_version": source.backend_version,
        "source_model": model.source_model,
        "kv_dtype": model.kv_dtype or "as the model",
        "built": datetime.now(UTC).date().isoformat(),
        "origins": {op: dict(sorted(c.items())) for op, c in sorted(source.origins.items())},
        "distance_from_monotone": falls,
        "memory": memory,
        "notes": [note for note in (model.note, spans) if note],
    }
    profile = StepProfile(
        name=known.name,
        gpu=known.gpu,
        model=model.model,
        layout=known.layout,
        kv_bytes_per_token=model.kv.bytes_per_token(),
        kv_bytes_per_token_rank=model.kv.bytes_per_token_rank(known.layout.tp),
        kv_capacity_tokens=memory["tokens"],
        block_tokens=model.block_tokens,
        max_model_len=model.max_model_len,
        limits=source.limits(),
        tables=tables,
        provenance=provenance,
    )
    accuracy = measure_accuracy(profile, source)
    log(f"{known.name}: {accuracy}")
    return replace(profile, provenance=provenance | {"interpolation_error": accuracy})


def _tabulate(source: KernelSource, gate: _Gate) -> Tables:
    dp = source.known.layout.dp
    samples = token_samples(MAX_STEP_TOKENS)
    prefill = [source.prefill(n) for n in samples]
    decode_samples = [n for n in samples if n <= MAX_BATCH]
    decode = [source.decode(n, 1024) for n in decode_samples]

    def curve(fix: Callable[[str, Sequence[float]], list[int]], table: str, xs: Sequence[int],
              values_ms: Sequence[float]) -> tuple[list[int], list[int]]:  # fmt: skip
        return thin(xs, fix(table, values_ms), CURVE_TOLERANCE)

    dense = curve(gate.keep, "dense", samples, [p.dense for p in prefill])
    dense_decode = curve(gate.cap, "dense_decode", decode_samples, [d.dense for d in decode])
    moe: tuple[list[int], list[int]] = ([], [])
    moe_decode: tuple[list[int], list[int]] = ([], [])
    if any(p.moe for p in prefill):
        # The database takes tokens per rank and multiplies; a profile counts the tokens of the whole group.
        moe = curve(gate.keep, "moe", [n * dp for n in samples], [p.moe for p in prefill])
        moe_decode = curve(gate.cap, "moe_decode", [n * dp for n in decode_samples], [d.moe for d in decode])
    new = [n for n in geometric(1, MAX_CHUNK_TOKENS, 2) if n not in (3, 6, 11)]
    cached = [0, *geometric(64, MAX_CONTEXT_TOKENS, 3)]
    context, work = [], []
    for n in new:
        chunks = max(1, min(WORK_CHUNKS, WORK_TOKENS // n))
        alone = [source.context_attention(n, c) for c in cached]
        full = [source.context_attention(n, c, chunks) / chunks for c in cached]
        context.append(gate.keep("context_attention", alone))
        work.append(_ns([min(a, w) for a, w in zip(alone, full, strict=True)]))
    batches = sorted({1, 2, 3, 4, 5, 6, 8, *geometric(8, MAX_BATCH, 2)})
    contexts = geometric(1, MAX_CONTEXT_TOKENS, 4)
    rows = [gate.cap("decode_attention", [source.decode(b, c).attention for c in contexts], True) for b in batches]
    exchange = _exchange(source, gate)
    return Tables(
        new, cached, context, work, *dense, *dense_decode, *moe, *moe_decode, batches, contexts, rows, [], *exchange
    )


def _exchange(source: KernelSource, gate: _Gate) -> tuple[list[int], list[int], list[int], list[int]]:
    found = source.exchange
    if found is None:
        return [], [], [], []
    prefill = gate.keep("exchange", found.prefill_ms)
    return found.tokens, prefill, found.decode_tokens, gate.cap("exchange_decode", found.decode_ms)


def build_known(names: Sequence[str], folder: Path, log: Callable[[str], None] = print) -> list[Path]:
    """Build the named known profiles (all of them for no names) into a folder; returns the files written."""
    chosen: list[KnownProfile] = []
    for name in names or [k.name for k in KNOWN]:
        known = known_profile(name)
        if known is None:
            reason = why_unavailable(name)
            raise InputError(
                name,
                f"not available: {reason}" if reason else "not a profile that can be built",
                "measure it (CSV tables, docs/fidelity.md)" if reason else nearest(name, [k.name for k in KNOWN]),
            )
        chosen.append(known)
    paths = []
    for known in chosen:
        path = folder / f"{known.name}.npz"
        save_profile(build_profile(known, log), path)
        paths.append(path)
    return paths
