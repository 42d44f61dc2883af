"""Times of steps, and of many steps that only decode, in closed form."""

from __future__ import annotations

from bisect import bisect_right
from math import ceil

import msgspec

from dynamo.core.timing.model import (
    QUADRATIC_COEFFICIENTS,
    Counts,
    PolynomialTiming,
    StepTiming,
    Timing,
)
from dynamo.operations.latency_summary import LatencyHistogram

NEWTON_STEPS = 20
"""Steps of Newton's method, which needs two or three where steps are alike."""


GAP_SPREAD = 0.02
"""The gaps of a leap are counted in parts within which they differ by this share."""
MAX_GAP_PARTS = 8


class Leap(msgspec.Struct, frozen=True):
    """Steps that take `first_s`, and each `slope_s` and `curve_s` times its number more."""

    first_s: float
    slope_s: float
    curve_s: float

    def step_s(self, number: int) -> float:
        """Return the time of the step of that number, from 0."""
        return self.first_s + number * (self.slope_s + number * self.curve_s)

    def duration_s(self, steps: int) -> float:
        """Return the time of the first `steps`."""
        pairs = steps * (steps - 1) / 2
        squares = pairs * (2 * steps - 1) / 3
        return self.first_s * steps + self.slope_s * pairs + self.curve_s * squares

    def steps_until(self, elapsed_s: float) -> int:
        """Return the number of the step, from 1, in which `elapsed_s` is, or which ends then."""
        steps = ceil(elapsed_s / self.first_s) if self.first_s > 0 else 1
        for _ in range(NEWTON_STEPS):
            rate_s = self.step_s(steps)
            change = ceil((elapsed_s - self.duration_s(steps)) / rate_s) if rate_s > 0 else 0
            if -1 <= change <= 1:
                break
            steps = max(1, steps + change)
        while self.duration_s(steps) < elapsed_s:
            steps += 1
        while steps > 1 and self.duration_s(steps - 1) >= elapsed_s:
            steps -= 1
        return max(1, steps)

    def steps_ended(self, elapsed_s: float) -> int:
        """Return how many steps have ended after `elapsed_s`."""
        steps = self.steps_until(elapsed_s)
        return steps if self.duration_s(steps) <= elapsed_s else steps - 1

    def count_slow(self, steps: int, target_s: float) -> int:
        """Return how many of the first `steps` take longer than `target_s`, which grow."""
        return steps - bisect_right(range(steps), target_s, key=self.step_s)

    def count_gaps(self, gaps: LatencyHistogram, steps: int, decoding: int) -> None:
        """Count the times between tokens of the first `steps` in a few parts."""
        first, last = self.first_s, self.step_s(steps - 1)
        if abs(last - first) <= GAP_SPREAD * first:
            gaps.add(self.duration_s(steps) / steps, steps * decoding)
            return
        spread = abs(last - first) / max(1e-9, min(first, last))
        parts = min(steps, MAX_GAP_PARTS, 1 + ceil(spread / GAP_SPREAD))
        done, done_s = 0, 0.0
        for part in range(1, parts + 1):
            until = steps * part // parts
            until_s = self.duration_s(until)
            gaps.add((until_s - done_s) / (until - done), (until - done) * decoding)
            done, done_s = until, until_s


class StepTime:
    """The step times of a worker whose cache has `capacity_tokens`, by a timing."""

    def __init__(self, timing: StepTiming, capacity_tokens: int) -> None:
        self._timing = timing
        self._capacity = capacity_tokens

    def step_s(
        self, new_tokens: int, sequences: int, decoding: int, context: int, attention: float
    ) -> float:
        """Return the time of a step."""
        counts = Counts(new_tokens, sequences, decoding, context, attention)
        return self._timing.step_ms(counts, self._capacity) * 1e-3

    def leap(self, sequences: int, context: int) -> Leap:
        """Return the steps that decode `sequences`, of which the first has this context."""
        timing = self._timing
        if isinstance(timing, Timing):
            first_ms = timing.c0 + timing.c2 * sequences + timing.c3 * context
            return Leap(first_ms * 1e-3, timing.c3 * sequences * 1e-3, 0.0)
        return _polynomial_leap(timing, sequences, context, self._capacity)


def _polynomial_leap(timing: PolynomialTiming, sequences: int, context: int, capacity: int) -> Leap:
    """Return a leap of polynomials: exact up to degree 2, else by the times of three steps."""
    if len(timing.decode) == QUADRATIC_COEFFICIENTS:
        c0, c1, c2 = timing.decode
        share, growth = context / capacity, sequences / capacity
        first_ms = (c2 * share + c1) * share + c0
        if first_ms >= timing.floor_ms:
            slope_ms = (c1 + 2 * c2 * share) * growth
            return Leap(first_ms * 1e-3, slope_ms * 1e-3, c2 * growth * growth * 1e-3)
    far = max(1, capacity // (8 * sequences))
    times = [
        timing.step_ms(Counts(0, sequences, sequences, context + number * sequences, 0.0), capacity)
        * 1e-3
        for number in (0, far, 2 * far)
    ]
    curve = (times[2] - 2 * times[1] + times[0]) / (2 * far * far)
    return Leap(times[0], (times[1] - times[0]) / far - curve * far, curve)
