"""Layer times as LLMServingSim's profiler writes them: taken in whole, and every way to refuse them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fake_workers.pricing.bundle import import_bundle, read_shape
from fake_workers.pricing.collectives import load_collectives
from fake_workers.pricing.registry import load_profile
from fake_workers.pricing.steps import RankBatch, step_ns
from harness.cli import app
from harness.errors import InputError

CONFIG = {
    "num_hidden_layers": 10,
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
META = "gpu: Some GPU\nmodel: some/model\nvllm_version: 0.19.0\nprofiled_at: '2026-01-01'\n"
ATTENTION = """prefill_chunk,kv_prefill,n_decode,kv_decode,time_us
0,0,1,16,5
0,0,1,1024,9
0,0,8,16,8
0,0,8,1024,30
16,0,0,0,10
16,512,0,0,20
16,1024,0,0,30
64,0,0,0,40
64,1024,0,0,60
64,0,1,16,48
64,0,1,1024,55
64,512,1,16,900
"""
PER_BLOCK = ("layernorm", "qkv_proj", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj")


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "bf16" / "tp1"
    folder.mkdir(parents=True)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (folder.parent / "meta.yaml").write_text(META)
    (folder / "attention.csv").write_text(ATTENTION)
    lines = [f"{layer},{n},{n}" for layer in ("embedding", *PER_BLOCK, "final_layernorm") for n in (1, 8, 64)]
    (folder / "dense.csv").write_text("\n".join(["layer,tokens,time_us", *lines]) + "\n")
    lines = [f"{layer},{n},{100 + n}" for layer in ("lm_head", "sampler") for n in (1, 8)]
    (folder / "per_sequence.csv").write_text("\n".join(["layer,sequences,time_us", *lines]) + "\n")
    return folder


def test_layers_become_steps(bundle: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    arguments = ["profile", "import", str(bundle), "--config", str(tmp_path / "config.json"), "--out", str(out)]
    result = CliRunner().invoke(app, [*arguments, "--kv-tokens", "5000"])
    assert result.exit_code == 0, result.output
    profile = load_profile(out)
    assert (profile.model, profile.kv_capacity_tokens, profile.max_model_len) == ("some/model", 5000, 4096)
    assert profile.kv_bytes_per_token == 2 * 10 * 2 * 128 * 2
    # ten blocks of seven layers, the norm twice: 80 + embedding and last norm; head of eight sequences
    dense = (82 * 8 + 2 * 108) * 1000
    assert step_ns(profile, [RankBatch((), 8, 8 * 1024)]) == pytest.approx(dense + 10 * 30_000, abs=10)
    # with a chunk: head of one sequence; the decode adds 8 us a layer to the chunk's 40, not its 5 alone
    assert step_ns(profile, [RankBatch(((63, 0),), 1, 16)]) == pytest.approx(
        (82 * 64 + 2 * 101 + 10 * (40 + 8)) * 1000, rel=0.01
    )
    # 64 on 512 was not measured: on the line between 0 and 1024
    assert profile.context_attention_ns(64, 512) == 500_000


def test_tensor_parallel_needs_collectives(bundle: Path, tmp_path: Path) -> None:
    two = bundle.rename(bundle.parent / "tp2")
    shape = read_shape(tmp_path / "config.json")
    with pytest.raises(InputError, match="holds no collectives"):
        import_bundle(two, shape, tmp_path / "out", name="x")
    collectives = load_collectives("h100")
    import_bundle(two, shape, tmp_path / "out", name="x", collectives=collectives)
    profile = load_profile(tmp_path / "out")
    all_reduce_ns = collectives.time_ns("all_reduce", 2, 8 * 1024 * 2)
    assert profile.dense_ns(8, True) == pytest.approx((82 * 8 + 2 * 108) * 1000 + 20 * all_reduce_ns, abs=100)


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("attention.csv", "0,0,8,1024,30", "0,0,8,1024,7", "8 decodes of 1024 tokens take 12% less"),
        ("attention.csv", "0,0,8,1024,30\n", "", "no row of 8 decodes of 1024 tokens"),
        ("attention.csv", "64,1024,0,0,60\n", "", "a chunk of 64 tokens has no prefix to both sides of 512"),
        ("attention.csv", "time_us", "ms", "line 1: is no table of a bundle"),
        ("dense.csv", "act_fn,8,8", "act_fn,9,8", "layer act_fn has other token counts"),
        ("dense.csv", "act_fn,8,8", "moe,8,8", "unknown layer moe"),
        ("dense.csv", "o_proj,1,1", "o_proj,1,fast", "column time_us: 'fast' is not a number"),
        ("per_sequence.csv", "sampler", "lm_head", "layer sampler is missing"),
        ("../meta.yaml", "gpu: Some GPU\n", "", "field gpu is missing"),
        ("../../config.json", '"hidden_size": 1024', '"hidden_size": 1024, "num_experts": 8', "a model with experts"),
        ("../../config.json", ": 10,", ": true,", "field num_hidden_layers must be a whole number"),
    ],
)
def test_faults_are_one_line(bundle: Path, tmp_path: Path, name: str, old: str, new: str, message: str) -> None:
    path = (bundle / name).resolve()
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(InputError, match=message):
        import_bundle(bundle, read_shape(tmp_path / "config.json"), tmp_path / "out", name="x")
