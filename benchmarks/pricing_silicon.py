"""Raw table prices against measured serving times: closed loop, fixed concurrency, no calibration.

The measured points (model, GPU, engine, lengths, concurrency, TTFT, TPOT) ship with aiconfigurator-core
(extra `[profile]`) as systems/silicon_sample.csv. Each is replayed by the plainest engine there is: all
requests of the first round start at once, whole budget, chunked prefill, no prefix cache, no host time.

Run: python benchmarks/pricing_silicon.py
"""

from __future__ import annotations

import csv
import random
import re
import statistics
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from fake_workers.errors import InputError
from fake_workers.pricing.profile import StepProfile
from fake_workers.pricing.registry import load_profile
from fake_workers.pricing.steps import RankBatch, step_ns

BUDGET_TOKENS = 8192
MAX_CONCURRENCY = 128
# Points with a longer mean TTFT ran out of KV memory and queued, which this engine does not model.
MAX_TTFT_MS = 20_000

# (model, precision, tensor parallel size, engine) of the measured points -> profile without the GPU
GROUPS = {
    ("meta-llama/Llama-3.1-70B", "fp8", 8, "vllm"): "llama-3.3-70b-fp8-tp8",
    ("openai/gpt-oss-120b", "fp4", 8, "vllm"): "gpt-oss-120b-mxfp4-tp8",
}


@dataclass
class _Request:
    """One request; times in ns since the start."""

    prompt: int
    output: int
    arrived: int
    done: int = 0
    made: int = 0
    first: int = 0


def closed_loop(profile: StepProfile, concurrency: int, prompt: int, output: int, seed: int = 0) -> tuple[float, float]:
    """Mean TTFT and TPOT in ms over ten rounds of requests, lengths uniform in 80..100 % of the given."""
    rng = random.Random(seed)
    left = concurrency * 10

    def new(now: int) -> _Request:
        return _Request(rng.randint(prompt * 8 // 10, prompt), rng.randint(output * 8 // 10, output), now)

    waiting = deque(new(0) for _ in range(concurrency))
    left -= concurrency
    running: list[_Request] = []
    ttft: list[float] = []
    tpot: list[float] = []
    now = 0
    while waiting or running:
        decodes = [r for r in running if r.done >= r.prompt]
        budget = BUDGET_TOKENS - len(decodes)
        chunks: list[tuple[_Request, int]] = []
        while waiting and sum(r.prompt - r.done for r in running if r.done < r.prompt) < budget:
            running.append(waiting.popleft())
        for r in running:
            if r.done < r.prompt and budget > 0:
                size = min(budget, r.prompt - r.done)
                chunks.append((r, size))
                budget -= size
        batch = RankBatch(
            tuple((size, r.done) for r, size in chunks), len(decodes), sum(r.prompt + r.made for r in decodes)
        )
        now += step_ns(profile, [batch])
        for r, size in chunks:
            r.done += size
            if r.done >= r.prompt:
                r.made, r.first = 1, now
        for r in decodes:
            r.made += 1
            if r.made >= r.output:
                running.remove(r)
                ttft.append((r.first - r.arrived) / 1e6)
                tpot.append((now - r.first) / 1e6 / (r.output - 1))
                if left:
                    left -= 1
                    waiting.append(new(now))
    return statistics.fmean(ttft), statistics.fmean(tpot)


def measured_points(path: Path) -> Iterator[tuple[str, int, int, int, float, float]]:
    """(profile name, prompt, output, concurrency, TTFT ms, TPOT ms) of the groups, newest of equal points."""
    points: dict[tuple[str, int, int, int], tuple[float, float]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            base = GROUPS.get((row["model_path"], row["precision"], int(float(row["tp_size"] or 0)), row["backend"]))
            found = re.search(r"silicon_concurrency=(\d+)", row["silicon_data_source"])
            if base is None or row["mode"] != "agg" or found is None:
                continue
            name = f"{base}-{row['system'].removesuffix('_sxm')}"
            shape = (name, int(float(row["isl"])), int(float(row["osl"])), int(found[1]))
            points[shape] = (float(row["silicon_ttft_ms"]), float(row["silicon_tpot_ms"]))
    for shape, (ttft, tpot) in sorted(points.items()):
        if shape[3] <= MAX_CONCURRENCY and ttft < MAX_TTFT_MS:
            yield (*shape, ttft, tpot)


def main() -> None:
    """Print every point and the mean absolute error per profile."""
    package = find_spec("aiconfigurator_core")
    if package is None or package.origin is None:
        raise SystemExit("the measured points ship with aiconfigurator-core: pip install '.[profile]'")
    errors: dict[str, list[tuple[float, float]]] = defaultdict(list)
    print(f"{'profile':34}{'in/out':>12}{'conc':>6}{'TTFT ms':>18}{'TPOT ms':>20}   (measured, ours)")
    for name, prompt, output, concurrency, ttft, tpot in measured_points(
        Path(package.origin).parent / "systems" / "silicon_sample.csv"
    ):
        try:
            profile = load_profile(name)
        except InputError:  # a GPU without a shipped profile
            continue
        our_ttft, our_tpot = closed_loop(profile, concurrency, prompt, output)
        errors[name].append((our_ttft / ttft - 1, our_tpot / tpot - 1))
        print(
            f"{name:34}{prompt:>6}/{output:<5}{concurrency:>6}{ttft:>9.0f}{our_ttft:>9.0f}"
            f"{tpot:>10.2f}{our_tpot:>10.2f}"
        )
    print("\nprofile: points, TTFT bias / mean absolute error, TPOT bias / mean absolute error (percent)")
    for name, pairs in errors.items():
        cells = []
        for which in (0, 1):
            off = [100 * pair[which] for pair in pairs]
            cells.append(f"{statistics.fmean(off):+.1f} / {statistics.fmean(map(abs, off)):.1f}")
        print(f"{name:34}{len(pairs):>4}   {cells[0]:>16}   {cells[1]:>16}")


if __name__ == "__main__":
    main()
