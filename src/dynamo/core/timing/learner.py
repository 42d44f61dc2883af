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
"""A step counts for so many times what was learnt at most: the rest is a pause."""
MEMORY = 0.7
"""Weight of the steps before, each time that the timing is learnt again."""
CHANGE = 1.5
"""Where steps take so many times what was learnt, or so many times less, the engine has changed."""
CHANGED_MEMORY = 0.1
"""Weight of the steps before then: it keeps coefficients that no step shows."""
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
        self._products = [[0.0] * (TERMS + 1) for _ in range(TERMS)]
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
            if timing is not None and self._prompts:
                spent_s = 0.0
                for step in self._prompts:
                    others_s = _predict_s(timing, (1.0, 0.0, step[2], step[3]))
                    spent_s += min(step[-1], MAX_RATIO * _predict_s(timing, step)) - others_s
                tokens = sum(step[1] for step in self._prompts)
                self._token_s = spent_s / tokens if spent_s > 0 else self._token_s
        return self._timing

    @property
    def token_s(self) -> float:
        """The time by which recent prompts made steps longer, for each of their tokens."""
        return self._token_s if self.timing is not None else INITIAL_TOKEN_S

    def _fit(self) -> Timing | None:
        before = self._timing
        steps = [step for step in (*self._prompts, *self._decodes) if step[-1] > 0]
        if len(steps) < MIN_STEPS:
            return before
        change = 1.0
        usual = {
            kind: _median([step[-1] for step in steps if bool(step[1]) is kind] or [0.0])
            for kind in (False, True)
        }
        expected = [usual[bool(step[1])] for step in steps]
        if before is not None:
            expected = [max(1e-9, _predict_s(before, step)) for step in steps]
            change = _median([step[-1] / each for step, each in zip(steps, expected, strict=True)])
        memory = MEMORY
        if not 1 / CHANGE < change < CHANGE:
            memory, expected = CHANGED_MEMORY, [change * each for each in expected]
            for line in self._products:  # as if the steps before had been as fast
                line[:] = [*(value / change**2 for value in line[:-1]), line[-1] / change]
        usual_s = _median(expected)
        rows = []
        for step, each in zip(steps, expected, strict=True):
            weight = 1 / max(usual_s, each)  # by the measured time, fast steps would count more
            *terms, seconds = step
            rows.append([weight * value for value in (*terms, min(seconds, MAX_RATIO * each))])
        columns = list(zip(*rows, strict=True))
        self._products = [
            [memory * old + sum(map(mul, a, b)) for old, b in zip(line, columns, strict=True)]
            for line, a in zip(self._products, columns, strict=False)
        ]
        scales = [line[index] ** 0.5 or 1.0 for index, line in enumerate(self._products)]
        scaled = [
            [value / own / scale for value, scale in zip(line, (*scales, 1.0), strict=True)]
            for line, own in zip(self._products, scales, strict=True)
        ]
        known = _values(before) if before is not None else (0.0,) * TERMS
        shares = _solve(scaled, [v * 1e-3 * scale for v, scale in zip(known, scales, strict=True)])
        values = (share / scale * 1e3 for share, scale in zip(shares, scales, strict=True))
        return Timing(*(float(f"{value:.4g}") for value in values))


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _values(timing: Timing) -> tuple[float, ...]:
    return timing.c0, timing.c1, timing.c2, timing.c3, timing.c4


def _predict_s(timing: Timing, step: Sequence[float]) -> float:
    return float(sum(map(mul, _values(timing), step))) * 1e-3


def _solve(equations: Sequence[Sequence[float]], start: list[float]) -> Sequence[float]:
    """Return the non-negative least squares solution by coordinate descent from `start`. Each of
    the normal `equations` has its right side at the end."""
    solution = start
    for _ in range(ROUNDS):
        for index in TOKENS_FIRST:
            line = equations[index]
            if line[index]:
                rest = line[-1] - sum(map(mul, line, solution)) + line[index] * solution[index]
                solution[index] = max(0.0, rest / line[index])
    return solution
