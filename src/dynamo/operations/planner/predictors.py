"""Forecasts of the next value of a series. Each predictor is a function of the values so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

Predictor = Callable[[Sequence[float]], float]
"""Returns a forecast of the value after these, which are at least one and in order of time."""

WINDOW = 240
"""Older values do not count."""
SMOOTHINGS = [number / 20 for number in range(1, 20)]
DISCOUNT = 0.95
"""The weight of an error beside that of the next value."""
MEAN_OF = 8
KALMAN_NOISE = 0.1, 0.01, 1.0
"""Variances of a change of the level, of a change of the trend, and of a measurement."""
ARIMA_LAGS = 2
ARIMA_MIN = 12
RIDGE = 1e-6


def adaptive(values: Sequence[float]) -> float:
    """Return the forecast of the exponential smoothing whose past forecasts were the best."""
    values = values[-WINDOW:]
    best, least = values[-1], float("inf")
    for alpha in SMOOTHINGS:
        level, error = values[0], 0.0
        for value in values[1:]:
            miss = value - level
            error = DISCOUNT * error + miss * miss
            level += alpha * miss
        if error <= least:
            best, least = level, error
    return best


def constant(values: Sequence[float]) -> float:
    """Return the last value."""
    return values[-1]


def moving_average(values: Sequence[float]) -> float:
    """Return the mean of the last values."""
    last = values[-MEAN_OF:]
    return sum(last) / len(last)


def kalman(values: Sequence[float]) -> float:
    """Return the forecast of a Kalman filter of level and trend."""
    level_noise, trend_noise, noise = KALMAN_NOISE
    level, trend = values[-WINDOW:][0], 0.0
    a, b, c = noise, 0.0, trend_noise  # the covariance [[a, b], [b, c]]
    for value in values[-WINDOW:][1:]:
        level += trend
        a, b, c = a + 2 * b + c + level_noise, b + c, c + trend_noise
        gain, trend_gain = a / (a + noise), b / (a + noise)
        miss = value - level
        level, trend = level + gain * miss, trend + trend_gain * miss
        a, b, c = (1 - gain) * a, (1 - gain) * b, c - trend_gain * b
    return max(0.0, level + trend)


def arima(values: Sequence[float]) -> float:
    """Return the forecast of an ARIMA(2, 1, 0), fitted by least squares."""
    values = values[-WINDOW:]
    if len(values) < ARIMA_MIN:
        return values[-1]
    steps = [after - before for before, after in pairwise(values)]
    rows = list(zip(steps[1:], steps, steps[2:], strict=False))  # the last two steps, the next one
    aa, ab, bb, ay, by = (
        sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1), (0, 2), (1, 2))
    )
    ridge = RIDGE * (1.0 + aa + bb)
    aa, bb = aa + ridge, bb + ridge
    scale = aa * bb - ab * ab
    first, second = (ay * bb - by * ab) / scale, (by * aa - ay * ab) / scale
    return max(0.0, values[-1] + first * steps[-1] + second * steps[-ARIMA_LAGS])
