"""Sessions from their middle."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from harness.load.midway import begun
from harness.trace.generate import generate_sessions
from harness.trace.model import Call, Session, SharedPrefix
from harness.trace.profile import load_profile
from harness.trace.runs import common_blocks


def _whole_session() -> Session:
    """A main chain of five, a fork of its second call, a sub-agent with a shared prefix, begun by the third."""
    prefix = (SharedPrefix("sys", 2),)
    calls = [Call(0, 0.0, None, "main", 640, 5, -1, 0, 10, (), prefix=0)]
    calls += [Call(i, 10.0 * i, None, "main", 640 * (i + 1), 5, i - 1, 10 * i, 10, (i - 1,), gap_s=2.0) for i in (1, 2)]
    calls.append(Call(3, 21.0, None, "fork", 1600, 5, 1, 18, 7, (1,), gap_s=3.0))
    calls.append(Call(4, 25.0, None, "sub", 320, 5, -1, 0, 5, (), 2, gap_s=1.0, prefix=0))
    calls.append(Call(5, 30.0, None, "main", 2560, 5, 2, 30, 10, (2, 3, 4), gap_s=2.0))
    return Session("s", 64, calls, prefix=prefix)


def test_a_session_from_the_middle_keeps_what_its_calls_have_in_common() -> None:
    whole = _whole_session()
    cut = begun(whole, 2)
    first, fork, sub, last = cut.calls
    assert (first.ref, first.keep_blocks, first.new_blocks, first.prefix) == (-1, 0, 30, 0), "all of it is new now"
    assert (first.deps, first.on_start, first.gap_s) == ((), None, 0.0)
    assert (fork.ref, fork.keep_blocks, fork.new_blocks, fork.prefix) == (0, 18, 7, -1)
    assert (fork.deps, fork.on_start, fork.gap_s) == ((), 0, 1.0), "as long after the first one as recorded"
    assert (sub.ref, sub.on_start, sub.prefix) == (-1, 0, 0)
    assert (last.ref, last.keep_blocks, last.deps) == (0, 30, (0, 1, 2))
    assert begun(whole, 0) is whole
    for a in range(2, 6):
        for b in range(a):
            expected = common_blocks(whole.calls, a, b)
            if b >= 2:
                assert common_blocks(cut.calls, a - 2, b - 2) == expected


@given(st.integers(0, 2**32), st.floats(0, 0.9))
@settings(max_examples=20, deadline=None)
def test_any_session_can_begin_anywhere(seed: int, share: float) -> None:
    (session,) = generate_sessions(load_profile("claude-code"), seed, 1)
    first = int(len(session.calls) * share)
    cut = begun(session, first)
    assert len(cut.calls) == len(session.calls) - first
    for call, old in zip(cut.calls, session.calls[first:], strict=True):
        assert call.blocks == old.blocks and call.index == old.index - first
        assert all(dep < call.index for dep in call.deps) and call.ref < call.index
        assert call.on_start is None or call.on_start < call.index
        if call.ref >= 0:
            assert call.keep_blocks <= cut.calls[call.ref].blocks
            assert call.keep_blocks <= common_blocks(session.calls, old.index, call.ref + first)
