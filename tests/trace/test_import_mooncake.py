"""Mooncake: multi-turn form, agentic form, and what exporters make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from import_helpers import blocks_of, plain, rows_file
from trace_builders import call, recorded_sessions, sessions

from harness.errors import InputError
from harness.trace.dependencies import derive_dependencies, replayed_starts_s
from harness.trace.exporters import export_agentic_mooncake, export_mooncake
from harness.trace.generate import generate_sessions
from harness.trace.importers import ImportOptions
from harness.trace.model import Session
from harness.trace.profile import load_profile
from harness.trace.read import detect_format, read_trace

FOLDER = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=60, deadline=None
)
HEADER = {
    "schema": "dynamo.agentic_mooncake",
    "version": 2,
    "block_size": 64,
    "hash_id_scope": "local",
    "source": {"format": "t", "digest": "d"},
}


def request(name: str, at_ms: float, ids: list[int], **more: Any) -> dict[str, Any]:
    values = {"request_id": name, "play_id": "p", "session_id": "main", "model": "m", "not_before_ms": at_ms}
    return {**values, "input_length": len(ids) * 64, "output_length": 3, "hash_ids": ids, **more}


def edge(name: str, delay_ms: float, trigger: str = "completion", relation: str = "sequence") -> dict[str, Any]:
    return {"request_id": name, "trigger": trigger, "delay_ms": delay_ms, "relation": relation}


def test_multi_turn_rows_with_ids_are_whole_prompts(tmp_path: Path) -> None:
    path = rows_file(
        tmp_path / "m.jsonl",
        {"session_id": "a", "timestamp": 500, "input_length": 1024, "output_length": 5, "hash_ids": [1, 2]},
        {"session_id": "b", "timestamp": 700, "input_length": 600, "output_length": 1, "hash_ids": [1, 9]},
        {"session_id": "a", "delay": 250, "input_length": 1536, "output_length": 7, "hash_ids": [1, 2, 3]},
        {"session_id": "b", "timestamp": 1700, "input_tokens": 512, "output_tokens": 2, "hash_ids": [1]},
    )
    assert detect_format(path) == "mooncake_multi_turn"
    a, b = read_trace(path)
    assert (a.id, a.start_s, b.id, b.start_s) == ("a", 0.5, "b", 0.7)
    assert [(c.ref, c.keep_blocks, c.new_blocks, c.deps, c.gap_s, c.t_s) for c in a.calls] == [
        (-1, 0, 2, (), 0.0, 0.0),
        (0, 2, 1, (0,), 0.25, 0.25),
    ]
    assert [(c.keep_blocks, c.new_blocks, c.gap_s) for c in b.calls] == [(0, 1, 0.0), (1, 0, 1.0)]


def test_multi_turn_rows_without_ids_add_to_the_conversation(tmp_path: Path) -> None:
    path = rows_file(
        tmp_path / "m.jsonl",
        {"session_id": "a", "input_length": 300, "output_length": 40},
        {"session_id": "a", "delay": 2, "input_length": 150, "output_length": 20},
    )
    (session,) = read_trace(path, options=ImportOptions(block_tokens=100))
    assert [(c.input_tokens, c.keep_blocks, c.new_blocks) for c in session.calls] == [(300, 0, 3), (490, 3, 1)]
    (full,) = read_trace(path, options=ImportOptions(block_tokens=100, turns="full", reuse=0.5))
    assert [(c.input_tokens, c.keep_blocks, c.new_blocks) for c in full.calls] == [(300, 0, 3), (150, 1, 0)]


def test_multi_turn_rows_without_lengths_say_what_to_do(tmp_path: Path) -> None:
    path = rows_file(tmp_path / "m.jsonl", {"session_id": "a", "input_length": 300})
    with pytest.raises(InputError, match="--output-tokens"):
        list(read_trace(path))
    (session,) = read_trace(path, options=ImportOptions(output_tokens=9))
    assert session.calls[0].output_tokens == 9


def test_a_wrong_block_size_is_named(tmp_path: Path) -> None:
    path = rows_file(
        tmp_path / "m.jsonl", {"session_id": "a", "input_length": 128, "output_length": 1, "hash_ids": [1, 2]}
    )
    with pytest.raises(InputError, match="line 1: field input_length: .*--block-tokens"):
        list(read_trace(path))
    (session,) = read_trace(path, options=ImportOptions(block_tokens=64))
    assert session.calls[0].blocks == 2


def test_agentic_rows_in_any_order(tmp_path: Path) -> None:
    """As AISimulate writes them: sorted by name, barriers with delay 0, each edge with its own delay."""
    path = rows_file(
        tmp_path / "a.jsonl",
        HEADER,
        request(
            "a-join",
            9000,
            [1, 2, 3],
            dependencies=[
                edge("b-root", 7000),
                edge("c-sub", 1000, relation="join"),
                edge("d-bar", 0, relation="replay_barrier"),
            ],
        ),
        request("b-root", 0, [1, 2], recorded_api_time_ms=2000),
        request(
            "c-sub", 3000, [7], session_id="sub", recorded_api_time_ms=5000,
            dependencies=[edge("b-root", 1000, relation="spawn")],
        ),
        request("d-bar", 500, [8], session_id="side", dependencies=[edge("b-root", 500, "dispatch", "spawn")]),
        {**request("z", 10, [1]), "play_id": "q"},
    )  # fmt: skip
    assert detect_format(path) == "agentic_mooncake"
    first, second = read_trace(path)
    assert (first.id, second.id, first.block_tokens) == ("p", "q", 64)
    assert [(c.chain, c.t_s, c.api_s, c.deps, c.on_start, c.gap_s, c.keep_blocks) for c in first.calls] == [
        ("main", 0.0, 2.0, (), None, 0.0, 0),
        ("f1", 0.5, None, (), 0, 0.5, 0),
        ("f2", 3.0, 5.0, (0,), None, 1.0, 0),
        ("main", 9.0, None, (0, 1, 2), None, 1.0, 2),
    ]
    assert [round(s, 9) for s in replayed_starts_s(first)] == [c.t_s for c in first.calls]
    assert (second.calls[0].t_s, second.calls[0].gap_s) == (0.01, 0.01)


@pytest.mark.parametrize(
    ("rows", "where"),
    [
        ([{**HEADER, "version": 1}], "line 1: field version"),
        ([{**HEADER, "block_size": 0}], "line 1: field block_size"),
        ([HEADER, request("a", 0, [1], dependencies=[edge("b", 0)])], "line 2: field dependencies"),
        ([HEADER, request("a", 0, [1], dependencies=[edge("a", 0)])], "line 2: field dependencies"),
        ([HEADER, request("a", 0, [1]), request("a", 0, [1])], "line 3: field request_id"),
        ([HEADER, request("a", 0, [1, 2], input_length=64)], "line 2: field input_length"),
        ([HEADER, request("a", 0, [1], dependencies=[{**edge("a", 0), "trigger": "x"}])], "line 2: field dependencies"),
        (
            [HEADER, request("a", 0, [1]), {**request("b", 0, [1]), "play_id": "q"}, request("c", 0, [1])],
            "line 4: field play_id",
        ),
    ],
)
def test_broken_agentic_rows_are_named(tmp_path: Path, rows: list[Any], where: str) -> None:
    path = rows_file(tmp_path / "a.jsonl", *rows)
    with pytest.raises(InputError) as caught:
        list(read_trace(path))
    assert caught.value.where == f"{path}: {where}"


@FOLDER
@given(session=recorded_sessions())
def test_agentic_export_is_the_same_calls(tmp_path: Path, session: Session) -> None:
    """Of any recorded session: times, dependencies, chains and sharing come back."""
    derive_dependencies(session)
    export_agentic_mooncake(tmp_path / "a.jsonl", [session])
    (again,) = read_trace(tmp_path / "a.jsonl")
    assert (again.id, again.block_tokens) == (session.id, session.block_tokens)
    assert plain(again) == plain(session)


@FOLDER
@given(session=sessions(), recorded=recorded_sessions())
def test_import_export_import_of_agentic_traces(tmp_path: Path, session: Session, recorded: Session) -> None:
    """Whatever dependencies a session has, they survive the second round unchanged."""
    session.prefix = ()
    for c in session.calls:
        c.prefix = -1
    export_agentic_mooncake(tmp_path / "a.jsonl", [session])
    first = list(read_trace(tmp_path / "a.jsonl"))
    export_agentic_mooncake(tmp_path / "b.jsonl", first)
    assert [plain(s) for s in read_trace(tmp_path / "b.jsonl")] == [plain(s) for s in first]
    keys = ("input_tokens", "output_tokens", "deps", "on_start", "gap_s", "model", "stop", "chain")
    by_size = [
        sorted((tuple(c[k] for k in keys if k not in ("deps", "on_start")) for c in plain(s)), key=repr) for s in first
    ]
    assert by_size == [
        sorted((tuple(c[k] for k in keys if k not in ("deps", "on_start")) for c in plain(s)), key=repr)
        for s in [session]
        if s.calls
    ]


def test_generated_sessions_export_as_plays(tmp_path: Path) -> None:
    made = list(generate_sessions(load_profile("claude-code"), 5, 3))
    export_agentic_mooncake(tmp_path / "a.jsonl.gz", made, "digest")
    again = list(read_trace(tmp_path / "a.jsonl.gz"))
    assert [s.id for s in again] == [s.id for s in made]
    for one, two in zip(made, again, strict=True):
        assert plain(two) == plain(one)


def test_agentic_export_wants_one_block_size(tmp_path: Path) -> None:
    one, two = Session("a", 64, [call(0, 0.0, 1)]), Session("b", 16, [])
    with pytest.raises(InputError, match="blocks of 16 tokens"):
        export_agentic_mooncake(tmp_path / "a.jsonl", [one, two])
    assert list(tmp_path.iterdir()) == []


def test_a_line_exports_as_multi_turn_rows(tmp_path: Path) -> None:
    path = rows_file(
        tmp_path / "m.jsonl",
        {"session_id": "a", "timestamp": 500, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"session_id": "a", "delay": 250.5, "input_length": 1536, "output_length": 7, "hash_ids": [1, 2, 4]},
        {"session_id": "b", "delay": 3, "input_length": 600, "output_length": 1, "hash_ids": [1, 9]},
    )
    first = list(read_trace(path))
    export_mooncake(tmp_path / "n.jsonl", first)
    again = list(read_trace(tmp_path / "n.jsonl"))
    assert [(s.id, s.start_s, plain(s)) for s in again] == [(s.id, s.start_s, plain(s)) for s in first]


def test_chains_of_a_parallel_session_become_sessions(tmp_path: Path) -> None:
    session = Session(
        "a",
        64,
        [
            call(0, 0.0, 4),
            call(1, 1.0, 6, 0, 4, chain="f1", on_start=0, gap_s=1.0),
            call(2, 5.0, 5, 0, 4, deps=(0,), gap_s=3.0),
        ],
        start_s=10.0,
    )
    assert export_mooncake(tmp_path / "m.jsonl", [session]) == 3
    rows = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [(r["session_id"], r.get("timestamp"), r.get("delay")) for r in rows] == [
        ("a/main", 10_000, None),
        ("a/main", None, 3000),
        ("a/f1", 11_000, None),
    ]
    main, side = read_trace(tmp_path / "m.jsonl", options=ImportOptions(block_tokens=64))
    assert blocks_of(main) == [(0, 1, 2, 3), (0, 1, 2, 3, 4)]
    assert len(side.calls) == 1
    assert rows[2]["hash_ids"][:4] == rows[0]["hash_ids"]


def test_shared_prefixes_have_the_same_ids_in_all_sessions(tmp_path: Path) -> None:
    made = list(generate_sessions(load_profile("claude-code"), 3, 6))
    export_mooncake(tmp_path / "m.jsonl", made)
    firsts: dict[str, list[int]] = {}
    for line in (tmp_path / "m.jsonl").read_text().splitlines():
        row = json.loads(line)
        firsts.setdefault(row["session_id"].split("/")[0], row["hash_ids"])
    keys = [
        (s.prefix[s.calls[0].prefix].key, s.prefix[s.calls[0].prefix].blocks, firsts[s.id]) for s in made if s.prefix
    ]
    assert len(keys) > 1
    for key, blocks, ids in keys:
        for other_key, other_blocks, other_ids in keys:
            shared = min(blocks, other_blocks) if key == other_key else 0
            assert ids[:shared] == other_ids[:shared]
            if ids is not other_ids:
                assert not set(ids[shared:]) & set(other_ids[shared:])


def test_the_real_mooncake_trace_goes_round(shared: Path, tmp_path: Path) -> None:
    first = list(read_trace(shared / "traces/mooncake/conversation_trace.jsonl.gz"))
    assert export_mooncake(tmp_path / "conversation_trace.jsonl.gz", first) == 12_031
    again = list(read_trace(tmp_path / "conversation_trace.jsonl.gz"))
    assert [(s.id, s.scope, s.start_s) for s in again] == [(s.id, s.scope, s.start_s) for s in first]
    for one, two in zip(first[0].calls, again[0].calls, strict=True):
        two.ref = one.ref  # of several calls with equally long common prefixes either may be named
        assert one == two
