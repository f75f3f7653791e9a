"""Block identities towards the router."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from harness.router import tokens

ORIGIN = st.integers(0, (1 << 38) - 2)
POSITION = st.integers(0, (1 << 24) - 2)
BLOCK = st.tuples(ORIGIN, POSITION)


def runs_of(lengths: list[int]) -> tokens.Runs:
    runs, at = [], 0
    for origin, length in enumerate(lengths):
        runs.append((origin, at, at + length))
        at += length
    return runs


@given(BLOCK, BLOCK)
def test_hashes_are_injective_and_large(a: tuple[int, int], b: tuple[int, int]) -> None:
    assert (tokens.block_hash(*a) == tokens.block_hash(*b)) == (a == b)
    assert 1 << 40 <= tokens.block_hash(*a) < 1 << 63


@given(ORIGIN, st.integers(0, 1000), st.integers(1, 50))
def test_a_run_is_its_blocks(origin: int, start: int, count: int) -> None:
    whole = tokens.tokens(origin, start, start + count)
    assert whole.tolist() == [int(tokens.tokens(origin, p, p + 1)[0]) for p in range(start, start + count)]
    assert int(whole.max()) < 1 << 31
    assert tokens.block_hashes(origin, start, start + count) == [
        tokens.block_hash(origin, p) for p in range(start, start + count)
    ]


@given(st.lists(st.tuples(ORIGIN, st.integers(0, 1000), st.integers(0, 30)), min_size=1, max_size=8))
def test_a_prompt_is_its_runs(parts: list[tuple[int, int, int]]) -> None:
    runs = [(origin, start, start + count) for origin, start, count in parts]
    assert tokens.prompt_tokens(runs).tolist() == [int(t) for run in runs for t in tokens.tokens(*run)]
    assert tokens.prompt_text(runs) == b"".join(tokens.prompt_text([run]) for run in runs)


def test_tokens_spread() -> None:
    """100,000 neighbouring blocks: as many repetitions as chance allows (2.3 expected), not more."""
    many = tokens.prompt_tokens([(o, 0, 1000) for o in range(100)])
    assert len(many) - len(np.unique(many)) < 12


def test_texts_differ_where_blocks_differ() -> None:
    text = tokens.prompt_text([(o, 0, 1000) for o in range(100)])
    pieces = {text[i : i + 8] for i in range(0, len(text), 8)}
    assert len(pieces) == 100_000
    assert text.isascii() and not set(text) & set(b'"\\<>&')


@given(st.integers(8, 64))
def test_padded_text_keeps_identity_in_front(width: int) -> None:
    runs = [(7, 0, 5)]
    narrow, wide = tokens.prompt_text(runs), tokens.prompt_text(runs, width)
    assert len(wide) == 5 * width
    assert [wide[i * width : i * width + 8] for i in range(5)] == [narrow[i * 8 : i * 8 + 8] for i in range(5)]


@given(st.lists(st.integers(1, 20), max_size=6), st.integers(0, 100))
def test_clip_is_a_prefix(lengths: list[int], blocks: int) -> None:
    runs = runs_of(lengths)
    clipped = tokens.clip(runs, blocks)
    assert tokens.total_blocks(clipped) == min(blocks, tokens.total_blocks(runs))
    whole, part = tokens.prompt_tokens(runs).tolist(), tokens.prompt_tokens(clipped).tolist()
    assert whole[: len(part)] == part
