"""Robust trend of a short series: Theil-Sen slope with Sen's confidence bound. Torch-free.

Source: P. K. Sen (1968), Estimates of the regression coefficient based on Kendall's tau, JASA 63:1379-1389.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Trend:
    """Slopes per step; each bound holds alone with the asked confidence (one-sided)."""

    slope: float
    lower: float
    upper: float


def robust_trend(steps: Sequence[float], values: Sequence[float], confidence: float) -> Trend:
    """Median of all pairwise slopes, and the order statistics that Kendall's score variance allows as bounds.

    `steps` rise. With N pairs and z the normal quantile of `confidence`, the bounds are the slopes of rank
    (N -+ z sqrt(var S)) / 2, var S = (n(n-1)(2n+5) - sum over ties t(t-1)(2t+5)) / 18. `values` need not be normal,
    only their noise independent; a constant series gives 0 for all three.
    """
    x, y = np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)
    first, second = np.triu_indices(len(x), k=1)
    slopes = np.sort((y[second] - y[first]) / (x[second] - x[first]))
    half_width = NormalDist().inv_cdf(confidence) * np.sqrt(_score_variance(y))
    low = int(np.floor((len(slopes) - half_width) / 2))
    high = int(np.ceil((len(slopes) + half_width) / 2))
    last = len(slopes) - 1
    return Trend(float(np.median(slopes)), float(slopes[max(low, 0)]), float(slopes[min(high, last)]))


def _score_variance(values: NDArray[np.float64]) -> float:
    n = len(values)
    _, ties = np.unique(values, return_counts=True)
    return float(n * (n - 1) * (2 * n + 5) - np.sum(ties * (ties - 1) * (2 * ties + 5))) / 18
