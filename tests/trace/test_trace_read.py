"""Reading and writing the project's format, and what broken files end in."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_builders import call, sessions

from harness.errors import InputError
from harness.trace import source
from harness.trace.model import Session
from harness.trace.read import count_calls, detect_format, read_trace, trace_files
from harness.trace.write import session_rows, write_trace

HEADER: dict[str, Any] = {"v": 1, "session": "a", "block": 64, "models": ["m"], "prefix": [{"key": "k", "blocks": 3}]}
CALL: dict[str, Any] = {
    "i": 0, "t": 0.5, "api": 1.5, "chain": "main", "in": 330, "out": 7, "ref": -1, "keep": 0, "new": 5, "deps": [],
}  # fmt: skip
NEXT = {**CALL, "i": 1, "t": 4.0, "ref": 0, "keep": 5, "new": 0, "deps": [0], "gap": 2.0}


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@settings(max_examples=60)
@given(data=st.data())
def test_write_then_read_gives_the_same_sessions(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("trace")
    wanted = [data.draw(sessions(session_id=f"s{number}")) for number in range(data.draw(st.integers(0, 3)))]
    for name in ("t.jsonl", "t.jsonl.gz"):
        assert write_trace(folder / name, wanted) == sum(len(session.calls) for session in wanted)
        assert list(read_trace(folder / name)) == wanted


def test_equal_sessions_give_equal_bytes_under_any_name(tmp_path: Path) -> None:
    session = Session("a", 64, [call(0, 0.0, 4), call(1, 3.5, 6, 0, 4, deps=(0,), gap_s=1.5)])
    write_trace(tmp_path / "one.jsonl.gz", [session])
    write_trace(tmp_path / "two.jsonl.gz", [session])
    assert (tmp_path / "one.jsonl.gz").read_bytes() == (tmp_path / "two.jsonl.gz").read_bytes()
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["one.jsonl.gz", "two.jsonl.gz"]


def test_rows_read_into_the_fields_they_name(tmp_path: Path) -> None:
    row = {**NEXT, "on": 0, "m": 0, "stop": "tool_use"}
    (session,) = read_trace(write_rows(tmp_path / "t.jsonl", HEADER, {**CALL, "pre": 0}, row))
    assert (session.id, session.block_tokens, session.scope, session.start_s) == ("a", 64, "local", None)
    assert session.prefix[session.calls[0].prefix].key == "k"
    second = session.calls[1]
    assert (second.t_s, second.api_s, second.input_tokens, second.output_tokens) == (4.0, 1.5, 330, 7)
    assert (second.ref, second.keep_blocks, second.new_blocks, second.blocks) == (0, 5, 0, 5)
    assert (second.deps, second.on_start, second.gap_s, second.model, second.stop) == ((0,), 0, 2.0, "m", "tool_use")


def test_source_stands_in_every_header() -> None:
    rows = [json.loads(row) for row in session_rows(Session("a", 64, [call(0, 0.0, 4)]), {"format": "weka"})]
    assert rows[0]["src"] == {"format": "weka"}
    assert rows[1]["in"] == 256


def test_no_deps_in_a_session_means_derived_ones(tmp_path: Path) -> None:
    bare = [{k: v for k, v in row.items() if k not in ("deps", "gap")} for row in (CALL, NEXT)]
    (session,) = read_trace(write_rows(tmp_path / "t.jsonl", HEADER, *bare))
    assert [(c.deps, c.gap_s) for c in session.calls] == [((), 0.5), ((0,), 2.0)]


@pytest.mark.parametrize("content", [b"", b"\n\n  \n"])
def test_an_empty_file_has_no_sessions(tmp_path: Path, content: bytes) -> None:
    for name, data in (("t.jsonl", content), ("t.jsonl.gz", gzip.compress(content))):
        (tmp_path / name).write_bytes(data)
        assert list(read_trace(tmp_path / name)) == []


def test_a_session_without_calls_is_a_session(tmp_path: Path) -> None:
    assert count_calls(read_trace(write_rows(tmp_path / "t.jsonl", HEADER, {**HEADER, "session": "b"}))) == (2, 0)


def without(name: str, row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != name}


BROKEN_ROWS: list[tuple[str, list[dict[str, Any]], str, str]] = [
    ("no session id", [{**HEADER, "session": None}, CALL], "line 1: field session", "expected str"),
    ("call without header", [CALL], "line 1", "no known trace format begins with the fields i, t"),
    ("no header", [{"v": 1, "session": "a"}], "line 1: field block", "missing"),
    ("version", [{**HEADER, "v": 2}], "line 1: field v", "<= 1"),
    ("scope", [{**HEADER, "scope": "world"}], "line 1: field scope", "local or global"),
    ("same id twice", [HEADER, HEADER], "line 2: field session", "twice"),
    ("unknown header field", [{**HEADER, "blok": 3}], "line 1: field blok", "not a field"),
    ("unknown call field", [HEADER, {**CALL, "gpa": 1}], "line 2: field gpa", "not a field"),
    ("missing field", [HEADER, without("out", CALL)], "line 2: field out", "missing"),
    ("text for a number", [HEADER, {**CALL, "in": "330"}], "line 2: field in", "expected int, got '330'"),
    ("number for text", [HEADER, {**CALL, "chain": 1}], "line 2: field chain", "expected str"),
    ("bool for a number", [HEADER, {**CALL, "out": True}], "line 2: field out", "expected int"),
    ("negative tokens", [HEADER, {**CALL, "out": -1}], "line 2: field out", ">= 0, got -1"),
    ("negative time", [HEADER, {**CALL, "t": -0.1}], "line 2: field t", ">= 0"),
    ("absurd tokens", [HEADER, {**CALL, "out": 2**60}], "line 2: field out", "<="),
    ("wrong number", [HEADER, CALL, {**NEXT, "i": 2}], "line 3: field i", "must be 1"),
    ("time goes back", [HEADER, CALL, {**NEXT, "t": 0.25}], "line 3: field t", "in order"),
    ("ref to itself", [HEADER, CALL, {**NEXT, "ref": 1}], "line 3: field ref", "earlier call"),
    ("ref below -1", [HEADER, {**CALL, "ref": -2}], "line 2: field ref", ">= -1"),
    ("keep without ref", [HEADER, {**CALL, "keep": 2, "new": 3}], "line 2: field keep", "names no call"),
    ("keep beyond ref", [HEADER, CALL, {**NEXT, "in": 394, "keep": 6}], "line 3: field keep", "5 blocks of call 0"),
    ("too few blocks", [HEADER, {**CALL, "new": 4}], "line 2: field in", "4 blocks of 64"),
    ("too many blocks", [HEADER, {**CALL, "new": 6}], "line 2: field in", "6 blocks of 64"),
    ("dep on itself", [HEADER, {**CALL, "deps": [0]}], "line 2: field deps", "earlier call"),
    ("dep twice", [HEADER, CALL, {**NEXT, "deps": [0, 0]}], "line 3: field deps", "rising"),
    ("negative dep", [HEADER, CALL, {**NEXT, "deps": [-1]}], "line 3: field deps", ">= 0"),
    ("on itself", [HEADER, {**CALL, "on": 0}], "line 2: field on", "earlier call"),
    ("deps in one call only", [HEADER, CALL, without("deps", NEXT)], "line 3: field deps", "in none"),
    ("gap without deps", [HEADER, {**without("deps", CALL), "gap": 1}], "line 2: field gap", "deps"),
    ("negative gap", [HEADER, CALL, {**NEXT, "gap": -1}], "line 3: field gap", ">= 0"),
    ("no such model", [HEADER, {**CALL, "m": 1}], "line 2: field m", "1 models"),
    ("no such prefix", [HEADER, {**CALL, "pre": 1}], "line 2: field pre", "1 prefixes"),
    ("prefix and ref", [HEADER, CALL, {**NEXT, "pre": 0}], "line 3: field pre", "without ref"),
    ("prefix longer than the call", [HEADER, {**CALL, "in": 128, "new": 2, "pre": 0}], "line 2: field pre", "only 2"),
    ("no object", [HEADER, [1]], "line 2", "list"),  # type: ignore[list-item]
]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "where", "what"), [row[1:] for row in BROKEN_ROWS], ids=[row[0] for row in BROKEN_ROWS]
)
def test_a_broken_row_names_line_and_field(tmp_path: Path, rows: list[dict[str, Any]], where: str, what: str) -> None:
    path = write_rows(tmp_path / "t.jsonl", *rows)
    with pytest.raises(InputError) as caught:
        list(read_trace(path))
    assert caught.value.where == f"{path}: {where}"
    assert what in caught.value.what
    assert caught.value.remedy


def good_trace(path: Path, calls: int = 400) -> Path:
    write_trace(path, [Session("a", 64, [call(i, i * 3.0, 4 + i, i - 1, 3 + i if i else 0) for i in range(calls)])])
    return path


def test_a_truncated_gzip_names_the_line_that_it_ends_in(tmp_path: Path) -> None:
    path = good_trace(tmp_path / "t.jsonl.gz")
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(InputError, match=r"line \d+: the gzip data ends in the middle; .*truncated"):
        list(read_trace(path))


def test_damaged_gzip_is_refused(tmp_path: Path) -> None:
    path = good_trace(tmp_path / "t.jsonl.gz")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(InputError):
        list(read_trace(path))


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (bytes(range(256)) * 8, "is not"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 100, "is not"),
        (b"hello, this is a letter\n", "is not JSON"),
        (b"TIMESTAMP,ContextTokens\n1,2\n", "is a table of azure without its column GeneratedTokens"),
        (b"[1, 2, 3]\n", "list"),
        (b"12\n", "int"),
        (b'{"a": 1, "b": 2}\n', "no known trace format begins with the fields a, b"),
        (b'{"v": 1, "session": "\xff\xfe"}\n', "UTF-8"),
        (b'{"v": 1, "session": "a", "block": 64', "is not JSON"),
        (b"[" * 100_000, "is not"),
    ],
    ids=["binary", "png", "text", "column", "list", "number", "other", "latin", "cut", "deep"],
)
def test_what_is_no_trace_ends_in_one_line(tmp_path: Path, content: bytes, what: str) -> None:
    for name, data in (("t.jsonl", content), ("t.jsonl.gz", gzip.compress(content))):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InputError, match="line 1") as caught:
            list(read_trace(tmp_path / name))
        assert what in str(caught.value)
        assert "\n" not in str(caught.value)


def test_not_utf8_in_a_later_row(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "t.jsonl", HEADER, CALL)
    path.write_bytes(path.read_bytes() + b'{"i": 1, "chain": "\xff"}\n')
    with pytest.raises(InputError, match="line 3: is not UTF-8"):
        list(read_trace(path))


def test_an_endless_line_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source.read_lines, "__defaults__", (1 << 20,))
    path = tmp_path / "bomb.jsonl.gz"
    with gzip.open(path, "wb") as out:
        out.write(json.dumps(HEADER).encode() + b"\n" + b'{"chain": "')
        for _ in range(64):
            out.write(b"x" * (1 << 20))
    assert path.stat().st_size < 200_000
    with pytest.raises(InputError, match="line 2: the line is longer than 1 MiB"):
        list(read_trace(path))


def test_sessions_come_one_at_a_time(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "t.jsonl", HEADER, CALL, {**HEADER, "session": "b"}, {"broken": True})
    stream = read_trace(path)
    assert next(stream).id == "a"
    with pytest.raises(InputError, match="line 4"):
        next(stream)


def test_missing_file_folder_and_list(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such trace file"):
        list(read_trace(tmp_path / "absent.jsonl"))
    with pytest.raises(InputError, match=r"no \.json or \.jsonl file"):
        list(read_trace(tmp_path))
    one = write_rows(tmp_path / "1.jsonl", HEADER)
    two = write_rows(tmp_path / "2.jsonl", {**HEADER, "session": "b"})
    (tmp_path / "notes.txt").write_text("no trace")
    assert trace_files(tmp_path) == [one, two]
    assert [s.id for s in read_trace(tmp_path)] == [s.id for s in read_trace([two, one])][::-1] == ["a", "b"]


def test_writing_into_a_missing_folder_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        write_trace(tmp_path / "absent" / "t.jsonl", [])


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "t.jsonl", HEADER)
    before = path.read_bytes()

    def failing() -> Any:
        yield Session("a", 64, [call(0, 0.0, 4)])
        raise InputError("elsewhere", "is broken", "mend it")

    with pytest.raises(InputError, match="elsewhere"):
        write_trace(path, failing())
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["t.jsonl"]


DELTA = {"session": "a", "block": 64, "scope": "local", "tool_tokens": 1, "groups": []}
DELTA_CALL = {
    "t": 0.0,
    "a": "main",
    "in": 320,
    "out": 5,
    "api": 1.0,
    "ref": -1,
    "keep": 0,
    "new": 5,
    "m": "m",
    "stop": "",
}


def test_broken_block_ids_are_refused_taken_or_repaired(tmp_path: Path) -> None:
    second = {**DELTA_CALL, "t": 2.0, "in": 130, "ref": 0, "keep": 5, "new": 3}
    third = {**DELTA_CALL, "t": 5.0, "in": 640, "ref": 1, "keep": 8, "new": 1}
    path = write_rows(tmp_path / "t.jsonl", DELTA, DELTA_CALL, second, third)
    assert detect_format(path) == "delta"
    with pytest.raises(InputError, match=r"line 3: field in.*--repair-blocks"):
        list(read_trace(path))
    (kept,) = read_trace(path, blocks="keep")
    assert [(c.keep_blocks, c.new_blocks) for c in kept.calls] == [(0, 5), (5, 3), (8, 1)]
    (repaired,) = read_trace(path, blocks="repair")
    assert [(c.keep_blocks, c.new_blocks) for c in repaired.calls] == [(0, 5), (2, 0), (2, 8)]
    write_trace(tmp_path / "own.jsonl", [repaired])
    assert list(read_trace(tmp_path / "own.jsonl")) == [repaired]


def test_delta_groups_become_chains(tmp_path: Path) -> None:
    rows = [DELTA_CALL, {**DELTA_CALL, "t": 3.0, "a": "sa1"}, {**DELTA_CALL, "t": 9.0}]
    (session,) = read_trace(write_rows(tmp_path / "t.jsonl", DELTA, *rows))
    assert [c.chain for c in session.calls] == ["main", "s1.0", "main"]
    assert [c.deps for c in session.calls] == [(), (0,), (0, 1)]
    assert session.calls[0].stop is None


@pytest.mark.parametrize(
    ("name", "wanted"), [("kvct_v8", (383, 26701)), ("kvct_v6dedup", (247, 14038)), ("neon", (30, 2725))]
)
def test_real_delta_files_survive_a_round_trip(
    shared: Path, tmp_path: Path, name: str, wanted: tuple[int, int]
) -> None:
    blocks = "repair" if name == "neon" else "strict"
    real = list(read_trace(shared / f"traces/weka_delta/{name}.dev.delta.jsonl.gz", blocks=blocks))  # type: ignore[arg-type]
    assert count_calls(real) == wanted
    write_trace(tmp_path / "t.jsonl.gz", real)
    assert list(read_trace(tmp_path / "t.jsonl.gz")) == real
