"""Random engine workloads, and the record of what an engine did with one: the same for every engine that is compared.

Time is counted in executed steps: a request with `at=k` arrives while the k-th non-empty step runs (or at once where
the engine is idle), and so does the abort with `abort_at=k`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from fake_workers.engine.connector import ConnectorOptions
from fake_workers.engine.events import KvEvent, Removed, Stored
from fake_workers.engine.node import Node
from fake_workers.engine.request import EngineRequest
from fake_workers.engine.scheduler import Batch, RankScheduler, SchedulerConfig
from fake_workers.pricing.steps import RankBatch

Record = tuple[Any, ...]
"""("S", ...) for a schedule call, ("U", ...) for an update call; see `scheduled` and `updated`."""


@dataclass(frozen=True)
class RemoteLoad:
    """What a lookup finds below the engine: the prompt's first `reach` tokens.

    `steps`: how many steps a load takes (-1: it happens inside the step that admits the request). It fails where
    `valid` is not None: after so many tokens, or with -1 altogether.
    """

    reach: int
    steps: int
    valid: int | None = None


@dataclass(frozen=True)
class Remote:
    """The connector's script for one request."""

    ready_at: int = 0
    """Lookups answer None until this step."""
    loads: tuple[RemoteLoad, ...] = ()
    """One after the other; then nothing is found any more."""
    save_steps: int | None = None
    """Steps for which the blocks are still read after the end."""

    @staticmethod
    def from_json(data: dict[str, Any]) -> Remote:
        """As `asdict` made it."""
        return Remote(**{**data, "loads": tuple(RemoteLoad(**load) for load in data["loads"])})


@dataclass(frozen=True)
class Spec:
    """One request of a workload. `runs` cover the prompt's full blocks."""

    request_id: str
    origin: int
    runs: tuple[tuple[int, int, int], ...]
    prompt_tokens: int
    output_tokens: int
    at: int
    abort_at: int | None = None
    priority: int = 0
    arrival: int = 0
    remote: Remote = Remote()

    def identity(self, position: int, block_tokens: int) -> tuple[int, int]:
        """(origin, pos) of the block at `position`, in the prompt or in what is generated."""
        if position < self.prompt_tokens // block_tokens:
            for origin, start, end in self.runs:
                if start <= position < end:
                    return origin, position
            raise AssertionError("runs do not cover the prompt")
        return self.origin, position

    def request(self) -> EngineRequest:
        """A fresh engine request of this specification."""
        return EngineRequest(
            self.request_id,
            self.origin,
            list(self.runs),
            self.prompt_tokens,
            self.output_tokens,
            self.arrival,
            self.priority,
        )


@dataclass(frozen=True)
class Workload:
    """An engine's options and the requests that it gets."""

    config: SchedulerConfig
    requests: tuple[Spec, ...]
    connector: ConnectorOptions | None = None

    def events(self) -> list[tuple[int, str, Spec]]:
        """(step, "add" or "abort", request) in the order of arrival."""
        out = [(spec.at, 0, order, "add", spec) for order, spec in enumerate(self.requests)]
        out += [
            (spec.abort_at, 1, order, "abort", spec)
            for order, spec in enumerate(self.requests)
            if spec.abort_at is not None
        ]
        out.sort(key=lambda e: e[:3])
        return [(at, kind, spec) for at, _, _, kind, spec in out]

    def to_json(self) -> dict[str, Any]:
        """A form that `from_json` reads back."""
        connector = None if self.connector is None else asdict(self.connector)
        requests = [asdict(spec) for spec in self.requests]
        return {"config": asdict(self.config), "requests": requests, "connector": connector}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Workload:
        """The workload of `to_json`."""
        requests = tuple(
            Spec(
                **{
                    **spec,
                    "runs": tuple(tuple(run) for run in spec["runs"]),
                    "remote": Remote.from_json(spec["remote"]),
                }
            )
            for spec in data["requests"]
        )
        connector = data["connector"]
        return Workload(
            SchedulerConfig(**data["config"]),
            requests,
            None if connector is None else ConnectorOptions(**connector),
        )


def random_config(rng: random.Random, *, is_async: bool, policy: str | None = None) -> SchedulerConfig:
    """Options that bring every rule into play: small pools, small budgets, few sequences."""
    block = rng.choice([2, 4, 4, 16])
    return SchedulerConfig(
        num_gpu_blocks=rng.choice([14, 24, 40, 40, 80, 300]),
        block_tokens=block,
        max_num_batched_tokens=rng.choice([3, 5, 16, 40, 64, 200]),
        max_num_seqs=rng.choice([1, 3, 8, 8, 30]),
        max_model_len=block * rng.choice([12, 20, 40]) + rng.randrange(block),
        async_scheduling=is_async,
        enable_prefix_caching=rng.random() < 0.9,
        scheduler_reserve_full_isl=rng.random() < 0.7,
        watermark=rng.choice([0.0, 0.0, 0.0, 0.05, 0.2]),
        long_prefill_token_threshold=rng.choice([0, 0, 0, 2, 9]),
        policy=policy or rng.choice(["fcfs", "fcfs", "priority"]),
    )


def random_workload(seed: int, *, is_async: bool, size: int = 40, future_blocks: bool = True) -> Workload:
    """A workload of up to `size` requests with shared prefixes, full repeats, bursts, pauses, aborts.

    With `future_blocks` a prompt may name blocks that another request is only going to generate (equal content by
    chance: a scheduler has to cope, real traffic does not have it).
    """
    rng = random.Random(seed)
    config = random_config(rng, is_async=is_async)
    block = config.block_tokens
    most_tokens = min(config.max_model_len, (config.num_gpu_blocks - 1) * block)
    long_outputs = rng.random() < 0.3
    pause = rng.choice([0, 1, 1, 3, 12])
    abort_share = rng.choice([0.0, 0.0, 0.1, 0.3])
    requests: list[Spec] = []
    at = 1
    for index in range(rng.randrange(2, size + 1)):
        at += rng.choice([0, 0, 1, pause])
        runs: list[tuple[int, int, int]] = []
        tail = rng.randrange(block)
        if requests and rng.random() < 0.75:
            other = rng.choice(requests)
            full = other.prompt_tokens // block
            reach = full
            if future_blocks and rng.random() < 0.3:
                reach = (other.prompt_tokens + other.output_tokens) // block
            keep = reach if rng.random() < 0.4 else rng.randrange(reach + 1)
            runs = cut_runs([*other.runs, (other.origin, full, max(reach, full))], keep)
        keep = sum(end - start for _, start, end in runs)
        new = 0 if keep and rng.random() < 0.3 else rng.randrange(0, rng.choice([2, 6, 15]))
        if new:
            runs.append((index, keep, keep + new))
        prompt = (keep + new) * block + tail
        prompt = max(1, min(prompt, most_tokens - 1))
        runs = cut_runs(runs, prompt // block)
        outputs = rng.choice([1, 1, 2, 3, rng.randrange(1, 12), rng.randrange(1, 40)])
        if long_outputs:
            outputs += rng.randrange(30)
        if prompt + outputs > most_tokens and not (most_tokens == config.max_model_len and rng.random() < 0.5):
            outputs = most_tokens - prompt  # else: cut off by max_model_len
        abort_at = at + rng.choice([0, 1, 2, rng.randrange(40)]) if rng.random() < abort_share else None
        requests.append(
            Spec(
                f"r{index}",
                index,
                tuple(runs),
                prompt,
                outputs,
                at,
                abort_at,
                rng.randrange(3),
                rng.choice([at, index]),
            )
        )
    return Workload(config, tuple(requests))


def cut_runs(runs: Iterable[tuple[int, int, int]], blocks: int) -> list[tuple[int, int, int]]:
    """The first `blocks` blocks of `runs`, without empty pieces."""
    return [(origin, start, min(end, blocks)) for origin, start, end in runs if start < min(end, blocks)]


# ---------------------------------------------------------------------- records


def scheduled(
    items: Iterable[tuple[str, int, int]],
    new: Iterable[str],
    resumed: Iterable[str],
    preempted: Iterable[str],
    waiting: Iterable[str],
    free: int,
) -> Record:
    """A schedule call: (id, tokens, computed before) in order, who is new, resumed, preempted; state after it."""
    return "S", tuple(items), tuple(new), tuple(resumed), tuple(sorted(preempted)), tuple(waiting), free


def updated(
    outputs: Iterable[tuple[str, bool]],
    running: Iterable[str],
    waiting: Iterable[str],
    free: int,
    events: Iterable[Record],
    empty: bool,
) -> Record:
    """An update call: (id, finished) for each token delivered, state after it, KV events published by it."""
    return "U", tuple(outputs), tuple(running), tuple(waiting), free, tuple(events), empty


def comparable(log: list[Record]) -> list[Record]:
    """The record without calls that had nothing to do.

    vLLM takes one more empty step after the last request is gone, to tell its workers; it takes no time. Events that
    an empty update publishes are counted to the next one.
    """
    out: list[Record] = []
    carried: tuple[Record, ...] = ()
    for record in log:
        if record[0] == "S":
            if record[1] or record[4]:
                out.append(record)
            continue
        _, outputs, running, waiting, free, events, empty = record
        if empty:
            carried += events
        else:
            out.append(("U", outputs, running, waiting, free, carried + events))
            carried = ()
    out.append(("end", carried))
    return out


def flat_events(events: Iterable[KvEvent]) -> Iterator[Record]:
    """Events block by block: ("+", origin, pos, parent) and ("-", origin, pos)."""
    for event in events:
        if isinstance(event, Stored):
            parent = event.parent
            for pos in range(event.start, event.start + event.count):
                yield "+", event.origin, pos, parent
                parent = event.origin, pos
        elif isinstance(event, Removed):
            for pos in reversed(range(event.start, event.start + event.count)):
                yield "-", event.origin, pos
        else:
            yield ("cleared",)


class RecordingRank(RankScheduler):
    """The engine under test, writing down what it does."""

    def __init__(self, config: SchedulerConfig, log: list[Record]) -> None:
        super().__init__(config, True)
        self.log = log

    def schedule(self) -> Batch:
        """As the engine's own."""
        before = {id(request) for request in self.running}
        batch = super().schedule()
        admitted = [i.request for i in batch.items if id(i.request) not in before]
        self.log.append(
            scheduled(
                [(i.request.request_id, i.tokens, i.cached) for i in batch.items],
                [r.request_id for r in admitted if not r.preemptions],
                [r.request_id for r in admitted if r.preemptions],
                [r.request_id for r in batch.preempted],
                [r.request_id for r in self.waiting],
                self.pool.free,
            )
        )
        return batch

    def update(self, batch: Batch) -> tuple[list[EngineRequest], list[EngineRequest]]:
        """As the engine's own."""
        before = [item.request.outputs for item in batch.items]
        result = super().update(batch)
        self.log.append(
            updated(
                [
                    (item.request.request_id, item.request.finished)
                    for item, outputs in zip(batch.items, before, strict=True)
                    if item.request.outputs > outputs
                ],
                [r.request_id for r in self.running],
                [r.request_id for r in self.waiting],
                self.pool.free,
                flat_events(self.events),
                not batch.items,
            )
        )
        return result


class UnitPrice:
    """Every step takes one nanosecond; no leaps."""

    def step_ns(self, ranks: list[RankBatch]) -> int:
        """One."""
        return 1

    def leap(self, ranks: list[RankBatch]) -> Any:
        """Not to be called."""
        raise AssertionError("this node must not leap")


def run_node(workload: Workload, rank: RankScheduler, log: list[Record]) -> list[Record]:
    """Drive a one-rank Node around `rank` (which writes `log`) with the workload; returns the comparable record."""
    node = Node(UnitPrice(), workload.config, leaping=False, keep_events=True)
    node.ranks[0] = rank
    requests: dict[str, EngineRequest] = {}
    events = workload.events()
    done = 0

    def deliver() -> None:
        nonlocal done
        _, kind, spec = events[done]
        done += 1
        if kind == "add":
            requests[spec.request_id] = spec.request()
            node.submit(0, requests[spec.request_id])
        else:
            node.abort(0, requests[spec.request_id])

    while node.busy or done < len(events):
        if not node.busy:
            deliver()
            node.advance(node.now_ns)
            continue
        while done < len(events) and events[done][0] <= node.steps:
            deliver()
        node.advance(node.now_ns + 1)
    return comparable(log)


def simpler(workload: Workload, fails: Any, most_tries: int = 400) -> Workload:
    """A smaller workload on which `fails(workload)` still holds: requests, aborts and outputs taken away greedily."""
    tries = 0
    size = max(1, len(workload.requests) // 2)
    while size:
        at = 0
        while at < len(workload.requests) and tries < most_tries:
            tries += 1
            smaller = replace(workload, requests=workload.requests[:at] + workload.requests[at + size :])
            if smaller.requests and fails(smaller):
                workload = smaller
            else:
                at += size
        size //= 2
    for at in range(len(workload.requests)):
        spec = workload.requests[at]
        simple = ({"abort_at": None}, {"output_tokens": 1}, {"priority": 0}, {"at": 1}, {"remote": Remote()})
        for changes in simple:
            changed = replace(workload.requests[at], **changes)
            smaller = replace(workload, requests=(*workload.requests[:at], changed, *workload.requests[at + 1 :]))
            if changed != spec and fails(smaller):
                workload = smaller
    return workload
