"""Bytes of KV cache per token, from model dimensions (one copy, whole model)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupedHeads:
    """Key and value per layer and KV head (multi-head or grouped-query attention)."""

    layers: int
    kv_heads: int
    head_dim: int
    element_bytes: int

    def bytes_per_token(self) -> int:
        """One key and one value vector per layer and KV head."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.element_bytes

    def bytes_per_token_rank(self, tp: int) -> int:
        """Heads are split over tp ranks; with fewer heads than ranks each rank still holds one."""
        return self.bytes_per_token() // self.kv_heads * max(1, -(-self.kv_heads // tp))


@dataclass(frozen=True, slots=True)
class SparseLatent:
    """Multi-head latent attention with a sparse indexer (DeepSeek-V3.2, GLM-5.x).

    Per layer one latent vector and one rotary key; per layer that has its own indexer one index key. Every
    tensor parallel rank needs the whole latent, so a token takes the same bytes on each of them.
    """

    layers: int
    index_layers: int
    latent_dim: int = 512
    rope_dim: int = 64
    index_dim: int = 128
    element_bytes: int = 1

    def bytes_per_token(self) -> int:
        """Latent and rotary key of all layers plus the index keys."""
        per_layer = self.latent_dim + self.rope_dim
        return (self.layers * per_layer + self.index_layers * self.index_dim) * self.element_bytes

    def bytes_per_token_rank(self, tp: int) -> int:
        """Replicated on all tp ranks."""
        return self.bytes_per_token()


KvCache = GroupedHeads | SparseLatent
