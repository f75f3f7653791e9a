"""Repeats of published measurements: the same load, the same router configuration, our numbers beside theirs."""
