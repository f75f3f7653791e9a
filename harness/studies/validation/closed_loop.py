"""A closed loop on the engine: so many clients, each sending its next request when its last one has ended.

What the serving benchmarks behind the measured points do (vLLM's benchmark_serving and its kin): all clients begin at
once, lengths are uniform in [ratio x L, L], ten requests per client, answers of a given length, no shared prefixes.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass
from math import ceil

from fake_workers.engine.node import Node, StepPrice
from fake_workers.engine.request import EngineRequest
from fake_workers.engine.scheduler import SchedulerConfig

REQUESTS_PER_CLIENT = 10


@dataclass(frozen=True, slots=True)
class Loop:
    """One measured operating point. Lengths in tokens."""

    concurrency: int
    prompt_tokens: int
    output_tokens: int
    length_ratio: float = 0.8
    requests: int | None = None
    """None: ten per client."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a client sees, ms: means and medians over all requests, and the length of the whole run in seconds."""

    ttft_ms: float
    tpot_ms: float
    ttft_median_ms: float
    tpot_median_ms: float
    duration_s: float
    steps: int


def run_loop(price: StepPrice, engine: SchedulerConfig, loop: Loop, seed: int = 1) -> Measured:
    """Run a closed loop to its end; nothing stands between clients and engine."""
    rng = random.Random(seed)
    total = loop.requests or REQUESTS_PER_CLIENT * loop.concurrency

    def length(most: int) -> int:
        return rng.randint(int(loop.length_ratio * most), most)

    shapes = [(length(loop.prompt_tokens), max(2, length(loop.output_tokens))) for _ in range(total)]
    node = Node(price, engine)
    block = engine.block_tokens
    sent_ns: list[int] = []

    def send(now_ns: int) -> None:
        number = len(sent_ns)
        sent_ns.append(now_ns)
        prompt, output = shapes[number]
        runs = [(number, 0, prompt // block)] if prompt >= block else []
        node.submit(0, EngineRequest(str(number), number, runs, prompt, output, now_ns))

    for _ in range(min(loop.concurrency, total)):
        send(0)
    ttft: list[float] = []
    tpot: list[float] = []
    end_ns = 0
    while (wake := node.wake_ns()) is not None:
        for outcome in node.advance(wake):
            if not outcome.done:
                continue
            request = outcome.request
            first, last = request.first_token_ns, request.finish_ns
            assert first is not None and last is not None
            number = int(request.request_id)
            ttft.append((first - sent_ns[number]) / 1e6)
            tpot.append((last - first) / 1e6 / (shapes[number][1] - 1))
            end_ns = max(end_ns, last)
            if len(sent_ns) < total:
                send(last)
    return Measured(
        statistics.fmean(ttft),
        statistics.fmean(tpot),
        statistics.median(ttft),
        statistics.median(tpot),
        end_ns / 1e9,
        node.steps,
    )


def engine_config(
    kv_tokens: int, loop: Loop, *, block_tokens: int = 16, budget_tokens: int = 8192, max_num_seqs: int = 1024
) -> SchedulerConfig:
    """The engine of a measured point: no prefix reuse (prompts are random), blocks for `kv_tokens`."""
    return SchedulerConfig(
        num_gpu_blocks=max(2, ceil(kv_tokens / block_tokens)) + 1,
        block_tokens=block_tokens,
        max_num_batched_tokens=budget_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=loop.prompt_tokens + loop.output_tokens + 1,
        enable_prefix_caching=False,
    )
