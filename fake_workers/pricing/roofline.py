"""A profile from peak rates and a model's dimensions: the last resort where nothing was measured.

Every kernel takes t0 + hypot(FLOPs / (e_c x peak), bytes / (e_m x bandwidth)): launch time, and the smooth maximum of
computing and moving at a share of what the data sheet says. The shares are calibrated on measured kernels of H200
(`Efficiency`); on a GPU that they do not come from they are an assumption. Collectives are measured tables or the
user's own (collectives.py), never a formula. Every report of a run with such a profile says so first.

`harness profile build --roofline SPEC.yaml --out DIR`; docs/fidelity.md shows how far such profiles lie from tables.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fake_workers.errors import InputError
from fake_workers.pricing.collectives import Collectives, load_collectives
from fake_workers.pricing.grid import geometric, thin, token_samples
from fake_workers.pricing.kv import GroupedHeads
from fake_workers.pricing.profile import Layout, Limits, StepProfile, Tables, check_tables

KIND = "roofline"
MAX_STEP_TOKENS, MAX_CHUNK_TOKENS, MAX_CONTEXT_TOKENS, MAX_BATCH = 33_792, 32_768, 1 << 20, 1024
_TOLERANCE = 0.002
_BF16 = 2

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]


class Strict(BaseModel):
    """Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Gpu(Strict):
    """The data sheet: dense peak rates (no sparsity) of one GPU."""

    name: str
    peak_flops: Positive = Field(description="of the weights' data type, FLOP/s")
    attention_peak_flops: Positive | None = Field(None, description="of attention (BF16 mostly); null: as peak_flops")
    memory_bytes_per_s: Positive
    memory_bytes: Positive
    memory_fraction: Share = 0.9


class Experts(Strict):
    """Routed experts of every layer."""

    count: Count
    top_k: Count
    ffn: Count
    shared_ffn: Annotated[int, Field(ge=0)] = 0


class Model(Strict):
    """A model with grouped-query attention; the names are those of its config.json in short."""

    name: str
    layers: Count
    hidden: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    ffn: Annotated[int, Field(ge=0)] = Field(0, description="intermediate size of dense layers; 0 with experts")
    vocab: Count
    weight_bytes: Positive = Field(description="per parameter: 2 BF16, 1 FP8, 0.5 FP4")
    kv_bytes: Annotated[int, Field(ge=1, le=4)] = Field(2, description="per element of the KV cache")
    experts: Experts | None = None
    max_model_len: Count
    block_tokens: Count = 16

    @model_validator(mode="after")
    def _one_kind(self) -> Model:
        if (self.ffn > 0) == (self.experts is not None):
            raise ValueError("give either ffn or experts")
        return self


class Efficiency(Strict):
    """Shares of the peaks that kernels reach, and launch times per layer.

    Defaults are fits to H200's measured kernels: GEMMs in BF16 within 7 % (in block-wise FP8 0.52, 0.74 and 7 us fit
    better, within 18 %); attention of Llama-3.1-8B and 70B and Qwen3-32B within 13 % (chunks) and 11 % (decode). The
    same numbers are off by 13 and 12 % on H100's kernels, by 22 and 25 % on B200's.
    """

    gemm_compute: Share = 0.83
    gemm_memory: Share = 0.88
    gemm_launch_us: Annotated[float, Field(ge=0)] = 4.0
    context_compute: Share = 0.62
    context_launch_us: Annotated[float, Field(ge=0)] = 30.0
    decode_memory: Share = 0.83
    decode_launch_us: Annotated[float, Field(ge=0)] = 14.0
    other_launch_us: Annotated[float, Field(ge=0)] = Field(4.0, description="norms and activations, per layer")


class Ranks(Strict):
    """Layout of a lock-step group."""

    tp: Count = 1
    dp: Count = 1
    ep: Count = 1


class Spec(Strict):
    """The whole description."""

    name: str = Field(pattern=r"^[\w.+-]+$")
    gpu: Gpu
    model: Model
    layout: Ranks = Ranks()
    collectives: str | None = Field(None, description="a GPU of the shipped table or a CSV file; needed above one GPU")
    efficiency: Efficiency = Efficiency()

    @model_validator(mode="after")
    def _fits(self) -> Spec:
        size = self.layout
        if self.collectives is None and size.tp * size.dp > 1:
            raise ValueError("collectives are needed with more than one GPU")
        if self.model.experts is None and size.dp > 1:
            raise ValueError("data-parallel ranks step together only for models with experts")
        if size.tp * size.dp % size.ep:
            raise ValueError("ep must divide tp x dp")
        return self


def read_spec(path: Path) -> Spec:
    """Read and check a description; a relative path of a CSV in it is relative to the file."""
    try:
        spec = Spec.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise InputError(str(path), "no such file", "give the path of a roofline description") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(str(path), f"is not YAML ({' '.join(str(error).split())})", "correct the syntax") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "(the whole file)"
        raise InputError(str(path), f"field {place}: {first['msg']}", "see docs/fidelity.md, own hardware") from None
    if spec.collectives and spec.collectives.endswith(".csv"):
        return spec.model_copy(update={"collectives": str((path.parent / spec.collectives).resolve())})
    return spec


class _Pricer:
    """Kernels of one rank, seconds for the whole model."""

    def __init__(self, spec: Spec, collectives: Collectives | None) -> None:
        self.spec, self._collectives = spec, collectives

    def _kernel(self, flops: float, nbytes: float) -> float:
        gpu, e = self.spec.gpu, self.spec.efficiency
        compute = flops / (e.gemm_compute * gpu.peak_flops)
        return e.gemm_launch_us / 1e6 + math.hypot(compute, nbytes / (e.gemm_memory * gpu.memory_bytes_per_s))

    def _gemm(self, m: float, k: float, n: float, weights: float = 1.0) -> float:
        """m x k by k x n; `weights`: how many such weight matrices are read for the m rows."""
        model = self.spec.model
        return self._kernel(2 * m * k * n, weights * k * n * model.weight_bytes + m * (k + n) * _BF16)

    def _collective(self, op: str, ranks: int, nbytes: float) -> float:
        if ranks == 1 or self._collectives is None:
            return 0.0
        return self._collectives.time_ns(op, ranks, round(nbytes)) / 1e9

    def dense(self, tokens: int, logits: int) -> float:
        """Everything of one rank that is neither attention nor routed experts."""
        model, tp, e = self.spec.model, self.spec.layout.tp, self.spec.efficiency
        width = model.heads * model.head_dim
        qkv = (width + 2 * max(model.kv_heads, tp) * model.head_dim) / tp
        layer = self._gemm(tokens, model.hidden, qkv) + self._gemm(tokens, width / tp, model.hidden)
        reduces = 1
        ffn = model.ffn if model.experts is None else model.experts.shared_ffn
        if ffn:
            layer += self._gemm(tokens, model.hidden, 2 * ffn / tp) + self._gemm(tokens, ffn / tp, model.hidden)
        if model.experts is None:
            reduces = 2
        else:
            layer += self._gemm(tokens, model.hidden, model.experts.count)
        # norms, rotary, activation: read and written once each
        other = tokens * (6 * model.hidden + 2 * ffn / tp) * _BF16
        layer += e.other_launch_us / 1e6 + other / (e.gemm_memory * self.spec.gpu.memory_bytes_per_s)
        layer += reduces * self._collective("all_reduce", tp, tokens * model.hidden * _BF16)
        return model.layers * layer + self._gemm(logits, model.hidden, model.vocab / tp)

    def moe(self, tokens: int) -> float:
        """Routed experts for the tokens of all ranks, dispatch and combine included; experts evenly loaded."""
        model, size = self.spec.model, self.spec.layout
        experts = model.experts
        assert experts is not None
        group = size.tp * size.dp
        split = group // size.ep  # GPUs that share one expert
        mine = experts.count / size.ep
        rows = tokens * experts.top_k / size.ep
        hit = mine * (1 - (1 - experts.top_k / experts.count) ** tokens)  # experts that any token chose
        layer = self._gemm(rows, model.hidden, 2 * experts.ffn / split, hit)
        layer += self._gemm(rows, experts.ffn / split, model.hidden, hit)
        if size.dp > 1:
            sent = tokens / group * experts.top_k * model.hidden
            layer += self._ep("ep_dispatch", group, sent * min(_BF16, max(1.0, model.weight_bytes)))
            layer += self._ep("ep_combine", group, sent * _BF16)
        else:
            layer += self._collective("all_reduce", size.tp, tokens * model.hidden * _BF16)
        return model.layers * layer

    def _ep(self, op: str, ranks: int, nbytes: float) -> float:
        assert self._collectives is not None
        has = any(o == op and r == ranks for o, r, *_ in self._collectives.measured())
        return self._collective(op if has else "all_to_all", ranks, nbytes)

    def context(self, new: int, cached: int) -> float:
        """Attention of one chunk, causal."""
        model, tp, e, gpu = self.spec.model, self.spec.layout.tp, self.spec.efficiency, self.spec.gpu
        flops = 4 * model.heads / tp * model.head_dim * new * (cached + new / 2)
        peak = (gpu.attention_peak_flops or gpu.peak_flops) * e.context_compute
        kv = (cached + new) * self._kv_layer_bytes() / (e.decode_memory * gpu.memory_bytes_per_s)
        return model.layers * (e.context_launch_us / 1e6 + math.hypot(flops / peak, kv))

    def decode(self, batch: int, context: int) -> float:
        """Attention of a decode batch."""
        model, e, gpu = self.spec.model, self.spec.efficiency, self.spec.gpu
        read = batch * context * self._kv_layer_bytes() / (e.decode_memory * gpu.memory_bytes_per_s)
        return model.layers * (e.decode_launch_us / 1e6 + read)

    def _kv_layer_bytes(self) -> float:
        model, tp = self.spec.model, self.spec.layout.tp
        return 2 * max(1, -(-model.kv_heads // tp)) * model.head_dim * model.kv_bytes

    def weights_bytes(self) -> float:
        """Weights that one GPU holds."""
        model, size = self.spec.model, self.spec.layout
        width = model.heads * model.head_dim
        attention = model.hidden * (2 * width + 2 * model.kv_heads * model.head_dim) / size.tp
        ffn = model.ffn if model.experts is None else model.experts.shared_ffn
        layer = attention + 3 * model.hidden * ffn / size.tp
        if model.experts is not None:
            layer += 3 * model.hidden * model.experts.ffn * model.experts.count / (size.tp * size.dp)
        return model.layers * layer * model.weight_bytes + 2 * model.vocab * model.hidden * _BF16 / size.tp


def build_roofline(spec: Spec) -> StepProfile:
    """The profile of a description."""
    collectives = load_collectives(spec.collectives) if spec.collectives else None
    price = _Pricer(spec, collectives)
    size, model = spec.layout, spec.model

    def ns(seconds: float) -> int:
        return max(1, round(seconds * 1e9))

    samples = token_samples(MAX_STEP_TOKENS)
    small = [n for n in samples if n <= MAX_BATCH]
    dense = thin(samples, [ns(price.dense(n, 1)) for n in samples], _TOLERANCE)
    dense_decode = thin(small, [ns(price.dense(n, n)) for n in small], _TOLERANCE)
    moe: tuple[list[int], list[int]] = ([], [])
    moe_decode: tuple[list[int], list[int]] = ([], [])
    if model.experts is not None:
        totals = [n * size.dp for n in samples]
        moe = thin(totals, [ns(price.moe(n)) for n in totals], _TOLERANCE)
        few = [n for n in totals if n <= MAX_BATCH * size.dp]
        moe_decode = thin(few, [ns(price.moe(n)) for n in few], _TOLERANCE)
    new, cached = geometric(1, MAX_CHUNK_TOKENS, 2), [0, *geometric(64, MAX_CONTEXT_TOKENS, 3)]
    batches = sorted({1, 2, 3, 4, 6, *geometric(8, MAX_BATCH, 2)})
    contexts = geometric(1, MAX_CONTEXT_TOKENS, 4)
    context = [[ns(price.context(n, c)) for c in cached] for n in new]
    decode = [[ns(price.decode(b, c)) for c in contexts] for b in batches]
    tables = Tables(new, cached, context, [], *dense, *dense_decode, *moe, *moe_decode, batches, contexts, decode)
    check_tables(tables, spec.name, "correct the description")
    kv = GroupedHeads(model.layers, model.kv_heads, model.head_dim, model.kv_bytes)
    room = spec.gpu.memory_bytes * spec.gpu.memory_fraction - price.weights_bytes() - 3 * 2**30
    tokens = max(0, int(room // kv.bytes_per_token_rank(size.tp)))
    return StepProfile(
        name=spec.name,
        gpu=spec.gpu.name,
        model=model.name,
        layout=Layout(size.tp, size.dp, size.ep),
        kv_bytes_per_token=kv.bytes_per_token(),
        kv_bytes_per_token_rank=kv.bytes_per_token_rank(size.tp),
        kv_capacity_tokens=tokens,
        block_tokens=model.block_tokens,
        max_model_len=model.max_model_len,
        limits=Limits(MAX_CHUNK_TOKENS, MAX_CONTEXT_TOKENS, MAX_CONTEXT_TOKENS, MAX_BATCH, MAX_STEP_TOKENS,
                      MAX_STEP_TOKENS * size.dp if model.experts else 0),
        tables=tables,
        provenance=_provenance(spec, collectives),
    )  # fmt: skip


def _provenance(spec: Spec, collectives: Collectives | None) -> dict[str, Any]:
    return {
        "kind": KIND,
        "package": "roofline estimate, nothing measured",
        "package_version": "-",
        "system": spec.gpu.name,
        "backend": "peak rates x calibrated shares",
        "backend_version": "-",
        "built": datetime.now(UTC).date().isoformat(),
        "spec": spec.model_dump(mode="json", exclude={"collectives"}),
        "collectives": collectives.gpu if collectives else "none",
        "collectives_beyond_measured_sizes": dict(collectives.beyond) if collectives else {},
        "notes": ["Kernel times are estimates from peak rates, not measurements (docs/fidelity.md, own hardware)."],
    }
