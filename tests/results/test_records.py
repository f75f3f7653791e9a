"""Call records: the digest, the round trip through Parquet, what is refused."""

from __future__ import annotations

import hashlib
import random
import struct
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import InputError
from harness.results.records import (
    COLUMNS,
    OUTCOMES,
    CallRecord,
    digest,
    read_calls,
    to_frame,
    to_records,
    write_calls,
)
from tests.results.synthetic import SHAPES, make_records

_int64 = st.integers(-(2**63), 2**63 - 1)
_share = st.none() | st.floats(0, 1)
_text = st.text(st.characters(codec="utf-8"), max_size=12)


def _field(name: str) -> st.SearchStrategy[Any]:
    if name == "outcome":
        return st.sampled_from(OUTCOMES)
    if COLUMNS[name] == pl.String:
        return _text
    if COLUMNS[name] == pl.Float64:
        return _share
    nullable = name in ("endpoint", "node", "routed_ns", "admitted_ns", "first_token_ns", "finish_ns")
    return st.none() | _int64 if nullable else _int64


_record = st.builds(CallRecord, **{name: _field(name) for name in COLUMNS})
_records = st.lists(_record, max_size=8, unique_by=lambda r: r.call_id)


@given(_records, st.randoms(use_true_random=False))
def test_digest_does_not_depend_on_the_order(records: list[CallRecord], rng: random.Random) -> None:
    shuffled = list(records)
    rng.shuffle(shuffled)
    assert digest(shuffled) == digest(records)


@given(_records.filter(bool), st.data())
def test_any_change_of_any_field_changes_the_digest(records: list[CallRecord], data: st.DataObject) -> None:
    before = digest(records)
    record = data.draw(st.sampled_from(records))
    name = data.draw(st.sampled_from(list(COLUMNS)))
    old = getattr(record, name)
    new = data.draw(_field(name).filter(lambda v: v != old or (v is None) != (old is None)))
    setattr(record, name, new)
    assert digest(records) != before


def test_digest_is_over_the_documented_bytes() -> None:
    """The byte form of one record, written out by hand: it must stay as it is for digests to stay
    comparable.
    """
    record = CallRecord(
        call_id="s/0",
        session="s",
        index=7,
        chain="main",
        arrival_ns=1,
        input_tokens=2,
        requested_output_tokens=3,
    )
    record.believed_share = 0.25
    integers = [7, 1, 2, 3, None, None, None, None, 0, None, None, 0, 0, 0, 0, 0, 0, 0, 0]
    present = [v is not None for v in integers] + [True, False]
    mask = sum(1 << bit for bit, there in enumerate(present) if there)
    body = struct.pack("<I19q2d", mask, *(v or 0 for v in integers), 0.25, 0.0)
    for text in ("s/0", "s", "main", "in_flight", ""):
        body += struct.pack("<I", len(text)) + text.encode()
    assert digest([record]) == hashlib.sha256(b"harness-calls/1\n" + body).hexdigest()
    assert digest([]) == hashlib.sha256(b"harness-calls/1\n").hexdigest()


def test_absent_and_zero_differ_and_negative_zero_does_not() -> None:
    def one(**changes: Any) -> str:
        base = {"call_id": "a", "session": "s", "index": 0, "chain": "c", "arrival_ns": 0}
        return digest([CallRecord(**base, input_tokens=1, requested_output_tokens=1, **changes)])

    assert one(routed_ns=None) != one(routed_ns=0)
    assert one(believed_share=None) != one(believed_share=0.0)
    assert one(believed_share=-0.0) == one(believed_share=0.0)


def test_text_cannot_move_from_one_field_to_the_next() -> None:
    base: dict[str, Any] = {"index": 0, "arrival_ns": 0, "input_tokens": 1, "requested_output_tokens": 1}
    a = CallRecord(call_id="x", session="ab", chain="c", **base)
    b = CallRecord(call_id="x", session="a", chain="bc", **base)
    assert digest([a]) != digest([b])


@given(_records)
@settings(max_examples=40)
def test_frame_round_trip(records: list[CallRecord]) -> None:
    assert to_records(to_frame(records)) == records


def test_parquet_round_trip_is_sorted_and_keeps_the_digest(tmp_path: Path) -> None:
    records = make_records(SHAPES[0], 300)
    write_calls(tmp_path / "calls.parquet", to_frame(records))
    frame = read_calls(tmp_path / "calls.parquet")
    assert list(frame.schema.items()) == list(COLUMNS.items())
    assert frame["call_id"].is_sorted()
    assert digest(to_records(frame)) == digest(records)
    write_calls(tmp_path / "again.parquet", to_frame(records[::-1]))
    assert (tmp_path / "again.parquet").read_bytes() == (tmp_path / "calls.parquet").read_bytes()


def test_missing_broken_and_foreign_files_are_input_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_calls(tmp_path / "calls.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 is not enough")
    with pytest.raises(InputError, match="not a readable Parquet file"):
        read_calls(tmp_path / "broken.parquet")
    pl.DataFrame({"a": [1]}).write_parquet(tmp_path / "foreign.parquet")
    with pytest.raises(InputError, match="schema unknown"):
        read_calls(tmp_path / "foreign.parquet")
    to_frame(make_records(SHAPES[0], 5)).write_parquet(
        tmp_path / "old.parquet", metadata={"harness.calls.schema": "999"}
    )
    with pytest.raises(InputError, match="schema 999"):
        read_calls(tmp_path / "old.parquet")
