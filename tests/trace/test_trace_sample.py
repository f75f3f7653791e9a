"""Sampling by strata, and the commands that convert and sample."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_builders import call
from typer.testing import CliRunner

from harness.errors import InputError
from harness.trace.cli import app
from harness.trace.generate import generate_sessions
from harness.trace.model import Session
from harness.trace.profile import load_profile
from harness.trace.read import read_trace
from harness.trace.sample import choose, moved, stratum
from harness.trace.write import write_trace


def test_strata_are_calls_and_sub_agents() -> None:
    def session(calls: int, chain: str = "main") -> Session:
        return Session("s", 64, [call(i, float(i), 1, chain=chain if i == 1 else "main") for i in range(calls)])

    assert [stratum(session(n)) for n in (0, 49, 50, 200, 1000)] == [
        (0, False), (0, False), (1, False), (2, False), (3, False),
    ]  # fmt: skip
    assert stratum(session(5, "s1.0")) == (0, True)
    assert stratum(session(5, "f1")) == (0, False)


found = st.lists(st.tuples(st.tuples(st.integers(0, 3), st.booleans()), st.integers(1, 3000)), min_size=1, max_size=60)


@given(found, st.data())
def test_every_stratum_has_its_share(found: list[tuple[tuple[int, bool], int]], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(found)))
    seed = data.draw(st.integers(0, 9))
    chosen = choose(found, count, seed)
    assert len(chosen) == count and chosen <= set(range(len(found)))
    assert chosen == choose(found, count, seed)
    whole = Counter(key for key, _ in found)
    part = Counter(found[number][0] for number in chosen)
    for key, size in whole.items():
        assert abs(part[key] - count * size / len(found)) < 1


def test_seeds_differ() -> None:
    found = [((0, False), calls) for calls in range(100)]
    assert len({frozenset(choose(found, 10, seed)) for seed in range(5)}) > 1


@pytest.mark.parametrize("count", [0, 4])
def test_a_sample_cannot_be_larger_than_the_trace(count: int) -> None:
    with pytest.raises(InputError, match="the trace has 3 sessions"):
        choose([((0, False), 1)] * 3, count, 1)


def test_how_far_statistics_moved() -> None:
    whole = [("a", 10.0), ("b", 0), ("c", None), ("d", 4)]
    sample = [("a", 12.0), ("b", 1), ("c", None), ("d", None)]
    assert [m.change for m in moved(whole, sample)] == [pytest.approx(0.2), None, None, None]


def test_the_sample_command(tmp_path: Path) -> None:
    made = list(generate_sessions(load_profile("claude-code"), 2, 12))
    write_trace(tmp_path / "t.jsonl.gz", made)
    arguments = ["sample", str(tmp_path / "t.jsonl.gz"), str(tmp_path / "s.jsonl"), "--sessions", "5", "--seed", "3"]
    result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    report = json.loads(result.stdout)
    kept = list(read_trace(tmp_path / "s.jsonl"))
    assert len(kept) == 5 and report["calls"] == sum(len(s.calls) for s in kept)
    by_id = {s.id: s for s in made}
    assert all(by_id[s.id] == s for s in kept)
    rows = {row["name"]: row for row in report["statistics"]}
    assert (rows["sessions"]["whole"], rows["sessions"]["sample"]) == (12, 5)
    assert rows["sessions"]["change"] == pytest.approx(-7 / 12)
    assert "block_hit_infinite" in rows
    table = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert "5 of 12 sessions, seed 3" in table.stdout
    with pytest.raises(InputError, match="is the input itself"):
        CliRunner().invoke(app, ["sample", *[arguments[1]] * 2, "--sessions", "1"], catch_exceptions=False)


def test_the_convert_command_takes_formats_and_options(tmp_path: Path) -> None:
    table = tmp_path / "a.csv"
    table.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n1,128,3\n2,640,4\n3,999,5\n")
    own, agentic, mooncake = (str(tmp_path / name) for name in ("o.jsonl", "a.jsonl.gz", "m.jsonl"))
    options = ["--from", "csv", "--calls-per-session", "50", "--reuse", "1", "--block-tokens", "32", "--seed", "2"]
    CliRunner().invoke(app, ["convert", str(table), own, *options], catch_exceptions=False)
    sessions = list(read_trace(own))
    assert {s.block_tokens for s in sessions} == {32}
    assert sum(len(s.calls) for s in sessions) == 3
    CliRunner().invoke(app, ["convert", own, agentic, "--to", "agentic_mooncake"], catch_exceptions=False)
    CliRunner().invoke(app, ["convert", agentic, mooncake, "--to", "mooncake"], catch_exceptions=False)
    back = tmp_path / "back.jsonl"
    CliRunner().invoke(app, ["convert", mooncake, str(back), "--block-tokens", "32"], catch_exceptions=False)
    assert [[(c.input_tokens, c.keep_blocks, c.deps) for c in s.calls] for s in read_trace(back)] == [
        [(c.input_tokens, c.keep_blocks, c.deps) for c in s.calls] for s in sessions
    ]


@pytest.mark.parametrize("wrong", [["--from", "parquet"], ["--reuse", "7"]])
def test_the_convert_command_refuses_wrong_options(tmp_path: Path, wrong: list[str]) -> None:
    table = tmp_path / "a.csv"
    table.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n1,128,3\n")
    with pytest.raises(InputError, match="--"):
        CliRunner().invoke(app, ["convert", str(table), str(tmp_path / "o.jsonl"), *wrong], catch_exceptions=False)
    assert not (tmp_path / "o.jsonl").exists()
