"""Latency models that are fitted online to measured prefill and decode times."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

FORGETTING_FACTOR = 0.98
"""Decay of old observations; the weight is halved after 34 newer ones."""

PRIOR_WEIGHT = 0.1
"""Weight of the start values, in observations, at each of two anchor points."""

OUTLIER_RATIO = 4.0
"""Largest ratio of observed to expected time after warm-up; further outliers are clipped. A request
that waited for memory says little about speed."""

WARMUP_OBSERVATIONS = 8
TYPICAL_TOKENS = 1_000

SLOWDOWN_PRIOR_OBSERVATIONS = 20.0
"""Weight of the prior that a worker is as fast as others of its kind, in observations."""


class LatencyRegression:
    """Fit y = base * u + slope * x, both at least 0, with y in milliseconds. The fit is recursive
    least squares of relative errors with exponential forgetting. The first observation scales the
    start values; their proportion then serves as a weak prior."""

    __slots__ = ("_prior", "_reach", "_sums", "_typical_x", "base", "observation_count", "slope")

    def __init__(self, base: float, slope: float, x0: float) -> None:
        """Anchor the prior at 0 and at `x0`, a typical x."""
        self.base = base
        self.slope = slope
        self.observation_count = 0
        self._typical_x = x0
        self._reach = 0.0
        self._prior = (base, slope)
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    def start_from(self, base: float, slope: float) -> None:
        """Replace the start values before the first observation."""
        if not self.observation_count and base + slope > 0:
            self._prior = self.base, self.slope = base, slope

    def predict(self, u: float, x: float) -> float:
        """Return the current estimate of y."""
        return self.base * u + self.slope * x

    def excess(self, u: float, x: float) -> float:
        """Return how far y may exceed the estimate at an x beyond all that were observed lately:
        small ones say little about the slope. At most, y grows in proportion to x from there on."""
        reach = self._reach
        if x <= reach or not reach:
            return 0.0
        return max(0.0, self.predict(1.0, reach) * x / reach - self.predict(u, x))

    def observe(self, u: float, x: float, y: float) -> None:
        """Add the measurement `y` at (u, x); a y of 0 or less is ignored."""
        expected = self.predict(u, x)
        if y <= 0.0 or expected <= 0.0:
            return
        if self.observation_count == 0:
            ratio = y / expected
            self._prior = (self._prior[0] * ratio, self._prior[1] * ratio)
            expected = y
        elif self.observation_count >= WARMUP_OBSERVATIONS:
            highest = expected + self.excess(u, x)
            y = min(max(y, expected / OUTLIER_RATIO), highest * OUTLIER_RATIO)
        self._reach = max(x, self._reach * FORGETTING_FACTOR)
        self.observation_count += 1
        weight = 1.0 / (expected * expected)
        uu, ux, xx, uy, xy = [FORGETTING_FACTOR * part for part in self._sums]
        wu, wx = weight * u, weight * x
        self._sums = (uu + wu * u, ux + wu * x, xx + wx * x, uy + wu * y, xy + wx * y)
        self._solve()

    def _solve(self) -> None:
        uu, ux, xx, uy, xy = self._sums
        base0, slope0 = self._prior
        for x in (0.0, self._typical_x):
            y = base0 + slope0 * x
            weight = PRIOR_WEIGHT / (y * y)
            uu += weight
            ux += weight * x
            xx += weight * x * x
            uy += weight * y
            xy += weight * x * y
        determinant = uu * xx - ux * ux
        if determinant <= 1e-9 * uu * xx:
            return
        base = (uy * xx - xy * ux) / determinant
        slope = (xy * uu - uy * ux) / determinant
        if base < 0.0:
            base, slope = 0.0, xy / xx
        elif slope < 0.0:
            base, slope = uy / uu, 0.0
        self.base, self.slope = base, slope


class WorkerLatencyModel:
    """Prefill and decode times that workers of one kind share. The start values are those that a
    worker publishes, or those of a mid-sized model on one GPU. `prefill`: u = steps, x = new
    tokens. `decode`, for one step: u = 1, x = context tokens of all decoding requests."""

    __slots__ = ("decode", "prefill")

    def __init__(self) -> None:
        self.prefill = LatencyRegression(15.0, 0.02, 1_000.0)
        self.decode = LatencyRegression(6.0, 5e-5, 20_000.0)

    def start_from(self, timing: Sequence[float]) -> None:
        """Start from the coefficients of a `Timing`, with requests of a typical length."""
        step, token, request, context, pair = timing
        self.prefill.start_from(step, token + pair * TYPICAL_TOKENS / 2)
        self.decode.start_from(step, context + request / TYPICAL_TOKENS)


class PrefillGroup(msgspec.Struct):
    """Prompts whose first tokens came together, from one or more steps. `context` is the number of
    context tokens decoded meanwhile. `delayed`: a prompt was cancelled before, and the engine may
    have ended its step first."""

    start_s: float
    end_s: float
    tokens: int
    context: int
    delayed: bool = False


class WorkerSlowdown:
    """The factor by which one worker is slower than its kind: the mean ratio of observed to
    expected times. A prior of 1 keeps chance from favouring workers with few observations."""

    __slots__ = ("_count", "_sum", "factor")

    def __init__(self) -> None:
        self.factor = 1.0
        self._sum = 0.0
        self._count = 0.0

    def observe(self, expected_ms: float, observed_ms: float) -> None:
        """Add one measured prefill."""
        ratio = observed_ms / expected_ms if expected_ms > 0.0 else 1.0
        ratio = min(max(ratio, 1.0 / OUTLIER_RATIO), OUTLIER_RATIO)
        self._count = FORGETTING_FACTOR * self._count + 1.0
        self._sum = FORGETTING_FACTOR * self._sum + ratio
        self.factor = (SLOWDOWN_PRIOR_OBSERVATIONS + self._sum) / (
            SLOWDOWN_PRIOR_OBSERVATIONS + self._count
        )
