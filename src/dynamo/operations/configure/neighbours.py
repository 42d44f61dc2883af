"""Correction of a prediction by measured rows that are like it: a Gaussian process on the logarithm
of measured over predicted, whose covariance falls with the distance between two cases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from dynamo.operations.configure.cases import Floats

Half = NDArray[np.float32]
WIDE_SHARE = 0.1
"""Share of the covariance that falls half as fast."""
MOST_VARIANCE = 0.3


class Features(msgspec.Struct, frozen=True):
    """The properties that distances are measured on: `names` are equal or not, `numbers` differ by
    their amount. `trend` has the columns of a linear model, if there is one."""

    names: Mapping[str, Sequence[str]]
    numbers: Mapping[str, Floats]
    trend: Floats | None = None

    def take(self, rows: NDArray[np.intp]) -> Features:
        """Return the features of some rows."""
        return Features(
            {key: [values[row] for row in rows] for key, values in self.names.items()},
            {key: values[rows] for key, values in self.numbers.items()},
            None if self.trend is None else self.trend[rows],
        )


class Similarity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a correction weighs its rows: `weights` of the distance by feature, `noise` of a row
    against the covariance, `scale` from covariance to variance, `trend` of the linear model. A bar
    is `bar` deviations wide near rows, and `far_bar` more where there are none. `shift` moves an
    uncertain estimate down, to where its expected relative error is least."""

    weights: Mapping[str, float]
    noise: float
    scale: float = 1.0
    bar: float = 1.5
    far_bar: float = 1.5
    trend: float = 0.0
    shift: float = 0.5


class Correction(msgspec.Struct, frozen=True):
    """Logarithms to add to a prediction: the estimate and its bars. `novelty` is 0 at measured rows
    and 1 where none is near."""

    estimate: Floats
    low: Floats
    high: Floats
    novelty: Floats


class Neighbours:
    """Measured rows with the logarithm of measured over predicted. `doubts` multiply the noise of
    rows that contradict their neighbours; `groups` name what `hide_group` hides."""

    def __init__(
        self,
        features: Features,
        errors: Floats,
        doubts: Floats,
        groups: Sequence[str],
        similarity: Similarity,
    ) -> None:
        self._features = features
        self._similarity = similarity
        self._groups = np.array(groups)
        self._errors = errors.astype(np.float32)
        covariance = self._covariance(features, features)
        covariance[np.diag_indices(len(errors))] += (similarity.noise * doubts).astype(np.float32)
        self.inverse: Half = np.linalg.inv(covariance)

    def correct(self, features: Features) -> Correction:
        """Return the corrections of cases."""
        return self._correct(features, self.inverse @ self._errors, self.inverse, None)

    def correct_hidden(self, features: Features, groups: Sequence[str]) -> Correction:
        """Return the corrections of cases as if no row of their own group had been measured."""
        parts = []
        wanted = np.array(groups)
        order = np.argsort(wanted, kind="stable")
        for group in np.unique(wanted):
            hidden = self._groups == group
            some = features.take(order[wanted[order] == group])
            parts.append(self._without(some, hidden) if hidden.any() else self.correct(some))
        back = np.argsort(order, kind="stable")
        return Correction(
            *(
                np.concatenate([getattr(part, field) for part in parts])[back]
                for field in Correction.__struct_fields__
            )
        )

    def _without(self, features: Features, hidden: NDArray[np.bool_]) -> Correction:
        shown = ~hidden
        cross = self.inverse[np.ix_(shown, hidden)]
        inverse = self.inverse[np.ix_(shown, shown)]
        inverse = inverse - cross @ np.linalg.solve(self.inverse[np.ix_(hidden, hidden)], cross.T)
        return self._correct(features, inverse @ self._errors[shown], inverse, shown)

    def _correct(
        self,
        features: Features,
        coefficients: Half,
        inverse: Half,
        shown: NDArray[np.bool_] | None,
    ) -> Correction:
        rows = self._features if shown is None else self._features.take(np.flatnonzero(shown))
        covariance = self._covariance(features, rows)
        mean = (covariance @ coefficients).astype(np.float64)
        known = np.einsum("ij,ij->i", covariance @ inverse, covariance).astype(np.float64)
        prior = np.ones(len(mean))
        if self._similarity.trend and features.trend is not None:
            prior = prior + self._similarity.trend * (features.trend**2).sum(1)
        return self._bars(mean, np.clip(prior - known, 0.0, prior))

    def _bars(self, mean: Floats, open_share: Floats) -> Correction:
        own = self._similarity
        novelty = np.clip(open_share, 0.0, 1.0)
        variance = own.scale * (open_share + own.noise)
        estimate = mean - own.shift * np.minimum(variance, MOST_VARIANCE)
        half = (own.bar + own.far_bar * novelty) * np.sqrt(variance)
        return Correction(estimate, mean - half, mean + half, novelty)

    def _covariance(self, left: Features, right: Features) -> Half:
        size = (len(next(iter(left.names.values()))), len(next(iter(right.names.values()))))
        distance = np.zeros(size, dtype=np.float32)
        for name, weight in self._similarity.weights.items():
            if name in left.names:
                known = {value: number for number, value in enumerate(set(right.names[name]))}
                a = np.array([known.get(value, -1) for value in left.names[name]])
                b = np.array([known[value] for value in right.names[name]])
                part: Any = a[:, None] != b[None, :]
            else:
                a, b = (side.numbers[name].astype(np.float32) for side in (left, right))
                part = np.abs(a[:, None] - b[None, :])
            distance += np.float32(weight) * part
        distance /= -2
        half: Half = np.exp(distance, out=distance)
        covariance: Half = half * half
        covariance *= np.float32(1 - WIDE_SHARE)
        half *= np.float32(WIDE_SHARE)
        covariance += half
        if self._similarity.trend and left.trend is not None and right.trend is not None:
            trend = left.trend.astype(np.float32) @ right.trend.T.astype(np.float32)
            covariance += np.float32(self._similarity.trend) * trend
        return covariance

    def leave_out(self, groups: Sequence[NDArray[np.intp]]) -> tuple[Floats, Floats]:
        """Return mean and open share of every row as if its group of `groups` had not been
        measured."""
        inverse = self.inverse.astype(np.float64)
        coefficients = inverse @ self._errors
        mean, variance = np.empty(len(self._errors)), np.empty(len(self._errors))
        for group in groups:
            block = np.linalg.inv(inverse[np.ix_(group, group)])
            mean[group] = self._errors[group] - block @ coefficients[group]
            variance[group] = np.diag(block)
        return mean, variance
