"""Prompts in engine blocks: identities against an explicit list of tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from harness.load.prompts import Origins, SessionPrompts, engine_runs
from harness.trace.model import Call, Session, SharedPrefix


def _call(index: int, ref: int, keep: int, new: int, tail: int = 0, block: int = 64, prefix: int = -1) -> Call:
    call = Call(index, 0.0, None, "main", (keep + new) * block + tail, 1, ref, keep, new)
    call.prefix = prefix
    return call


def _expand(runs: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    return [(o, p) for o, a, b in runs for p in range(a, b)]


@given(st.data())
def test_equal_blocks_are_exactly_equal_token_prefixes(data: st.DataObject) -> None:
    """Two calls name block k alike iff their first (k+1)*B tokens are the same tokens."""
    trace_block = data.draw(st.sampled_from([4, 6, 16]))
    engine_block = data.draw(st.sampled_from([2, 4, 5, 16, 32]))
    calls: list[Call] = []
    tokens: list[list[tuple[int, int]]] = []
    for index in range(data.draw(st.integers(1, 6))):
        ref = data.draw(st.integers(-1, index - 1))
        keep = data.draw(st.integers(0, calls[ref].blocks)) if ref >= 0 else 0
        new = data.draw(st.integers(0 if keep else 1, 5))
        tail = data.draw(st.integers(0, trace_block - 1))
        calls.append(_call(index, ref if keep else -1, keep, new, tail, trace_block))
        kept = tokens[ref][: keep * trace_block] if ref >= 0 else []
        tokens.append(kept + [(index, i) for i in range(len(kept), calls[-1].input_tokens)])
    prompts = SessionPrompts(Session("s", trace_block, calls), engine_block, Origins())
    named = [_expand(prompts.runs(i)) for i in range(len(calls))]
    for a in range(len(calls)):
        assert len(named[a]) == calls[a].input_tokens // engine_block
        assert [p for _, p in named[a]] == list(range(len(named[a])))
        for b in range(len(calls)):
            for k in range(min(len(named[a]), len(named[b]))):
                same = tokens[a][: (k + 1) * engine_block] == tokens[b][: (k + 1) * engine_block]
                assert (named[a][k] == named[b][k]) == same


def test_the_tail_past_the_last_trace_block_is_the_calls_own() -> None:
    assert engine_runs([(7, 0, 2)], 64, 9, 64 * 2 + 40, 16) == [(7, 0, 8), (9, 8, 10)]


def test_shared_prefixes_are_one_origin_for_all_sessions() -> None:
    origins = Origins()
    sessions = [
        Session(name, 64, [_call(0, -1, 0, 5, prefix=0), _call(1, 0, 5, 2)], prefix=(SharedPrefix("sys", 3),))
        for name in ("a", "b")
    ]
    first, second = (SessionPrompts(s, 64, origins) for s in sessions)
    assert first.runs(0)[0] == second.runs(0)[0]
    assert first.runs(0)[0][1:] == (0, 3)
    assert first.runs(0)[1] != second.runs(0)[1]
    assert first.runs(1)[:2] == first.runs(0)
    assert first.origin(0) != second.origin(0)


def test_a_session_without_a_shared_prefix_shares_nothing() -> None:
    origins = Origins()
    one, two = (SessionPrompts(Session(n, 64, [_call(0, -1, 0, 5)]), 64, origins) for n in "ab")
    assert not set(_expand(one.runs(0))) & set(_expand(two.runs(0)))
