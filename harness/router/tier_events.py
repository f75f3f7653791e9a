"""KV events of tiers below the GPU in router blocks: which hashes go on the wire and which blocks they stand for.

A hash of a tier stands for `hash_blocks` engine blocks, a router block for as many as the granularity says; one of the
two numbers divides the other. The blocks of a chunk belong to the origin of its last block and, before that, to what
this origin continues, so the chunk's blocks are resolved to their owners.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fake_workers.engine.events import TierEvent
from harness.errors import InputError
from harness.router.granularity import Granularity
from harness.router.tokens import Runs


@dataclass(slots=True)
class RouterTierEvent:
    """A TierEvent in router blocks."""

    t_ns: int
    medium: str
    stored: bool
    hashes: Literal["chunk", "block", "placeholder"]
    labels: Runs
    """The hashes on the wire: (origin, first, end), counted in chunks or in router blocks ("block", "placeholder")."""
    blocks: Runs
    """The router blocks that they stand for, by owner, in the order of the labels."""
    parent: tuple[int, int] | None
    """Label of the chunk or block before."""
    label_blocks: int
    """Router blocks per label."""


def check_tier_grain(hash_blocks: int, blocks_per_router_block: int) -> None:
    """InputError where a tier's hashes and router blocks do not lie on one grid."""
    if hash_blocks % blocks_per_router_block and blocks_per_router_block % hash_blocks:
        raise InputError(
            "router.block_tokens",
            f"router blocks of {blocks_per_router_block} engine blocks and a tier's chunks of {hash_blocks} do not fit",
            "let one be a multiple of the other (null: the engine's own block size)",
        )


def in_router_blocks(event: TierEvent, grain: Granularity) -> RouterTierEvent | None:
    """The event in router blocks; None where it completes or breaks none."""
    g, origin = grain.factor, event.origin
    if event.hashes == "placeholder":
        return _placeholder(event, g)
    unit = max(event.hash_blocks, g) if event.hashes == "chunk" else g
    first, end = event.start // unit, (event.start + event.count) // unit
    if first >= end:
        return None
    per_label = unit // g
    blocks = _owners(origin, first * per_label, end * per_label, grain)
    parent = None if first == 0 else (grain.owner(origin, first * unit - 1), first - 1)
    labels = [(origin, first, end)] if event.hashes == "chunk" else blocks
    return RouterTierEvent(event.t_ns, event.medium, event.stored, event.hashes, labels, blocks, parent, per_label)


def _placeholder(event: TierEvent, g: int) -> RouterTierEvent | None:
    """Only the last block of each chunk is named: with chunks larger than router blocks the others stay unknown."""
    size = event.hash_blocks
    if size <= g:
        runs = [(event.origin, event.start // g, (event.start + event.count) // g)]
    else:
        ends = range(event.start + size, event.start + event.count + 1, size)
        runs = [(event.origin, end // g - 1, end // g) for end in ends]
    runs = [run for run in runs if run[1] < run[2]]
    if not runs:
        return None
    return RouterTierEvent(event.t_ns, event.medium, event.stored, "placeholder", runs, runs, None, 1)


def _owners(origin: int, first: int, end: int, grain: Granularity) -> Runs:
    """Router blocks first .. end-1 of the content that ends with `origin`, by the origin of their last engine block."""
    out: Runs = []
    while end > first:
        begin, before = grain.begin(origin)
        start = max(first, begin // grain.factor)
        if start < end:
            out.append((origin, start, end))
            end = start
        origin = before
    out.reverse()
    return out
