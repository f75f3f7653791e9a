"""Building: grids and gates on made-up measurements; the real database where it is installed."""

from __future__ import annotations

import importlib.util
import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_workers.errors import InputError
from fake_workers.pricing import build, source
from fake_workers.pricing.accuracy import measure_accuracy, summary
from fake_workers.pricing.build import build_known
from fake_workers.pricing.exchange import Exchange, Experts, experts_of, measured_exchange
from fake_workers.pricing.grid import geometric, monotone, thin, token_samples
from fake_workers.pricing.interpolate import LogCurve
from fake_workers.pricing.known import KNOWN, KnownProfile, known_profile
from fake_workers.pricing.profile import Limits
from fake_workers.pricing.registry import load_profile
from fake_workers.pricing.source import Parts, classify

HAS_DATABASE = importlib.util.find_spec("aiconfigurator_core") is not None


@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=40))
def test_monotone_is_rising_and_leaves_rising_values(values: list[float]) -> None:
    fixed = monotone(values)
    assert len(fixed) == len(values)
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(fixed))
    rising = sorted(values)
    assert monotone(rising) == pytest.approx(rising)


def test_monotone_pools_a_dip() -> None:
    assert monotone([1.0, 8.0, 2.0, 16.0]) == pytest.approx([1.0, 4.0, 4.0, 16.0])


@given(st.lists(st.integers(1, 10**9), min_size=2, max_size=60), st.sampled_from((0.001, 0.05)))
def test_thin_keeps_every_sample_within_tolerance(values: list[int], tolerance: float) -> None:
    xs = list(range(3, 3 + len(values)))
    kept_x, kept_y = thin(xs, values, tolerance)
    curve = LogCurve(kept_x, kept_y)
    for x, y in zip(xs, values, strict=True):
        assert abs(curve.at(x) - y) <= tolerance * y + 1


def test_thin_of_a_power_law_is_its_ends() -> None:
    assert thin([1, 2, 4, 8, 16], [10, 20, 40, 80, 160], 0.001) == ([1, 16], [10, 160])


@given(st.integers(1, 100), st.integers(2, 10**6), st.integers(1, 8))
def test_geometric_axis(low: int, factor: int, per_octave: int) -> None:
    axis = geometric(low, low * factor, per_octave)
    assert axis[0] == low and axis[-1] == low * factor and axis == sorted(set(axis))


def test_token_samples_hold_all_small_counts() -> None:
    samples = token_samples(20_000)
    assert samples[:1088] == list(range(1, 1089)) and samples[-1] == 20_000
    assert samples == sorted(set(samples))


@pytest.mark.parametrize(
    ("operation", "part"),
    [
        ("context_attention", "attention"),
        ("generation_attention", "attention"),
        ("context_ar_1", "dense"),
        ("context_qkv_gemm", "dense"),
        ("context_router_gemm", "dense"),
        ("context_shared_ffn2_gemm", "dense"),
        ("context_moe", "moe"),
        ("context_moe_pre_dispatch", "moe"),
        ("generation_moe_overlap", "moe"),
    ],
)
def test_operations_by_class(operation: str, part: str) -> None:
    assert classify(operation) == part


class FakeSource:
    """A made-up GPU: launch time plus work; decode at `polluted` tokens is measured twice too slow."""

    polluted: tuple[int, ...] = ()
    falling = False
    exchange: Exchange | None = None
    backend_version, package_version = "0", "0"

    def __init__(self, known: KnownProfile) -> None:
        self.known = known
        self.origins: dict[str, dict[str, int]] = {}

    def prefill(self, new: int, cached: int = 0, batch: int = 1) -> Parts:
        attention = max(1.0, batch * new * (cached + new / 2) * 1e-7)
        return Parts(attention, 2 + batch * new * 1e-3, 1 + batch * new * 2e-3)

    def context_attention(self, new: int, cached: int = 0, batch: int = 1) -> float:
        return self.prefill(new, cached, batch).attention

    def decode(self, batch: int, context: int) -> Parts:
        attention = 0.1 + batch * context * 1e-5
        if self.falling:
            attention = 1e3 / (1 + context)
        dense = (2 if batch in self.polluted else 1) * (2 + batch * 1e-3)
        return Parts(attention, dense, 1.0 + batch * 1e-3)

    def memory(self) -> dict[str, int]:
        return {"tokens": 1000}

    def limits(self) -> Limits:
        return Limits(1, 1, 1, 1, 1, 1)


@pytest.fixture
def fake_source(monkeypatch: pytest.MonkeyPatch) -> type[FakeSource]:
    class Own(FakeSource):
        pass

    monkeypatch.setattr(build, "KernelSource", Own)
    return Own


def test_build_from_made_up_measurements(fake_source: type[FakeSource], tmp_path: Path) -> None:
    fake_source.polluted = (1, 8)
    (path,) = build_known(["glm-5.2-fp8-dp8ep8-b200"], tmp_path, log=lambda _: None)
    profile = load_profile(path)
    # The disturbed batches cost what a batch one larger does: real engines can pad.
    assert profile.dense_ns(1, True) == pytest.approx(2_002_000, abs=1)
    assert profile.dense_ns(8, True) == pytest.approx(2_009_000, rel=1e-3)
    assert profile.moe_ns(800, False) == pytest.approx((1 + 100 * 2e-3) * 1e6, rel=2e-3)  # 100 tokens a rank
    error = profile.provenance["interpolation_error"]
    assert error["prefill_step"]["mean"] < 0.01 and error["dense"]["mean"] < 0.001
    assert profile.provenance["distance_from_monotone"]["dense_decode"]["max"] == pytest.approx(0.5, abs=0.01)


def test_a_stated_capacity_takes_the_place_of_the_computed_one(fake_source: type[FakeSource], tmp_path: Path) -> None:
    (path,) = build_known(["glm-5.2-fp8-dp8ep8-h200"], tmp_path, log=lambda _: None)
    profile = load_profile(path)
    assert profile.kv_capacity_tokens == profile.provenance["memory"]["tokens"] == 182_000
    assert profile.capacity_stated_by.startswith("llm-d blog")
    (path,) = build_known(["glm-5.2-fp8-dp8ep8-b200"], tmp_path, log=lambda _: None)
    assert load_profile(path).capacity_stated_by == ""


def test_measured_dispatch_has_tables_of_its_own(fake_source: type[FakeSource], tmp_path: Path) -> None:
    fake_source.exchange = Exchange([1, 100], [1.0, 2.0], [1, 50], [0.5, 0.6], "DeepEP on 2 nodes")
    (path,) = build_known(["glm-5.2-fp8-dp16ep16-h200"], tmp_path, log=lambda _: None)
    profile = load_profile(path)
    assert profile.exchange_ns(100, False) == 2_000_000 and profile.exchange_ns(1, True) == 500_000
    assert "DeepEP on 2 nodes, priced by the tokens of the fullest rank" in profile.provenance["notes"][-1]
    profile.exchange_ns(101, False)
    assert profile.out_of_grid["tokens of one rank's dispatch"] == 101


def test_experts_of_a_model_configuration(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    moe = {"hidden_size": 6144, "n_routed_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 78}
    file.write_text(json.dumps(moe | {"first_k_dense_replace": 3}))
    assert experts_of(file) == Experts(6144, 256, 8, 75)
    file.write_text(json.dumps({"hidden_size": 4096, "num_hidden_layers": 32}))
    assert experts_of(file) is None
    assert measured_exchange(tmp_path, Experts(6144, 256, 8, 75), 2) is None


def test_shipped_dispatch_times_are_the_measured_rows() -> None:
    # 8192 tokens of hidden size 7168 on two nodes of H200: dispatch 1,609 us, combine 3,928 us (20 SMs); decode steps
    # 32 tokens: 40.07 and 60.93 us. DeepSeek-V3.2 has that hidden size and 58 layers with experts.
    deepseek = load_profile("deepseek-v3.2-fp8-dp16ep16-h200")
    assert deepseek.exchange_ns(8192, False) == 58 * (1_609_000 + 3_928_000)
    assert deepseek.exchange_ns(32, True) == 58 * (40_070 + 60_930)
    # GLM-5.2 sends 6144: the same bytes with 7/6 of the tokens, in 75 layers.
    glm = load_profile("glm-5.2-fp8-dp16ep16-h200")
    assert glm.exchange_ns(9557, False) == 75 * (1_609_000 + 3_928_000)


def test_polluted_rows_are_refused(fake_source: type[FakeSource], tmp_path: Path) -> None:
    fake_source.falling = True
    with pytest.raises(InputError, match="rows of decode_attention fall where they must rise"):
        build_known(["glm-5.2-fp8-dp8ep8-b200"], tmp_path, log=lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_unknown_profile_cannot_be_built(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"not a profile that can be built; nearest: .*llama-3\.3-70b-fp8-tp8"):
        build_known(["llama-70b-fp8-tp8-h200"], tmp_path)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(source, "import_module", missing)
    with pytest.raises(InputError, match=r"needs the package aiconfigurator-core.*pip install '\.\[profile\]'"):
        source.KernelSource(KNOWN[0])


def test_summary() -> None:
    assert summary([0.1, 0.3, 0.2]) == {"mean": 0.2, "p95": 0.3, "max": 0.3}


@pytest.mark.skipif(not HAS_DATABASE, reason="aiconfigurator-core (extra [profile]) is not installed")
@pytest.mark.parametrize("name", ["glm-5.2-fp8-dp8ep8-b200", "glm-5.2-fp8-dp16ep16-h200", "qwen3-32b-bf16-tp2-h100"])
def test_shipped_profiles_are_what_the_database_gives(name: str, tmp_path: Path) -> None:
    (path,) = build_known([name], tmp_path, log=lambda _: None)
    assert load_profile(path).tables == load_profile(name).tables


@pytest.mark.skipif(not HAS_DATABASE, reason="aiconfigurator-core (extra [profile]) is not installed")
def test_error_against_the_database_at_other_points() -> None:
    known = known_profile("llama-3.3-70b-fp8-tp8-h200")
    assert known is not None
    error = measure_accuracy(load_profile(known.name), source.KernelSource(known), seed=7)
    assert error["prefill_step"]["mean"] < 0.003 and error["decode_step"]["mean"] < 0.003
    assert math.isfinite(error["same_chunks"]["max"])
