"""All benchmarks, one after the other."""

from __future__ import annotations

import sys

from benchmarks import cache, decision, engine, fabric, pricing, replay

if __name__ == "__main__":
    sys.argv = sys.argv[:1]
    for module in (pricing, engine, fabric, cache, decision, replay):
        print(f"\n== {module.__name__}\n", flush=True)
        module.main()
