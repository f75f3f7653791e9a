"""Random workloads for engines with a connector: the scripted connector, and the record of what the engine did with it.

The script lives in the requests (`Spec.remote`) and counts in steps, so that any engine can be played the same.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import replace
from typing import Any

from fake_workers.engine.connected import ConnectedRank
from fake_workers.engine.connector import ConnectorOptions
from fake_workers.engine.node import EngineStuckError, Node
from fake_workers.engine.request import EngineRequest
from fake_workers.engine.scheduler import Batch
from tests.engine.workload import (
    Record,
    Remote,
    RemoteLoad,
    Spec,
    UnitPrice,
    Workload,
    flat_events,
    random_workload,
    scheduled,
    updated,
)


def random_connected_workload(seed: int, *, is_async: bool, size: int = 40) -> Workload:
    """A random workload whose requests have a script each."""
    workload = random_workload(seed, is_async=is_async, size=size)
    rng = random.Random(seed ^ 0xC0FFEE)
    options = ConnectorOptions(
        kv_role=rng.choice(["kv_both", "kv_both", "kv_both", "kv_consumer", "kv_producer"]),
        kv_load_failure_policy=rng.choice(["fail", "recompute"]),
        requires_kv_delivery=rng.choice([None, None, False]),
    )
    hits, fails = rng.choice([0.3, 0.7, 1.0]), rng.choice([0.0, 0.2, 0.5])
    inside, unknown = rng.choice([0.0, 0.2]), rng.choice([0.0, 0.3])
    saves, longest = rng.choice([0.0, 0.5]), rng.choice([2, 5, 25])
    requests = []
    for spec in workload.requests:
        loads: list[RemoteLoad] = []
        while spec.prompt_tokens > 1 and rng.random() < hits and len(loads) < 4:
            reach = rng.choice([spec.prompt_tokens, rng.randrange(1, spec.prompt_tokens + 1)])
            steps = -1 if rng.random() < inside else rng.randrange(longest)
            valid = rng.choice([-1, 0, rng.randrange(reach)]) if rng.random() < fails and steps >= 0 else None
            loads.append(RemoteLoad(reach, steps, valid))
        ready_at = spec.at + rng.randrange(1, 12) if rng.random() < unknown else 0
        save_steps = rng.randrange(6) if rng.random() < saves else None
        requests.append(replace(spec, remote=Remote(ready_at, tuple(loads), save_steps)))
    return replace(workload, requests=tuple(requests), connector=options)


STUCK: Record = ("stuck",)
"""End of a record: requests wait for blocks that nobody will free (C4 has vLLM's own way there)."""


class Outside:
    """What happens to an engine from outside, by step: arrivals and aborts, and what its connector says."""

    def __init__(self, workload: Workload) -> None:
        self._heap: list[tuple[int, int, int, str, Spec]] = []
        self._serial = 0
        self._unknown: set[str] = set()
        self._started: dict[str, int] = {}
        self._loading: dict[str, RemoteLoad] = {}
        self._loaded_at: dict[str, int] = {}
        for at, kind, spec in workload.events():
            self._push(at, 0, kind, spec)
        for spec in workload.requests:
            if spec.remote.ready_at:
                self._unknown.add(spec.request_id)
                self._push(spec.remote.ready_at, 1, "ready", spec)

    def _push(self, at: int, order: int, kind: str, spec: Spec) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (at, order, self._serial, kind, spec))

    @property
    def pending(self) -> bool:
        """Whether anything is still to come."""
        return bool(self._heap)

    def due(self, step: int) -> bool:
        """Whether the next thing happens up to `step`."""
        return bool(self._heap) and self._heap[0][0] <= step

    def next(self, step: int) -> tuple[str, Spec, RemoteLoad | None]:
        """The next thing: "add", "abort", "ready", "loaded" (with the load) or "saved"."""
        _, _, _, kind, spec = heapq.heappop(self._heap)
        if kind == "ready":
            self._unknown.discard(spec.request_id)
        if kind == "loaded":
            self._loaded_at[spec.request_id] = step
        return kind, spec, self._loading.pop(spec.request_id) if kind == "loaded" else None

    def unknown(self, request_id: str) -> bool:
        """Whether lookups of the request answer None."""
        return request_id in self._unknown

    def lookup(self, spec: Spec, local: int) -> tuple[int, bool] | None:
        """Connector.lookup."""
        if spec.request_id in self._unknown:
            return None
        at = self._started.get(spec.request_id, 0)
        if at >= len(spec.remote.loads):
            return 0, False
        load = spec.remote.loads[at]
        reach = min(load.reach, spec.prompt_tokens - 1) if load.steps < 0 else load.reach
        more = max(0, reach - local)
        return more, more > 0 and load.steps >= 0

    def started(self, spec: Spec, external: int, step: int) -> None:
        """Connector.start_load."""
        if not external:
            return
        at = self._started.get(spec.request_id, 0)
        self._started[spec.request_id] = at + 1
        load = spec.remote.loads[at]
        if load.steps >= 0:
            valid = load.valid if load.valid is None else min(load.valid, external - 1)
            self._loading[spec.request_id] = replace(load, valid=valid)
            self._push(step + load.steps, 2, "loaded", spec)

    def finished(self, spec: Spec, step: int) -> bool:
        """Connector.finish."""
        name = spec.request_id
        # the end of a load frees the blocks of a request that is over, so no save may answer for them as well
        if spec.remote.save_steps is None or name in self._loading or self._loaded_at.get(name) == step:
            return False
        self._push(step + spec.remote.save_steps, 2, "saved", spec)
        return True


def line(holding: Any, waiting: Any, deferred: Any) -> list[str]:
    """The waiting requests for a record: those that hold blocks, the others, and those passed over so far."""
    return [*holding, "/", *waiting, "/", *sorted(deferred)]


class RecordingConnectedRank(ConnectedRank):
    """The engine under test, writing down what it does."""

    log: list[Record]

    def _line(self) -> list[str]:
        queues = (self.holding, self.waiting)
        deferred = [r.request_id for queue in queues for r in queue if r.transfer and r.transfer.deferred]
        holding, waiting = ([r.request_id for r in queue] for queue in queues)
        return line(holding, waiting, deferred)

    def owed(self, outside: Outside) -> bool:
        """`outstanding` as it truly is: an answer that is there but was not fetched is not owed."""
        waiting = [r for queue in (self.holding, self.waiting) for r in queue if r.transfer]
        return bool(self._delayed) or any(
            (r.transfer.loading and not r.transfer.arrived) or (r.transfer.deferred and outside.unknown(r.request_id))
            for r in waiting
            if r.transfer
        )

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
                self._line(),
                self.pool.free,
            )
        )
        return batch

    def update(self, batch: Batch) -> tuple[list[EngineRequest], list[EngineRequest]]:
        """As the engine's own."""
        before = [item.request.outputs for item in batch.items]
        result = super().update(batch)
        delivered = [
            (item.request.request_id, item.request.finished)
            for item, outputs in zip(batch.items, before, strict=True)
            if item.request.outputs > outputs
        ]
        self.log.append(
            updated(
                delivered + sorted((r.request_id, True) for r in result[1] if r.failed),
                [r.request_id for r in self.running],
                self._line(),
                self.pool.free,
                flat_events(self.events),
                not batch.items,
            )
        )
        return result


class ScriptedConnector:
    """`Outside` behind the Connector protocol."""

    def __init__(self, outside: Outside, specs: dict[str, Spec]) -> None:
        self.outside = outside
        self.specs = specs
        self.node: Node | None = None
        self.saved: dict[str, int] = {}

    @property
    def _step(self) -> int:
        assert self.node is not None
        return self.node.steps

    def lookup(self, rank: int, request: EngineRequest, local_hit_tokens: int) -> tuple[int, bool] | None:
        """See Connector."""
        return self.outside.lookup(self.specs[request.request_id], local_hit_tokens)

    def start_load(self, rank: int, request: EngineRequest, local_hit_tokens: int, external_tokens: int) -> None:
        """See Connector."""
        self.outside.started(self.specs[request.request_id], external_tokens, self._step)

    def save(self, rank: int, request: EngineRequest, computed_tokens: int) -> None:
        """See Connector."""
        self.saved[request.request_id] = max(computed_tokens, self.saved.get(request.request_id, 0))

    def preempted(self, rank: int, request: EngineRequest) -> None:
        """See Connector."""

    def finish(self, rank: int, request: EngineRequest) -> bool:
        """See Connector."""
        return self.outside.finished(self.specs[request.request_id], self._step)


def run_connected(workload: Workload, log: list[Record]) -> list[Record]:
    """Drive a one-rank node with a connector through the workload; returns the comparable record."""
    assert workload.connector is not None
    outside = Outside(workload)
    connector = ScriptedConnector(outside, {spec.request_id: spec for spec in workload.requests})
    rank = RecordingConnectedRank(workload.config, True, connector, workload.connector)
    rank.log = log
    node = Node(UnitPrice(), workload.config, leaping=False, keep_events=True, connector=connector)
    node.connect([rank])
    connector.node = node
    requests: dict[str, EngineRequest] = {}

    def deliver() -> None:
        kind, spec, load = outside.next(node.steps)
        if kind == "add":
            requests[spec.request_id] = spec.request()
            node.submit(0, requests[spec.request_id])
        elif kind == "abort":
            node.abort(0, requests[spec.request_id])
        elif kind == "ready":
            node.lookup_ready()
        elif kind == "saved":
            node.blocks_released(0, requests[spec.request_id])
        else:
            assert load is not None
            valid = load.valid
            node.load_ended(0, requests[spec.request_id], None if valid == -1 else valid, valid is not None)

    try:
        while node.busy or outside.pending:
            if not node.busy:
                if rank.unfinished and not rank.owed(outside):
                    return [*comparable_connected(log), STUCK]
                deliver()
                node.advance(node.now_ns)
                continue
            while outside.due(node.steps):
                deliver()
            node.advance(node.now_ns + 1)
    except EngineStuckError:
        return [*comparable_connected(log), STUCK]
    if rank.unfinished:
        return [*comparable_connected(log), STUCK]
    assert not node.held and rank.pool.free == rank.pool.blocks, "blocks leaked"
    return comparable_connected(log)


def comparable_connected(log: list[Record]) -> list[Record]:
    """The record without calls that had nothing to do and changed nothing.

    vLLM polls while it waits for its connector, so that it has many such calls; events of an empty update are counted
    to the next one that is kept.
    """
    out: list[Record] = []
    carried: tuple[Record, ...] = ()
    state: tuple[Any, ...] = ()
    for record in log:
        if record[0] == "S":
            if record[1] or record[4] or record[5:] != state:
                out.append(record)
            state = record[5:]
            continue
        _, outputs, running, waiting, free, events, empty = record
        if empty and not outputs and (waiting, free) == state:
            carried += events
        else:
            out.append(("U", outputs, running, waiting, free, carried + events))
            carried = ()
        state = waiting, free
    out.append(("end", carried))
    return out
