"""Loads of the published disaggregation runs, with seeds of ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import polars as pl

from harness.load.midway import begun
from harness.studies.ladder import Load, SharedPrefix, Stage
from harness.studies.shared_prefix import offsets_s, staged_load
from harness.trace.model import Call, Session
from harness.trace.model import SharedPrefix as TracePrefix
from harness.workload import Loaded


def unique_prompts(rate: float, duration_s: float, input_tokens: int, output_tokens: int, seed: int) -> Loaded:
    """inference-perf's `random` data at a constant rate: prompts of one length that share nothing."""
    times = offsets_s("constant", Stage(rate=rate, duration=duration_s), np.random.default_rng([seed, 7]))
    sessions = []
    for index, t_s in enumerate(times):
        only = Call(
            index=0,
            t_s=0.0,
            api_s=None,
            chain="main",
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            ref=-1,
            keep_blocks=0,
            new_blocks=input_tokens // 64,
        )
        sessions.append(Session(id=f"r{index:05d}", block_tokens=64, calls=[only], start_s=t_s))
    return Loaded(sessions, "random")


def ladder(
    workload: SharedPrefix, load: Load, stages: list[Stage], seed: int, block_tokens: int
) -> tuple[Loaded, Callable[[pl.DataFrame], dict[str, pl.DataFrame]]]:
    """inference-perf's `shared_prefix` ladder, and its calls by stage."""
    made = staged_load(workload, load, stages, seed, block_tokens, observed=False)
    stage_of = made.stage_of

    def split(calls: pl.DataFrame) -> dict[str, pl.DataFrame]:
        numbers = calls["index"].to_list()
        stage = pl.Series("stage", [stage_of[number] for number in numbers])
        return {f"{one.rate:g}": calls.filter(stage == i) for i, one in enumerate(stages)}

    return Loaded([made.session], "shared_prefix"), split


def lanes(sessions: Sequence[Session], count: int, first: Callable[[Session], int] = lambda _: 0) -> Loaded:
    """`count` users at once: each takes up the next session when the last call of its own has ended.

    A user is one Session: the calls of the sessions that fall to it, one session after the other. `first`: the call
    at which a user's first session begins.
    """
    out = []
    for lane in range(min(count, len(sessions))):
        calls: list[Call] = []
        prefix: list[TracePrefix] = []
        blocks = sessions[0].block_tokens
        for number, whole in enumerate(sessions[lane::count]):
            session = begun(whole, first(whole)) if number == 0 else whole
            if session.block_tokens != blocks:
                raise ValueError("lanes need sessions of one block size")
            calls.extend(_appended(session, len(calls), len(prefix)))
            prefix.extend(session.prefix)
        out.append(Session(id=f"user{lane:03d}", block_tokens=blocks, calls=calls, prefix=tuple(prefix)))
    return Loaded(out, "lanes")


def _appended(session: Session, offset: int, prefixes: int) -> list[Call]:
    """A session's calls behind `offset` others, after the last of them."""
    made = []
    for call in session.calls:
        deps = tuple(dep + offset for dep in call.deps)
        start = None if call.on_start is None else call.on_start + offset
        if not deps and start is None and offset:
            deps = (offset - 1,)
        made.append(
            replace(
                call,
                index=call.index + offset,
                ref=call.ref + offset if call.ref >= 0 else -1,
                deps=deps,
                on_start=start,
                prefix=call.prefix + prefixes if call.prefix >= 0 else -1,
            )
        )
    return made
