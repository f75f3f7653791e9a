"""A user whose GPU nobody has tables of: his own CSV tables, or an estimate, from files to the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from fake_workers.pricing.profile import StepProfile
from fake_workers.pricing.roofline import build_roofline, read_spec
from harness.cli import main

SPEC = Path(__file__).parents[2] / "examples" / "own-gpu" / "roofline-llama-70b-mi355x.yaml"


def write_tables(profile: StepProfile, folder: Path) -> None:
    """What a user's profiler would write: a thin grid of the profile's own prices."""
    folder.mkdir()
    meta = {
        "name": "my-mi355x", "gpu": "AMD Instinct MI355X", "model": profile.model, "tp": 8,
        "kv_bytes_per_token": 163_840, "kv_bytes_per_token_rank": 20_480, "kv_capacity_tokens": 500_000,
        "max_model_len": 131_072, "source": "rocprof, vLLM 0.32, 2026-11",
    }  # fmt: skip
    (folder / "profile.yaml").write_text(yaml.safe_dump(meta))
    rows = ["prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"]
    for new in (1, 64, 1024, 8192):
        rows += [f"{new},{c},0,0,{profile.context_attention_ns(new, c) / 1e3}" for c in (0, 1024, 16_384, 131_072)]
    for batch in (1, 16, 256):
        rows += [f"0,0,{batch},{c},{profile.decode_row(batch).price_ns(batch * c) / 1e3}" for c in (1, 4096, 131_072)]
    (folder / "attention.csv").write_text("\n".join(rows) + "\n")
    dense = ["tokens,time_us"] + [f"{n},{profile.dense_ns(n, False) / 1e3}" for n in (1, 64, 1024, 8192)]
    (folder / "dense.csv").write_text("\n".join(dense) + "\n")


def experiment(folder: Path, profile: str) -> Path:
    trace = {
        "id": "s1", "block_size": 64, "models": ["m"], "hash_id_scope": "local", "tool_tokens": 0, "system_tokens": 0,
        "requests": [
            {"t": 1.0 * i, "type": "s", "model": "m", "in": 640 * (i + 1), "out": 20,
             "hash_ids": list(range(10 * (i + 1))), "input_types": [], "output_types": [], "stop": "end_turn"}
            for i in range(3)
        ],
    }  # fmt: skip
    (folder / "trace.json").write_text(json.dumps(trace))
    document: dict[str, Any] = {
        "name": "own", "trace": {"path": "trace.json"}, "load": {"arrivals": "at_once"}, "cluster": {"nodes": 1},
        "model": {"profile": profile}, "router": {"kind": "round_robin"},
    }  # fmt: skip
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def run(folder: Path, profile: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["run", str(experiment(folder, profile)), "--out", str(folder / "out")])
    return int(end.value.code or 0)


def summary(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "out" / "summary.json").read_text())
    return document


def test_tables_of_ones_own_run_and_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tables(build_roofline(read_spec(SPEC)), tmp_path / "my-gpu")
    monkeypatch.chdir("/")  # the folder is relative to the experiment file
    assert run(tmp_path, "./my-gpu") == 0
    result = summary(tmp_path)
    assert result["outcome"]["completed"] == 3 and result["validity"]["valid"]
    assert any("user's own tables (rocprof, vLLM 0.32, 2026-11)" in note for note in result["validity"]["notes"])
    assert "AMD Instinct MI355X" in (tmp_path / "out" / "report.html").read_text()


def test_an_estimate_is_marked_in_summary_and_report(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as end:
        main(["profile", "build", "--roofline", str(SPEC), "--out", str(tmp_path)])
    assert not end.value.code
    assert run(tmp_path, "./llama-70b-fp8-tp8-mi355x.npz") == 0
    assert any("ROOFLINE ESTIMATE" in note for note in summary(tmp_path)["validity"]["notes"])
    assert "ROOFLINE ESTIMATE" in (tmp_path / "out" / "report.html").read_text()


def test_a_fault_in_a_table_is_one_line_with_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tables(build_roofline(read_spec(SPEC)), tmp_path / "my-gpu")
    table = tmp_path / "my-gpu" / "attention.csv"
    table.write_text(table.read_text().replace("1024,1024,0,0", "1024,1024,0,zero", 1))
    assert run(tmp_path, "./my-gpu") == 2
    assert "attention.csv line 11 column kv_decode" in capsys.readouterr().err
