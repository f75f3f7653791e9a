"""Profiles estimated from peak rates: shape, distance from measured tables, marks, bad descriptions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from fake_workers.errors import InputError
from fake_workers.pricing.profile import read_profile, save_profile
from fake_workers.pricing.registry import load_profile
from fake_workers.pricing.roofline import KIND, Spec, build_roofline, read_spec
from fake_workers.pricing.steps import RankBatch, step_ns

EXAMPLE = Path(__file__).parents[2] / "examples" / "own-gpu" / "roofline-llama-70b-mi355x.yaml"


def document(**changes: Any) -> dict[str, Any]:
    spec: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    for path, value in changes.items():
        *sections, last = path.split("__")
        place = spec
        for section in sections:
            place = place[section]
        place[last] = value
    return spec


def test_the_example_becomes_a_marked_profile(tmp_path: Path) -> None:
    profile = build_roofline(read_spec(EXAMPLE))
    save_profile(profile, tmp_path / "x.npz")
    again = read_profile(tmp_path / "x.npz")
    assert again.provenance["kind"] == KIND and "not measurements" in again.provenance["notes"][0]
    assert again.kv_bytes_per_token == 163_840
    assert 9_000_000 < again.kv_capacity_tokens < 13_000_000  # 8 x (288 GB x 0.9 - 9 GB of weights - 3 GiB) / 160 KiB
    assert (tmp_path / "x.npz").stat().st_size < 25_000


def test_it_lies_as_far_from_measured_tables_as_the_documentation_says() -> None:
    sheet = {"name": "H200", "peak_flops": 989e12, "memory_bytes_per_s": 4.8e12, "memory_bytes": 151e9}
    model = {"name": "q", "layers": 64, "hidden": 5120, "heads": 64, "kv_heads": 8, "head_dim": 128, "ffn": 25_600,
             "vocab": 151_936, "weight_bytes": 2, "max_model_len": 40_960}  # fmt: skip
    guess = build_roofline(
        Spec.model_validate({"name": "q", "gpu": sheet, "model": model, "layout": {"tp": 2}, "collectives": "h200"})
    )
    table = load_profile("qwen3-32b-bf16-tp2-h200")
    assert guess.kv_bytes_per_token == table.kv_bytes_per_token
    assert guess.kv_capacity_tokens == pytest.approx(table.kv_capacity_tokens, rel=0.05)
    for batch in (
        RankBatch(((8192, 0),)), RankBatch(((2048, 4096),)), RankBatch((), 1, 8192), RankBatch((), 64, 64 * 8192),
        RankBatch(((1024, 0),), 32, 32 * 4000),
    ):  # fmt: skip
        assert step_ns(guess, [batch]) == pytest.approx(step_ns(table, [batch]), rel=0.2)


def test_twice_the_gpu_is_faster_but_collectives_and_launches_remain() -> None:
    slow = build_roofline(Spec.model_validate(document()))
    fast = build_roofline(
        Spec.model_validate(
            document(gpu__peak_flops=1e16, gpu__attention_peak_flops=5e15, gpu__memory_bytes_per_s=1.6e13)
        )
    )
    big, small = RankBatch(((8192, 0),)), RankBatch((), 1, 100)
    assert 1.2 < step_ns(slow, [big]) / step_ns(fast, [big]) < 2
    assert 1 < step_ns(slow, [small]) / step_ns(fast, [small]) < 1.5


def test_experts_are_read_as_often_as_they_are_hit() -> None:
    spec = document(
        model__experts={"count": 128, "top_k": 8, "ffn": 1536}, model__hidden=4096, layout={"tp": 8, "ep": 8}
    )
    del spec["model"]["ffn"]
    profile = build_roofline(Spec.model_validate(spec))
    times = [profile.moe_ns(n, True) for n in (1, 8, 64, 512)]
    assert times == sorted(times) and times[1] < 8 * times[0] and times[3] < 8 * times[2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu__peak_flops": -1}, "gpu.peak_flops"),
        ({"model__ffn": 0}, "either ffn or experts"),
        ({"model__colour": "red"}, "colour"),
        ({"collectives": None}, "collectives are needed"),
        ({"layout": {"tp": 4, "dp": 2}}, "data-parallel ranks step together only"),
        ({"efficiency": {"gemm_compute": 1.2}}, "efficiency.gemm_compute"),
    ],
)
def test_bad_descriptions_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(document(**changes)))
    with pytest.raises(InputError, match=message):
        read_spec(path)


def test_a_collective_that_nobody_measured_is_refused() -> None:
    with pytest.raises(InputError, match="no measured all_reduce of 4 ranks"):
        build_roofline(Spec.model_validate(document(layout={"tp": 4})))
