"""Percentiles and ratios as all results have them: null of nothing, linear between order statistics."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def percentile(values: Floats, q: float) -> float | None:
    """The q-th percentile (0..100), linear interpolation; None of nothing."""
    return float(np.percentile(values, q)) if len(values) else None


def spread(values: Floats) -> dict[str, float | None]:
    """Mean and percentiles as the contract has them for times."""
    return {
        "mean": float(values.mean()) if len(values) else None,
        "p50": percentile(values, 50),
        "p90": percentile(values, 90),
        "p99": percentile(values, 99),
    }


def seconds(frame: pl.DataFrame, expression: pl.Expr) -> Floats:
    """An expression in ns over a table, as seconds, rows without a value left out."""
    return frame.select(expression.alias("v"))["v"].drop_nulls().cast(pl.Float64).to_numpy() / 1e9


def ratio(part: float, whole: float) -> float | None:
    """A share; None of nothing."""
    return part / whole if whole else None
