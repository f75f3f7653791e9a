"""Speed, shown and never asserted: `python -m benchmarks` runs all of it (see docs/performance.md)."""
