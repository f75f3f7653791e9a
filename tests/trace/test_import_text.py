"""Formats that carry text: LMCache agent traces, OpenTelemetry, aiperf conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from import_helpers import rows_file

from harness.errors import InputError
from harness.trace.dependencies import replayed_starts_s
from harness.trace.hashes import block_ids
from harness.trace.importers import ImportOptions
from harness.trace.importers.tokens import TokenStream
from harness.trace.model import Session
from harness.trace.read import detect_format, read_trace

SMALL = ImportOptions(block_tokens=4, bytes_per_token=1)


@given(st.binary(max_size=60), st.binary(max_size=60), st.integers(1, 9))
def test_block_ids_are_equal_as_far_as_the_prefix_is(a: bytes, b: bytes, size: int) -> None:
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    first, second = block_ids(a, size), block_ids(b, size)
    assert len(first) == len(a) // size
    common = next(
        (i for i, (x, y) in enumerate(zip(first, second, strict=False)) if x != y), min(len(first), len(second))
    )
    assert common == min(same // size, len(first), len(second))


@given(st.text(max_size=50), st.integers(1, 5), st.integers(2, 9))
def test_full_blocks_never_exceed_the_tokens(text: str, width: int, block: int) -> None:
    stream = TokenStream(ImportOptions(block_tokens=block, bytes_per_token=width))
    data = stream.encode(text)
    assert 0 <= stream.count(data) - len(stream.ids(data)) * block < block


def test_text_rows_become_sessions(tmp_path: Path) -> None:
    row = {"timestamp": 1_000_000, "input": "abcdefgh", "output": "xy", "session_id": "a"}
    path = rows_file(
        tmp_path / "t.jsonl",
        row,
        {**row, "timestamp": 1_500_000, "session_id": "b"},
        {**row, "timestamp": 3_000_000, "input": "abcdefghijkl!"},
    )
    assert detect_format(path) == "text"
    a, b = read_trace(path, options=SMALL)
    assert (a.id, a.start_s, b.id, b.start_s) == ("a", 0.0, "b", 0.5)
    assert [
        (c.t_s, c.input_tokens, c.output_tokens, c.keep_blocks, c.new_blocks, c.deps, c.gap_s) for c in a.calls
    ] == [
        (0.0, 8, 2, 0, 2, (), 0.0),
        (2.0, 13, 2, 2, 1, (0,), 2.0),
    ]


def test_a_first_row_longer_than_what_is_peeked_at(tmp_path: Path) -> None:
    row = {"input": "x" * 200_000, "timestamp": 1, "output": "y", "session_id": "a"}
    path = rows_file(tmp_path / "t.jsonl.gz", row)
    assert detect_format(path) == "text"
    (session,) = read_trace(path)
    assert session.calls[0].input_tokens == 50_000


def test_the_real_lmcache_traces(shared: Path) -> None:
    sessions = list(read_trace(shared / "traces/lmcache_agent/miniswe"))
    calls = [c for s in sessions for c in s.calls]
    assert (len(sessions), len(calls), sum(c.input_tokens for c in calls)) == (20, 402, 2_418_532)
    # Agents append to their conversation: all but the last block of the prompt before is kept.
    for session in sessions:
        assert {c.chain for c in session.calls} == {"main"}
        for earlier, later in zip(session.calls, session.calls[1:], strict=False):
            assert later.keep_blocks >= earlier.blocks - 1
        assert replayed_starts_s(session) == pytest.approx([c.t_s for c in session.calls], abs=1e-6)


def test_a_tokenizer_by_path(tmp_path: Path, shared: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    row = {"timestamp": 1, "input": "a b a b b", "output": "a b", "session_id": "a"}
    options = ImportOptions(tokenizer=str(tmp_path / "tokenizer.json"), block_tokens=2)
    (session,) = read_trace(rows_file(tmp_path / "t.jsonl", row, {**row, "input": "a b a b b a"}), options=options)
    assert [(c.input_tokens, c.output_tokens, c.keep_blocks, c.new_blocks) for c in session.calls] == [
        (5, 2, 0, 2),
        (6, 2, 2, 1),
    ]


def test_a_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    path = rows_file(tmp_path / "t.jsonl", {"timestamp": 1, "input": "a", "output": "b", "session_id": "a"})
    with pytest.raises(InputError, match="--tokenizer gone.json: is not a file"):
        list(read_trace(path, options=ImportOptions(tokenizer="gone.json")))


def otlp_span(name: str, start_s: float, end_s: float, parent: str = "", **attributes: Any) -> dict[str, Any]:
    kinds = {str: "stringValue", int: "intValue"}
    return {
        "traceId": "t",
        "spanId": name,
        "parentSpanId": parent,
        "startTimeUnixNano": str(int(start_s * 1e9)),
        "endTimeUnixNano": str(int(end_s * 1e9)),
        "attributes": [
            {"key": "gen_ai." + key.replace("__", "."), "value": {kinds[type(value)]: str(value)}}
            for key, value in attributes.items()
        ],
    }


def test_otlp_with_usage_and_agents(tmp_path: Path) -> None:
    """Without messages there are lengths only, and `reuse` says what is shared."""
    usage = {"usage__input_tokens": 640, "usage__output_tokens": 7, "request__model": "m"}
    spans = [
        otlp_span("root", 100, 190, operation__name="invoke_agent"),
        otlp_span("1", 101, 103, "root", operation__name="chat", **usage),
        otlp_span("tool", 103, 180, "root", operation__name="execute_tool"),
        otlp_span("agent", 104, 170, "tool", operation__name="invoke_agent"),
        otlp_span("2", 105, 106, "agent", operation__name="chat", **usage),
        otlp_span("3", 181, 182, "root", operation__name="chat", **usage),
    ]
    path = tmp_path / "o.json"
    path.write_text(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}, indent=1))
    assert detect_format(path) == "otel"
    (session,) = read_trace(path, options=ImportOptions(reuse=0.5))
    assert [
        (c.chain, c.t_s, c.api_s, c.deps, c.gap_s, c.keep_blocks, c.new_blocks, c.model) for c in session.calls
    ] == [
        ("main", 0.0, 2.0, (), 0.0, 0, 10, "m"),
        ("s1.0", 4.0, 1.0, (0,), 2.0, 5, 5, "m"),
        ("main", 80.0, 1.0, (0, 1), 75.0, 5, 5, "m"),
    ]


def test_otel_messages_are_hashed(tmp_path: Path) -> None:
    def span(name: str, second: int, messages: list[dict[str, str]]) -> dict[str, Any]:
        at = f"2026-02-25T10:00:0{second}"
        attributes = {"gen_ai.input.messages": json.dumps(messages), "gen_ai.output.text": "four"}
        return {"span_id": name, "start_time": at, "end_time": at + ".5", "attributes": attributes}

    one = {"role": "user", "content": "Question"}
    two = {"role": "assistant", "content": "four"}
    document = {"trace_id": "t", "spans": [span("b", 3, [one, two, one]), span("a", 1, [one])]}
    path = tmp_path / "o.json"
    path.write_text(json.dumps(document))
    (session,) = read_trace(path, options=SMALL)
    assert [(c.t_s, c.api_s, c.input_tokens, c.output_tokens, c.keep_blocks, c.deps) for c in session.calls] == [
        (0.0, 0.5, 15, 4, 0, ()),
        (2.0, 0.5, 46, 4, 3, (0,)),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"trace_id": "t", "spans": []}', "no span is a call"),
        ('{"trace_id": "t", "spans": [1]}', r"field spans\[0\]: is not an object"),
        ('{"trace_id": "t", "spans": [{"start_time": "x"}]}', "is not a time: 'x'"),
        ('{"trace_id": "t", "spans": [{"start_time": "2026-01-01"}]}', "is not a time: None"),
        ('{"trace_id": "t", "spans": [', "is not JSON"),
        (
            '{"trace_id": "t", "spans": [{"start_time": "2026-01-02", "end_time": "2026-01-01"}]}',
            "before the span's start",
        ),
        (
            '{"trace_id": "t", "spans": [{"start_time": "2026-01-01", "end_time": "2026-01-02", '
            '"attributes": {"gen_ai.usage.output_tokens": -3}}]}',
            "is not a number of tokens",
        ),
    ],
)
def test_broken_otel_documents_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "o.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        list(read_trace(path))


def test_the_real_otel_files(shared: Path) -> None:
    expected = {
        "advanced_code_review_workflow.json": (1, 15),
        "advanced_customer_support_escalation.json": (1, 9),
        "advanced_fan_in_dependencies.json": (1, 4),
        "advanced_multi_agent_research.json": (1, 12),
        "advanced_parallel_requests.json": (1, 5),
        "advanced_prefix_sharing_example.json": (4, 7),
        "advanced_software_architecture_review.json": (1, 15),
        "simple_simple_chain.json": (1, 3),
        "simple_simple_chain_alt.json": (1, 3),
    }
    for name, (count, calls) in expected.items():
        sessions = list(read_trace(shared / "traces/otel" / name))
        assert (len(sessions), sum(len(s.calls) for s in sessions)) == (count, calls), name
        for session in sessions:
            assert replayed_starts_s(session) == pytest.approx([c.t_s for c in session.calls], abs=1e-6)
    (fan_in,) = read_trace(shared / "traces/otel/advanced_fan_in_dependencies.json")
    assert fan_in.calls[3].deps == (0, 1, 2)


def test_a_document_that_is_no_trace(shared: Path) -> None:
    with pytest.raises(InputError, match="no known trace format begins with the fields input_sequence_length"):
        list(read_trace(shared / "traces/otel/workload_catalog_code-generation.json"))


def message(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def turn(text: str, output: int = 4, **more: Any) -> dict[str, Any]:
    return {"messages": [message(text)], "max_tokens": output, **more}


def shape(session: Session) -> list[tuple[Any, ...]]:
    return [(c.chain, c.t_s, c.deps, c.gap_s, c.input_tokens, c.keep_blocks) for c in session.calls]


def test_aiperf_multi_turn_accumulates(tmp_path: Path) -> None:
    turns = [{"text": "abcdefgh", "output_length": 4}, {"texts": ["ij", {"contents": ["k"]}], "delay": 1500}]
    path = rows_file(tmp_path / "m.jsonl", {"session_id": "a", "turns": turns})
    assert detect_format(path) == "aiperf_multi_turn"
    with pytest.raises(InputError, match="line 1: field turns: .*--output-tokens"):
        list(read_trace(path, options=SMALL))
    options = ImportOptions(block_tokens=4, bytes_per_token=1, output_tokens=9)
    (session,) = read_trace(path, options=options)
    assert shape(session) == [("main", 0.0, (), 0.0, 8, 0), ("main", 1.5, (0,), 1.5, 16, 2)]
    assert [c.output_tokens for c in session.calls] == [4, 9]


def test_dag_forks_inherit_spawns_do_not(tmp_path: Path) -> None:
    """'<user>' and the newline make 7 more bytes of each message: 8 for one letter, two blocks of 4."""
    path = rows_file(
        tmp_path / "d.jsonl",
        {
            "session_id": "root",
            "turns": [
                turn("a", spawns=["x", {"children": ["y"], "join_at": 2}]),
                turn("b", delay=1000),
                turn("c", forks=["z"]),
            ],
        },
        {"session_id": "x", "turns": [turn("x", delay=500)]},
        {"session_id": "y", "turns": [turn("y"), turn("y", delay=9000)]},
        {"session_id": "z", "turns": [turn("z")]},
        {"session_id": "other", "turns": [turn("a")]},
    )
    assert detect_format(path) == "aiperf_dag"
    root, other = read_trace(path, options=SMALL)
    assert (root.id, other.id, len(other.calls)) == ("root", "other", 1)
    assert shape(root) == [
        ("main", 0.0, (), 0.0, 8, 0),
        ("s2.0", 0.0, (0,), 0.0, 8, 1),
        ("s1.0", 0.5, (0,), 0.5, 8, 1),
        ("main", 1.5, (0, 2), 1.0, 20, 2),
        ("s2.0", 9.0, (1,), 9.0, 20, 2),
        ("main", 9.0, (3, 4), 0.0, 32, 5),
        ("f3", 9.0, (5,), 0.0, 44, 8),
    ]


def test_dag_orchestrator_rounds(tmp_path: Path) -> None:
    rounds = [{"spawns": ["a", "b"]}, {"spawns": ["c"], "think_time_ms": 2000}]
    path = rows_file(
        tmp_path / "d.jsonl",
        {"session_id": "o", "orchestrator": True, "rounds": rounds, "think_time_ms": 1000},
        *({"session_id": name, "turns": [turn(name)]} for name in "abc"),
    )
    (session,) = read_trace(path, options=SMALL)
    assert [(c.t_s, c.deps, c.gap_s) for c in session.calls] == [(1.0, (), 1.0), (1.0, (), 1.0), (3.0, (0, 1), 2.0)]


def test_dag_isolated_turns_and_early_children(tmp_path: Path) -> None:
    path = rows_file(
        tmp_path / "d.jsonl",
        {
            "session_id": "r",
            "context_mode": "message_array_with_responses",
            "turns": [turn("a"), turn("abcdefghi")],
            "pre_session_spawns": ["p"],
        },
        {"session_id": "p", "turns": [turn("p")]},
    )
    (session,) = read_trace(path, options=SMALL)
    assert [(c.chain, c.input_tokens, c.deps) for c in session.calls] == [
        ("f1", 8, ()),
        ("main", 8, ()),
        ("main", 16, (1,)),
    ]


@pytest.mark.parametrize(
    ("rows", "message_text"),
    [
        ([{"session_id": "a", "turns": [turn("a", forks=["b"])]}], "'b' that it begins is not in the file"),
        ([{"session_id": "a", "turns": [turn("a", forks=["a"])]}], "every conversation is begun by another one"),
        ([{"session_id": "a", "turns": [turn("a")]}] * 2, "stands twice"),
        (
            [
                {"session_id": "a", "turns": [turn("a")]},
                {"session_id": "b", "turns": [turn("a", forks=["c"])]},
                {"session_id": "c", "turns": [turn("a", forks=["b"])]},
            ],
            "line 2: field session_id: the conversation is begun only by those that it begins itself",
        ),
        ([{"session_id": "a", "turns": [{"messages": [message("a")]}]}], "--output-tokens"),
        ([{"session_id": "a", "turns": [turn("a", max_tokens=-1)]}], r"field turns: .*"),
    ],
)
def test_broken_dags_are_named(tmp_path: Path, rows: list[Any], message_text: str) -> None:
    with pytest.raises(InputError, match=message_text):
        list(read_trace(rows_file(tmp_path / "d.jsonl", *rows)))
