"""The load that inference-perf makes: `shared_prefix` prompts, staged arrivals, each stage drained before the next.

The rules are inference-perf's (its load timer, load generator and shared-prefix data generator):

- prompts are shuffled once and sent in that order, from its beginning in every stage;
- a stage sends int(rate * duration) requests, the first no earlier than one second after the stage began;
- `poisson`: each second gets a Poisson number of requests, with exponential gaps that are scaled to fill the second;
- `constant`: exponential gaps, scaled to fill the stage;
- the next stage begins `interval_s` after the last request of this one has ended.

inference-perf publishes no seed, so arrivals and order are ours, by seed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from harness.studies.ladder import Load, SharedPrefix, Stage
from harness.trace.model import Call, Session

LEAD_S = 1.0
"""inference-perf schedules a stage's first request this long after the stage's start."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Prompt lengths in tokens as the engine sees them, and the output length it is asked for."""

    system_tokens: int
    question_tokens: int
    output_tokens: int


def lengths(workload: SharedPrefix, observed: bool) -> Lengths:
    """Configured lengths, or scaled to the mean prompt length that the server was seen to count."""
    system, question = workload.system_prompt_len, workload.question_len
    if observed and workload.observed_input_len is not None:
        scale = workload.observed_input_len / (system + question)
        system, question = round(system * scale), round(question * scale)
    return Lengths(system, question, workload.output_len)


def offsets_s(kind: str, stage: Stage, rng: Generator) -> list[float]:
    """When a stage's requests are sent, in seconds after the timer's start, ascending."""
    if kind == "constant":
        gaps = rng.exponential(1.0, stage.requests)
        return [float(t) for t in np.cumsum(gaps) * (stage.duration / gaps.sum())] if stage.requests else []
    times: list[float] = []
    second = 0
    while len(times) < stage.requests:
        count = int(rng.poisson(stage.rate))
        if count:
            gaps = rng.exponential(1.0, count)
            times += [second + float(t) for t in np.cumsum(gaps) / gaps.sum()]
        second += 1
    return times[: stage.requests]


@dataclass(slots=True)
class StagedLoad:
    """The whole ladder as one session, and the stage of every call by its index."""

    session: Session
    stage_of: list[int]


def staged_load(
    workload: SharedPrefix, load: Load, stages: list[Stage], seed: int, block_tokens: int, observed: bool
) -> StagedLoad:
    """All calls of the ladder.

    One session, because a stage starts when the one before has drained: the first call of a stage depends on the end of
    every call of the stage before, the others are released relative to its start.
    """
    size = lengths(workload, observed)
    total = workload.num_groups * workload.num_prompts_per_group
    order = np.random.default_rng([seed, 1]).permutation(total)
    arrivals = np.random.default_rng([seed, 2])
    prompt_tokens = size.system_tokens + size.question_tokens
    blocks, shared = prompt_tokens // block_tokens, size.system_tokens // block_tokens
    calls: list[Call] = []
    stage_of: list[int] = []
    first_of_prompt: dict[int, int] = {}
    first_of_group: dict[int, int] = {}
    previous: tuple[int, ...] = ()
    for number, stage in enumerate(stages):
        times = offsets_s(load.type, stage, arrivals)
        head = len(calls)
        for i, t_s in enumerate(times):
            index = len(calls)
            prompt = int(order[i % total])
            group = prompt // workload.num_prompts_per_group
            if prompt in first_of_prompt:
                ref, keep = first_of_prompt[prompt], blocks
            elif group in first_of_group:
                ref, keep = first_of_group[group], shared
            else:
                ref, keep = -1, 0
            first_of_prompt.setdefault(prompt, index)
            first_of_group.setdefault(group, index)
            pause_s = LEAD_S + (load.interval_s if number else 0.0)
            calls.append(
                Call(
                    index=index,
                    t_s=t_s,
                    api_s=None,
                    chain=f"stage {number}",
                    input_tokens=prompt_tokens,
                    output_tokens=size.output_tokens,
                    ref=ref,
                    keep_blocks=keep,
                    new_blocks=blocks - keep,
                    deps=previous if i == 0 else (),
                    on_start=head if i else None,
                    gap_s=t_s - times[0] if i else pause_s + t_s,
                )
            )
            stage_of.append(number)
        if times:
            previous = tuple(range(head, len(calls)))
    return StagedLoad(Session(id="ladder", block_tokens=block_tokens, calls=calls), stage_of)
