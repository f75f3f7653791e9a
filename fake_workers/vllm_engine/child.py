"""vLLM's own schedulers behind a pipe: JSON lines in on standard input, one JSON line out for each.

    python -m fake_workers.vllm_engine.child        (in the interpreter that `harness engine install` made)

A request is a list `[command, engine, ...]`; engines are numbered by whoever speaks to us:

    ["new", e, {SchedulerConfig}]                          a fresh scheduler
    ["add", e, [id, origin, runs, prompt, output, arrival, priority]]
    ["abort", e, id]
    ["schedule", e]                                        -> the batch, and the state after it
    ["update", e]                                          the oldest scheduled batch has run -> tokens, ends, KV events
    ["held", e, runs]                                      -> how many blocks of that prefix are cached

An answer is `{"ok": ...}`; an error ends the process with its traceback on standard error. Tokens are made up: token
k of block (origin, pos) is a function of the three, so vLLM's block hashes and our block names map one to one.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

from fake_workers.vllm_engine import torch_stub

torch_stub.install()

import msgspec  # noqa: E402  (after the placeholders)
from vllm.distributed.kv_events import BlockRemoved, BlockStored  # noqa: E402
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402
from vllm.v1.request import RequestStatus  # noqa: E402

from fake_workers.engine.scheduler import SchedulerConfig  # noqa: E402
from fake_workers.vllm_engine.scheduler import make_request, make_scheduler, token  # noqa: E402

Runs = list[list[int]]


class _Content:
    """What a request's tokens are."""

    def __init__(self, origin: int, runs: Runs, prompt_tokens: int, block_tokens: int) -> None:
        self._origin, self._runs, self._block = origin, runs, block_tokens
        self._full = prompt_tokens // block_tokens

    def name(self, pos: int) -> tuple[int, int]:
        """(origin, pos) of the block at `pos`."""
        if pos < self._full:
            for origin, start, end in reversed(self._runs):
                if start <= pos < end:
                    return origin, pos
        return self._origin, pos

    def token(self, at: int) -> int:
        """Token number `at`."""
        return token(*self.name(at // self._block), at % self._block)

    def prompt(self, prompt_tokens: int) -> list[int]:
        """The prompt's token ids."""
        out: list[int] = []
        block = self._block
        for pos in range(-(-prompt_tokens // block)):
            first = token(*self.name(pos), 0)
            out.extend(range(first, first + min(block, prompt_tokens - pos * block)))
        return out


class Engine:
    """One scheduler of vLLM's, driven step by step."""

    def __init__(self, config: SchedulerConfig) -> None:
        if config.block_tokens > 256:
            raise ValueError("blocks of more than 256 tokens have no token ids here")
        self._block = config.block_tokens
        self.scheduler = make_scheduler(config)
        self._pool = self.scheduler.kv_cache_manager.block_pool
        self._content: dict[str, _Content] = {}
        self._batches: deque[tuple[Any, list[str], set[str]]] = deque()
        self._hashes: dict[tuple[int, int], Any] = {}
        self._names: dict[Any, tuple[int, int]] = {}
        self._events: list[list[Any]] = []
        self.scheduler.kv_event_publisher = self

    # ------------------------------------------------------------------ commands

    def add(self, request: list[Any]) -> dict[str, Any]:
        """A request arrives."""
        request_id, origin, runs, prompt_tokens, output_tokens, arrival_ns, priority = request
        content = self._content[request_id] = _Content(origin, runs, prompt_tokens, self._block)
        made = make_request(
            request_id, content.prompt(prompt_tokens), output_tokens, self._block, arrival_ns / 1e9, priority
        )
        for pos, block_hash in enumerate(made.block_hashes):
            self._hashes[content.name(pos)] = block_hash
        self.scheduler.add_request(made)
        return self._state()

    def abort(self, request_id: str) -> dict[str, Any]:
        """The client went away."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        return self._state()

    def schedule(self) -> dict[str, Any]:
        """vLLM puts the next batch together."""
        output = self.scheduler.schedule()
        ids = list(output.num_scheduled_tokens)
        requests = self.scheduler.requests
        # as the real runner: a prefill chunk yields no token; to be read right after schedule()
        samples = {i for i in ids if not requests[i].is_prefill_chunk}
        self._batches.append((output, ids, samples))
        computed = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return {
            "items": [[i, n, computed[i], i in samples] for i, n in output.num_scheduled_tokens.items()],
            "new": [r.req_id for r in output.scheduled_new_reqs],
            "preempted": sorted(output.preempted_req_ids or ()),
            **self._state(),
        }

    def update(self) -> dict[str, Any]:
        """The oldest batch has been executed: vLLM takes its tokens in."""
        output, ids, samples = self._batches.popleft()
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={i: at for at, i in enumerate(ids)},
            sampled_token_ids=[[self._next_token(i)] if i in samples else [] for i in ids],
        )
        self._events = []
        outputs = self.scheduler.update_from_output(output, result)
        tokens = outputs[0].outputs if 0 in outputs else []
        delivered = [[o.request_id, len(o.new_token_ids), o.finish_reason is not None] for o in tokens]
        for request_id, _, finished in delivered:
            if finished:
                self._content.pop(request_id, None)
        return {"delivered": delivered, "events": self._events, **self._state()}

    def held(self, runs: Runs) -> int:
        """How many leading blocks of a prompt the cache would give."""
        count = 0
        for origin, start, end in runs:
            for pos in range(start, end):
                block_hash = self._hashes.get((origin, pos))
                if block_hash is None or not self._pool.get_cached_block(block_hash, [0]):
                    return count
                count += 1
        return count

    # ------------------------------------------------------------------ inside

    def _next_token(self, request_id: str) -> int:
        request = self.scheduler.requests.get(request_id)
        return 0 if request is None else self._content[request_id].token(request.num_tokens)

    def _state(self) -> dict[str, Any]:
        scheduler = self.scheduler
        for event in self._pool.kv_event_queue:  # names of blocks that entered the cache with generated tokens
            if isinstance(event, BlockStored):
                self._register(event)
        for request in scheduler.running:
            self._name_generated(request)
        return {
            "running": [r.request_id for r in scheduler.running],
            "waiting": [r.request_id for r in scheduler.waiting],
            "free": self._pool.get_num_free_blocks(),
        }

    def _name_generated(self, request: Any) -> None:
        content = self._content[request.request_id]
        for pos in range(len(request.block_hashes) - 1, -1, -1):
            name = content.name(pos)
            if name in self._hashes:
                break
            self._hashes[name] = request.block_hashes[pos]

    def _register(self, event: BlockStored) -> None:
        for i, block_hash in enumerate(event.block_hashes):
            first = event.token_ids[i * self._block] >> 8
            self._names[block_hash] = first >> 16, first & 0xFFFF

    def publish(self, batch: Any) -> None:
        """vLLM's scheduler hands its KV events over: block by block, under the simulator's names."""
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._register(event)
                parent = None if event.parent_block_hash is None else self._names[event.parent_block_hash]
                self._events.append(["+", [self._names[h] for h in event.block_hashes], parent])
            elif isinstance(event, BlockRemoved):
                self._events.append(["-", [self._names[h] for h in event.block_hashes]])
            else:
                self._events.append(["cleared"])

    def shutdown(self) -> None:
        """Nothing to close (the publisher's part of a scheduler's end)."""


def main() -> None:
    """Answer until standard input ends."""
    engines: dict[int, Engine] = {}
    decode, encode = msgspec.json.Decoder().decode, msgspec.json.Encoder().encode
    out = sys.stdout.buffer
    for line in sys.stdin.buffer:
        command, number, *rest = decode(line)
        answer: Any = None
        if command == "new":
            engines[number] = Engine(SchedulerConfig(**rest[0]))
        elif command in ("add", "abort", "schedule", "update", "held"):
            answer = getattr(engines[number], command)(*rest)
        else:
            raise ValueError(f"unknown command {command}")
        out.write(encode({"ok": answer}) + b"\n")
        out.flush()


if __name__ == "__main__":
    main()
