"""Timed workloads for a node: a list of actions, played the same way on nodes that step and nodes that leap.

What a request shares with earlier ones is settled when it arrives, since real prompts repeat generated blocks only of
calls that have ended.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fake_workers.engine.node import EngineStuckError, Node, StepPrice
from fake_workers.engine.request import EngineRequest
from fake_workers.engine.scheduler import SchedulerConfig
from fake_workers.pricing.steps import RankBatch
from tests.engine.workload import cut_runs, flat_events

HISTORY_NS = 60_000


@dataclass(frozen=True)
class Submit:
    """A request arrives: `keep` (0..1) of an earlier request's blocks, `new` blocks, `tail` tokens."""

    wait_ns: int
    rank: int
    parent: int
    keep: float
    new: int
    tail: int
    outputs: int
    priority: int = 0


@dataclass(frozen=True)
class Abort:
    """The client of an earlier request goes away (nothing happens if it has ended)."""

    wait_ns: int
    victim: int


@dataclass(frozen=True)
class Look:
    """A cut point: gauges `back_ns` ago on every rank; KV events are taken if `take`."""

    wait_ns: int
    back_ns: int
    take: bool


Action = Submit | Abort | Look


class RandomPrice:
    """A step price from random numbers, and leaps that add its steps up one by one.

    Per rank: piecewise linear in the sum of contexts, plus prefill; the slowest rank counts.
    """

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.base_ns = rng.choice([1, 50, 5000])
        self.knots = [(0, rng.randrange(1, 9)), *((rng.randrange(400), rng.randrange(9)) for _ in range(3))]
        self.per_request_ns = rng.choice([0, 100])
        self.per_token_ns = rng.randrange(1, 60)

    def step_ns(self, ranks: list[RankBatch]) -> int:
        """Duration of one step."""
        return self.base_ns + max(self._rank_ns(rank) for rank in ranks)

    def _rank_ns(self, rank: RankBatch) -> int:
        context = rank.decode_context_tokens
        cost = rank.decodes * self.per_request_ns
        cost += sum(max(0, context - knot) * slope for knot, slope in self.knots)
        return cost + sum(new * (self.per_token_ns + cached // 8) for new, cached in rank.prefills)

    def leap(self, ranks: list[RankBatch]) -> SlowLeap:
        """The decode steps that start with `ranks`."""
        return SlowLeap(self, ranks)


class SlowLeap:
    """The definition of a leap: the sum of its steps' prices."""

    def __init__(self, price: StepPrice, ranks: list[RankBatch]) -> None:
        assert not any(rank.prefills for rank in ranks)
        self.price, self.ranks, self.sums = price, ranks, [0]

    def cumulative_ns(self, steps: int) -> int:
        """Duration of the first `steps` steps."""
        while len(self.sums) <= steps:
            i = len(self.sums) - 1
            grown = [RankBatch((), r.decodes, r.decode_context_tokens + i * r.decodes) for r in self.ranks]
            self.sums.append(self.sums[-1] + self.price.step_ns(grown))
        return self.sums[steps]

    def step_ns(self, i: int) -> int:
        """Duration of step i."""
        return self.cumulative_ns(i) - self.cumulative_ns(i - 1)

    def steps_until(self, duration_ns: int) -> int:
        """Steps that end within `duration_ns`."""
        steps = 0
        while self.cumulative_ns(steps + 1) <= duration_ns:
            steps += 1
        return steps


class TimedConnector:
    """A connector whose every answer follows from the request's name and its count, some nanoseconds late."""

    def __init__(self, seed: int, scale_ns: int) -> None:
        self.seed = seed
        self.scale_ns = scale_ns
        self.node: Node | None = None
        self.said: list[Any] = []
        """What it was told of saves, preemptions and ends."""
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._serial = 0
        self._known: dict[str, int | None] = {}
        self._loading: set[str] = set()
        self._attempts: dict[str, int] = {}

    def next_ns(self) -> int | None:
        """Time of the next answer."""
        return self._heap[0][0] if self._heap else None

    def run(self) -> None:
        """Give the next answer; the node stands at its time."""
        heapq.heappop(self._heap)[2]()

    def _later(self, name: str, what: Callable[[Node], None]) -> None:
        node = self.node
        assert node is not None
        rng = random.Random(f"{self.seed} {name}")
        at = node.now_ns + rng.choice([0, 1, rng.randrange(self.scale_ns), rng.randrange(20 * self.scale_ns)])
        self._serial += 1
        heapq.heappush(self._heap, (at, self._serial, lambda: what(node)))

    def lookup(self, rank: int, request: EngineRequest, local_hit_tokens: int) -> tuple[int, bool] | None:
        """See Connector."""
        name = request.request_id
        attempt = self._attempts.get(name, 0)
        rng = random.Random(f"{self.seed} {name} {attempt}")
        if name not in self._known:
            self._known[name] = None
            if rng.random() < 0.5:

                def answer(node: Node) -> None:
                    self._known[name] = attempt
                    node.lookup_ready()

                self._later(f"{name} lookup {attempt}", answer)
            else:
                self._known[name] = attempt
        if self._known[name] is None:
            return None
        if attempt > 3 or request.prompt_tokens < 2:
            return 0, False
        reach = rng.choice([0, request.prompt_tokens, rng.randrange(request.prompt_tokens)])
        inside = rng.random() < 0.1
        more = max(0, min(reach, request.prompt_tokens - inside) - local_hit_tokens)
        return more, not inside

    def start_load(self, rank: int, request: EngineRequest, local_hit_tokens: int, external_tokens: int) -> None:
        """See Connector."""
        name = request.request_id
        transfer = request.transfer
        assert transfer is not None
        if not external_tokens:
            return
        attempt = self._attempts[name] = self._attempts.get(name, 0) + 1
        if not transfer.loading:
            return
        self._loading.add(name)
        rng = random.Random(f"{self.seed} {name} load {attempt}")
        failed = rng.random() < 0.2

        def end(node: Node) -> None:
            self._loading.discard(name)
            tokens = rng.choice([None, rng.randrange(external_tokens)])
            by_tier = None if failed else {"far": external_tokens}
            node.load_ended(rank, request, tokens if failed else None, failed, by_tier)

        self._later(f"{name} load {attempt}", end)

    def save(self, rank: int, request: EngineRequest, computed_tokens: int) -> None:
        """See Connector."""
        assert self.node is not None
        self.said.append((self.node.now_ns, rank, request.request_id, computed_tokens))

    def preempted(self, rank: int, request: EngineRequest) -> None:
        """See Connector."""
        self._known.pop(request.request_id, None)
        self.said.append((rank, request.request_id))

    def finish(self, rank: int, request: EngineRequest) -> bool:
        """See Connector."""
        name = request.request_id
        transfer = request.transfer
        assert transfer is not None
        if name in self._loading or transfer.loading or random.Random(f"{self.seed} {name} end").random() < 0.7:
            return False
        self._later(f"{name} save", lambda node: node.blocks_released(rank, request))
        return True


def play(
    node: Node, actions: Sequence[Action], *, by_wake: bool = False, connector: TimedConnector | None = None
) -> list[Any]:
    """Everything that can be seen of a node while `actions` are played, and its state at the end.

    With `by_wake` the node is advanced to each of its own wake-up times on the way, as the harness does; a connector
    needs that.
    """
    if connector is not None:
        connector.node = node
    config, block = node.config, node.config.block_tokens
    log: list[Any] = []
    requests: list[tuple[int, EngineRequest]] = []
    space = (config.num_gpu_blocks - 1) * block
    # an answer may be cut off by max_model_len, but a request that the pool can never hold would wait for ever
    most = min(config.max_model_len, space), space if space < config.max_model_len else 1 << 30
    now = 0

    def advance(t_ns: int) -> None:
        while by_wake:
            due = connector.next_ns() if connector is not None else None
            times = [at for at in (node.wake_ns(), due) if at is not None and at <= t_ns]
            if not times:
                break
            seen(node.advance(min(times)))
            if due == min(times) and connector is not None:
                connector.run()
        seen(node.advance(t_ns))

    def seen(outcomes: list[Any]) -> None:
        log.extend((o.t_ns, o.rank, o.request.request_id, o.first, o.done) for o in outcomes)

    for action in actions:
        now += action.wait_ns
        advance(now)
        if isinstance(action, Submit):
            request = _request(action, len(requests), requests, block, most, now)
            rank = action.rank % len(node.ranks)
            requests.append((rank, request))
            node.submit(rank, request)
        elif isinstance(action, Abort) and requests:
            rank, request = requests[action.victim % len(requests)]
            if not request.finished:
                node.abort(rank, request)
        elif isinstance(action, Look):
            for rank in range(len(node.ranks)):
                log.append(node.gauges(rank, max(0, now - action.back_ns)))
                if action.take:
                    log.append(_taken(node, rank))
    end = 1 << 50
    advance(end)
    if connector is not None and any(engine.unfinished for engine in node.ranks):
        # one whose load has failed stands in its own way (docs/engine.md, C4); others behind it are not asked again
        raise EngineStuckError("requests wait and nothing will happen any more")
    for rank, engine in enumerate(node.ranks):
        assert engine.pool.free == engine.pool.blocks and not engine.unfinished
        log.append(_taken(node, rank))
        log.append(_blocks(engine.pool.queue(), backwards=True))
        log.append(sorted(_blocks(engine.pool.resident(), backwards=False)))
        log.append(engine.pool.blank)
        log.append(node.gauges(rank, end))
    log.append([(r.hit_tokens, r.admitted_ns, r.first_token_ns, r.finish_ns, r.preemptions) for _, r in requests])
    log.append([r.outputs for _, r in requests])
    if connector is not None:
        log.append([(r.external_tokens, r.external_by_tier, r.restore_ns, r.failed) for _, r in requests])
        log.append(connector.said)
    log.append((node.totals, node.steps))
    assert not node.busy
    return log


def _request(
    action: Submit, index: int, requests: list[tuple[int, EngineRequest]], block: int, most: tuple[int, int], now: int
) -> EngineRequest:
    longest, fits = most
    runs: list[tuple[int, int, int]] = []
    if requests and action.parent >= 0:
        _, parent = requests[action.parent % len(requests)]
        known = parent.known_runs(block) if parent.finished else parent.runs
        runs = cut_runs(known, round(action.keep * sum(end - start for _, start, end in known)))
    keep = sum(end - start for _, start, end in runs)
    if action.new:
        runs.append((index, keep, keep + action.new))
    prompt = max(1, min((keep + action.new) * block + action.tail % block, longest - 1))
    return EngineRequest(
        f"r{index}",
        index,
        cut_runs(runs, prompt // block),
        prompt,
        max(1, min(action.outputs, fits - prompt)),
        now,
        action.priority,
    )


def _taken(node: Node, rank: int) -> list[Any]:
    return [(event.t_ns, *flat) for event in node.take_events(rank) for flat in flat_events([event])]


def _blocks(runs: list[tuple[int, int, int]], *, backwards: bool) -> list[tuple[int, int]]:
    return [
        (origin, pos)
        for origin, start, end in runs
        for pos in (reversed(range(start, end)) if backwards else range(start, end))
    ]


def random_actions(rng: random.Random, count: int, ranks: int, waits: Sequence[int]) -> list[Action]:
    """`count` actions with waits drawn from `waits`, ns; half the time in a rush, so that requests compete."""
    actions: list[Action] = []
    if rng.random() < 0.5:
        waits = waits[: len(waits) // 2 + 1]
    for _ in range(count):
        wait = rng.choice(waits)
        kind = rng.random()
        if kind < 0.5:
            outputs = rng.choice([1, 2, 3, rng.randrange(1, 20), rng.randrange(1, 90)])
            actions.append(
                Submit(
                    wait,
                    rng.randrange(ranks),
                    rng.choice([-1, rng.randrange(50)]),
                    rng.choice([1.0, rng.random()]),
                    rng.randrange(0, rng.choice([3, 12])),
                    rng.randrange(16),
                    outputs,
                    rng.randrange(3),
                )
            )
        elif kind < 0.6:
            actions.append(Abort(wait, rng.randrange(50)))
        else:
            actions.append(Look(wait, rng.choice([0, 1, rng.randrange(HISTORY_NS)]), rng.random() < 0.5))
    return actions


def random_node_config(rng: random.Random, *, is_async: bool, policy: str) -> SchedulerConfig:
    """A small engine whose requests fight for blocks, tokens and slots."""
    block = rng.choice([2, 4, 16])
    return SchedulerConfig(
        num_gpu_blocks=rng.choice([12, 20, 20, 40, 60, 200]),
        block_tokens=block,
        max_num_batched_tokens=rng.choice([4, 16, 64]),
        max_num_seqs=rng.choice([2, 5, 8, 8]),
        max_model_len=rng.choice([30, 60, 130]),
        async_scheduling=is_async,
        enable_prefix_caching=rng.random() < 0.9,
        scheduler_reserve_full_isl=rng.random() < 0.7,
        watermark=rng.choice([0.0, 0.0, 0.1]),
        long_prefill_token_threshold=rng.choice([0, 0, 5]),
        policy=policy,
    )
