"""The commands `harness trace ...`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_trace_read import CALL, HEADER, good_trace, write_rows
from typer.testing import CliRunner

from harness.errors import InputError
from harness.trace.cli import app
from harness.trace.read import read_trace

runner = CliRunner()


def ok(*arguments: object) -> str:
    result = runner.invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def refused(*arguments: object) -> InputError:
    result = runner.invoke(app, [str(a) for a in arguments])
    assert isinstance(result.exception, InputError)
    return result.exception


def test_stats_as_table_and_as_json(tmp_path: Path) -> None:
    path = good_trace(tmp_path / "t.jsonl.gz", calls=3)
    found = json.loads(ok("stats", path, "--json"))
    assert (found["calls"], found["blocks"]) == (3, {"kept": 9, "new": 6})
    table = ok("stats", path)
    assert "input_per_call.median" in table and "block_hit_by_window (300 s)" in table


def test_generate_check_convert_give_one_trace(tmp_path: Path) -> None:
    made, copy = tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl"
    said = json.loads(ok("generate", "--seed", 3, "--sessions", 2, made, "--json"))
    assert said["calls"] == sum(len(s.calls) for s in read_trace(made)) and said["bytes"] == made.stat().st_size
    assert "no violation" in ok("check", made)
    assert f"{said['calls']:,} calls" in ok("convert", made, copy)
    assert list(read_trace(copy)) == list(read_trace(made))


def test_generate_without_a_shared_prefix(tmp_path: Path) -> None:
    for name, flags in (("a.jsonl", []), ("b.jsonl", ["--no-shared-prefix"])):
        ok("generate", "--profile", "chat", "--sessions", 4, *flags, tmp_path / name)
    shared, alone = list(read_trace(tmp_path / "a.jsonl")), list(read_trace(tmp_path / "b.jsonl"))
    assert all(s.prefix and s.calls[0].prefix == 0 for s in shared)
    assert all(not s.prefix and s.calls[0].prefix == -1 for s in alone)
    assert [[c.input_tokens for c in s.calls] for s in shared] == [[c.input_tokens for c in s.calls] for s in alone]


def test_convert_repairs_on_request(tmp_path: Path) -> None:
    broken = write_rows(tmp_path / "t.jsonl", {"session": "a", "block": 64}, {**CALL, "a": "main", "new": 9})
    assert "--repair-blocks" in refused("convert", broken, tmp_path / "o.jsonl").remedy
    ok("convert", "--repair-blocks", broken, tmp_path / "o.jsonl")
    (session,) = read_trace(tmp_path / "o.jsonl")
    assert session.calls[0].new_blocks == 5


def test_convert_does_not_write_over_its_input(tmp_path: Path) -> None:
    path = good_trace(tmp_path / "t.jsonl.gz")
    before = path.read_bytes()
    assert "input itself" in refused("convert", path, path).what
    assert path.read_bytes() == before


def test_check_lists_violations_and_fails(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "t.jsonl", HEADER, {**CALL, "out": -1, "i": 3})
    result = runner.invoke(app, ["check", str(path)])
    assert f"{path}: line 2: out:" in result.stdout
    assert isinstance(result.exception, InputError) and "1 violations" in str(result.exception)
    rows = json.loads(runner.invoke(app, ["check", str(path), "--json"]).stdout)
    assert [(row["line"], row["field"]) for row in rows] == [(2, "out")]


@pytest.mark.slow
def test_targets_table(tmp_path: Path) -> None:
    table = ok("targets", "--seeds", "1", "--markdown").splitlines()
    assert table[0].startswith("| statistic | target | seed 1 |")
    assert len(table) > 60
    assert all(line.endswith(("| 1 of 1 |", "| 0 of 1 |")) for line in table[2:])


def test_targets_with_no_list_of_seeds() -> None:
    assert "whole numbers" in refused("targets", "--seeds", "1,x").what
