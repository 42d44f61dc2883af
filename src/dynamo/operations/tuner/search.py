"""The search for better settings: successive halving in replays of a record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import msgspec

from dynamo.operations.tuner.outcome import Comparison, Figures, SettingOutcome, compare

Values = tuple[tuple[str, Any], ...]
"""The values of all tuned settings by key."""
Play = Callable[[Values], SettingOutcome]
"""Plays a part of the record with these values."""

STAGE_SIZES = (20, 8, 4)
"""Replays of each stage, the one with the present settings among them."""
MAX_COARSE = 12
STEP_COST = 0.001
"""Each step away from the present values has to gain this share."""


class Recommendation(msgspec.Struct, frozen=True):
    """Other values of settings, from `before` to `after`, what they gain in the replay of a record,
    and the figures there. The settings are tried, kept and taken back together."""

    before: Mapping[str, Any]
    after: Mapping[str, Any]
    comparison: Comparison
    old: Figures
    new: Figures

    @property
    def safety_score(self) -> float:
        """The share of resampled records in which nothing gets worse."""
        return self.comparison.safety_score


class SettingSearch:
    """Searches for better values of `ranges`, which has the values to try of each setting, in
    order. `stages` play longer and longer parts of the record. The results stay if `run` is
    interrupted."""

    def __init__(
        self,
        ranges: Mapping[str, Sequence[Any]],
        start: Mapping[str, Any],
        stages: Sequence[Play],
        min_safety_score: float,
    ) -> None:
        self._ranges = ranges
        self._start: Values = tuple((key, start[key]) for key in ranges)
        self._stages = stages
        self._min_safety_score = min_safety_score
        self._outcomes: list[dict[Values, SettingOutcome]] = [{} for _ in stages]
        self._keys: list[dict[Values, tuple[bool, float]]] = [{} for _ in stages]

    @property
    def replays(self) -> int:
        """The number of replays so far."""
        return sum(map(len, self._outcomes))

    def run(self) -> None:
        """Search. Takes at most the replays of `STAGE_SIZES`."""
        self._explore()
        for stage in range(1, len(self._stages)):
            size = STAGE_SIZES[stage - len(self._stages)]
            for values in [self._start, *self._ranked(stage - 1)[: size - 1]]:
                self._play(stage, values)

    def recommendations(self, min_gain: float) -> list[Recommendation]:
        """Return what gains enough, the best first: by the last stage that has results. Without
        regard to safety, so that the caller can say what was refused."""
        stage = max(
            (number for number, each in enumerate(self._outcomes) if len(each) > 1), default=0
        )
        ranked = [self._recommend(stage, values) for values in self._ranked(stage)]
        return [each for each in ranked if each.comparison.gain >= min_gain]

    def _recommend(self, stage: int, values: Values) -> Recommendation:
        old, new = (self._outcomes[stage][each] for each in (self._start, values))
        before = dict(self._start)
        changed = {key: value for key, value in values if value != before[key]}
        return Recommendation(
            {key: before[key] for key in changed},
            changed,
            compare(old, new),
            old.figures,
            new.figures,
        )

    def _ranked(self, stage: int) -> list[Values]:
        """Return the candidates of a stage without the present settings, the best first."""
        keys = self._keys[stage]
        return sorted((each for each in keys if each != self._start), key=keys.__getitem__)

    def _play(self, stage: int, values: Values) -> None:
        outcomes = self._outcomes[stage]
        if values in outcomes:
            return
        outcome = outcomes[values] = self._stages[stage](values)
        before = outcomes[self._start]
        safe = compare(before, outcome).safety_score > self._min_safety_score
        cost = outcome.figures.cost * (1 + STEP_COST * self._steps(values))
        self._keys[stage][values] = (not safe and values != self._start, cost)

    def _steps(self, values: Values) -> int:
        """Return how far values are from the present ones."""
        steps = 0
        for (key, value), (_, before) in zip(values, self._start, strict=True):
            if self._is_number(key):
                steps += sum(
                    min(value, before) < each <= max(value, before) for each in self._ranges[key]
                )
            else:
                steps += value != before
        return steps

    def _explore(self) -> None:
        """Try a coarse grid of all numbers, then the neighbours of the best, as long as one of them
        is better."""
        self._play(0, self._start)
        for values in self._coarse():
            self._play(0, values)
        best: Values | None = None
        while best != (best := min(self._keys[0], key=self._keys[0].__getitem__)):
            for values in self._neighbours(best):
                if len(self._outcomes[0]) >= STAGE_SIZES[0]:
                    return
                self._play(0, values)

    def _coarse(self) -> Iterator[Values]:
        numbers = [key for key in self._ranges if self._is_number(key)]
        choices = [self._ranges[key][1::2] for key in numbers]
        for chosen in list(product(*choices))[:MAX_COARSE]:
            yield self._with(self._start, dict(zip(numbers, chosen, strict=True)))

    def _neighbours(self, values: Values) -> Iterator[Values]:
        """Yield the values that are one step away: numbers alone, other choices, and two numbers
        together."""
        steps: list[dict[str, Any]] = []
        for key, value in values:
            tried = self._ranges[key]
            near = self._near(tried, value) if self._is_number(key) else tried
            steps += [{key: other} for other in near if other != value]
        for step in steps:
            yield self._with(values, step)
        for first, second in product(steps, steps):
            (key, _), (other, _) = *first.items(), *second.items()
            if key < other and self._is_number(key) and self._is_number(other):
                yield self._with(values, {**first, **second})

    def _near(self, tried: Sequence[Any], value: Any) -> Sequence[Any]:
        """Return the next smaller and the next larger value."""
        smaller = [other for other in tried if other < value][-1:]
        return smaller + [other for other in tried if other > value][:1]

    def _is_number(self, key: str) -> bool:
        return not isinstance(self._ranges[key][0], str)

    def _with(self, values: Values, step: Mapping[str, Any]) -> Values:
        return tuple((key, step.get(key, value)) for key, value in values)
