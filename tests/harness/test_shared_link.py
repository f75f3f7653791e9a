"""One link inside a whole run (engine, LMCache, fabric) against the analytic answer of processor sharing.

Every prompt lies in the store behind one slow link and is asked for at a Poisson instant. On the link transfers share
the rate equally, so it is an M/D/1 processor-sharing queue: its mean time in system is service / (1 - load), whatever
the distribution of sizes, and each single transfer's end follows from the arrivals by an elementary recursion.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness.experiment import Experiment
from harness.results.store import Run
from harness.runner import run_experiment
from harness.trace.model import Call, Session
from harness.workload import Loaded

pytestmark = [pytest.mark.usefixtures("lmcache"), pytest.mark.slow]

TOKENS, BLOCK = 4096, 64
LINK_BYTES_PER_S = 0.5e9
SERVICE_S = TOKENS * 131_072 / LINK_BYTES_PER_S
PROMPTS = 100
TOPOLOGY = """\
about: one slow link to the store, everything else as good as free
counts: {n: 1, g: 1}
links:
  - {from: "gpu[n,g]", to: "host[n]", gbytes_per_s: 100000}
  - {from: "host[n]", to: store, gbytes_per_s: 0.5, back_gbytes_per_s: 0.5}
"""


def shared_evenly(arrivals_s: list[float], service_s: float) -> list[float]:
    """Time in system of each job of a processor-sharing server, all of one size; written without events or links."""
    left: dict[int, float] = {}
    out = [0.0] * len(arrivals_s)
    now = 0.0
    pending = list(enumerate(arrivals_s))
    while pending or left:
        end = now + min(left.values()) * len(left) if left else float("inf")
        then = min(end, pending[0][1]) if pending else end
        for job in left:
            left[job] -= (then - now) / len(left)
        for job in [job for job, work in left.items() if work <= 1e-12]:
            out[job] = then - arrivals_s[job]
            del left[job]
        while pending and pending[0][1] <= then:
            left[pending.pop(0)[0]] = service_s
        now = then
    return out


def test_the_reference_itself() -> None:
    assert shared_evenly([0.0], 2.0) == pytest.approx([2.0])
    assert shared_evenly([0.0, 1.0], 2.0) == pytest.approx([3.0, 3.0])
    assert shared_evenly([0.0, 0.0, 9.0], 1.0) == pytest.approx([2.0, 2.0, 1.0])


def ask_all(tmp_path: Path, offsets_s: list[float]) -> Run:
    """Each prompt is computed once and goes to the store; then they are asked for again, in turn, at the offsets."""
    calls: list[Call] = []

    def add(ref: int, deps: tuple[int, ...], on_start: int | None, gap_s: float) -> None:
        blocks = TOKENS // BLOCK
        calls.append(
            Call(
                index=len(calls),
                t_s=0.0,
                api_s=None,
                chain="main",
                input_tokens=TOKENS + 1,
                output_tokens=1,
                ref=ref,
                keep_blocks=blocks if ref >= 0 else 0,
                new_blocks=0 if ref >= 0 else blocks,
                deps=deps,
                on_start=on_start,
                gap_s=gap_s,
            )
        )

    for prompt in range(PROMPTS):
        add(-1, (prompt - 1,) if prompt else (), None, 2.0)
    for number, offset_s in enumerate(offsets_s):
        first = number == 0
        add(number % PROMPTS, (PROMPTS - 1,) if first else (), None if first else PROMPTS, 60.0 if first else offset_s)
    topology = tmp_path / "one-link.yaml"
    topology.write_text(TOPOLOGY)
    experiment = Experiment.model_validate(
        {
            "name": "one-link",
            "trace": {"path": "made"},
            "load": {"arrivals": "at_once", "client_timeout_s": None},
            "cluster": {
                "nodes": 1,
                "gpus_per_node": 1,
                "engine": {"enable_prefix_caching": False, "block_size": BLOCK},
            },
            "model": {"profile": "llama-3.1-8b-bf16-tp1-h100"},
            "router": {"kind": "round_robin"},
            "cache": {
                "kind": "lmcache",
                "lmcache": {
                    "l1_size_gb": 256,
                    "l2_store_policy": "skip_l1",
                    "l2_adapters": [{"name": "store"}],
                    "l2_prefetch_max_in_flight": 10_000,
                },
            },
            "fabric": {"topology": str(topology)},
            "output": {"report": False},
        }
    )
    session = Session(id="s", block_tokens=BLOCK, calls=calls)
    return run_experiment(experiment, tmp_path / "out", loaded=Loaded([session], "made"), show_progress=False)


@pytest.mark.parametrize(("load", "asks"), [(0.3, 600), (0.7, 1_500)])
def test_a_shared_link_in_a_run_is_a_processor_sharing_queue(tmp_path: Path, load: float, asks: int) -> None:
    gaps_s = np.random.default_rng(11).exponential(SERVICE_S / load, asks)
    offsets_s = np.cumsum(gaps_s) - gaps_s[0]
    run = ask_all(tmp_path, offsets_s.tolist())
    assert run.summary["validity"]["valid"], run.summary["validity"]
    asked = run.calls.sort("index")[PROMPTS:]
    assert asked["shared_tokens"].to_list() == [TOKENS] * asks, "every prompt comes from the store, whole"
    arrivals_s = (asked["arrival_ns"] - asked["arrival_ns"][0]).to_numpy() / 1e9
    assert np.abs(arrivals_s - offsets_s).max() < 1e-6

    waited_s = (asked["admitted_ns"] - asked["arrival_ns"]).to_numpy() / 1e9
    expected_s = np.array(shared_evenly(arrivals_s.tolist(), SERVICE_S))
    # a call that arrives in the middle of a step of the engine is looked up at the step's end, milliseconds later, and
    # those that share the link with it are so much earlier; all others are met to the copy to the GPU, 5 us
    off_s = np.abs(waited_s - expected_s)
    assert np.median(off_s) < 1e-5 and np.percentile(off_s, 90) < 1e-4 and off_s.max() < 0.02
    assert waited_s.max() > 2.5 * SERVICE_S, "transfers did share the link"
    # and so on average as theory has it, within what so many arrivals can tell
    assert waited_s.mean() == pytest.approx(SERVICE_S / (1 - load), rel=0.12)
    tail = np.percentile(waited_s, 99) / SERVICE_S
    assert tail > 2.5 if load < 0.5 else tail > 6
