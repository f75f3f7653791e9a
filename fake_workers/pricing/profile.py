"""Step times of one model on one GPU type in one layout, read from a profile file.

A profile file is an .npz of integer tables (nanoseconds) plus a JSON record of what it is and where it comes
from. Arrays are read once and kept as plain lists; nothing on the hot path touches an array library.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fake_workers.errors import InputError
from fake_workers.pricing.calibration import RAW, Calibration
from fake_workers.pricing.decode_row import DecodeRow
from fake_workers.pricing.interpolate import ContextSurface, LogCurve, beyond, cell

FORMAT = 1
# Chunks of agentic traffic rarely repeat exactly: the memo serves repeats nearby and must not grow with the
# run.
_MEMO_ENTRIES = 1 << 15


@dataclass(frozen=True, slots=True)
class Layout:
    """How a group of GPUs is divided: an endpoint is one rank of `tp` GPUs; `dp` ranks step together."""

    tp: int
    dp: int = 1
    ep: int = 1

    @property
    def gpus(self) -> int:
        """GPUs of the whole lock-step group."""
        return self.tp * self.dp


@dataclass(frozen=True, slots=True)
class Tables:
    """Integer tables, all prices in ns per step (all layers).

    context_ns[i][j]  attention of one chunk of context_new[i] tokens on context_cached[j] cached ones, alone
                      in its step
    context_work_ns   the same chunk's share in a step that is full of such chunks: never more, less where a
                      lone chunk is bound by kernel launches. Empty: same as context_ns
    dense_ns          everything that is neither attention nor MoE, over tokens of one rank; tensor-parallel
                      collectives included. `dense` for steps with prefill tokens, `dense_decode` for pure
                      decode steps
    moe_ns            routed experts over the tokens of ALL ranks of the group, with dispatch and combine unless
                      exchange_ns holds those; empty for models without experts
    decode_ns[i][j]   decode attention of decode_batch[i] requests of decode_context[j] tokens each
    decode_mixed_ns   the same decodes in a step that also holds a prefill chunk: what they add to the chunk's own
                      attention. Empty: not measured, same as decode_ns
    exchange_ns       dispatch to and combine from the experts' GPUs, over the tokens of the FULLEST rank (what one
                      rank has to send bounds it, however little the others send); `exchange_decode` for pure decode
                      steps. Empty: in moe_ns
    """

    context_new: list[int]
    context_cached: list[int]
    context_ns: list[list[int]]
    context_work_ns: list[list[int]]
    dense_tokens: list[int]
    dense_ns: list[int]
    dense_decode_tokens: list[int]
    dense_decode_ns: list[int]
    moe_tokens: list[int]
    moe_ns: list[int]
    moe_decode_tokens: list[int]
    moe_decode_ns: list[int]
    decode_batch: list[int]
    decode_context: list[int]
    decode_ns: list[list[int]]
    decode_mixed_ns: list[list[int]] = field(default_factory=list)
    exchange_tokens: list[int] = field(default_factory=list)
    exchange_ns: list[int] = field(default_factory=list)
    exchange_decode_tokens: list[int] = field(default_factory=list)
    exchange_decode_ns: list[int] = field(default_factory=list)


_OPTIONAL = ("decode_mixed_ns", "exchange_tokens", "exchange_ns", "exchange_decode_tokens", "exchange_decode_ns")
"""Tables that a file leaves out where they are empty."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How far the source tables were measured; beyond it prices are extrapolations and are flagged."""

    new_tokens: int
    cached_tokens: int
    decode_context_tokens: int
    decode_batch: int
    step_tokens: int
    moe_tokens: int


@dataclass(eq=False)
class StepProfile:
    """Prices of the parts of a step. All methods return whole nanoseconds with the calibration applied.

    kv_bytes_per_token        bytes of one token's KV in the whole model, each counted once
    kv_bytes_per_token_rank   bytes that one GPU of an endpoint holds of it (heads split, latent replicated)
    kv_capacity_tokens        tokens that fit the KV memory of one endpoint; 0: does not fit or not known
    out_of_grid               what was asked beyond `limits`, with the largest argument; read after a run
    """

    name: str
    gpu: str
    model: str
    layout: Layout
    kv_bytes_per_token: int
    kv_bytes_per_token_rank: int
    kv_capacity_tokens: int
    block_tokens: int
    max_model_len: int
    limits: Limits
    tables: Tables = field(repr=False)
    provenance: dict[str, Any] = field(repr=False)
    calibration: Calibration = RAW
    out_of_grid: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        t = self.tables
        self._context = ContextSurface(t.context_new, t.context_cached, t.context_ns)
        self._work = ContextSurface(t.context_new, t.context_cached, t.context_work_ns) if t.context_work_ns else None
        self._dense = LogCurve(t.dense_tokens, t.dense_ns)
        self._dense_decode = LogCurve(t.dense_decode_tokens, t.dense_decode_ns)
        self._moe = LogCurve(t.moe_tokens, t.moe_ns) if t.moe_tokens else None
        self._moe_decode = LogCurve(t.moe_decode_tokens, t.moe_decode_ns) if t.moe_decode_tokens else None
        self._exchange = LogCurve(t.exchange_tokens, t.exchange_ns) if t.exchange_tokens else None
        self._exchange_decode = (
            LogCurve(t.exchange_decode_tokens, t.exchange_decode_ns) if t.exchange_decode_tokens else None
        )
        self._log_batch = [math.log(b) for b in t.decode_batch]
        self._log_decode = [[math.log(v) for v in row] for row in t.decode_ns]
        self._log_mixed = [[math.log(v) for v in row] for row in t.decode_mixed_ns]
        limit = self.limits.decode_context_tokens
        self._measured_cells = sum(1 for c in t.decode_context[1:] if c <= limit)
        self._context_memo: dict[tuple[int, int], int] = {}
        self._work_memo: dict[tuple[int, int], int] = {}
        self._dense_memo: dict[tuple[int, bool], int] = {}
        self._moe_memo: dict[tuple[int, bool], int] = {}
        self._exchange_memo: dict[tuple[int, bool], int] = {}
        self._rows: dict[int, DecodeRow] = {}
        self._mixed_rows: dict[int, DecodeRow] = {}

    def calibrated(self, calibration: Calibration) -> StepProfile:
        """The same tables under another calibration (none of the memos are shared)."""
        copied = {f: getattr(self, f) for f in self.__dataclass_fields__ if f not in ("calibration", "out_of_grid")}
        return StepProfile(**copied, calibration=calibration)

    def with_kv_bytes(self, per_token: int) -> StepProfile:
        """The same tables with another size of a token's KV; how many tokens a GPU holds stays as it is."""
        copied = {f: getattr(self, f) for f in self.__dataclass_fields__ if f != "out_of_grid"}
        rank = -(-self.kv_bytes_per_token_rank * per_token // self.kv_bytes_per_token)
        return StepProfile(**(copied | {"kv_bytes_per_token": per_token, "kv_bytes_per_token_rank": rank}))

    def _note(self, what: str, value: int, limit: int) -> None:
        if value > limit and value > self.out_of_grid.get(what, 0):
            self.out_of_grid[what] = value

    def context_attention_ns(self, new_tokens: int, cached_tokens: int) -> int:
        """Attention of one request's chunk of new_tokens on cached_tokens already in the KV cache."""
        key = (new_tokens, cached_tokens)
        price = self._context_memo.get(key)
        if price is None:
            self._note("prefill chunk tokens", new_tokens, self.limits.new_tokens)
            self._note("cached prefix tokens", cached_tokens, self.limits.cached_tokens)
            price = self.calibration.prefill(self._context.at(new_tokens, cached_tokens))
            if len(self._context_memo) >= _MEMO_ENTRIES:
                self._context_memo.clear()
            self._context_memo[key] = price
        return price

    def context_attention_sum_ns(self, prefills: Sequence[tuple[int, int]]) -> int:
        """Attention of all prefill chunks (new, cached) of one step of one rank.

        Kernels of a step run over all chunks at once. A small chunk alone is bound by launches, which several
        chunks share; large ones are bound by work, which adds up. So: the larger of the dearest lone chunk
        and the sum of the chunks' work. For a single chunk that is its own price.
        """
        if len(prefills) == 1 or self._work is None:
            return sum(self.context_attention_ns(new, cached) for new, cached in prefills)
        alone = work = 0
        for chunk in prefills:
            price = self.context_attention_ns(*chunk)
            if price > alone:
                alone = price
            share = self._work_memo.get(chunk)
            if share is None:
                if len(self._work_memo) >= _MEMO_ENTRIES:
                    self._work_memo.clear()
                share = self._work_memo[chunk] = min(price, self.calibration.prefill(self._work.at(*chunk)))
            work += share
        return work if work > alone else alone

    def dense_ns(self, tokens: int, decode_only: bool) -> int:
        """The part of one rank that is neither attention nor MoE, for `tokens` tokens on that rank."""
        key = (tokens, decode_only)
        price = self._dense_memo.get(key)
        if price is None:
            if not decode_only:
                self._note("tokens of one rank's step", tokens, self.limits.step_tokens)
            price = self._curve(tokens, decode_only, self._dense_decode if decode_only else self._dense)
            self._dense_memo[key] = price
        return price

    def moe_ns(self, tokens: int, decode_only: bool) -> int:
        """The routed experts of the whole group for `tokens` tokens over all its ranks; 0 without experts.

        decode_only: no rank holds prefill tokens. Below one token per rank the price of one per rank holds:
        idle ranks join the collective step with a dummy token.
        """
        key = (tokens, decode_only)
        price = self._moe_memo.get(key)
        if price is None:
            curve = self._moe_decode if decode_only else self._moe
            if curve is not None:
                self._note("tokens of one MoE step", tokens, self.limits.moe_tokens)
            price = self._curve(tokens, decode_only, curve) if curve is not None else 0
            self._moe_memo[key] = price
        return price

    def exchange_ns(self, tokens: int, decode_only: bool) -> int:
        """Dispatch and combine where the fullest rank holds `tokens` tokens; 0 where moe_ns holds them."""
        curve = self._exchange_decode if decode_only else self._exchange
        if curve is None:
            return 0
        key = (tokens, decode_only)
        price = self._exchange_memo.get(key)
        if price is None:
            measured = self.tables.exchange_decode_tokens if decode_only else self.tables.exchange_tokens
            self._note("tokens of one rank's dispatch", tokens, measured[-1])
            price = self._exchange_memo[key] = self._curve(tokens, decode_only, curve)
        return price

    def _curve(self, tokens: int, decode_only: bool, curve: LogCurve) -> int:
        price = curve.at(tokens)
        return self.calibration.decode(price) if decode_only else self.calibration.prefill(price)

    def decode_row(self, batch: int) -> DecodeRow:
        """Decode attention of `batch` requests over the sum of their contexts; made once per batch size.

        Between tabulated batch sizes rows are interpolated log-log at equal context per request; beyond the
        last they grow at most in proportion to the batch, below the first they stay.
        """
        row = self._rows.get(batch)
        if row is None:
            row = self._rows[batch] = self._make_row(batch, self._log_decode)
        return row

    def mixed_decode_row(self, batch: int) -> DecodeRow:
        """The same in a step that also holds prefill chunks: what the decodes add to the chunks' attention."""
        if not self._log_mixed:
            return self.decode_row(batch)
        row = self._mixed_rows.get(batch)
        if row is None:
            row = self._mixed_rows[batch] = self._make_row(batch, self._log_mixed)
        return row

    def _make_row(self, batch: int, table: list[list[float]]) -> DecodeRow:
        self._note("decode batch", batch, self.limits.decode_batch)
        log_batch = math.log(batch)
        i, f = cell(self._log_batch, log_batch)
        low, high = table[i], table[i + 1]
        prices: list[int] = []
        floor = 0
        for a, b in zip(low, high, strict=True):
            z = a + f * (b - a) + beyond(self._log_batch, log_batch, a, b, 1.0)
            floor = max(floor, self.calibration.decode(round(math.exp(z))))
            prices.append(floor)
        contexts = [batch * c for c in self.tables.decode_context]
        return DecodeRow(batch, contexts, prices, self._measured_cells, self._note_context)

    def _note_context(self, batch: int, context_tokens: int) -> None:
        # Called for a cell that may begin below the limit: the note compares the mean context itself.
        self._note("decode context tokens", -(-context_tokens // batch), self.limits.decode_context_tokens)

    @property
    def capacity_stated_by(self) -> str:
        """Who states the KV capacity, where it isn't computed from GPU memory and weights; else empty."""
        return str(self.provenance.get("memory", {}).get("stated_by", ""))

    def describe(self) -> dict[str, Any]:
        """What the profile is, as plain data (for listings and for a run's record)."""
        return {
            "name": self.name,
            "gpu": self.gpu,
            "model": self.model,
            "tp": self.layout.tp,
            "dp": self.layout.dp,
            "ep": self.layout.ep,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "kv_bytes_per_token_rank": self.kv_bytes_per_token_rank,
            "kv_capacity_tokens": self.kv_capacity_tokens,
            "block_tokens": self.block_tokens,
            "max_model_len": self.max_model_len,
            "limits": asdict(self.limits),
            "calibration": self.calibration.as_dict(),
            "provenance": self.provenance,
        }


_META = ("name", "gpu", "model", "kv_bytes_per_token", "kv_bytes_per_token_rank", "kv_capacity_tokens",
         "block_tokens", "max_model_len", "provenance")  # fmt: skip


def save_profile(profile: StepProfile, path: Path) -> None:
    """Write the tables and the record into one compressed .npz (equal contents give equal bytes)."""
    meta = {key: getattr(profile, key) for key in _META}
    meta |= {"format": FORMAT, "layout": asdict(profile.layout), "limits": asdict(profile.limits)}
    arrays: dict[str, Any] = {key: np.asarray(value, dtype=np.int64) for key, value in asdict(profile.tables).items()}
    for name in _OPTIONAL:
        if not getattr(profile.tables, name):
            del arrays[name]
    text = json.dumps(meta, indent=1, sort_keys=True, ensure_ascii=False)
    arrays["meta"] = np.frombuffer(text.encode(), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as out:
        np.savez_compressed(out, **arrays)


def read_profile(path: Path) -> StepProfile:
    """Load and check a profile file."""
    where = str(path)
    remedy = "build it again with `harness profile build`"
    try:
        with np.load(path, allow_pickle=False) as data:
            arrays = {key: data[key].tolist() for key in data.files}
    except FileNotFoundError:
        raise InputError(where, "no such profile file", "check the path") from None
    except (OSError, ValueError, EOFError, KeyError) as error:
        raise InputError(where, f"not a profile file ({error})", remedy) from None
    except Exception as error:  # zipfile.BadZipFile and zlib.error have no common base with the above
        raise InputError(where, f"not a readable profile file ({error})", remedy) from None
    try:
        meta = json.loads(bytes(arrays.pop("meta")))
        if meta["format"] != FORMAT:
            raise InputError(where, f"profile format {meta['format']}, this version reads {FORMAT}", remedy)
        tables = Tables(**arrays)
        check_tables(tables, where)
        return StepProfile(
            layout=Layout(**meta["layout"]),
            limits=Limits(**meta["limits"]),
            tables=tables,
            **{key: meta[key] for key in _META},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(where, f"profile file is incomplete or damaged ({error!r})", remedy) from None


def check_tables(tables: Tables, where: str, remedy: str = "build the profile again") -> None:
    """Refuse tables that cannot be priced: wrong shapes, axes out of order, prices below 1 ns."""

    def fail(what: str) -> None:
        raise InputError(where, what, remedy)

    def axis(name: str, xs: Sequence[int], start: int, least: int) -> None:
        if len(xs) < least:
            fail(f"{name} needs at least {least} grid points, has {len(xs)}")
        if xs and xs[0] < start:
            fail(f"{name} begins at {xs[0]}, must not be below {start}")
        if any(b <= a for a, b in pairwise(xs)):
            fail(f"{name} does not increase strictly")

    def prices(name: str, ys: Sequence[int], n: int, check: Callable[[int, int], bool] | None = None) -> None:
        if len(ys) != n:
            fail(f"{name} has {len(ys)} prices for {n} grid points")
        if any(y < 1 for y in ys):
            fail(f"{name} holds a price below 1 ns")
        if check is not None and any(check(a, b) for a, b in pairwise(ys)):
            fail(f"{name} falls where it must not")

    axis("context_new", tables.context_new, 1, 2)
    axis("context_cached", tables.context_cached, 0, 2)
    axis("decode_batch", tables.decode_batch, 1, 2)
    axis("decode_context", tables.decode_context, 1, 2)
    for name in ("dense", "dense_decode", "moe", "moe_decode", "exchange", "exchange_decode"):
        xs, ys = getattr(tables, f"{name}_tokens"), getattr(tables, f"{name}_ns")
        axis(f"{name}_tokens", xs, 1, 1 if name.startswith("dense") else 0)
        prices(f"{name}_ns", ys, len(xs))
    for name in ("moe", "exchange"):
        if bool(getattr(tables, f"{name}_tokens")) != bool(getattr(tables, f"{name}_decode_tokens")):
            fail(f"{name} and {name}_decode must both be given or both be empty")
    grids: dict[str, tuple[list[list[int]], list[int], list[int]]] = {
        "context_ns": (tables.context_ns, tables.context_new, tables.context_cached),
        "decode_ns": (tables.decode_ns, tables.decode_batch, tables.decode_context),
    }
    if tables.context_work_ns:
        grids["context_work_ns"] = (tables.context_work_ns, tables.context_new, tables.context_cached)
    if tables.decode_mixed_ns:
        grids["decode_mixed_ns"] = (tables.decode_mixed_ns, tables.decode_batch, tables.decode_context)
    for name, (rows, outer, inner) in grids.items():
        if len(rows) != len(outer):
            fail(f"{name} has {len(rows)} rows for {len(outer)} grid points")
        for i, row in enumerate(rows):
            prices(f"{name}[{i}]", row, len(inner), (lambda a, b: b < a) if name.startswith("decode") else None)
