"""Fits a correction of step times to some concurrencies of a layout; the others judge it.

Five parameters, in the order of `Parameters`: scale of steps with prompt tokens, scale of pure decode steps, time per
step, time per sequence and step, time around the engine per request. Relative errors of TTFT and TPOT at FIT
concurrencies are made small by Gauss-Newton steps with finite differences through the engine itself, weighted towards
the least absolute error. Weak priors hold a parameter that the points cannot tell at "no correction".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from fake_workers.pricing.calibration import Calibration
from fake_workers.pricing.node_price import ProfilePrice
from fake_workers.pricing.profile import StepProfile
from harness.studies.validation.closed_loop import Loop, Measured, engine_config, run_loop
from harness.studies.validation.points import Correction, Layout, Point, doubtful

FIT = (4, 32)
"""Concurrencies that a correction is fitted on; where a group has none of them, its lowest and its middle one."""
QUEUED_MS = 10_000.0
"""Points above it wait for KV blocks: they say little about a step, and are left out of the fit (not of the test)."""

Vector = NDArray[np.float64]
# log scale prefill, log scale decode, ms per step, ms per sequence, ms around
_LOW: Vector = np.array([math.log(0.5), math.log(0.5), 0.0, 0.0, 0.0])
_HIGH: Vector = np.array([math.log(3.0), math.log(2.0), 20.0, 0.5, 400.0])
_STEP: Vector = np.array([0.05, 0.05, 0.3, 0.01])
_PRIOR: Vector = np.array([0.5, 0.3, 5.0, 0.1, 100.0])
_START: Vector = np.array([0.0, 0.0, 0.2, 0.005, 5.0])
_PRIOR_WEIGHT = 0.3
_SMALL = 0.03  # errors below it weigh like squares, larger ones like absolute values
ITERATIONS = 2


def fit_concurrencies(points: Sequence[Point]) -> tuple[int, ...]:
    """Which concurrencies of these points a fit uses."""
    seen = sorted({point.concurrency for point in points})
    chosen = tuple(c for c in FIT if c in seen)
    if len(chosen) == len(FIT) or len(seen) < 3:
        return chosen or tuple(seen[:1])
    return (seen[0], seen[len(seen) // 2])


def predict(profile: StepProfile, layout: Layout, point: Point, steps: Calibration) -> Measured:
    """The point through the engine; nothing around it."""
    requests = point.concurrency * layout.requests_per_client
    loop = Loop(point.concurrency, point.prompt_tokens, point.output_tokens, layout.length_ratio, requests)
    block = profile.block_tokens
    kv = layout.num_gpu_blocks * block if layout.num_gpu_blocks else profile.kv_capacity_tokens
    engine = engine_config(kv, loop, block_tokens=block, budget_tokens=layout.budget_tokens)
    return run_loop(ProfilePrice(profile.calibrated(steps)), engine, loop)


def fit(profile: StepProfile, layout: Layout) -> Correction:
    """The correction of one layout."""
    chosen = fit_concurrencies(layout.points)
    doubt = doubtful(layout.points)
    points = [p for p in layout.points if p.concurrency in chosen and p.ttft_ms < QUEUED_MS and p.row not in doubt]
    x = _START.copy()
    for _ in range(ITERATIONS):
        base = _errors(profile, layout, points, x)
        slopes = [
            (_errors(profile, layout, points, x + e) - base) / e.sum() for e in np.diag(np.append(_STEP, 0.0))[:4]
        ]
        around = np.array([v for p, e in zip(points, base[::2], strict=True) for v in (math.exp(-e) / p.ttft_ms, 0.0)])
        x = _step(x, base, np.stack([*slopes, around], axis=1))
    return correction_of(x)


def _step(x: Vector, errors: Vector, slopes: Vector) -> Vector:
    """One bounded, reweighted Gauss-Newton step."""
    weight = np.sqrt(1.0 / np.maximum(np.abs(errors), _SMALL))
    matrix = np.vstack([slopes * weight[:, None], np.diag(_PRIOR_WEIGHT / _PRIOR)])
    target = np.concatenate([-errors * weight, -x * _PRIOR_WEIGHT / _PRIOR])
    move: Vector = np.zeros_like(x)
    free = np.ones(len(x), dtype=bool)
    for _ in range(len(x)):
        move[free] = np.linalg.lstsq(matrix[:, free], target - matrix[:, ~free] @ move[~free], rcond=None)[0]
        out = free & ((x + move < _LOW) | (x + move > _HIGH))
        if not out.any():
            break
        move[out] = np.clip(x + move, _LOW, _HIGH)[out] - x[out]
        free &= ~out
    return np.clip(x + move, _LOW, _HIGH)


def _errors(profile: StepProfile, layout: Layout, points: Sequence[Point], x: Vector) -> Vector:
    """log(predicted / measured) of TTFT and TPOT, point by point."""
    correction = correction_of(x)
    out: list[float] = []
    for point in points:
        seen = predict(profile, layout, point, correction.steps)
        ttft = seen.ttft_ms + correction.around_ns / 1e6
        out += [math.log(ttft / point.ttft_ms), math.log(seen.tpot_ms / point.tpot_ms)]
    return np.array(out)


def correction_of(x: Vector) -> Correction:
    """The parameters as the engine takes them."""

    def scale(log: float) -> Fraction:
        return Fraction(round(math.exp(log), 4)).limit_denominator(10_000)

    steps = Calibration(scale(x[0]), scale(x[1]), max(0, int(x[2] * 1e6)), max(0, int(x[3] * 1e6)))
    return Correction(steps, max(0, int(x[4] * 1e6)))
