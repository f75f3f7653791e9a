"""Files that are broken, truncated, not UTF-8, gzip bombs or gigantic, in every format: one clear line each."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.errors import InputError
from harness.trace import source
from harness.trace.importers import IMPORTERS, ImportOptions
from harness.trace.read import FORMATS, detect_format, read_trace

OPTIONS = ImportOptions(calls_per_session=1, output_tokens=5)
EDGE = {"request_id": "a", "trigger": "completion", "delay_ms": 5, "relation": "sequence"}
REQUEST = {"request_id": "a", "play_id": "p", "session_id": "s", "model": "m", "not_before_ms": 0, "input_length": 64,
           "output_length": 1, "hash_ids": [1]}  # fmt: skip
CHAT = {"chat_id": 1, "parent_chat_id": -1, "timestamp": 1.0, "input_length": 16, "output_length": 1, "hash_ids": [1]}
TURN = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
SPAN = {"span_id": "a", "start_time": "2026-01-01T00:00:00", "end_time": "2026-01-01T00:00:01",
        "attributes": {"gen_ai.usage.input_tokens": 64, "gen_ai.usage.output_tokens": 2}}  # fmt: skip
GOOD: dict[str, list[Any]] = {
    "agentic_mooncake": [
        {"schema": "dynamo.agentic_mooncake", "version": 2, "block_size": 64, "hash_id_scope": "local", "source": {}},
        REQUEST,
        {**REQUEST, "request_id": "b", "dependencies": [EDGE]},
    ],
    "bailian": [CHAT, {**CHAT, "chat_id": 2, "parent_chat_id": 1}],
    "mooncake": [{"timestamp": t, "input_length": 512, "output_length": 1, "hash_ids": [1]} for t in (0, 5)],
    "mooncake_multi_turn": [{"session_id": "s", "input_length": 512, "output_length": 1, "hash_ids": [1]}] * 2,
    "llmservingsim": [{"input_toks": 20, "output_toks": 3, "arrival_time_ns": 5}] * 2,
    "aiperf_dag": [{"session_id": name, "turns": [TURN]} for name in "ab"],
    "aiperf_multi_turn": [{"session_id": name, "turns": [{"text": "hello"}]} for name in "ab"],
    "text": [{"timestamp": 1, "input": "hello", "output": "you", "session_id": "s"}] * 2,
    "otel": [{"trace_id": "t", "spans": [SPAN, {**SPAN, "span_id": "b"}]}],
    "csv": ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:17:03.97,48,10", "2023-11-16 18:17:04.97,48,10"],
}
NAMES = sorted(GOOD)
NO_FIXTURE_CHECK = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=40, deadline=None
)


def good(name: str) -> bytes:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in GOOD[name]).encode()


def refuse(path: Path, kind: str | None = None) -> InputError:
    with pytest.raises(InputError) as caught:
        list(read_trace(path, kind=kind, options=OPTIONS))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert str(path) in caught.value.where
    return caught.value


def test_there_is_a_good_file_of_every_format() -> None:
    assert sorted(importer.name for importer in IMPORTERS) == NAMES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("packed", [False, True])
def test_good_files_are_recognised(tmp_path: Path, name: str, packed: bool) -> None:
    path = tmp_path / "file"
    path.write_bytes(gzip.compress(good(name)) if packed else good(name))
    assert detect_format(path) == name
    sessions = list(read_trace(path, options=OPTIONS))
    assert sum(len(s.calls) for s in sessions) == 2
    assert list(read_trace(path, kind=name, options=OPTIONS)) == sessions


@pytest.mark.parametrize("name", NAMES)
def test_truncated_files(tmp_path: Path, name: str) -> None:
    (tmp_path / "plain").write_bytes(good(name).rstrip()[:-9])
    refuse(tmp_path / "plain")
    (tmp_path / "packed").write_bytes(gzip.compress(good(name))[:-12])
    error = refuse(tmp_path / "packed")
    assert "ends in the middle" in error.what


@pytest.mark.parametrize("name", NAMES)
def test_files_that_are_not_utf8(tmp_path: Path, name: str) -> None:
    data = good(name)
    place = len(data) - 7
    (tmp_path / "file").write_bytes(data[:place] + b"\xff\xfe" + data[place:])
    refuse(tmp_path / "file")


@pytest.mark.parametrize("name", FORMATS)
def test_empty_files_have_no_sessions(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_bytes(b" \n\n")
    assert list(read_trace(tmp_path / "file", kind=name, options=OPTIONS)) == []


@pytest.mark.parametrize("name", NAMES)
def test_binary_and_foreign_files(tmp_path: Path, name: str) -> None:
    foreign = (
        b"\x00\x01\x02PK" * 50,
        b"[1, 2]\n",
        b'{"a": 1}\n',
        b"<html>\n",
        b'"x"\n',
        b'a,b\rc,"d\n',
        b"[" * 100_000,
    )
    for data in foreign:
        (tmp_path / "file").write_bytes(data)
        refuse(tmp_path / "file")
        refuse(tmp_path / "file", kind=name)


@NO_FIXTURE_CHECK
@given(name=st.sampled_from(NAMES), data=st.data())
def test_damaged_bytes_end_in_a_trace_or_in_one_line(tmp_path: Path, name: str, data: st.DataObject) -> None:
    content = bytearray(good(name))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "file").write_bytes(bytes(content))
    try:
        list(read_trace(tmp_path / "file", kind=name, options=OPTIONS))
    except InputError as error:
        assert "\n" not in str(error)


JUNK = st.sampled_from([None, -1, 1.5, 2**70, 1e300, "", "x", [], [1], {}, {"a": []}, True, [[1]], float("1e18")])


@NO_FIXTURE_CHECK
@given(name=st.sampled_from([name for name in NAMES if name != "csv"]), data=st.data())
def test_wrong_values_end_in_a_trace_or_in_one_line(tmp_path: Path, name: str, data: st.DataObject) -> None:
    rows = json.loads(json.dumps(GOOD[name]))
    target: Any = data.draw(st.sampled_from(rows))
    while True:
        keys = list(target) if isinstance(target, dict) else list(range(len(target)))
        key = data.draw(st.sampled_from(keys))
        if isinstance(target[key], (dict, list)) and target[key] and data.draw(st.booleans()):
            target = target[key]
            continue
        target[key] = data.draw(JUNK)
        break
    (tmp_path / "file").write_text("".join(json.dumps(row) + "\n" for row in rows))
    try:
        sessions = list(read_trace(tmp_path / "file", kind=name, options=OPTIONS))
    except InputError as error:
        assert "\n" not in str(error)
        return
    for session in sessions:
        for call in session.calls:
            assert call.input_tokens >= 0 and call.gap_s >= 0
            assert all(dep < call.index for dep in call.deps)


def bomb(path: Path, head: bytes, mib: int) -> Path:
    """A file of a few hundred kB that unpacks to `mib` MiB."""
    with gzip.open(path, "wb", compresslevel=9) as out:
        out.write(head)
        for _ in range(mib):
            out.write(b" " * (1 << 20))
    return path


@pytest.mark.parametrize("name", ["weka", "otel", "mooncake", "csv", "own"])
def test_gzip_bombs(tmp_path: Path, name: str) -> None:
    heads = {
        "weka": b'{"id": "a", "requests": [',
        "own": b'{"v":1,"session":"a","block":64}\n',
        "otel": b'{"trace_id": "t", "spans": [',
    }
    path = bomb(tmp_path / "bomb.gz", heads.get(name) or good(name).split(b"\n")[0] + b"\n", 70)
    error = refuse(path)
    assert "unpacks to more than" in error.what or "is longer than" in error.what


def test_the_limit_on_unpacking_can_be_raised(tmp_path: Path) -> None:
    """Blank lines between rows: only the size of the whole gives the file away."""
    path = tmp_path / "bomb.gz"
    with gzip.open(path, "wb", compresslevel=9) as out:
        out.write(good("mooncake"))
        for _ in range(70):
            out.write((b" " * 1023 + b"\n") * 1024)
    error = refuse(path)
    assert error.what.startswith("unpacks to more than 250 times its size")
    assert "--max-unpack-ratio" in error.remedy
    token = source.LIMITS.set(source.Limits(ratio=2000))
    try:
        (session,) = read_trace(path)
    finally:
        source.LIMITS.reset(token)
    assert len(session.calls) == 2


def test_gigantic_documents_are_refused_and_the_limit_can_be_raised(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    path.write_text('{"id": "a", "requests": [' + " " * 3_000_000 + "]}")
    token = source.LIMITS.set(source.Limits(document_bytes=1 << 20))
    try:
        error = refuse(path)
    finally:
        source.LIMITS.reset(token)
    assert "is longer than 1 MiB" in error.what and "--max-document-mib" in error.remedy
    assert [s.calls for s in read_trace(path)] == [[]]


def test_gigantic_lines_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(good("mooncake") + b'{"timestamp": 9, "hash_ids": [' + b"1," * 3_000_000)
    assert "is longer than 4 MiB" in refuse(path).what


def test_unknown_format_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(good("csv"))
    with pytest.raises(InputError, match="--from parquet: is not a format"):
        list(read_trace(tmp_path / "file", kind="parquet"))
