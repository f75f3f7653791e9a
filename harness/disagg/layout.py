"""Which bytes of a prompt's KV go from which GPU to which: vLLM's mapping of tensor-parallel ranks (NIXL connector).

Every decode rank reads what it holds itself from the prefill rank that has it (v1/nixl/tp_mapping.py of vLLM 0.32):

- latent attention: each rank holds all of it, so each decode rank reads it once, from one prefill rank;
- heads, decode TP >= prefill TP: each decode rank reads its heads from one prefill rank;
- heads, decode TP < prefill TP: it reads them from several, once each even where prefill ranks share a head.

A descriptor is one block of one layer's key or value (of the latent: one block of one layer), per pair of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from fake_workers.pricing.known import known_kv
from fake_workers.pricing.kv import GroupedHeads, SparseLatent
from fake_workers.pricing.profile import StepProfile
from harness.errors import InputError


@dataclass(frozen=True, slots=True)
class KvShape:
    """What a model's KV cache is made of, as far as moving it depends on that.

    bytes_per_token: one copy, whole model. heads: KV heads, 0 for latent attention. regions: separately stored parts of
    a block (layers, times two where key and value are apart).
    """

    bytes_per_token: int
    heads: int
    regions: int

    def rank_bytes_per_token(self, tp: int) -> int:
        """What one of tp ranks holds of a token."""
        if not self.heads:
            return self.bytes_per_token
        return self.bytes_per_token // self.heads * max(1, -(-self.heads // tp))


@dataclass(frozen=True, slots=True)
class RankRead:
    """One decode rank's read from one prefill rank."""

    source: int
    target: int
    bytes_per_token: int


def kv_shape(
    profile: StepProfile, descriptors_per_block: int | None = None, bytes_per_token: int | None = None
) -> KvShape:
    """The shape of a profile's model; a model that is not known needs `kv_transfer.descriptors_per_block`."""
    moved = bytes_per_token or profile.kv_bytes_per_token
    known = known_kv(profile.model)
    heads = known.kv_heads if isinstance(known, GroupedHeads) else 0
    if known is None:
        # heads are split, latents are not: what a rank holds tells which it is (with one rank both are the same)
        share = profile.kv_bytes_per_token // profile.kv_bytes_per_token_rank
        heads = share if share > 1 or profile.layout.tp == 1 else 0
    if descriptors_per_block is not None:
        return KvShape(moved, heads, descriptors_per_block)
    if known is None:
        raise InputError(
            "kv_transfer.descriptors_per_block",
            f"the number of layers of {profile.model} is not known",
            "give it: layers, times two where key and value are stored apart",
        )
    if isinstance(known, SparseLatent):
        # the indexer's keys are a cache of their own (vLLM allocates it beside the latent)
        return KvShape(moved, 0, known.layers + known.index_layers)
    return KvShape(moved, heads, 2 * known.layers)


@cache
def reads(shape: KvShape, prefill_tp: int, decode_tp: int) -> tuple[RankRead, ...]:
    """All reads of one request, over all decode ranks."""
    held = shape.rank_bytes_per_token(decode_tp)
    out = []
    for target in range(decode_tp):
        if not shape.heads or decode_tp >= prefill_tp:
            out.append(RankRead(target * prefill_tp // decode_tp, target, held))
            continue
        ratio = prefill_tp // decode_tp
        by_head: dict[int, int] = {}
        for source in range(target * ratio, (target + 1) * ratio):
            by_head.setdefault(source * shape.heads // prefill_tp, source)
        base, more = divmod(held, len(by_head))
        out += [RankRead(s, target, base + (i < more)) for i, s in enumerate(by_head.values())]
    return tuple(out)


def check_tp(prefill_tp: int, decode_tp: int) -> None:
    """vLLM's connector maps ranks where one size divides the other."""
    low, high = sorted((prefill_tp, decode_tp))
    if high % low:
        raise InputError(
            "cluster.pools", f"TP{prefill_tp} and TP{decode_tp} do not divide each other", "choose sizes that do"
        )
