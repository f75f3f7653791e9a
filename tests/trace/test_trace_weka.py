"""Import of raw weka documents: nested times, twins, parallel chains, block ids; and the real files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import InputError
from harness.trace.model import Session
from harness.trace.prefixes import PrefixIndex
from harness.trace.read import read_trace


def row(t: float, ids: list[int], **more: Any) -> dict[str, Any]:
    return {
        "t": t,
        "type": "n",
        "model": "m",
        "in": 64 * len(ids) + 7,
        "out": 5,
        "hash_ids": ids,
        "api_time": 2.0,
        **more,
    }


def group(t: float, *requests: dict[str, Any]) -> dict[str, Any]:
    return {"t": t, "type": "subagent", "agent_id": "a", "duration_ms": 1, "requests": list(requests)}


def document(*requests: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": "s", "block_size": 64, "hash_id_scope": "local", "requests": list(requests), **more}


def read(folder: Path, *documents: dict[str, Any]) -> list[Session]:
    path = folder / "t.json"
    path.write_text("\n".join(json.dumps(d) for d in documents))
    return list(read_trace(path))


MAIN = [row(0.0, [1, 2, 3]), row(10.0, [1, 2, 3, 4])]


@pytest.mark.parametrize("inner", [(0.5, 4.0), (20.5, 24.0)], ids=["relative", "absolute"])
def test_times_inside_a_group_are_relative_or_absolute(tmp_path: Path, inner: tuple[float, float]) -> None:
    agent = group(20.0, row(inner[0], [50]), row(inner[1], [50, 51]))
    (session,) = read(tmp_path, document(*MAIN, agent, row(30.0, [1, 2, 3, 4, 5])))
    assert [(c.t_s, c.chain) for c in session.calls] == [
        (0.0, "main"), (10.0, "main"), (20.5, "s1.0"), (24.0, "s1.0"), (30.0, "main"),
    ]  # fmt: skip
    assert [c.deps for c in session.calls] == [(), (0,), (1,), (2,), (1, 3)]


def test_one_relative_group_makes_the_session_relative(tmp_path: Path) -> None:
    late = group(5.0, row(9.0, [70]))
    (session,) = read(tmp_path, document(MAIN[0], late, group(20.0, row(0.0, [60]))))
    assert [(c.t_s, c.chain) for c in session.calls] == [(0.0, "main"), (14.0, "s1.0"), (20.0, "s2.0")]


def test_groups_inside_groups(tmp_path: Path) -> None:
    nested = group(20.0, row(0.0, [50]), group(3.0, row(0.5, [60])))
    (session,) = read(tmp_path, document(*MAIN, nested))
    assert [(c.t_s, c.chain) for c in session.calls[2:]] == [(20.0, "s1.0"), (23.5, "s2.0")]


def test_twins_are_one_call_and_repeats_are_two(tmp_path: Path) -> None:
    twin = row(0.5, [1, 2, 3], type="s")
    again = row(100.0, [1, 2, 3], type="s")
    (session,) = read(tmp_path, document(row(0.0, [1, 2, 3]), twin, again))
    assert [c.t_s for c in session.calls] == [0.0, 100.0]
    same_type = document(row(0.0, [1, 2, 3]), row(0.5, [1, 2, 3]))
    assert [len(s.calls) for s in read(tmp_path, same_type)] == [2]


def test_parallel_flat_calls_become_chains_of_their_own(tmp_path: Path) -> None:
    calls = [
        row(0.0, [1, 2, 3, 4]),
        row(3.0, [1, 2, 3, 4, 5], api_time=10.0),
        row(4.0, [1, 2, 3, 4, 80]),  # forks from the first call while the second runs
        row(5.0, [1, 90, 91], api_time=4.0),  # another agent: only the system prompt in common
        row(7.0, [1, 2, 3, 4, 80, 81], api_time=1.0),
        row(14.0, [1, 2, 3, 4, 5, 6]),
        row(20.0, [1, 90, 91, 92]),
        row(60.0, [1, 70]),  # a compaction: everything stands still
    ]
    (session,) = read(tmp_path, document(*calls))
    assert [c.chain for c in session.calls] == ["main", "main", "f1", "f2", "f1", "main", "f2", "f2"]
    assert [c.keep_blocks for c in session.calls] == [0, 4, 4, 1, 5, 5, 3, 1]
    assert (session.calls[2].on_start, session.calls[2].gap_s) == (1, 1.0)
    assert session.calls[5].deps == (1, 4)


def test_a_hashed_partial_block_is_dropped(tmp_path: Path) -> None:
    partial = row(0.0, [1, 2, 3], **{"in": 150})
    (session,) = read(tmp_path, document(partial, row(9.0, [1, 2, 4], **{"in": 192})))
    assert [(c.keep_blocks, c.new_blocks) for c in session.calls] == [(0, 2), (2, 1)]


def test_one_document_a_line_and_a_spread_document(tmp_path: Path) -> None:
    assert [s.id for s in read(tmp_path, document(*MAIN), document(*MAIN, id="u"))] == ["s", "u"]
    (tmp_path / "p.json").write_text(json.dumps(document(*MAIN), indent=1))
    (session,) = read_trace(tmp_path / "p.json")
    assert len(session.calls) == 2
    (tmp_path / "z.json.gz").write_bytes(gzip.compress(json.dumps(document()).encode()))
    (session,) = read_trace(tmp_path / "z.json.gz")
    assert session.calls == []


@pytest.mark.parametrize(
    ("broken", "where", "what"),
    [
        (document(MAIN[0], {**MAIN[1], "in": -1}), "requests[1]: field in", ">= 0"),
        (document({**MAIN[0], "t": "0"}), "requests[0]: field t", "expected float"),
        (document({k: v for k, v in MAIN[0].items() if k != "out"}), "requests[0]", "out"),
        (document({**MAIN[0], "hash_ids": [1, "2", 3]}), "requests[0]: field [1]", "expected int"),
        (document({**MAIN[0], "hash_ids": [2**70, 2, 3]}), "requests[0]: field hash_ids", "64 bits"),
        (document({**MAIN[0], "in": 64}), "requests[0]: field in", "do not fit 3 block ids"),
        (document({**MAIN[0], "t": -3.0}), "requests[0]: field t", "before the session's start"),
        (document(*MAIN, group(4.0, {"t": 0.0})), "requests[2].requests[0]", "in"),
        (document(hash_id_scope="world"), "field hash_id_scope", "local or global"),
        (document(block_size=0), "field block_size", ">= 1"),
    ],
)
def test_what_breaks_a_document_is_named(tmp_path: Path, broken: dict[str, Any], where: str, what: str) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, broken)
    assert where in caught.value.where
    assert what in caught.value.what


@pytest.mark.parametrize("cut", [0.3, 0.99])
def test_a_cut_document(tmp_path: Path, cut: float) -> None:
    text = json.dumps(document(*MAIN, row(20.0, list(range(5000)))))
    (tmp_path / "t.json").write_text(text[: int(len(text) * cut)])
    with pytest.raises(InputError, match=r"t\.json"):
        list(read_trace(tmp_path / "t.json"))


@given(st.lists(st.lists(st.integers(0, 1), max_size=8), max_size=12))
def test_prefix_index_finds_the_longest_common_prefix(contents: list[list[int]]) -> None:
    # Chained ids: one number per distinct prefix.
    ids: dict[tuple[int, ...], int] = {}
    prompts = [[ids.setdefault(tuple(c[: n + 1]), len(ids)) for n in range(len(c))] for c in contents]
    check_prefixes(prompts)


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=10))
def test_ids_that_are_not_chained_never_share_what_differs(prompts: list[list[int]]) -> None:
    index = PrefixIndex()
    for number, prompt in enumerate(prompts):
        ref, keep = index.add(np.array(prompt, dtype=np.int64))
        assert ref < number
        if keep:
            assert prompts[ref][:keep] == prompt[:keep]


def check_prefixes(prompts: list[list[int]]) -> None:
    index = PrefixIndex()
    for number, prompt in enumerate(prompts):
        ref, keep = index.add(np.array(prompt, dtype=np.int64))
        common = [next((n for n, (a, b) in enumerate(zip(prompt, p, strict=False)) if a != b), min(len(prompt), len(p)))
                  for p in prompts[:number]]  # fmt: skip
        assert keep == max(common, default=0)
        assert common[ref] == keep if keep else ref == -1


def test_real_raw_files_equal_their_delta_form(shared: Path) -> None:
    delta = {s.id: s for s in read_trace(shared / "traces/weka_delta/kvct_v8.dev.delta.jsonl.gz")}
    raw = list(read_trace(shared / "traces/weka"))
    assert len(raw) == 30
    assert sum(len({c.chain for c in s.calls if "." in c.chain}) for s in raw) == 24
    for session in raw:
        wanted = delta[session.id]
        for ours, theirs in zip(session.calls, wanted.calls, strict=True):
            theirs.ref = ours.ref  # several earlier calls may share equally much: either may be named
        assert session == wanted
