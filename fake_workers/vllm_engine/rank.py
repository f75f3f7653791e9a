"""vLLM's own scheduler in a node's loop: a child process decides, this side keeps what node, gauges and records read.

For short runs that check a finding: a round trip and vLLM's own bookkeeping per step, no leaps.
"""

from __future__ import annotations

import os
import subprocess
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import msgspec

from fake_workers.engine.blocks import BlockPool, PromptRuns
from fake_workers.engine.events import Cleared, KvEvent, Removed, Stored
from fake_workers.engine.request import EngineRequest
from fake_workers.engine.scheduler import Batch, RankScheduler, Scheduled, SchedulerConfig
from fake_workers.errors import InputError
from fake_workers.vllm_engine.install import VERSION, interpreter

_SOURCES = Path(__file__).parents[2]


class VllmChildError(Exception):
    """The child process is gone; the text holds the end of what it said."""


class VllmProcess:
    """The process that holds vLLM's schedulers, any number of them."""

    def __init__(self, log: Path | None = None) -> None:
        """Starts it; InputError if vLLM's files are not installed. `log` gets its standard error."""
        python = interpreter()
        if python is None:
            raise InputError(
                "cluster.engine.kind",
                f"vLLM {VERSION} is not installed",
                "run `harness engine install`",
            )
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        errors: int | IO[bytes] = log.open("wb") if log is not None else subprocess.DEVNULL
        self._process = subprocess.Popen(
            [str(python), "-m", "fake_workers.vllm_engine.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={k: v for k, v in os.environ.items() if k != "PYTHONHOME"} | {"PYTHONPATH": str(_SOURCES)},
            start_new_session=True,  # Ctrl-C ends the run, which then ends this
        )
        if not isinstance(errors, int):
            errors.close()
        self._encode = msgspec.json.Encoder().encode
        self._decode = msgspec.json.Decoder().decode
        self._engines = 0

    def ask(self, *request: Any) -> Any:
        """One command and its answer."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(self._encode(request) + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            said = self._log.read_text(errors="replace")[-2000:] if self._log is not None else ""
            raise VllmChildError(f"vLLM's scheduler process ended (exit {process.poll()})\n{said}".rstrip())
        return self._decode(line)["ok"]

    def rank(self, config: SchedulerConfig, keep_events: bool) -> VllmRank:
        """A fresh engine."""
        self._engines += 1
        return VllmRank(config, keep_events, self, self._engines - 1)

    def close(self) -> None:
        """Ends the process."""
        process = self._process
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


class _PoolView(BlockPool):
    """The child's block pool as far as it is looked at from here."""

    def __init__(self, blocks: int, rank: VllmRank) -> None:
        super().__init__(blocks)
        self._rank = rank
        self.free_blocks = blocks

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return self.free_blocks

    def cached_prefix(self, prompt: PromptRuns) -> int:
        """Leading blocks of the prompt that are cached."""
        return self._rank.held(prompt)


class VllmRank(RankScheduler):
    """RankScheduler's face over vLLM's Scheduler: same calls from the node, same state for those who look."""

    def __init__(self, config: SchedulerConfig, keep_events: bool, process: VllmProcess, number: int) -> None:
        super().__init__(config, keep_events)
        self._process, self._number = process, number
        self._pool = _PoolView(config.num_gpu_blocks - 1, self)
        self.pool = self._pool
        self._requests: dict[str, EngineRequest] = {}
        self._under_way: deque[Batch] = deque()
        process.ask("new", number, asdict(config))

    def add(self, request: EngineRequest) -> None:
        """A new request."""
        self._requests[request.request_id] = request
        what = (request.request_id, request.origin, request.runs, request.prompt_tokens, request.output_tokens)
        self._take_state(self._ask("add", [*what, request.arrival_ns, request.priority]))

    def abort(self, request: EngineRequest) -> None:
        """The client went away."""
        if request.finished:
            return
        request.finished = True
        self._take_state(self._ask("abort", request.request_id))
        request.running = False

    def schedule(self) -> Batch:
        """vLLM's schedule()."""
        answer = self._ask("schedule")
        batch = Batch()
        for request_id in answer["preempted"]:
            victim = self._requests[request_id]
            victim.preemptions += 1
            batch.preempted.append(victim)
        for request_id, tokens, cached, samples in answer["items"]:
            request = self._requests[request_id]
            request.computed = cached + tokens
            batch.items.append(Scheduled(request, tokens, cached, samples))
        for request_id in answer["new"]:
            request = self._requests[request_id]
            if request.hit_tokens is None:
                request.hit_tokens = next(item.cached for item in batch.items if item.request is request)
        self._take_state(answer)
        self._under_way.append(batch)
        return batch

    def update(self, batch: Batch) -> tuple[list[EngineRequest], list[EngineRequest]]:
        """vLLM's update_from_output() for `batch`.

        A node passes empty batches of an engine at rest by; vLLM hears of them before the next one. A batch that
        schedule() has not made is the node's own, and empty.
        """
        if not any(made is batch for made in self._under_way):
            return [], []
        events: list[Any] = []
        while self._under_way.popleft() is not batch:
            events += self._ask("update")["events"]
        answer = self._ask("update")
        events += answer["events"]
        first: list[EngineRequest] = []
        done: list[EngineRequest] = []
        for request_id, tokens, finished in answer["delivered"]:
            request = self._requests[request_id]
            if request.finished:
                continue
            request.outputs += tokens
            if tokens and request.outputs == tokens:
                first.append(request)
            if finished:
                request.finished = True
                done.append(request)
        if self.keep_events:
            for event in events:
                self.events += _runs_of(event)
        self._take_state(answer)
        for request in done:
            del self._requests[request.request_id]
        return first, done

    def held(self, prompt: PromptRuns) -> int:
        """Leading blocks of the prompt that vLLM's cache holds."""
        return int(self._process.ask("held", self._number, prompt))

    def _ask(self, *request: Any) -> Any:
        return self._process.ask(request[0], self._number, *request[1:])

    def _take_state(self, answer: dict[str, Any]) -> None:
        for request in self.running:
            request.running = False
        self.running = [self._requests[i] for i in answer["running"]]
        for request in self.running:
            request.running = True
        self.waiting = deque(self._requests[i] for i in answer["waiting"])
        self._pool.free_blocks = answer["free"]


def _runs_of(event: list[Any]) -> list[KvEvent]:
    """A KV event of the child's, block by block, as runs."""
    if event[0] == "cleared":
        return [Cleared(0)]
    blocks: list[tuple[int, int]] = [(origin, pos) for origin, pos in event[1]]
    if event[0] == "-":
        return [Removed(0, origin, pos, 1) for origin, pos in blocks]
    parent = tuple(event[2]) if event[2] is not None else None
    out: list[KvEvent] = []
    for origin, pos in blocks:
        last = out[-1] if out else None
        if isinstance(last, Stored) and last.origin == origin and last.start + last.count == pos:
            last.count += 1
        else:
            out.append(Stored(0, origin, pos, 1, parent))
        parent = (origin, pos)
    return out
