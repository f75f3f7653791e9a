"""Which rank reads what: sums, vLLM's own mapping of ranks where it can be imported, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_workers.pricing.registry import load_profile
from harness.disagg.layout import KvShape, check_tp, kv_shape, reads
from harness.errors import InputError

SIZES = st.sampled_from([1, 2, 4, 8, 16])


@given(SIZES, SIZES, st.sampled_from([1, 2, 4, 8]))
def test_every_decode_rank_gets_all_that_it_holds(prefill_tp: int, decode_tp: int, heads: int) -> None:
    shape = KvShape(heads * 1000, heads, 2)
    found = reads(shape, prefill_tp, decode_tp)
    for rank in range(decode_tp):
        mine = [read for read in found if read.target == rank]
        assert sum(read.bytes_per_token for read in mine) == shape.rank_bytes_per_token(decode_tp)
        assert len({read.source for read in mine}) == len(mine)
        assert all(0 <= read.source < prefill_tp for read in mine)
    if decode_tp <= heads:
        assert sum(read.bytes_per_token for read in found) == shape.bytes_per_token


def test_the_latent_is_read_by_every_decode_rank() -> None:
    shape = KvShape(47_616, 0, 99)
    assert [(r.source, r.bytes_per_token) for r in reads(shape, 8, 4)] == [
        (0, 47_616),
        (2, 47_616),
        (4, 47_616),
        (6, 47_616),
    ]
    assert sum(r.bytes_per_token for r in reads(shape, 1, 8)) == 8 * 47_616


def test_more_decode_ranks_than_prefill_ranks_split_the_heads() -> None:
    found = reads(KvShape(8000, 8, 2), 1, 4)
    assert [(r.source, r.target, r.bytes_per_token) for r in found] == [(0, t, 2000) for t in range(4)]


def test_fewer_decode_ranks_read_from_several_and_no_head_twice() -> None:
    found = reads(KvShape(4000, 4, 2), 8, 1)
    assert [r.source for r in found] == [0, 2, 4, 6], "ranks 1, 3, 5, 7 hold copies of the same heads"
    assert [r.bytes_per_token for r in found] == [1000] * 4


def test_shapes_of_known_models_and_of_others() -> None:
    assert kv_shape(load_profile("gpt-oss-120b-mxfp4-tp1-h200")) == KvShape(73_728, 8, 72)
    glm = kv_shape(load_profile("glm-5.2-fp8-tp8ep8-h200"))
    assert (glm.bytes_per_token, glm.heads, glm.regions) == (47_616, 0, 99)
    assert kv_shape(load_profile("gpt-oss-120b-mxfp4-tp1-h200"), 36, 41_504) == KvShape(41_504, 8, 36)
    unknown = load_profile("gpt-oss-120b-mxfp4-tp1-h200")
    unknown.model = "nobody/knows"
    with pytest.raises(InputError, match="descriptors_per_block"):
        kv_shape(unknown)


def test_sizes_that_do_not_divide_are_refused() -> None:
    check_tp(8, 2)
    with pytest.raises(InputError, match="do not divide"):
        check_tp(6, 4)
