"""A user's own tables: the way in and every way to get them wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fake_workers.errors import InputError
from fake_workers.pricing.profile import save_profile
from fake_workers.pricing.registry import load_profile
from fake_workers.pricing.steps import DecodeLeap, RankBatch, step_ns

META = """name: my-model-mi300x
gpu: AMD MI300X
model: my/model
source: measured with a profiler
tp: 2
kv_bytes_per_token: 1000
max_model_len: 32768
"""
ATTENTION = """prefill_chunk,kv_prefill,n_decode,kv_decode,time_us
128,0,0,0,10
128,4096,0,0,20
1024,0,0,0,100
1024,4096,0,0,300
0,0,1,128,5
0,0,1,8192,15
0,0,8,128,10
0,0,8,8192,50.5
"""
DENSE = "tokens,time_us\n1,1000\n64,1100\n2048,9000\n"
MOE = "tokens,time_us,decode_only\n1,10,1\n64,20,1\n1,15,0\n4096,500,0\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("profile.yaml", META), ("attention.csv", ATTENTION), ("dense.csv", DENSE)):
        (tmp_path / name).write_text(text)
    return tmp_path


def test_tables_become_a_profile(folder: Path) -> None:
    profile = load_profile(folder)
    assert (profile.name, profile.layout.tp, profile.layout.dp) == ("my-model-mi300x", 2, 1)
    assert (profile.kv_bytes_per_token_rank, profile.block_tokens) == (500, 16)
    assert profile.context_attention_ns(1024, 4096) == 300_000
    assert profile.decode_row(8).price_ns(8 * 8192) == pytest.approx(50_500, abs=1)
    assert profile.dense_ns(64, True) == profile.dense_ns(64, False) == 1_100_000
    assert profile.moe_ns(64, True) == 0
    assert step_ns(profile, [RankBatch((), 1, 128)]) == 5_000 + 1_000_000
    # Without a table of work shares the chunks of a step simply add up.
    assert profile.context_attention_sum_ns([(128, 0), (1024, 0)]) == 110_000
    ranks = [RankBatch((), 3, 3000)]
    leap = DecodeLeap(profile, ranks)
    assert leap.cumulative_ns(2) == step_ns(profile, ranks) + step_ns(profile, [RankBatch((), 3, 3003)])
    assert profile.out_of_grid == {}
    profile.context_attention_ns(5000, 0)
    assert profile.out_of_grid == {"prefill chunk tokens": 5000}


def test_moe_table_is_optional(folder: Path) -> None:
    (folder / "moe.csv").write_text(MOE)
    profile = load_profile(folder)
    assert (profile.moe_ns(64, True), profile.moe_ns(4096, False)) == (20_000, 500_000)


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("attention.csv", "time_us\n", "time\n", r"attention\.csv line 1: column time_us is missing"),
        ("attention.csv", "128,0,0,0,10", "128,0,0,0,ten", r"attention\.csv line 2 column time_us: 'ten'"),
        ("attention.csv", "128,0,0,0,10", "128,0,0,0", r"line 2 column time_us: None is not a number"),
        (
            "attention.csv",
            "128,0,0,0,10",
            "128,0,0,0,0",
            "line 2 column time_us: 0 us is below one nanosecond",
        ),
        ("attention.csv", "128,0,0,0,10", "128,0,0,0,nan", "line 2 column time_us: nan is not a finite"),
        (
            "attention.csv",
            "128,0,0,0,10",
            "12.5,0,0,0,10",
            "line 2 column prefill_chunk: 12.5 is not a whole",
        ),
        ("attention.csv", "128,0,0,0,10", "128,0,0,0,10,7", "line 2: more values than columns"),
        (
            "attention.csv",
            "128,0,0,0,10",
            "2,7,1,128,10\n128,0,0,0,10",
            "line 2: no row of the chunk 2 on 7 alone",
        ),
        ("attention.csv", "128,4096,0,0,20", "128,0,0,0,20", "line 3: repeats the point of line 2"),
        ("attention.csv", "128,4096,0,0,20\n", "", "no row for 128, 4096; measure the full grid"),
        ("attention.csv", "0,0,1,128,5", "0,0,1,0,5", "line 6 column kv_decode"),
        ("attention.csv", "8192,50.5", "8192,9", "line 9 column time_us: 8 decodes of 8192 tokens take less"),
        (
            "attention.csv",
            "0,0,1,128,5\n0,0,1,8192,15\n0,0,8,128,10\n0,0,8,8192,50.5\n",
            "",
            "n_decode, kv_decode",
        ),
        ("dense.csv", "64,1100", "64,-1", "line 3 column time_us: -1 is not a finite number of at least 0"),
        ("dense.csv", "64,1100", "1,1100", "line 3: repeats the point of line 2"),
        ("dense.csv", "\n1,1000", "\n0,1000", "line 2 column tokens: must be at least 1"),
        ("dense.csv", "tokens,time_us\n1,1000\n64,1100\n2048,9000\n", "tokens,time_us\n", "holds no rows"),
        ("dense.csv", "tokens,time_us", "tokens,time_us,kind", "line 1: unknown column kind"),
        ("profile.yaml", "tp: 2", "tp: two", "field tp must be a whole number of at least 1"),
        ("profile.yaml", "tp: 2", "tpp: 2", "unknown field tpp"),
        ("profile.yaml", "gpu: AMD MI300X\n", "", "field gpu is missing"),
        ("profile.yaml", META, "- a\n", "is not a mapping"),
        ("profile.yaml", META, "a: [", "not valid YAML"),
    ],
)
def test_errors_name_file_line_and_column(folder: Path, file: str, old: str, new: str, message: str) -> None:
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new, 1))
    with pytest.raises(InputError, match=message) as caught:
        load_profile(folder)
    assert file in str(caught.value)


@pytest.mark.parametrize("file", ["profile.yaml", "attention.csv", "dense.csv"])
def test_missing_files(folder: Path, file: str) -> None:
    (folder / file).unlink()
    with pytest.raises(InputError, match=f"{file}: missing"):
        load_profile(folder)


def test_decode_only_column_needs_both_kinds(folder: Path) -> None:
    (folder / "dense.csv").write_text("tokens,time_us,decode_only\n1,5,1\n")
    with pytest.raises(InputError, match="column decode_only: no row with 0"):
        load_profile(folder)
    (folder / "dense.csv").write_text("tokens,time_us,decode_only\n1,5,2\n")
    with pytest.raises(InputError, match="column decode_only: 2 is neither 0 nor 1"):
        load_profile(folder)


def test_decodes_beside_a_chunk(folder: Path) -> None:
    """Mixed rows price decodes in steps with a chunk by what they add to it (median); pure decode steps stay."""
    rows = (
        "1024,0,1,128,107\n1024,0,1,8192,130\n128,0,1,128,19\n128,0,1,8192,45\n128,4096,1,128,29\n128,4096,1,8192,50\n"
    )
    plain = load_profile(folder)
    (folder / "attention.csv").write_text(ATTENTION + rows)
    profile = load_profile(folder)
    assert profile.tables.decode_mixed_ns[0] == [9_000, 30_000]
    # no mixed row holds 8 decodes: the ratio of the largest batch that one has, 9 to 5 and 30 to 15
    assert profile.tables.decode_mixed_ns[1] == [18_000, 101_000]
    mixed, pure = [RankBatch(((128, 0),), 1, 128)], [RankBatch((), 1, 128)]
    assert step_ns(profile, mixed) - step_ns(plain, mixed) == 4_000
    assert step_ns(profile, pure) == step_ns(plain, pure)
    # kept in a profile file; without mixed rows the file is as before
    save_profile(profile, folder / "kept.npz")
    assert load_profile(folder / "kept.npz").tables == profile.tables
    save_profile(plain, folder / "plain.npz")
    assert load_profile(folder / "plain.npz").tables == plain.tables
    with np.load(folder / "plain.npz") as kept:
        assert "decode_mixed_ns" not in kept.files


def test_mixed_rows_need_the_decode_grid(folder: Path) -> None:
    (folder / "attention.csv").write_text(ATTENTION + "1024,0,1,128,107\n")
    with pytest.raises(InputError, match="no mixed row for 1, 8192"):
        load_profile(folder)
