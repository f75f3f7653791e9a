"""Small sessions for the tests of the trace package, by hand and at random."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from harness.trace.model import Call, Session, SharedPrefix


def call(index: int, t_s: float, blocks: int, ref: int = -1, keep: int = 0, **more: Any) -> Call:
    """A call whose prompt has `blocks` blocks of 64 tokens, `keep` of them those of call `ref`."""
    values: dict[str, Any] = {"api_s": 2.0, "chain": "main", "output_tokens": 10, "input_tokens": blocks * 64}
    values.update(more)
    return Call(index=index, t_s=t_s, ref=ref, keep_blocks=keep, new_blocks=blocks - keep, **values)


@st.composite
def sessions(draw: st.DrawFn, max_calls: int = 12, session_id: str = "s") -> Session:
    """Any session that the format allows, with explicit dependencies."""
    calls: list[Call] = []
    t_ms = 0
    prefix = draw(st.lists(st.integers(1, 6), max_size=2))
    for index in range(draw(st.integers(0, max_calls))):
        t_ms += draw(st.integers(0, 5_000))
        ref = draw(st.integers(-1, index - 1))
        keep = draw(st.integers(0, calls[ref].blocks)) if ref >= 0 else 0
        new = draw(st.integers(0, 9))
        pre = draw(st.integers(-1, len(prefix) - 1)) if ref < 0 else -1
        if pre >= 0:
            new = max(new, prefix[pre])
        deps = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else set()
        calls.append(
            Call(
                index=index,
                t_s=t_ms / 1000,
                api_s=draw(st.none() | st.integers(0, 9_000).map(lambda ms: ms / 1000)),
                chain=draw(st.sampled_from(["main", "f1", "s1.0", "s1.1"])),
                input_tokens=(keep + new) * 16 + draw(st.integers(0, 15)),
                output_tokens=draw(st.integers(0, 500)),
                ref=ref,
                keep_blocks=keep,
                new_blocks=new,
                deps=tuple(sorted(deps)),
                on_start=draw(st.none() | st.integers(0, index - 1)) if index else None,
                gap_s=draw(st.integers(0, 9_000)) / 1000,
                model=draw(st.sampled_from([None, "large", "fast"])),
                stop=draw(st.sampled_from([None, "tool_use", "end_turn"])),
                prefix=pre,
            )
        )
    return Session(
        id=session_id,
        block_tokens=16,
        calls=calls,
        scope=draw(st.sampled_from(["local", "global"])),
        prefix=tuple(SharedPrefix(f"p{number}", blocks) for number, blocks in enumerate(prefix)),
        start_s=draw(st.none() | st.integers(0, 10_000).map(float)),
    )


@st.composite
def recorded_sessions(draw: st.DrawFn, max_calls: int = 14) -> Session:
    """A session as an importer sees it: times, blocks and chain names, no dependencies; times overlap as they like."""
    calls: list[Call] = []
    t_ms = 0
    for index in range(draw(st.integers(1, max_calls))):
        t_ms += draw(st.integers(0, 8_000))
        ref = draw(st.integers(-1, index - 1))
        keep = draw(st.integers(0, calls[ref].blocks)) if ref >= 0 else 0
        calls.append(
            call(
                index,
                t_ms / 1000,
                keep + draw(st.integers(1, 9)),
                ref,
                keep,
                api_s=draw(st.none() | st.integers(0, 12_000).map(lambda ms: ms / 1000)),
                chain=draw(st.sampled_from(["main", "main", "f1", "s1.0", "s1.1", "s2.0"])),
            )
        )
    return Session("r", 64, calls)


def explicit_blocks(calls: list[Call]) -> list[list[tuple[int, int]]]:
    """Every prompt as the plain list of its blocks (the call that had the block first, position)."""
    prompts: list[list[tuple[int, int]]] = []
    for c in calls:
        kept = prompts[c.ref][: c.keep_blocks] if c.ref >= 0 else []
        prompts.append([*kept, *((c.index, p) for p in range(c.keep_blocks, c.blocks))])
    return prompts
