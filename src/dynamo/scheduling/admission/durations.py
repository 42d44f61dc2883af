"""How long requests keep their place at a worker, learnt from those that left."""

from __future__ import annotations

from itertools import accumulate
from math import log2

MIN_DURATION_S = 0.001
BINS_PER_DOUBLING = 4
BINS = BINS_PER_DOUBLING * 24
DECAY = 0.99
"""An observation counts half after 69 more."""
MIN_OBSERVATIONS = 4
"""Fewer observations of a kind say less than the pace of all and the length of their answers."""
DEFAULT_TPOT_S = 0.02
DEFAULT_OUTPUT_TOKENS = 512
"""Before anything was seen an answer is thought to fill half of its bound, or of this, at such a
pace."""
OVERDUE_SHARE = 0.25
"""Whatever took longer than anything before will take so much of its age again."""
_MAX_WEIGHT = 1e100


class DurationHistogram:
    """Durations in bins of 19 %, newer ones weighing more."""

    __slots__ = ("_newest_weight", "_suffix_sums", "_sums", "_weights", "count")

    def __init__(self) -> None:
        self.count = 0
        self._newest_weight = 1.0
        self._weights = [0.0] * BINS
        self._sums = [0.0] * BINS
        self._suffix_sums: tuple[list[float], list[float]] | None = None

    def observe(self, seconds: float) -> None:
        """One more."""
        self.count += 1
        self._newest_weight /= DECAY
        at = _bin_index(seconds)
        self._weights[at] += self._newest_weight
        self._sums[at] += self._newest_weight * seconds
        self._suffix_sums = None
        if self._newest_weight > _MAX_WEIGHT:
            self._weights = [weight / self._newest_weight for weight in self._weights]
            self._sums = [total / self._newest_weight for total in self._sums]
            self._newest_weight = 1.0

    def estimate_remaining_s(self, age_s: float) -> float:
        """The mean of what is left of those that lasted longer than `age_s`."""
        weights, sums = self._suffix_sums or self._compute_suffix_sums()
        at = _bin_index(age_s)
        weight, total = weights[at + 1], sums[at + 1]
        here = self._weights[at]
        if here:
            mean = self._sums[at] / here
            if age_s >= mean:  # its bin may hold some that last on
                low, high = _bin_start_s(at), _bin_start_s(at + 1)
                here *= max(0.0, min(1.0, (high - age_s) / (high - low)))
                mean = (age_s + high) / 2
            weight += here
            total += here * mean
        if weight <= weights[0] * 1e-3:
            return age_s * OVERDUE_SHARE
        return max(0.0, total / weight - age_s)

    def _compute_suffix_sums(self) -> tuple[list[float], list[float]]:
        self._suffix_sums = (_suffix_sums(self._weights), _suffix_sums(self._sums))
        return self._suffix_sums


def _suffix_sums(values: list[float]) -> list[float]:
    return [*reversed([0.0, *accumulate(reversed(values))])]


def _bin_index(seconds: float) -> int:
    if seconds <= MIN_DURATION_S:
        return 0
    return min(int(log2(seconds / MIN_DURATION_S) * BINS_PER_DOUBLING), BINS - 1)


def _bin_start_s(at: int) -> float:
    return float(MIN_DURATION_S * 2.0 ** (at / BINS_PER_DOUBLING))


class DurationModel:
    """By the answer's bound (`max_tokens`, in powers of two), which is all that is known of its
    length ahead. `token_s`: seconds a token of an answer, of late."""

    def __init__(self) -> None:
        self.tpot_s = DEFAULT_TPOT_S
        self._mean_output_tokens = 0.0
        self._mean_fill_ratio = 0.5
        self._histograms: dict[int, DurationHistogram] = {}
        self._output_tokens_by_class: dict[int, float] = {}

    def observe(self, bound: int, held_s: float) -> None:
        """A request of that bound kept its place so long."""
        kind = bound.bit_length()
        spread = self._histograms.get(kind)
        if spread is None:
            spread = self._histograms[kind] = DurationHistogram()
        spread.observe(held_s)

    def observe_output(self, bound: int, tokens: int, seconds: float) -> None:
        """An answer of so many tokens took so long after its first."""
        kind = bound.bit_length()
        known = self._output_tokens_by_class.get(kind, float(tokens))
        self._output_tokens_by_class[kind] = known + 0.1 * (tokens - known)
        self._mean_output_tokens += (
            0.1 * (tokens - self._mean_output_tokens) if self._mean_output_tokens else tokens
        )
        self._mean_fill_ratio += 0.1 * (tokens / max(1, bound) - self._mean_fill_ratio)
        if tokens > 1 and seconds > 0.0:
            self.tpot_s += 0.1 * (seconds / (tokens - 1) - self.tpot_s)

    def predict_output_tokens(self, bound: int) -> float:
        """How long an answer of that bound is expected to be: as its like were; else as long as the
        others, or filling as much of its bound."""
        known = self._output_tokens_by_class.get(bound.bit_length())
        if known is not None:
            return known
        return max(
            min(bound, self._mean_output_tokens),
            min(bound, DEFAULT_OUTPUT_TOKENS) * self._mean_fill_ratio,
        )

    def predict_remaining_s(self, bound: int, age_s: float) -> float:
        """How long a request of that bound and age will still keep its place, about."""
        spread = self._histograms.get(bound.bit_length())
        if spread is None or spread.count < MIN_OBSERVATIONS:
            guess_s = self.predict_output_tokens(bound) * self.tpot_s
            return max(guess_s - age_s, age_s * OVERDUE_SHARE)
        return spread.estimate_remaining_s(age_s)
