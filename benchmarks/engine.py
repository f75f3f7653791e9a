"""How fast the engine is, with leaps and step by step.

    python -m benchmarks.engine [--keep-events]

(a) one rank with 8 decodes on 100k tokens of context, 1,000 tokens each; (b) the same on each of 8 lock-step ranks;
(c) 400 short requests at random times on one rank, with shared prefixes, looked at by a router at every arrival.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from fake_workers.engine.node import Node
from fake_workers.engine.request import EngineRequest
from fake_workers.engine.scheduler import SchedulerConfig
from fake_workers.pricing.node_price import ProfilePrice
from fake_workers.pricing.registry import load_profile

BLOCK = 16
LONG = SchedulerConfig(num_gpu_blocks=60_000, block_tokens=BLOCK, max_model_len=131_072)
SHORT = SchedulerConfig(num_gpu_blocks=4_000, block_tokens=BLOCK, max_model_len=16_384)


@dataclass
class Run:
    """What one run took."""

    tokens: int
    steps: int
    events: int
    wall_s: float


def decodes(node: Node) -> int:
    """8 requests of 100k tokens on every rank; 1,000 output tokens each."""
    tokens = 0
    for index in range(8 * len(node.ranks)):
        blocks = 100_000 // BLOCK
        node.submit(
            index % len(node.ranks),
            EngineRequest(f"r{index}", index, [(index, 0, blocks)], blocks * BLOCK, 1000, 0),
        )
        tokens += 1000
    node.advance(1 << 60)
    return tokens


def short(node: Node) -> int:
    """Open-loop arrivals, about 12 a second; a quarter of each prompt's length is shared."""
    rng = random.Random(1)
    now = tokens = 0
    for index in range(400):
        now += round(rng.expovariate(12) * 1e9)
        node.advance(now)
        node.gauges(0, now)
        node.take_events(0)
        shared, own = rng.choice([0, 16, 40, 64]), rng.randrange(4, 200)
        runs = [(1_000_000 + shared, 0, shared)] if shared else []
        runs.append((index, shared, shared + own))
        outputs = rng.randrange(10, 400)
        tokens += outputs
        node.submit(0, EngineRequest(f"r{index}", index, runs, (shared + own) * BLOCK + 5, outputs, now))
    node.advance(1 << 60)
    return tokens


def measure(
    load: Callable[[Node], int], profile: str, config: SchedulerConfig, leaping: bool, keep_events: bool
) -> Run:
    """Play one load on a fresh node."""
    price = ProfilePrice(load_profile(profile))
    node = Node(price, config, price.profile.layout.dp, leaping=leaping, keep_events=keep_events)
    start = time.perf_counter()
    tokens = load(node)
    return Run(tokens, node.steps, node.boundaries_taken, time.perf_counter() - start)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep-events", action="store_true", help="KV events are kept, as for a precise router")
    keep_events = parser.parse_args().keep_events
    tensor, experts = "llama-3.3-70b-fp8-tp8-h200", "glm-5.2-fp8-dp8ep8-b200"
    cases = [
        ("8 decodes at 100k, 1 rank", decodes, tensor, LONG),
        ("8 decodes at 100k, 8 ranks", decodes, experts, LONG),
        ("400 short requests, 1 rank", short, tensor, SHORT),
    ]
    head = ("case", "mode", "tokens", "steps", "events", "tokens/event", "wall s", "steps/s", "events/s")
    print("{:27} {:5} {:>8} {:>7} {:>7} {:>12} {:>8} {:>10} {:>9}".format(*head))
    for name, load, profile, config in cases:
        for leaping in (True, False):
            run = measure(load, profile, config, leaping, keep_events)
            print(
                f"{name:27} {'leap' if leaping else 'step':5} {run.tokens:8} {run.steps:7} {run.events:7} "
                f"{run.tokens / run.events:12.1f} {run.wall_s:8.3f} {run.steps / run.wall_s:10.0f} "
                f"{run.events / run.wall_s:9.0f}"
            )


if __name__ == "__main__":
    main()
