"""Mooncake import and weka export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from test_trace_read import write_rows
from trace_builders import explicit_blocks, recorded_sessions

from harness.errors import InputError
from harness.trace.dependencies import replayed_starts_s
from harness.trace.exporters.weka import export_weka, weka_document
from harness.trace.generate import generate_sessions
from harness.trace.model import Session
from harness.trace.profile import load_profile
from harness.trace.read import detect_format, read_trace
from harness.trace.stats import trace_stats

ROW: dict[str, Any] = {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}


def test_mooncake_rows_become_independent_calls(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "m.jsonl", ROW, {**ROW, "timestamp": 1500, "input_length": 1600, "hash_ids": [7, 8, 10, 11]}
    )
    assert detect_format(path) == "mooncake"
    (session,) = read_trace(path)
    assert (session.id, session.block_tokens, session.scope) == ("m", 512, "global")
    assert [(c.t_s, c.gap_s, c.deps, c.ref, c.keep_blocks, c.new_blocks) for c in session.calls] == [
        (0.0, 0.0, (), -1, 0, 2),
        (1.5, 1.5, (), 0, 2, 1),
    ]


@pytest.mark.parametrize(
    ("row", "where"),
    [
        ({**ROW, "timestamp": -1}, "line 2: field timestamp"),
        ({**ROW, "input_length": 99}, "line 2: field input_length"),
        ({**ROW, "hash_ids": [1, "a"]}, "line 2: field hash_ids"),
        ({**ROW, "hash_ids": [2**80, 8, 9]}, "line 2: field hash_ids"),
        ({"timestamp": 3}, "line 2: field input_length"),
    ],
)
def test_broken_mooncake_rows_are_named(tmp_path: Path, row: dict[str, Any], where: str) -> None:
    path = write_rows(tmp_path / "m.jsonl", {**ROW, "timestamp": 0}, row)
    with pytest.raises(InputError) as caught:
        list(read_trace(path))
    assert caught.value.where == f"{path}: {where}"


def test_mooncake_time_goes_forward(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "m.jsonl", {**ROW, "timestamp": 10}, ROW)
    with pytest.raises(InputError, match="line 2: field timestamp"):
        list(read_trace(path))


def test_the_real_mooncake_trace(shared: Path) -> None:
    (session,) = read_trace(shared / "traces/mooncake/conversation_trace.jsonl.gz")
    assert len(session.calls) == 12_031
    assert replayed_starts_s(session) == [call.t_s for call in session.calls]
    found = trace_stats([session])
    # Published with the last, partial block of each request counted (0.366); without it somewhat more.
    assert found["block_hit_infinite"] == pytest.approx(0.38, abs=0.02)
    assert found["input_per_call"]["mean"] == pytest.approx(12_035, rel=0.001)


@given(recorded_sessions())
def test_exported_ids_are_the_blocks(session: Session) -> None:
    document = weka_document(session)
    rows = [(0.0, r) for r in document["requests"] if r["type"] == "n"]
    rows += [(g["t"], r) for g in document["requests"] if g["type"] == "subagent" for r in g["requests"]]
    names: dict[tuple[int, int], int] = {}
    blocks = {tuple(names.setdefault(b, len(names)) for b in prompt) for prompt in explicit_blocks(session.calls)}
    found = {tuple(number - 1 for number in row["hash_ids"]) for _, row in rows}
    assert found == blocks
    assert sorted(round(base + row["t"], 6) for base, row in rows) == [call.t_s for call in session.calls]


def test_import_export_import_gives_the_same_calls(shared: Path, tmp_path: Path) -> None:
    first = list(read_trace(shared / "traces/weka"))
    export_weka(tmp_path / "w.jsonl.gz", first)
    again = list(read_trace(tmp_path / "w.jsonl.gz"))
    for one, two in zip(first, again, strict=True):
        for a, b in zip(one.calls, two.calls, strict=True):
            b.ref = a.ref  # of several earlier calls with equally long common prefixes either may be named
        assert one == two


def test_generated_sessions_export_too(tmp_path: Path) -> None:
    made = list(generate_sessions(load_profile("claude-code"), 3, 4))
    export_weka(tmp_path / "w.jsonl", made)
    assert json.loads((tmp_path / "w.jsonl").read_text().splitlines()[0])["id"] == made[0].id
    for one, two in zip(made, read_trace(tmp_path / "w.jsonl"), strict=True):
        assert [(c.t_s, c.api_s, c.input_tokens, c.output_tokens, c.keep_blocks, c.model) for c in one.calls] == [
            (c.t_s, c.api_s, c.input_tokens, c.output_tokens, c.keep_blocks, c.model) for c in two.calls
        ]
