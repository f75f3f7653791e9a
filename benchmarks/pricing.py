"""Cost of pricing: microseconds per call on the hot paths of the engine. Run: python benchmarks/pricing.py"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from fake_workers.pricing.registry import load_profile
from fake_workers.pricing.steps import DecodeLeap, RankBatch, step_ns

PROFILES = ("llama-3.3-70b-fp8-tp8-h200", "glm-5.2-fp8-dp8ep8-b200")
CALLS = 3000
LEAP_STEPS = 500


def microseconds(call: Callable[[], object], calls: int = CALLS) -> float:
    """Median over five rounds of the mean time of one call."""
    rounds = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        rounds.append((time.perf_counter() - start) / calls * 1e6)
    return sorted(rounds)[2]


def measure(name: str, seed: int = 1) -> dict[str, float]:
    """Microseconds per call for one profile with all its ranks busy."""
    rng = random.Random(seed)
    start = time.perf_counter()
    profile = load_profile(name)
    load_us = (time.perf_counter() - start) * 1e6
    ranks = [RankBatch((), b, b * (20_000 + 5_000 * i)) for i in range(profile.layout.dp) for b in (5 + i % 3,)]
    leap = DecodeLeap(profile, ranks)
    end = leap.cumulative_ns(LEAP_STEPS)

    def mixed() -> int:
        chunk = (rng.randrange(1, 8000), rng.randrange(200_000))
        return step_ns(profile, [RankBatch((chunk,), 5, 100_000), *ranks[1:]])

    return {
        "load profile (once)": load_us,
        "step_ns, decode only": microseconds(lambda: step_ns(profile, ranks)),
        "step_ns, with a new chunk": microseconds(mixed),
        "DecodeLeap, made for a new batch": microseconds(lambda: DecodeLeap(profile, ranks)),
        "steps_until, random time": microseconds(lambda: leap.steps_until(rng.randrange(end))),
        "cumulative_ns, random step": microseconds(lambda: leap.cumulative_ns(rng.randrange(LEAP_STEPS))),
    }


def main() -> None:
    """Print a table."""
    results = {name: measure(name) for name in PROFILES}
    print(f"{'microseconds per call':36}" + "".join(f"{name:>32}" for name in PROFILES))
    for row in results[PROFILES[0]]:
        print(f"{row:36}" + "".join(f"{results[name][row]:32.1f}" for name in PROFILES))


if __name__ == "__main__":
    main()
