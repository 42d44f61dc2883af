"""Learns the timing of an engine from its steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import mul

from dynamo.core.timing.model import StepCounts, Timing

TERMS = 5
TOKENS_FIRST = (1, 0, 2, 3, 4)
"""The order in which terms get what steps take, where all steps have as many prompt tokens."""
SKIPPED_STEPS = 16
"""Steps after a start or a change of role that are not learnt: they compile, allocate, fill caches.
"""
WINDOW = 96
"""Steps of each kind that are remembered: with prompts, and without."""
MIN_STEPS = 32
REFIT_STEPS = 256
"""After so many further steps the timing is learnt again when somebody asks for it."""
MAX_RATIO = 4.0
"""A step that takes so many times what was learnt is a pause of something else."""
PRIOR = 0.01
"""Weight of the coefficients so far beside the steps, which keeps those that no step shows."""
ROUNDS = 50
INITIAL_TOKEN_S = 0.001


class TimingLearner:
    """Recent steps of one engine, and the non-negative coefficients of a `Timing` that explain them
    with the least error, which is relative for steps that are longer than usual. `observe` costs
    half a microsecond, a fit a millisecond."""

    def __init__(self) -> None:
        self._prompts: deque[tuple[float, ...]] = deque(maxlen=WINDOW)
        self._decodes: deque[tuple[float, ...]] = deque(maxlen=WINDOW)
        self._skip = SKIPPED_STEPS
        self._new_steps = 0
        self._timing: Timing | None = None
        self._token_s = INITIAL_TOKEN_S

    def restart(self) -> None:
        """Leave out the next steps, because the engine has just started or has another role."""
        self._skip = SKIPPED_STEPS

    def observe(self, counts: StepCounts, seconds: float) -> None:
        """Remember a step."""
        if self._skip:
            self._skip -= 1
            return
        new_tokens = counts.new_tokens
        self._new_steps += 1
        (self._prompts if new_tokens else self._decodes).append(
            (1.0, new_tokens, counts.seqs, counts.decode_context, counts.attention, seconds)
        )

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The coefficients of `timing`, for `Load`; empty before there are enough steps."""
        timing = self.timing
        return () if timing is None else _values(timing)

    @property
    def timing(self) -> Timing | None:
        """The timing as learnt so far; None before there are enough steps."""
        if self._new_steps >= (MIN_STEPS if self._timing is None else REFIT_STEPS):
            self._new_steps = 0
            self._timing = timing = self._fit()
            tokens, attention = (sum(step[index] for step in self._prompts) for index in (1, 4))
            if timing is not None and tokens:
                spent_s = (timing.c1 * tokens + timing.c4 * attention) * 1e-3
                self._token_s = spent_s / tokens or self._token_s
        return self._timing

    @property
    def token_s(self) -> float:
        """The time that a prompt token takes, its attention included, in recent prompts."""
        return self._token_s if self.timing is not None else INITIAL_TOKEN_S

    def _fit(self) -> Timing | None:
        before = self._timing
        steps = [step for step in (*self._prompts, *self._decodes) if step[-1] > 0]
        if before is not None:
            usual = [step for step in steps if step[-1] < MAX_RATIO * _predict_s(before, step)]
            steps = (
                usual if len(usual) > len(steps) / 2 else steps
            )  # else the engine is another one
        if len(steps) < MIN_STEPS:
            return before
        usual_s = sorted(step[-1] for step in steps)[len(steps) // 2]
        weights = [1 / max(usual_s, step[-1]) for step in steps]
        rows = [
            [term * each for term in step[:-1]] for step, each in zip(steps, weights, strict=True)
        ]
        targets = [step[-1] * each for step, each in zip(steps, weights, strict=True)]
        columns = list(zip(*rows, strict=True))
        scales = [sum(column) / len(rows) or 1.0 for column in columns]
        normal = [[sum(map(mul, a, b)) for b in columns] for a in columns]
        normal = [
            [value / scales[i] / scales[j] for j, value in enumerate(line)]
            for i, line in enumerate(normal)
        ]
        right = [
            sum(map(mul, a, targets)) / scale for a, scale in zip(columns, scales, strict=True)
        ]
        known = _values(before) if before is not None else (0.0,) * TERMS
        start = [value * 1e-3 * scale for value, scale in zip(known, scales, strict=True)]
        shares = _solve(normal, right, start, 0.0 if before is None else PRIOR * len(rows))
        values = (share / scale * 1e3 for share, scale in zip(shares, scales, strict=True))
        return Timing(*(float(f"{value:.4g}") for value in values))


def _values(timing: Timing) -> tuple[float, ...]:
    return timing.c0, timing.c1, timing.c2, timing.c3, timing.c4


def _predict_s(timing: Timing, step: Sequence[float]) -> float:
    return float(sum(map(mul, _values(timing), step))) * 1e-3


def _solve(
    normal: Sequence[Sequence[float]], right: Sequence[float], start: Sequence[float], weight: float
) -> Sequence[float]:
    """Return the non-negative least squares solution near `start`, by coordinate descent."""
    solution = list(start)
    for _ in range(ROUNDS):
        for index in TOKENS_FIRST:
            line = normal[index]
            diagonal = line[index] + weight
            if not diagonal:
                continue
            rest = right[index] - sum(map(mul, line, solution)) + line[index] * solution[index]
            solution[index] = max(0.0, (rest + weight * start[index]) / diagonal)
    return solution
