"""The checker names every violation, by line and field."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from test_trace_read import CALL, DELTA, DELTA_CALL, HEADER, NEXT, good_trace, write_rows

from harness.trace.check import MAX_VIOLATIONS, check_trace
from harness.trace.read import read_trace


def places(path: Path) -> list[tuple[int, str]]:
    return [(v.line, v.field) for v in check_trace(path)]


def test_good_traces_have_none(tmp_path: Path) -> None:
    assert check_trace(good_trace(tmp_path / "t.jsonl.gz")) == []
    assert check_trace(write_rows(tmp_path / "d.jsonl", DELTA, DELTA_CALL)) == []
    (tmp_path / "empty.jsonl").write_bytes(b"")
    assert check_trace(tmp_path / "empty.jsonl") == []


def test_every_violation_is_named(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "t.jsonl",
        HEADER,
        {**CALL, "out": -1, "in": "x", "more": 1},  # three in one row; the next rows are not blamed for it
        NEXT,
        {**NEXT, "i": 5, "t": 1.0, "ref": 7, "deps": [9, 1]},
        {**HEADER, "block": 0},
        {**CALL, "in": 99999},  # its session could not be read: neither can it be judged
        {**HEADER, "session": "a"},
        {**CALL, "in": 99999},
    )
    assert places(path) == [
        (2, "in"), (2, "out"), (2, "more"),
        (4, "t"), (4, "ref"), (4, "i"), (4, "deps"), (4, "deps"),
        (5, "block"),
        (7, "session"),
        (8, "in"),
    ]  # fmt: skip
    assert all(v.what and v.remedy for v in check_trace(path))


def test_lines_that_are_no_rows(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "t.jsonl", HEADER, CALL)
    path.write_bytes(path.read_bytes() + b"{broken\n\xff\xfe\n7\n" + json.dumps(NEXT).encode() + b"\n")
    assert [v.line for v in check_trace(path)] == [3, 4, 5]


def test_broken_bytes_are_the_last_violation(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(json.dumps(r).encode() + b"\n" for r in (HEADER, {**CALL, "i": 3})))[:-9])
    found = check_trace(path)
    assert (found[0].line, found[0].field) == (2, "i")
    assert "ends in the middle" in found[-1].what


def test_other_formats_give_what_stopped_the_reading(tmp_path: Path) -> None:
    good = {"t": 0.0, "type": "n", "in": 64, "out": 1, "hash_ids": [1]}
    text = json.dumps({"id": "s", "requests": [good, {**good, "out": -1}]})
    (tmp_path / "w.json").write_text(text)
    (violation,) = check_trace(tmp_path / "w.json")
    assert (violation.line, violation.field) == (1, "requests[1]: out")


def test_it_stops_after_many(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "t.jsonl", HEADER, *[{"x": 1}] * MAX_VIOLATIONS)
    assert len(check_trace(path)) == MAX_VIOLATIONS


def test_a_file_is_good_exactly_when_it_can_be_read(shared: Path) -> None:
    folder = shared / "traces/weka_delta"
    assert check_trace(folder / "kvct_v6dedup.dev.delta.jsonl.gz") == []
    neon = check_trace(folder / "neon.dev.delta.jsonl.gz")
    assert len(neon) == MAX_VIOLATIONS and {v.field for v in neon} == {"in"}
    assert sum(1 for _ in read_trace(folder / "neon.dev.delta.jsonl.gz", blocks="keep")) == 30
