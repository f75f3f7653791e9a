"""What stands for an engine block towards the router: one pseudo token, one hash, or a short text.

A block is (origin, pos): origin is the call that first brought its content, pos its index in that call's
prompt. The router hashes block content chained to everything before it, so two blocks are confused only if
they follow the very same prefix and carry the same token: with b bits and s distinct continuations of one
prefix the chance is about s*s / 2**(b+1). Worst is the root (every session is a continuation of the empty
prefix): 10,000 sessions give 0.023 expected confusions with the 31-bit tokens and 2e-7 with the 48-bit texts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Runs = list[tuple[int, int, int]]

TEXT_BYTES = 8
"""Characters per block in the text form: 8 base64 digits = 48 bits."""

_HASH_BASE = 1 << 62
_CHUNK_BASE = 2 << 62
"""Hashes of a tier of its own (LMCache's of its chunks) are never those of the engine."""
_POS_BITS = 24
_WORD = 2**64 - 1
_ALPHABET = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_", dtype=np.uint8)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser: a bijection of 64-bit numbers that spreads neighbours."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _keys(origin: int, start: int, end: int) -> NDArray[np.uint64]:
    """Injective 64-bit numbers of blocks start..end-1 (origin below 2**38, positions below 2**24)."""
    return np.arange(start, end, dtype=np.uint64) + np.uint64(((origin + 1) << _POS_BITS) & _WORD)


def _prompt_keys(runs: Runs) -> NDArray[np.uint64]:
    """The same of all blocks of `runs`, in order. Prompts have up to hundreds of runs, so not run by run."""
    bases, counts = [], []
    blocks = 0
    for origin, start, end in runs:
        bases.append((((origin + 1) << _POS_BITS) + start - blocks) & _WORD)
        counts.append(end - start)
        blocks += end - start
    return np.repeat(np.array(bases, dtype=np.uint64), counts) + np.arange(blocks, dtype=np.uint64)


def tokens(origin: int, start: int, end: int) -> NDArray[np.uint64]:
    """One 31-bit pseudo token per block."""
    return _mix(_keys(origin, start, end)) >> np.uint64(33)


def prompt_tokens(runs: Runs) -> NDArray[np.uint64]:
    """Pseudo tokens of a whole prompt, one per block."""
    if not runs:
        return np.empty(0, dtype=np.uint64)
    return _mix(_prompt_keys(runs)) >> np.uint64(33)


def block_hash(origin: int, pos: int) -> int:
    """The engine's hash of one block: an opaque label, above 2**62 because the router refuses small integers."""
    return _HASH_BASE + ((origin + 1) << _POS_BITS) + pos


def block_hashes(origin: int, start: int, end: int) -> list[int]:
    """Engine hashes of blocks start..end-1."""
    first = block_hash(origin, start)
    return list(range(first, first + end - start))


def chunk_hashes(origin: int, start: int, end: int) -> list[int]:
    """A tier's own hashes of its chunks start..end-1."""
    first = block_hash(origin, start) - _HASH_BASE + _CHUNK_BASE
    return list(range(first, first + end - start))


def prompt_text(runs: Runs, bytes_per_block: int = TEXT_BYTES) -> bytes:
    """The prompt as text, `bytes_per_block` (at least 8, or 4 with 24 bits) characters per block.

    The first 8 characters carry the block's identity, the rest is padding: real-sized text costs no entropy.
    """
    if not runs:
        return b""
    x = _mix(_prompt_keys(runs))
    digits = min(TEXT_BYTES, bytes_per_block)
    out = np.full((len(x), bytes_per_block), ord("x"), dtype=np.uint8)
    for i in range(digits):
        out[:, i] = _ALPHABET[((x >> np.uint64(58 - 6 * i)) & np.uint64(63)).astype(np.intp)]
    return out.tobytes()


def tail_text(request_number: int, length: int) -> bytes:
    """Text of a partial last block, which no other request shares."""
    if length <= 0:
        return b""
    return (f"{request_number:x}~".encode() + b"x" * length)[:length]


def clip(runs: Runs, blocks: int) -> Runs:
    """The first `blocks` blocks of a prompt."""
    out: Runs = []
    for origin, start, end in runs:
        if blocks <= 0:
            break
        take = min(end - start, blocks)
        out.append((origin, start, start + take))
        blocks -= take
    return out


def total_blocks(runs: Runs) -> int:
    """Blocks in a prompt."""
    return sum(end - start for _, start, end in runs)
