"""Measure how well `dynamo configure` predicts measured runs.

    python benchmarks/configurator_accuracy.py silicon_sample.csv

The file has AI Configurator's columns. Every row is predicted with all rows of the same key hidden,
and once more with all of the same model, GPU, engine and precision hidden. The constants were fitted
with all of them (configurator_fit.py).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from dynamo.operations.configure.cases import CaseArrays
from dynamo.operations.configure.measured import MeasuredRow, read_silicon
from dynamo.operations.configure.neighbours import Features, Neighbours, Similarity
from dynamo.operations.configure.predictor import (
    TIMES,
    Formula,
    case_forecast,
    load_constants,
    row_split,
    split_forecast,
)
from dynamo.operations.configure.step_time import StepTimes

Array = NDArray[np.float64]
MOST_GPUS = 16
MEMORY_SHARE = 0.92
HELD_OUT = 0.3
"""Share of all rows that is not in the file: a row without copies is likelier to lack a twin."""


COVERED = 0.83
LEAST_CONFIGURATIONS = 6
LIMITS = (0.3, 0.6)
GOALS = {
    ("ttft", "key"): " (wanted: mean 20 %, median 9.5 %)",
    ("ttft", "combination"): " (wanted: median 25 %)",
    ("tpot", "key"): " (wanted: mean 6.5 %)",
    ("tpot", "combination"): " (wanted: mean 16 %)",
    ("split_ttft", "key"): " (wanted: median 25 %)",
    ("split_tpot", "key"): " (wanted: mean 8 %)",
}
MEDIAN_OF_SQUARE = 0.455


class Sample:
    """Measured rows of one kind, with what their prediction needs. Copies are one row."""

    def __init__(self, rows: Sequence[MeasuredRow]) -> None:
        groups = [[rows[number] for number in group] for group in _indices(rows, _copy_key)]
        self.rows = [_mean_row(group) for group in groups]
        self.copies = np.array([float(len(group)) for group in groups])
        self.keys = _indices(self.rows, _run_key)
        self.combinations = _indices(self.rows, lambda row: row.combination)
        self.chance = np.zeros(len(self.rows))
        for key in self.keys:
            self.chance[key] = HELD_OUT ** (self.copies[key].sum() - 1) * self.copies[key]
        self.split = bool(self.rows and self.rows[0].prefill_workers)
        self.measured = {
            name: np.array([getattr(row, f"{name}_ms") for row in self.rows])
            for name in ("ttft", "tpot")
        }
        if self.split:
            self._splits = [row_split(row) for row in self.rows]
        else:
            self._cases = [row.case() for row in self.rows]
            self.arrays = CaseArrays(self._cases)

    def formula(self, times: StepTimes) -> Formula:
        """Return the times of the rows in closed form."""
        if self.split:
            return split_forecast(times, self._splits)
        return case_forecast(times, self._cases, self.arrays)

    def errors(self, formula: Formula) -> Mapping[str, Array]:
        """Return logarithms of measured over computed times."""
        return {name: np.log(self.measured[name] / getattr(formula, name)) for name in TIMES}


class Scores:
    """Predictions of a sample with rows hidden, as logarithms of measured over predicted."""

    def __init__(self, sample: Sample, errors: Array, neighbours: Neighbours) -> None:
        self._sample, self._errors, self._neighbours = sample, errors, neighbours

    def hidden(self, groups: Sequence[NDArray[np.intp]]) -> tuple[Array, Array, Array]:
        """Return what is left of the errors, its variance, and the novelty of each row."""
        own = self._neighbours._similarity  # noqa: SLF001
        mean, variance = self._neighbours.leave_out(groups)
        shift = own.shift * np.minimum(own.scale * variance, 0.3)
        left = self._errors - mean + shift
        return left, own.scale * variance, np.clip(variance - own.noise, 0, 1)


def fit_neighbours(
    sample: Sample, features: Features, errors: Array, similarity: Similarity
) -> tuple[Neighbours, Array, Similarity]:
    """Return the neighbours with doubts of rows that contradict the others, the doubts, and the
    similarity with its scale and bars."""
    doubts: Array = np.ones(len(errors))
    groups = [row.combination for row in sample.rows]
    for _ in range(2):
        neighbours = Neighbours(features, errors, doubts, groups, similarity)
        mean, variance = neighbours.leave_out(sample.keys)
        squares = (errors - mean) ** 2 / variance
        scale = float(np.median(squares)) / MEDIAN_OF_SQUARE
        doubts = np.maximum(1.0, squares / scale / 4).round(3).astype(np.float64)
    neighbours = Neighbours(features, errors, doubts, groups, similarity)
    ratios, novelty = [], []
    for hidden in (sample.keys, sample.combinations):
        mean, variance = neighbours.leave_out(hidden)
        ratios.append(np.abs(errors - mean) / np.sqrt(scale * variance))
        novelty.append(float(np.mean(np.clip(variance - similarity.noise, 0, 1))))
    near, far = (_quantile(ratio, sample.chance, COVERED) for ratio in ratios)
    slope = max(0.0, (far - near) / max(0.05, novelty[1] - novelty[0]))
    tuned = msgspec.structs.replace(
        similarity,
        scale=round(scale, 4),
        bar=round(max(0.5, near - slope * novelty[0]), 3),
        far_bar=round(slope, 3),
    )
    return Neighbours(features, errors, doubts, groups, tuned), doubts, tuned


def score(left: Array, weights: Array) -> tuple[float, float]:
    """Return mean and median of the relative error."""
    relative = np.abs(np.expm1(-left))
    return float(np.average(relative, weights=weights)), _quantile(relative, weights, 0.5)


def _quantile(values: Array, weights: Array, share: float) -> float:
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][np.searchsorted(reached, share)])


def _copy_key(row: MeasuredRow) -> object:
    times = {"id": "", "ttft_ms": 0.0, "tpot_ms": 0.0}
    return msgspec.structs.replace(row, **times)


def _run_key(row: MeasuredRow) -> object:
    return (
        row.combination, row.gpus, row.isl, row.osl, row.concurrency,
        row.prefill_gpus, row.prefill_workers, row.decode_workers,
    )  # fmt: skip


def _mean_row(rows: Sequence[MeasuredRow]) -> MeasuredRow:
    def mean(read: Callable[[MeasuredRow], float]) -> float:
        return math.exp(sum(math.log(read(row)) for row in rows) / len(rows))

    return msgspec.structs.replace(
        rows[0],
        id="",
        ttft_ms=float(f"{mean(lambda row: row.ttft_ms):.6g}"),
        tpot_ms=float(f"{mean(lambda row: row.tpot_ms):.6g}"),
    )


def _indices(
    rows: Sequence[MeasuredRow], key: Callable[[MeasuredRow], object]
) -> Sequence[NDArray[np.intp]]:
    values: dict[object, list[int]] = {}
    for number, row in enumerate(rows):
        values.setdefault(key(row), []).append(number)
    return [np.array(numbers) for numbers in values.values()]


def read_samples(path: Path) -> tuple[Sample, Sample]:
    """Return the usable rows of a file: replicas that do both, and prefill with decode workers. Rows
    without workers' counts, over 16 GPUs, or whose weights do not fit are not usable."""
    together, apart, unusable = [], [], 0
    for row in read_silicon(path):
        if not isinstance(row, MeasuredRow):
            unusable += 1
        elif row.prefill_workers and row.decode_workers:
            apart.append(row)
        elif not row.prefill_workers and row.gpus <= MOST_GPUS and _fits(row):
            together.append(row)
    print(f"{len(together)} rows of replicas, {len(apart)} disaggregated, {unusable} unreadable")
    return Sample(together), Sample(apart)


def _fits(row: MeasuredRow) -> bool:
    case = row.case()
    return case.shape.weight_bytes() / row.gpus < case.gpu.memory * 1e9 * MEMORY_SHARE


def report(
    sample: Sample, constants: Mapping[str, float], similarity: Mapping[str, Similarity]
) -> None:
    """Print the errors of a sample with its own kind of rows hidden, and of choices by them."""
    formula = sample.formula(StepTimes(constants))
    prefix = "split_" if sample.split else ""
    blind: dict[str, Array] = {}
    for name, errors in sample.errors(formula).items():
        own = similarity[prefix + name]
        neighbours, _, tuned = fit_neighbours(sample, formula.features, errors, own)
        print(f"{prefix}{name}: formula alone {_text(score(errors, sample.chance))}")
        scores = Scores(sample, errors, neighbours)
        for title, groups in (("key", sample.keys), ("combination", sample.combinations)):
            left, variance, novelty = scores.hidden(groups)
            half = (tuned.bar + tuned.far_bar * novelty) * np.sqrt(variance)
            shift = tuned.shift * np.minimum(variance, 0.3)
            inside = np.average(np.abs(left - shift) <= half, weights=sample.chance)
            goal = GOALS.get((prefix + name, title), "")
            print(
                f"  {title} hidden: {_text(score(left, sample.chance))}, bars hold {inside:.0%}{goal}"
            )
            blind[name] = sample.measured[name] * np.exp(-left)
            if title == "key" and not sample.split:
                hopper = (sample.arrays.domain == 0) & (sample.arrays.moe_layers == 0)
                print(f"    dense Hopper {_text(score(left[hopper], sample.chance[hopper]))}")
    if not sample.split:
        report_choices(sample, blind)


def report_choices(sample: Sample, blind: Mapping[str, Array]) -> None:
    """Print how often the configuration of most tokens/s/GPU within a limit on TPOT misses that in
    truth by over 10 %, and what the other choices lose. The combination is hidden."""
    load = np.array([row.concurrency * row.osl / row.gpus for row in sample.rows])
    osl = np.array([float(row.osl) for row in sample.rows])
    rates, expected = (
        load / (times["ttft"] + osl * times["tpot"]) for times in (sample.measured, blind)
    )
    workloads = _indices(
        sample.rows, lambda row: (row.combination, row.isl, row.osl, row.first_wave)
    )
    missed, regrets, count = [], [], 0
    for rows in workloads:
        if len({_run_key(sample.rows[row]) for row in rows}) < LEAST_CONFIGURATIONS:
            continue
        count += 1
        tpot, guess = sample.measured["tpot"][rows], blind["tpot"][rows]
        for share in LIMITS:
            limit = np.quantile(tpot, share)
            within = np.where(guess <= limit, expected[rows], 0.0)
            chosen = int(np.argmax(within) if within.any() else np.argmin(guess))
            missed.append(tpot[chosen] > 1.1 * limit)
            if not missed[-1]:
                best = rates[rows][tpot <= limit].max()
                regrets.append(max(0.0, 1 - rates[rows][chosen] / best))
    print(
        f"{count} workloads: {np.mean(missed):.1%} of choices miss the limit (wanted 10 %), ",
        end="",
    )
    print(f"mean regret of the others {np.mean(regrets):.1%} (wanted 10 %)")


def _text(values: tuple[float, float]) -> str:
    return f"mean {values[0]:.1%}, median {values[1]:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="measured rows in AI Configurator's columns")
    args = parser.parse_args()
    constants, similarity = load_constants()
    for sample in read_samples(args.data):
        report(sample, constants, similarity)


if __name__ == "__main__":
    main()
