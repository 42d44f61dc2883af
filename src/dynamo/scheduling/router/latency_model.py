"""How long a worker takes, learnt from what it did: nothing needs to be configured."""

from __future__ import annotations

FORGETTING_FACTOR = 0.98
"""An observation counts half after 34 more."""

PRIOR_WEIGHT = 0.1
"""What the start values count for, in observations, at either of two points."""

OUTLIER_RATIO = 4.0
"""An observation further off than this (after the first few) is taken as this far off: a request
that waited for memory says little about speed."""

WARMUP_OBSERVATIONS = 8

SLOWDOWN_PRIOR_OBSERVATIONS = 20.0
"""So many observations hold a worker's pace at that of its kind."""


class LatencyRegression:
    """y = base u + slope x with both at least 0, by recursive least squares of relative errors
    under exponential forgetting. The first observation scales the start values; their proportion
    then counts as a weak prior. y in milliseconds."""

    __slots__ = ("_prior", "_sums", "_typical_x", "base", "observation_count", "slope")

    def __init__(self, base: float, slope: float, x0: float) -> None:
        """`x0`: a typical x, where the prior is anchored beside 0."""
        self.base = base
        self.slope = slope
        self.observation_count = 0
        self._typical_x = x0
        self._prior = (base, slope)
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    def predict(self, u: float, x: float) -> float:
        """The present estimate."""
        return self.base * u + self.slope * x

    def observe(self, u: float, x: float, y: float) -> None:
        """`y` > 0 was measured at (u, x)."""
        expected = self.predict(u, x)
        if y <= 0.0 or expected <= 0.0:
            return
        if self.observation_count == 0:
            ratio = y / expected
            self._prior = (self._prior[0] * ratio, self._prior[1] * ratio)
            expected = y
        elif self.observation_count >= WARMUP_OBSERVATIONS:
            y = min(max(y, expected / OUTLIER_RATIO), expected * OUTLIER_RATIO)
        self.observation_count += 1
        weight = 1.0 / (expected * expected)
        uu, ux, xx, uy, xy = (FORGETTING_FACTOR * part for part in self._sums)
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
    """Times of workers of one kind, which learn together. Start values are those of a mid-sized
    model on one GPU.

    `prefill`: u = chunks (steps), x = new tokens; `decode`: u = 1, x = tokens of context of all
    that decode, for one step.
    """

    __slots__ = ("decode", "prefill")

    def __init__(self) -> None:
        self.prefill = LatencyRegression(15.0, 0.02, 1_000.0)
        self.decode = LatencyRegression(6.0, 5e-5, 20_000.0)


class WorkerSlowdown:
    """How much slower than its kind one worker is: the mean of observed over expected times, drawn
    to 1 as long as little is known, so that chance makes no favourites."""

    __slots__ = ("_count", "_sum", "factor")

    def __init__(self) -> None:
        self.factor = 1.0
        self._sum = 0.0
        self._count = 0.0

    def observe(self, expected_ms: float, observed_ms: float) -> None:
        """One prefill took so long."""
        ratio = observed_ms / expected_ms if expected_ms > 0.0 else 1.0
        ratio = min(max(ratio, 1.0 / OUTLIER_RATIO), OUTLIER_RATIO)
        self._count = FORGETTING_FACTOR * self._count + 1.0
        self._sum = FORGETTING_FACTOR * self._sum + ratio
        self.factor = (SLOWDOWN_PRIOR_OBSERVATIONS + self._sum) / (
            SLOWDOWN_PRIOR_OBSERVATIONS + self._count
        )
