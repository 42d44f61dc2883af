"""Arrivals of requests, for benchmarks and replays: Poisson and gamma processes, even ones, ramps,
days, and the windows of ServeGen."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from random import Random

import msgspec

from dynamo.core.errors import ConfigError

WINDOW_BINS = 120
BIN_SPREAD, MAX_CV = 0.15, 3.0
"""The rate of a bin of a window varies by so much, times the variation of the clients."""
INPUT_SIGMA, INPUT_RANGE = 1.0, (16, 30_000)
OUTPUT_SIGMA, OUTPUT_RANGE = 0.8, (2, 4_000)
"""Lengths in a window are lognormal around its means."""
COLUMNS = ("t_s", "rate_rps", "rate_weighted_cv", "mean_in_tok", "mean_out_tok")


class Arrivals(msgspec.Struct, frozen=True):
    """Arrivals at `rate` a second. With `rate_to` the rate grows linearly to that over
    `duration_s`; with `day_s` it swings between both instead, and begins with `rate`. `cv` is the
    coefficient of variation of the times between arrivals: 1 is a Poisson process, 0 an even one,
    others are gamma processes. Arrivals end after `duration_s`, 0: never."""

    rate: float
    rate_to: float = 0.0
    duration_s: float = 0.0
    cv: float = 1.0
    day_s: float = 0.0

    def times(self, rng: Random) -> Iterator[float]:
        """Yield the times of arrivals in seconds."""
        now: float | None = 0.0
        while now is not None:
            now = self._advance(now, self._draw_gap(rng))
            if now is None or (self.duration_s and now > self.duration_s):
                return
            yield now

    def _draw_gap(self, rng: Random) -> float:
        """Return a time between arrivals at a rate of 1."""
        if self.cv == 1.0:
            return rng.expovariate(1.0)
        variance = self.cv * self.cv
        return rng.gammavariate(1 / variance, variance) if variance else 1.0

    def _advance(self, now: float, gap: float) -> float | None:
        """Return when `gap` more requests have arrived; None if a falling rate never gets there."""
        if not self.rate_to:
            return now + gap / self.rate
        if self.day_s:
            return self._advance_day(now, gap)
        slope = (self.rate_to - self.rate) / self.duration_s
        rate = self.rate + slope * now
        root = rate * rate + 2 * slope * gap
        if root < 0:
            return None
        return now + 2 * gap / (rate + math.sqrt(root))  # also where the slope is 0

    def _advance_day(self, now: float, gap: float) -> float:
        target = self._arrived_by(now) + gap
        low, high = now, now + gap / min(self.rate, self.rate_to)
        while high - low > 1e-9 * max(1.0, high):
            middle = (low + high) / 2
            if self._arrived_by(middle) < target:
                low = middle
            else:
                high = middle
        return high

    def _arrived_by(self, now: float) -> float:
        """Return how many requests of a day arrive up to a time in the mean."""
        mean, swing = (self.rate + self.rate_to) / 2, (self.rate_to - self.rate) / 2
        turn = 2 * math.pi / self.day_s
        return mean * now - swing * math.sin(turn * now) / turn


class Window(msgspec.Struct, frozen=True):
    """A part of a recorded load: its start, rate, variation of clients, and mean lengths."""

    start_s: float
    rate: float
    cv: float
    input_tokens: float
    output_tokens: float


class SyntheticLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """Requests that share nothing. Lengths are uniform within 20 % of `isl` prompt tokens and `osl`
    output tokens. `rate`, `cv`, `peak` and `day` (seconds) are those of `Arrivals`. With `windows`,
    a file of ServeGen, rates and lengths are those of its windows, scaled to the mean `rate`."""

    isl: int
    osl: int
    requests: int
    rate: float
    cv: float = 1.0
    peak: float = 0.0
    day: float = 0.0
    windows: str = ""

    def draw(self, rng: Random) -> Iterator[float | tuple[float, int, int]]:
        """Yield the time of each request, with its lengths where windows tell them."""
        if self.windows:
            return draw_windows(read_windows(self.windows), self.rate, rng)
        return Arrivals(self.rate, self.peak, cv=self.cv, day_s=self.day).times(rng)


def read_windows(path: str) -> Sequence[Window]:
    """Read windows of ServeGen (CSV). Raises `ConfigError`. Blocks."""
    try:
        with open(path, newline="") as file:  # noqa: PTH123 - the error names the path as typed
            rows = [[float(row[name]) for name in COLUMNS] for row in csv.DictReader(file)]
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (KeyError, ValueError, TypeError, csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: {error}", hint=f"wanted: columns {', '.join(COLUMNS)}"
        ) from None
    starts = [row[0] for row in rows]
    if len(rows) < 2 or not 0 < sum(row[1] for row in rows) < math.inf or starts != sorted(starts):
        raise ConfigError(f"{path}: wanted two windows or more with a rate, in order of time")
    return [Window(*row) for row in rows]


def draw_windows(
    windows: Sequence[Window], mean_rate: float, rng: Random
) -> Iterator[tuple[float, int, int]]:
    """Yield time, prompt and output tokens of each request. The mean rate of all windows becomes
    `mean_rate`. Within a window, bins have rates that vary, and Poisson arrivals."""
    length_s = windows[1].start_s - windows[0].start_s
    scale = mean_rate * len(windows) / sum(window.rate for window in windows)
    for window in windows:
        variance = (BIN_SPREAD * min(MAX_CV, max(window.cv, 1e-3))) ** 2
        for number in range(WINDOW_BINS):
            rate = window.rate * scale * rng.gammavariate(1 / variance, variance)
            start_s = window.start_s - windows[0].start_s + number * length_s / WINDOW_BINS
            bin_load = Arrivals(max(rate, 1e-12), duration_s=length_s / WINDOW_BINS)
            for time_s in bin_load.times(rng):
                prompt = _draw_length(window.input_tokens, INPUT_SIGMA, INPUT_RANGE, rng)
                output = _draw_length(window.output_tokens, OUTPUT_SIGMA, OUTPUT_RANGE, rng)
                yield start_s + time_s, prompt, output


def _draw_length(mean: float, sigma: float, bounds: tuple[int, int], rng: Random) -> int:
    low, high = bounds
    length = rng.lognormvariate(math.log(max(1.0, mean)) - sigma * sigma / 2, sigma)
    return min(high, max(low, round(length)))
