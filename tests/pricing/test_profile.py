"""Profile files: what is shipped, what they say about themselves, bad files."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_workers.errors import InputError
from fake_workers.pricing.build import build_known
from fake_workers.pricing.decode_row import FRACTION_BITS
from fake_workers.pricing.known import KNOWN, why_unavailable
from fake_workers.pricing.kv import GroupedHeads, SparseLatent
from fake_workers.pricing.profile import StepProfile, Tables, check_tables, read_profile, save_profile
from fake_workers.pricing.registry import PROFILES, list_profiles, load_profile, profile_names, show_profile
from fake_workers.pricing.steps import RankBatch, step_ns
from tests.pricing.synthetic import make_profile, tables


def test_every_known_profile_is_shipped_and_small() -> None:
    assert profile_names() == sorted(k.name for k in KNOWN)
    for name in profile_names():
        assert (PROFILES / f"{name}.npz").stat().st_size < 25_000
    assert "Apache License, Version 2.0" in (PROFILES / "NOTICE").read_text()


@pytest.mark.parametrize(
    ("name", "published_bytes"),
    [
        ("llama-3.3-70b-fp8-tp8-h200", 163_840),
        ("glm-5.2-fp8-dp8ep8-b200", 47_616),
        ("deepseek-v3.2-fp8-dp8ep8-b200", 42_944),
        ("minimax-m3-bf16-tp8ep8-h200", 61_440),
    ],
)
def test_kv_bytes_per_token_as_published(name: str, published_bytes: int) -> None:
    assert load_profile(name).kv_bytes_per_token == published_bytes


def test_kv_bytes_on_one_rank() -> None:
    minimax_m3 = GroupedHeads(layers=60, kv_heads=4, head_dim=128, element_bytes=1)
    assert minimax_m3.bytes_per_token() == 61_440  # published
    assert minimax_m3.bytes_per_token_rank(8) == 15_360  # four heads on eight ranks: each still holds one
    assert minimax_m3.bytes_per_token_rank(2) == 30_720
    glm = SparseLatent(layers=78, index_layers=21)
    assert glm.bytes_per_token_rank(8) == glm.bytes_per_token()  # the latent is needed whole on every rank


@pytest.mark.parametrize("name", profile_names())
def test_shipped_profile_is_complete(name: str) -> None:
    profile = load_profile(name)
    origin = profile.provenance
    assert origin["package"] == "aiconfigurator-core" and origin["licence"] == "Apache-2.0"
    assert origin["backend_version"] and origin["origins"]["context_attention"]
    assert origin["memory"]["tokens"] == profile.kv_capacity_tokens > profile.block_tokens
    blocks = {"glm": 64, "dee": 64}
    assert profile.block_tokens == (128 if name.startswith("minimax-m3") else blocks.get(name[:3], 16))
    assert not why_unavailable(name)
    for part in ("prefill_step", "decode_step"):
        assert origin["interpolation_error"][part]["mean"] < (0.08 if name.endswith("b200") else 0.015)
    json.dumps(profile.describe())


def test_a_stated_capacity_stands_only_where_none_was_computed() -> None:
    stated = {name for name in profile_names() if load_profile(name).capacity_stated_by}
    assert stated == {k.name for k in KNOWN if k.stated} == {"glm-5.2-fp8-dp8ep8-h200"}
    glm = load_profile("glm-5.2-fp8-dp8ep8-h200")
    assert glm.kv_capacity_tokens == 182_000 and "llm-d blog" in glm.capacity_stated_by
    assert "no KV budget" in glm.provenance["memory"]["reason"]


def test_step_times_of_a_layout_with_stated_capacity_are_the_tables_of_its_gpu() -> None:
    # Attention and everything dense are one rank's own: those of sixteen ranks are the same rows.
    eight, sixteen = load_profile("glm-5.2-fp8-dp8ep8-h200"), load_profile("glm-5.2-fp8-dp16ep16-h200")
    for field in ("context_ns", "context_work_ns", "dense_ns", "dense_decode_ns", "decode_ns"):
        assert getattr(eight.tables, field) == getattr(sixteen.tables, field), field
    # On one node dispatch and combine are in the experts' rows, and half as many ranks hold twice the experts.
    assert not eight.tables.exchange_ns and sixteen.tables.exchange_ns
    assert eight.moe_ns(8 * 128, True) > sixteen.moe_ns(16 * 128, True)


@pytest.mark.parametrize(
    ("bf16", "fp8"),
    [
        ("llama-3.1-8b-bf16-tp1-h100", "llama-3.1-8b-bf16-kvfp8-tp1-h100"),
        ("llama-3.3-70b-fp8-kvbf16-tp8-h200", "llama-3.3-70b-fp8-tp8-h200"),
        ("qwen3-32b-bf16-tp2-h100", "qwen3-32b-bf16-kvfp8-tp2-h100"),
        ("gpt-oss-120b-mxfp4-tp1-h100", "gpt-oss-120b-mxfp4-kvfp8-tp1-h100"),
    ],
)
def test_kv_dtype_moves_bytes_capacity_and_attention(bf16: str, fp8: str) -> None:
    wide, narrow = load_profile(bf16), load_profile(fp8)
    assert wide.kv_bytes_per_token == 2 * narrow.kv_bytes_per_token
    assert narrow.kv_capacity_tokens == pytest.approx(2 * wide.kv_capacity_tokens, rel=1e-3)
    batch, context = 32, 32_000
    price = wide.decode_row(batch).price_ns(batch * context) / narrow.decode_row(batch).price_ns(batch * context)
    assert 1.2 < price < 2.2  # reads half the bytes; kernels keep some fixed cost
    assert wide.dense_ns(2048, False) == narrow.dense_ns(2048, False)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("minimax-m3-fp8-tp8ep8-h200", "no FP8 rows"),
        ("minimax-m3-nvfp4-tp8ep8-b200", "fall by 13 %"),
        ("glm-5.2-fp8-dp8ep8-h100", "no room"),
        ("glm-5.2-nvfp4-tp8ep8-h100", "no NVFP4 units"),
    ],
)
def test_what_the_database_cannot_price_is_refused_with_the_reason(name: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=reason):
        load_profile(name)
    with pytest.raises(InputError, match=reason):
        build_known([name], tmp_path)


@pytest.mark.parametrize("name", profile_names())
def test_prices_rise_where_they_must(name: str) -> None:
    profile = load_profile(name)
    ranks = profile.layout.dp
    by_context = [step_ns(profile, [RankBatch((), 8, 8 * c)] * ranks) for c in (16, 1000, 20_000, 100_000, 10**6)]
    assert by_context == sorted(by_context)
    by_chunk = [step_ns(profile, [RankBatch(((n, 10_000),))] * ranks) for n in (64, 512, 2048, 8192, 16_384)]
    assert by_chunk == sorted(by_chunk)
    by_batch = [step_ns(profile, [RankBatch((), b, b * 8000)] * ranks) for b in (1, 8, 64, 256)]
    # small batches are bound by launches: measured times of 1 and 8 differ by noise either way
    assert all(a <= b * 1.05 for a, b in pairwise(by_batch)) and by_batch[1:] == sorted(by_batch[1:])


def test_published_prefill_times_are_reproduced() -> None:
    # 218,996 tokens in chunks of 8192, all ranks busy: seconds found when the database was first explored.
    for name, seconds in (("llama-3.3-70b-fp8-tp8-h200", 19.6), ("glm-5.2-fp8-dp8ep8-b200", 42.5)):
        profile = load_profile(name)
        done = total = 0
        while done < 218_996:
            new = min(8192, 218_996 - done)
            total += step_ns(profile, [RankBatch(((new, done),))] * profile.layout.dp)
            done += new
        assert total / 1e9 == pytest.approx(seconds, rel=0.01)


def test_out_of_grid_is_recorded_with_the_largest_argument() -> None:
    profile = load_profile("llama-3.3-70b-fp8-tp8-h200")
    step_ns(profile, [RankBatch(((8192, 8000),), 4, 4 * 100_000)])
    assert profile.out_of_grid == {}
    step_ns(profile, [RankBatch(((8192, 50_000), (20_000, 40_000)), 4, 4 * 200_000)])
    assert profile.out_of_grid == {
        "prefill chunk tokens": 20_000,
        "cached prefix tokens": 50_000,
        "decode context tokens": 200_000,
    }
    assert load_profile("llama-3.3-70b-fp8-tp8-h200").out_of_grid == {}
    glm = load_profile("glm-5.2-fp8-dp8ep8-b200")
    step_ns(glm, [RankBatch(((4096, 1_000_000),), 4, 4 * 1_000_000)])
    assert glm.out_of_grid == {}
    step_ns(glm, [RankBatch(((8192, 0),))] * 8)
    assert glm.out_of_grid == {"tokens of one MoE step": 65_536}


@settings(deadline=None, max_examples=60)
@given(tables(), st.integers(1, 300), st.integers(1, 5000))
def test_decode_row_meets_the_grid(table: Tables, batch: int, context: int) -> None:
    profile = make_profile(table)
    row = profile.decode_row(batch)
    # At grid points of a tabulated batch the tabulated price comes back (within the rounding of a slope).
    for b, prices in zip(table.decode_batch, table.decode_ns, strict=True):
        got = [profile.decode_row(b).price_ns(b * c) for c in table.decode_context]
        assert all(abs(g - p) <= 1 for g, p in zip(got, prices, strict=True))
    assert row.price_ns(batch * context) <= row.price_ns(batch * context + 1)


@settings(deadline=None, max_examples=60)
@given(tables(), st.integers(1, 10**6))
def test_beyond_the_grid_prices_stay_within_the_growth_of_the_work(table: Tables, factor: int) -> None:
    profile = make_profile(table)
    new, cached, tokens = table.context_new[-1], table.context_cached[-1], table.dense_tokens[-1]
    corner = profile.context_attention_ns(new, cached)
    assert corner <= profile.context_attention_ns(new * factor, cached) <= corner * factor**2 * 1.001 + 1
    longer = profile.context_attention_ns(new, cached * factor)
    assert corner <= longer <= corner * factor * 1.001 + 1
    last = profile.dense_ns(tokens, False)
    assert last <= profile.dense_ns(tokens * factor, False) <= last * factor * 1.001 + 1
    batch, context = table.decode_batch[-1], table.decode_context[-1]
    full = table.decode_ns[-1][-1]
    wide = profile.decode_row(batch * factor).price_ns(batch * factor * context)
    rounding = 1 + (batch * factor * context >> FRACTION_BITS)  # of the slope over the widest cell
    assert full - rounding <= wide <= full * factor * 1.001 + 1


def test_grid_points_of_curves_come_back() -> None:
    profile = load_profile("glm-5.2-fp8-dp8ep8-b200")
    t = profile.tables
    assert [profile.dense_ns(n, False) for n in t.dense_tokens] == t.dense_ns
    assert [profile.dense_ns(n, True) for n in t.dense_decode_tokens] == t.dense_decode_ns
    assert [profile.moe_ns(n, False) for n in t.moe_tokens] == t.moe_ns
    assert profile.moe_ns(1, True) == t.moe_decode_ns[0]  # idle ranks join with a dummy token
    assert [profile.context_attention_ns(n, 0) for n in t.context_new] == [row[0] for row in t.context_ns]
    assert load_profile("qwen3-32b-bf16-tp2-h100").moe_ns(100, False) == 0


@pytest.mark.parametrize("name", ["glm-5.2-fp8-tp8ep8-h200", "glm-5.2-fp8-dp16ep16-h200"])
def test_file_round_trip_is_exact_and_repeatable(name: str, tmp_path: Path) -> None:
    profile = load_profile(name)
    save_profile(profile, tmp_path / "a.npz")
    save_profile(read_profile(tmp_path / "a.npz"), tmp_path / "b.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    again = load_profile(tmp_path / "a.npz")
    assert again.tables == profile.tables and again.describe() == profile.describe()


def test_listing_is_plain_data() -> None:
    rows = list_profiles()
    assert [row["name"] for row in rows] == profile_names()
    json.dumps(rows)
    rows[0]["name"] = "changed"
    assert list_profiles()[0]["name"] != "changed"
    assert show_profile("qwen3-32b-bf16-tp2-h100")["limits"]["cached_tokens"] == 16_384


def test_unknown_name_names_the_nearest() -> None:
    with pytest.raises(InputError, match=r"no step-time profile of that name.*llama-3\.3-70b-fp8-tp8-h200") as found:
        load_profile("llama-3.3-70b-tp8-h200")
    assert len(str(found.value)) < 400
    with pytest.raises(InputError, match="all: harness profile list"):
        load_profile("zzz")


def test_broken_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such profile file"):
        load_profile(tmp_path / "missing.npz")
    text = tmp_path / "text.npz"
    text.write_text("not a profile")
    with pytest.raises(InputError, match="not a"):
        load_profile(text)
    whole = (PROFILES / "qwen3-32b-bf16-tp2-h100.npz").read_bytes()
    cut = tmp_path / "cut.npz"
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="not a"):
        load_profile(cut)
    other = tmp_path / "other.npz"
    np.savez(other, numbers=np.arange(3))
    with pytest.raises(InputError, match="incomplete"):
        load_profile(other)


def _profile() -> StepProfile:
    return load_profile("qwen3-32b-bf16-tp2-h100")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("context_new", [4], "context_new needs at least 2"),
        ("context_cached", [0, 0], "context_cached does not increase"),
        ("decode_batch", [0, 1], "decode_batch begins at 0"),
        ("decode_batch", [3], "decode_batch needs at least 2"),
        ("dense_ns", [1], "dense_ns has 1 prices"),
        ("moe_tokens", [1], "moe_ns has 0 prices"),
        ("decode_ns", [[5, 4]], "decode_ns has 1 rows"),
        ("exchange_tokens", [1], "exchange_ns has 0 prices"),
    ],
)
def test_tables_that_cannot_be_priced(field: str, value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_tables(replace(_profile().tables, **{field: value}), "here")


def test_falling_decode_rows_and_free_prices_are_refused() -> None:
    table = _profile().tables
    rows = [list(row) for row in table.decode_ns]
    rows[3][5] = rows[3][4] - 1
    with pytest.raises(InputError, match=r"decode_ns\[3\] falls"):
        check_tables(replace(table, decode_ns=rows), "here")
    with pytest.raises(InputError, match="below 1 ns"):
        check_tables(replace(table, dense_ns=[0, *table.dense_ns[1:]]), "here")
