"""The durations of requests at their workers, and the rate of dequeues, both measured."""

from __future__ import annotations

from itertools import accumulate
from math import log2

MIN_DURATION_S = 0.001
BINS_PER_DOUBLING = 4
BINS = BINS_PER_DOUBLING * 24
DECAY = 0.99
"""Weight of an observation relative to the next one: it halves after 69 more."""
MIN_OBSERVATIONS = 4
"""A class with fewer observations is predicted from output length and time per token."""
DEFAULT_TPOT_S = 0.02
DEFAULT_OUTPUT_TOKENS = 512
"""Without observations an answer is predicted to fill half of `max_tokens`, or half of this."""
OVERDUE_SHARE = 0.25
"""A request older than all observed ones is predicted to last this share of its age longer."""
GAP_WEIGHT = 0.1
"""Weight of the newest gap between two dequeues in their running mean, after the first ten."""
MAX_GAP_AGE_S = 10.0
"""A rate of dequeues without a newer gap for this time, and another mean gap, is not reliable.
Requests that are rejected because of a wrong rate are not queued, and so would never correct it."""
_MAX_WEIGHT = 1e100


class DurationHistogram:
    """Durations in bins of 19 % width. Newer observations weigh more."""

    def __init__(self) -> None:
        self.count = 0
        self._newest_weight = 1.0
        self._weights = [0.0] * BINS
        self._sums = [0.0] * BINS
        self._suffix_sums: tuple[list[float], list[float]] | None = None

    def observe(self, seconds: float) -> None:
        """Add one observation."""
        self.count += 1
        self._newest_weight /= DECAY
        bin_index = _bin_index(seconds)
        self._weights[bin_index] += self._newest_weight
        self._sums[bin_index] += self._newest_weight * seconds
        self._suffix_sums = None
        if self._newest_weight > _MAX_WEIGHT:
            self._weights = [weight / self._newest_weight for weight in self._weights]
            self._sums = [total / self._newest_weight for total in self._sums]
            self._newest_weight = 1.0

    def estimate_remaining_s(self, age_s: float) -> float:
        """Return the mean remaining time of the observations longer than `age_s`."""
        if self._suffix_sums is None:
            self._suffix_sums = (_suffix_sums(self._weights), _suffix_sums(self._sums))
        weights, sums = self._suffix_sums
        bin_index = _bin_index(age_s)
        weight, total = weights[bin_index + 1], sums[bin_index + 1]
        bin_weight = self._weights[bin_index]
        if bin_weight:
            mean = self._sums[bin_index] / bin_weight
            if age_s >= mean:  # a part of this bin lasts longer than `age_s`
                low, high = _bin_start_s(bin_index), _bin_start_s(bin_index + 1)
                bin_weight *= max(0.0, min(1.0, (high - age_s) / (high - low)))
                mean = (age_s + high) / 2
            weight += bin_weight
            total += bin_weight * mean
        if weight <= weights[0] * 1e-3:
            return age_s * OVERDUE_SHARE
        return max(0.0, total / weight - age_s)


def _suffix_sums(values: list[float]) -> list[float]:
    return [*reversed([0.0, *accumulate(reversed(values))])]


def _bin_index(seconds: float) -> int:
    if seconds <= MIN_DURATION_S:
        return 0
    return min(int(log2(seconds / MIN_DURATION_S) * BINS_PER_DOUBLING), BINS - 1)


def _bin_start_s(bin_index: int) -> float:
    return float(MIN_DURATION_S * 2.0 ** (bin_index / BINS_PER_DOUBLING))


class DurationModel:
    """Predict durations and output lengths by `max_tokens`, in classes of powers of two. `tpot_s`
    is a running mean of the seconds per output token."""

    def __init__(self) -> None:
        self.tpot_s = DEFAULT_TPOT_S
        self._mean_duration_s = 0.0
        self._mean_output_tokens = 0.0
        self._mean_fill_ratio = 0.5
        self._histograms: dict[int, DurationHistogram] = {}
        self._output_tokens_by_class: dict[int, float] = {}

    def observe(self, max_tokens: int, duration_s: float) -> None:
        """Record how long a request occupied its slot."""
        length_class = max_tokens.bit_length()
        if length_class not in self._histograms:
            self._histograms[length_class] = DurationHistogram()
        self._histograms[length_class].observe(duration_s)
        mean_s = self._mean_duration_s
        self._mean_duration_s += 0.1 * (duration_s - mean_s) if mean_s else duration_s

    def observe_output(self, max_tokens: int, tokens: int, seconds: float) -> None:
        """Record an answer's length and the seconds from its first token to its end."""
        length_class = max_tokens.bit_length()
        mean = self._output_tokens_by_class.get(length_class, float(tokens))
        self._output_tokens_by_class[length_class] = mean + 0.1 * (tokens - mean)
        self._mean_output_tokens += (
            0.1 * (tokens - self._mean_output_tokens) if self._mean_output_tokens else tokens
        )
        self._mean_fill_ratio += 0.1 * (tokens / max(1, max_tokens) - self._mean_fill_ratio)
        if tokens > 1 and seconds > 0.0:
            self.tpot_s += 0.1 * (seconds / (tokens - 1) - self.tpot_s)

    def predict_output_tokens(self, max_tokens: int) -> float:
        """Return the mean output length of the class. An unobserved class uses the larger of the
        overall mean length and the overall fill ratio of `max_tokens`."""
        mean = self._output_tokens_by_class.get(max_tokens.bit_length())
        if mean is not None:
            return mean
        return max(
            min(max_tokens, self._mean_output_tokens),
            min(max_tokens, DEFAULT_OUTPUT_TOKENS) * self._mean_fill_ratio,
        )

    def predict_mean_s(self) -> float:
        """Return the predicted seconds of a request of which nothing is known."""
        return self._mean_duration_s or self.predict_remaining_s(DEFAULT_OUTPUT_TOKENS, 0.0)

    def predict_remaining_s(self, max_tokens: int, age_s: float) -> float:
        """Return the predicted remaining seconds of a request of that age."""
        histogram = self._histograms.get(max_tokens.bit_length())
        if histogram is None or histogram.count < MIN_OBSERVATIONS:
            whole_s = self.predict_output_tokens(max_tokens) * self.tpot_s
            return max(whole_s - age_s, age_s * OVERDUE_SHARE)
        return histogram.estimate_remaining_s(age_s)


class DequeueRate:
    """The measured rate of dequeues. Where several frontends share the workers, only this rate
    shows which part of the freed slots this frontend gets."""

    def __init__(self) -> None:
        self._mean_gap_s = 0.0
        self._gaps = 0
        self._last_gap_s = 0.0
        self._last_dequeue_s: float | None = None

    def record_dequeue(self, now: float, still_waiting: int) -> None:
        """Record a dequeue. After the last waiting request the next gap is not measured."""
        if self._last_dequeue_s is not None:
            self._gaps += 1
            weight = max(GAP_WEIGHT, 1 / self._gaps)
            self._mean_gap_s += (now - self._last_dequeue_s - self._mean_gap_s) * weight
            self._last_gap_s = now
        self._last_dequeue_s = now if still_waiting else None

    def skip_gap(self) -> None:
        """Measure no gap up to the next dequeue, because no request waited for some of its time."""
        self._last_dequeue_s = None

    def reset(self) -> None:
        """Forget all gaps, because other workers serve from now on."""
        self._gaps, self._mean_gap_s, self._last_dequeue_s = 0, 0.0, None

    def is_reliable(self, now: float) -> bool:
        """Whether enough gaps were measured, the last one not long ago."""
        age_s = now - self._last_gap_s
        return self._gaps >= MIN_OBSERVATIONS and age_s <= MAX_GAP_AGE_S + self._mean_gap_s

    def predict_wait_s(self, ahead: int) -> float:
        """Return the predicted wait behind `ahead` other requests, in seconds."""
        return (ahead + 1) * self._mean_gap_s
