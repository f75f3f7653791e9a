"""What a decision of the real router costs as the cluster grows: milliseconds of wall time, by part.

    python -m benchmarks.decision [--release v0.7.1] [--nodes 8,32,128] [--decisions N]

Nodes of 8 endpoints, 40 sessions with prompts of 219,000 tokens and more. Before each decision `--changed` workers have
new gauges and, with precise scoring, the KV of the 3,700 tokens that the session's last call added is reported; each
call's answer is passed back before the next decision (what gauges wait for while answers are under way counts as
answers). Also: the CPU per decision of the router and of the harness.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path

from fake_workers.engine.events import KvEvent, Stored
from fake_workers.engine.gauges import Gauges
from fake_workers.engine.scheduler import SchedulerConfig
from harness.experiment import Experiment, load_experiment
from harness.router.base import RouteRequest
from harness.router.endpoints import loopback_endpoints
from harness.router.select import make_router

EXAMPLE = Path(__file__).parents[1] / "examples" / "compare.yaml"
ENGINE = SchedulerConfig(num_gpu_blocks=8_000, block_tokens=64)
SESSIONS = 40
PROMPT_BLOCKS, NEW_BLOCKS = 3_400, 58
"""About 219,000 and 3,700 tokens, the means of the published corpus."""

PARTS = ("push_s", "barrier_s", "ext_proc_s", "response_s", "router_cpu_s")


def measure(experiment: Experiment, nodes: int, decisions: int, changed: int, seed: int = 1) -> dict[str, float]:
    """Milliseconds per decision."""
    rng = random.Random(seed)
    endpoints = loopback_endpoints(8 * nodes, ranks_per_node=8)
    with tempfile.TemporaryDirectory() as logs:
        router = make_router(experiment, endpoints, "model", ENGINE, Path(logs))
        try:
            router.start()
            blocks = [PROMPT_BLOCKS] * SESSIONS
            if router.reads_kv_events:
                for session in range(SESSIONS):
                    whole: list[KvEvent] = [Stored(0, session, 0, PROMPT_BLOCKS, None)]
                    router.publish_kv_events({session % len(endpoints): whole})
            router.settle()
            before, cpu_before = router.stats(), time.process_time()
            for number in range(decisions):
                session = number % SESSIONS
                workers = rng.sample(range(len(endpoints)), changed)
                router.push_gauges({w: Gauges(rng.randrange(8), rng.randrange(3), rng.random()) for w in workers})
                if router.reads_kv_events:
                    known = blocks[session]
                    new: list[KvEvent] = [Stored(0, session, known, NEW_BLOCKS, (session, known - 1))]
                    router.publish_kv_events({session % len(endpoints): new})
                blocks[session] += NEW_BLOCKS
                runs = [(session, 0, blocks[session])]
                tokens = blocks[session] * ENGINE.block_tokens
                call = RouteRequest(f"c{number}", f"s{session}", "model", runs, tokens, 400)
                router.decide(call)
                router.tell_first_token(call.request_id)
                router.tell_end(call.request_id, tokens, 0, 400)
            router.settle()
            after, cpu = router.stats(), time.process_time() - cpu_before
        finally:
            router.stop()
    per_decision = {part: (after[part] - before[part]) / decisions * 1e3 for part in PARTS}
    return {**per_decision, "harness CPU": cpu / decisions * 1e3}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--release", default="v0.7.1")
    parser.add_argument("--nodes", default="8,32,128")
    parser.add_argument("--decisions", type=int, default=100)
    parser.add_argument("--changed", type=int, default=8)
    options = parser.parse_args()
    heads = ("push", "KV barrier", "decide", "answers", "router CPU", "harness CPU")
    print(f"{'ms per decision':20}{'endpoints':>10}" + "".join(f"{head:>13}" for head in heads))
    for config in ("load", "precise"):
        for nodes in (int(text) for text in options.nodes.split(",")):
            overrides = [f"router.release={options.release}", f"router.config={config}", f"cluster.nodes={nodes}"]
            cost = measure(load_experiment(EXAMPLE, overrides, None), nodes, options.decisions, options.changed)
            print(f"{config:20}{8 * nodes:>10}" + "".join(f"{value:13.2f}" for value in cost.values()), flush=True)


if __name__ == "__main__":
    main()
