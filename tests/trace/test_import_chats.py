"""Bailian, LLMServingSim and tables of requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from import_helpers import rows_file

from harness.errors import InputError
from harness.trace.dependencies import replayed_starts_s
from harness.trace.exporters import export_mooncake
from harness.trace.importers import ImportOptions
from harness.trace.read import detect_format, read_trace

CHAT: dict[str, Any] = {"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 40, "output_length": 3,
                        "type": "text", "turn": 1, "hash_ids": [7, 8, 9]}  # fmt: skip


def test_bailian_chats_hang_together_by_parent(tmp_path: Path) -> None:
    path = rows_file(
        tmp_path / "b.jsonl",
        CHAT,
        {**CHAT, "chat_id": 5, "timestamp": 62.0, "hash_ids": [1, 2, 3]},
        {
            **CHAT,
            "chat_id": 2,
            "parent_chat_id": 1,
            "timestamp": 70.114,
            "input_length": 64,
            "hash_ids": [7, 8, 10, 11],
        },
        {
            **CHAT,
            "chat_id": 3,
            "parent_chat_id": 2,
            "timestamp": 90.114,
            "input_length": 64,
            "hash_ids": [7, 8, 10, 12],
        },
        {**CHAT, "chat_id": 4, "parent_chat_id": 2, "timestamp": 95.114, "input_length": 32, "hash_ids": [7, 8]},
        {**CHAT, "chat_id": 6, "parent_chat_id": 99, "timestamp": 96.0},
    )
    assert detect_format(path) == "bailian"
    first, second, orphan = read_trace(path)
    assert (first.id, first.block_tokens, first.scope, first.start_s) == ("1", 16, "global", 61.114)
    assert [(c.chain, c.t_s, c.deps, c.gap_s, c.keep_blocks, c.new_blocks) for c in first.calls] == [
        ("main", 0.0, (), 0.0, 0, 2),
        ("main", 9.0, (0,), 9.0, 2, 2),
        ("main", 29.0, (1,), 20.0, 3, 1),
        ("f1", 34.0, (1,), 25.0, 2, 0),
    ]
    assert replayed_starts_s(first) == [c.t_s for c in first.calls]
    assert (second.id, orphan.id, len(orphan.calls)) == ("5", "6", 1)


@pytest.mark.parametrize(
    ("row", "where"),
    [
        (CHAT, "line 2: field chat_id"),
        ({**CHAT, "chat_id": 2, "input_length": 90}, "line 2: field input_length"),
        ({**CHAT, "chat_id": 2, "parent_chat_id": 1, "timestamp": 1.0}, "line 2: field timestamp"),
        ({**CHAT, "chat_id": "x"}, "line 2: field chat_id"),
    ],
)
def test_broken_bailian_rows_are_named(tmp_path: Path, row: dict[str, Any], where: str) -> None:
    path = rows_file(tmp_path / "b.jsonl", CHAT, row)
    with pytest.raises(InputError) as caught:
        list(read_trace(path))
    assert caught.value.where == f"{path}: {where}"


def test_llmservingsim_token_ids_are_hashed(tmp_path: Path) -> None:
    tokens = list(range(100))
    other = [*tokens[:20], *range(500, 530)]
    path = rows_file(
        tmp_path / "l.jsonl",
        {"input_toks": 50, "output_toks": 4, "arrival_time_ns": 2_000_000_000, "input_tok_ids": other},
        {"input_toks": 100, "output_toks": 4, "arrival_time_ns": 1_000_000_000, "input_tok_ids": tokens},
        {
            "session_id": "s",
            "arrival_time_ns": 4_059_740,
            "sub_requests": [
                {"input_toks": 40, "output_toks": 1, "tool_duration_ns": 500_000_000, "input_tok_ids": tokens[:40]},
                {"input_toks": 64, "output_toks": 2, "tool_duration_ns": 0, "input_tok_ids": tokens[:64]},
            ],
        },
    )
    assert detect_format(path) == "llmservingsim"
    session, flat = read_trace(path)
    assert (session.id, session.start_s, session.block_tokens) == ("s", 0.00405974, 16)
    assert [(c.keep_blocks, c.new_blocks, c.deps, c.gap_s) for c in session.calls] == [
        (0, 2, (), 0.0),
        (2, 2, (0,), 0.5),
    ]
    assert [(c.t_s, c.gap_s, c.ref, c.keep_blocks, c.new_blocks, c.deps) for c in flat.calls] == [
        (1.0, 1.0, -1, 0, 6, ()),
        (2.0, 2.0, 0, 1, 2, ()),
    ]


def test_llmservingsim_sessions_without_ids_repeat_what_came_before(tmp_path: Path) -> None:
    sub = [{"input_toks": 1472, "output_toks": 133, "tool_duration_ns": 1e9}, {"input_toks": 1582, "output_toks": 125}]
    path = rows_file(tmp_path / "l.jsonl", {"session_id": "s", "arrival_time_ns": 0, "sub_requests": sub})
    (session,) = read_trace(path)
    assert [(c.ref, c.keep_blocks, c.new_blocks) for c in session.calls] == [(-1, 0, 92), (0, 92, 6)]
    (half,) = read_trace(path, options=ImportOptions(reuse=0.5))
    assert half.calls[1].keep_blocks == 46


def test_llmservingsim_ids_must_fit(tmp_path: Path) -> None:
    row = {"input_toks": 5, "output_toks": 4, "arrival_time_ns": 1, "input_tok_ids": [1]}
    with pytest.raises(InputError, match="line 1: field input_tok_ids: 1 ids for 5 tokens"):
        list(read_trace(rows_file(tmp_path / "l.jsonl", row)))


def test_real_llmservingsim_files(shared: Path) -> None:
    (example,) = read_trace(shared / "traces/llmservingsim/example_trace.jsonl")
    assert [c.input_tokens for c in example.calls][:4] == [10, 22, 16, 4]
    (mixed,) = read_trace(shared / "traces/llmservingsim/workload_me2_01_mixed.jsonl")
    assert (len(mixed.calls), sum(c.input_tokens for c in mixed.calls)) == (608, 5_604_402)
    assert replayed_starts_s(mixed) == [c.t_s for c in mixed.calls]
    (small,) = read_trace(shared / "traces/llmservingsim/example_trace.jsonl", options=ImportOptions(block_tokens=5))
    assert sum(c.keep_blocks for c in small.calls) > 0


AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.9799600,640,8\n"
)
BURST = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def test_tables_want_a_model_of_sessions(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(AZURE)
    assert detect_format(path) == "csv"
    with pytest.raises(InputError, match="neither sessions nor block ids.*--calls-per-session 1"):
        list(read_trace(path))
    with pytest.raises(InputError, match="--reuse"):
        list(read_trace(path, options=ImportOptions(calls_per_session=4)))
    (session,) = read_trace(path, options=ImportOptions(calls_per_session=1))
    assert [(c.t_s, c.gap_s, c.input_tokens, c.output_tokens, c.new_blocks, c.ref) for c in session.calls] == [
        (0.0, 0.0, 4808, 10, 75, -1),
        (2.0, 2.0, 640, 8, 10, -1),
    ]


def test_burstgpt_sessions_and_durations(tmp_path: Path) -> None:
    path = tmp_path / "b.csv"
    path.write_text(
        BURST + "5,a,1.5,GPT-4,100,10,110,Conversation log\n6,,2,ChatGPT,64,1,65,API log\n"
        "9,a,4,GPT-4,200,20,220,Conversation log\n"
    )
    with pytest.raises(InputError, match="has sessions.*--reuse"):
        list(read_trace(path))
    session, single = read_trace(path, options=ImportOptions(reuse=1.0, block_tokens=10))
    assert (session.id, session.start_s, single.start_s) == ("a", 0.0, 1.0)
    assert [(c.t_s, c.api_s, c.deps, c.gap_s, c.keep_blocks, c.new_blocks, c.model) for c in session.calls] == [
        (0.0, 1.5, (), 0.0, 0, 10, "GPT-4"),
        (4.0, 4.0, (0,), 2.5, 10, 10, "GPT-4"),
    ]


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ("2023-11-16 18:17:03,x,1", "line 4: field ContextTokens"),
        ("2023-11-16 18:17:03,-3,1", "line 4: field ContextTokens"),
        ("yesterday,3,1", "line 4: field TIMESTAMP"),
        ("2023-11-16 18:17:03,3", "line 4"),
        ("nan,3,1", "line 4: field TIMESTAMP"),
    ],
)
def test_broken_tables_are_named(tmp_path: Path, line: str, where: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(AZURE + line + "\n")
    with pytest.raises(InputError) as caught:
        list(read_trace(path, options=ImportOptions(calls_per_session=1)))
    assert caught.value.where == f"{path}: {where}"


def test_the_real_azure_trace(shared: Path, tmp_path: Path) -> None:
    path = shared / "traces/azure/AzureLLMInferenceTrace_code.csv.gz"
    (session,) = read_trace(path, options=ImportOptions(calls_per_session=1))
    assert (len(session.calls), sum(c.input_tokens for c in session.calls)) == (8_819, 18_059_974)
    assert sum(c.keep_blocks for c in session.calls) == 0
    model = ImportOptions(calls_per_session=8, reuse=0.95, think_s=2.0)
    made = list(read_trace(path, options=model))
    assert sum(len(s.calls) for s in made) == 8_819
    assert 5 < 8_819 / len(made) < 9
    for one in made:
        for earlier, later in zip(one.calls, one.calls[1:], strict=False):
            assert later.t_s >= earlier.t_s + 2.0
            assert later.input_tokens >= earlier.input_tokens + earlier.output_tokens
            assert later.keep_blocks == int(earlier.blocks * 0.95)
    assert [s.id for s in read_trace(path, options=model)] == [s.id for s in made]
    export_mooncake(tmp_path / "m.jsonl", made)
    again = list(read_trace(tmp_path / "m.jsonl", options=ImportOptions(block_tokens=64)))
    assert [[(c.input_tokens, c.keep_blocks, c.gap_s) for c in s.calls] for s in again] == [
        [(c.input_tokens, c.keep_blocks, c.gap_s) for c in s.calls] for s in made
    ]


@pytest.mark.parametrize(
    "wrong",
    [{"reuse": 2.0}, {"calls_per_session": 0.5}, {"block_tokens": 0}, {"think_s": -1.0}, {"bytes_per_token": 0}],
)
def test_wrong_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="--"):
        ImportOptions(**wrong)
