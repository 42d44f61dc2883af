"""How long requests keep their place at a worker, learnt from those that left."""

from __future__ import annotations

from itertools import accumulate
from math import log2

SHORTEST_S = 0.001
PER_DOUBLING = 4
BINS = PER_DOUBLING * 24
FORGET = 0.99
"""An observation counts half after 69 more."""
FEW = 4
"""Fewer observations of a kind say less than the pace of all and the length of their answers."""
GUESSED_TOKEN_S = 0.02
GUESSED_TOKENS = 512
"""Before anything was seen an answer is thought to fill half of its bound, or of this, at such a
pace."""
OVERDUE = 0.25
"""Whatever took longer than anything before will take so much of its age again."""
_LARGEST_UNIT = 1e100


class Spread:
    """Durations in bins of 19 %, newer ones weighing more."""

    __slots__ = ("_sums", "_tails", "_unit", "_weights", "seen")

    def __init__(self) -> None:
        self.seen = 0
        self._unit = 1.0
        self._weights = [0.0] * BINS
        self._sums = [0.0] * BINS
        self._tails: tuple[list[float], list[float]] | None = None

    def observe(self, seconds: float) -> None:
        """One more."""
        self.seen += 1
        self._unit /= FORGET
        at = _bin(seconds)
        self._weights[at] += self._unit
        self._sums[at] += self._unit * seconds
        self._tails = None
        if self._unit > _LARGEST_UNIT:
            self._weights = [weight / self._unit for weight in self._weights]
            self._sums = [total / self._unit for total in self._sums]
            self._unit = 1.0

    def rest(self, age_s: float) -> float:
        """The mean of what is left of those that lasted longer than `age_s`."""
        weights, sums = self._tails or self._add_up()
        at = _bin(age_s)
        weight, total = weights[at + 1], sums[at + 1]
        here = self._weights[at]
        if here:
            mean = self._sums[at] / here
            if age_s >= mean:  # its bin may hold some that last on
                low, high = _edge(at), _edge(at + 1)
                here *= max(0.0, min(1.0, (high - age_s) / (high - low)))
                mean = (age_s + high) / 2
            weight += here
            total += here * mean
        if weight <= weights[0] * 1e-3:
            return age_s * OVERDUE
        return max(0.0, total / weight - age_s)

    def _add_up(self) -> tuple[list[float], list[float]]:
        self._tails = (_tails(self._weights), _tails(self._sums))
        return self._tails


def _tails(values: list[float]) -> list[float]:
    return [*reversed([0.0, *accumulate(reversed(values))])]


def _bin(seconds: float) -> int:
    if seconds <= SHORTEST_S:
        return 0
    return min(int(log2(seconds / SHORTEST_S) * PER_DOUBLING), BINS - 1)


def _edge(at: int) -> float:
    return float(SHORTEST_S * 2.0 ** (at / PER_DOUBLING))


class Durations:
    """By the answer's bound (`max_tokens`, in powers of two), which is all that is known of its
    length ahead. `token_s`: seconds a token of an answer, of late."""

    def __init__(self) -> None:
        self.token_s = GUESSED_TOKEN_S
        self._usual = 0.0
        self._filled = 0.5
        self._kinds: dict[int, Spread] = {}
        self._tokens: dict[int, float] = {}

    def observe(self, bound: int, held_s: float) -> None:
        """A request of that bound kept its place so long."""
        kind = bound.bit_length()
        spread = self._kinds.get(kind)
        if spread is None:
            spread = self._kinds[kind] = Spread()
        spread.observe(held_s)

    def answered(self, bound: int, tokens: int, seconds: float) -> None:
        """An answer of so many tokens took so long after its first."""
        kind = bound.bit_length()
        known = self._tokens.get(kind, float(tokens))
        self._tokens[kind] = known + 0.1 * (tokens - known)
        self._usual += 0.1 * (tokens - self._usual) if self._usual else tokens
        self._filled += 0.1 * (tokens / max(1, bound) - self._filled)
        if tokens > 1 and seconds > 0.0:
            self.token_s += 0.1 * (seconds / (tokens - 1) - self.token_s)

    def answer_tokens(self, bound: int) -> float:
        """How long an answer of that bound is expected to be: as its like were; else as long as the
        others, or filling as much of its bound."""
        known = self._tokens.get(bound.bit_length())
        if known is not None:
            return known
        return max(min(bound, self._usual), min(bound, GUESSED_TOKENS) * self._filled)

    def rest(self, bound: int, age_s: float) -> float:
        """How long a request of that bound and age will still keep its place, about."""
        spread = self._kinds.get(bound.bit_length())
        if spread is None or spread.seen < FEW:
            guess_s = self.answer_tokens(bound) * self.token_s
            return max(guess_s - age_s, age_s * OVERDUE)
        return spread.rest(age_s)
