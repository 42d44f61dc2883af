"""The predictor: formulas, corrected by measured rows that are like the case."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dynamo.core.errors import ConfigError
from dynamo.operations.configure.cases import Case, CaseArrays, Floats
from dynamo.operations.configure.catalogue import DATA
from dynamo.operations.configure.measured import MeasuredRow, read_silicon, shipped_rows
from dynamo.operations.configure.neighbours import Features, Neighbours, Similarity
from dynamo.operations.configure.shapes import ModelShape
from dynamo.operations.configure.step_time import FEED_SLACK_MS, StepTimes
from dynamo.operations.configure.yaml_files import read_yaml

LOAD_RANGE = (-1.2, 1.0)
MOST_FEED_LOAD = 0.95
FEED_TURNS = 6
ROWS_AT_ONCE = 2000
TIMES = ("ttft", "tpot")
FAR = 0.85
"""Novelty from which an estimate is marked as extrapolated."""
SHORTEST_MS, LONGEST_MS = 0.01, 1e9


class Split(msgspec.Struct, frozen=True):
    """Prefill and decode workers with their loads. Each decode case has its share of the requests;
    `concurrency` is that of all workers together."""

    prefill: Case
    decode: Case
    prefill_workers: int
    decode_workers: int

    @property
    def concurrency(self) -> float:
        """Requests in all workers."""
        return self.decode.concurrency * self.decode_workers

    @property
    def divides_kv(self) -> bool:
        """Whether KV heads are divided among more or fewer GPUs when KV is handed over."""
        return not self.decode.shape.latent and self.decode.gpus != self.prefill.gpus


class Formula(msgspec.Struct, frozen=True):
    """TTFT and TPOT in closed form, and the features of their correction."""

    ttft: Floats
    tpot: Floats
    features: Features


class Estimates(msgspec.Struct, frozen=True):
    """Three rows of each time: the estimates, and both ends of bars that hold four measurements of
    five. `novelty` is that of TPOT: from `FAR` on an estimate is extrapolated."""

    ttft_ms: Floats
    tpot_ms: Floats
    novelty: Floats

    @property
    def extrapolated(self) -> Sequence[bool]:
        """Whether no measured row is near a case."""
        return [bool(novelty > FAR) for novelty in self.novelty]


class Predictor:
    """Predictions of TTFT and TPOT. `rows` are the measured rows that correct them."""

    def __init__(
        self,
        rows: Sequence[MeasuredRow],
        constants: Mapping[str, float],
        similarities: Mapping[str, Similarity],
    ) -> None:
        self.times = StepTimes(constants)
        self._similarities = similarities
        self._together = [row for row in rows if not row.prefill_workers]
        self._apart = [row for row in rows if row.prefill_workers]
        self._neighbours: dict[str, Mapping[str, Neighbours]] = {}
        self._newest: dict[tuple[str, ...], tuple[str, str, bool]] = {}

    @classmethod
    def shipped(
        cls, more: Sequence[MeasuredRow] = (), shape: ModelShape | None = None
    ) -> Predictor:
        """Return the predictor with the rows and constants of this package, and `more` rows. For a
        `shape` the rows of models that have experts like it, or none, are enough."""
        constants, similarities = load_constants()
        rows = [*shipped_rows(), *more]
        if shape is not None:
            rows = [row for row in rows if (row.case().shape.experts > 0) == (shape.experts > 0)]
        return cls(rows, constants, similarities)

    def newest(self, engine: str, family: str, gpu: str) -> tuple[str, str, bool]:
        """Return the version of an engine, the day and whether only the first wave counted, of its
        newest measured row: of the model and GPU if there are any."""
        if not self._newest:
            for row in sorted([*self._together, *self._apart], key=lambda row: row.day):
                for key in (
                    (row.engine,),
                    (row.engine, row.model),
                    (row.engine, row.model, row.gpu),
                ):
                    self._newest[key] = (row.version, row.day, bool(row.first_wave))
        keys = ((engine, family, gpu), (engine, family), (engine,))
        return next((self._newest[key] for key in keys if key in self._newest), ("", "", False))

    def predict(self, cases: Sequence[Case], hidden: Sequence[str] = ()) -> Estimates:
        """Return estimates of replicas that compute prompts and answers. `hidden` has the
        combination of each case whose rows are not looked at."""
        return self._estimate("", case_forecast(self.times, cases, CaseArrays(cases)), hidden)

    def predict_split(self, splits: Sequence[Split], hidden: Sequence[str] = ()) -> Estimates:
        """Return estimates of prefill workers with decode workers."""
        return self._estimate("split_", split_forecast(self.times, splits), hidden)

    def _estimate(self, kind: str, formula: Formula, hidden: Sequence[str]) -> Estimates:
        times: list[Floats] = []
        for name in TIMES:
            own = self._neighbours_of(kind)[name]
            features = formula.features
            change = own.correct_hidden(features, hidden) if hidden else own.correct(features)
            logarithms = np.array([change.estimate, change.low, change.high])
            time = getattr(formula, name) * np.exp(logarithms)
            times.append(np.clip(time, SHORTEST_MS, LONGEST_MS))
        ttft_ms, tpot_ms = times
        return Estimates(ttft_ms, tpot_ms, change.novelty)

    def _neighbours_of(self, kind: str) -> Mapping[str, Neighbours]:
        if kind not in self._neighbours:
            rows = self._apart if kind else self._together
            if kind:
                formula = split_forecast(self.times, [row_split(row) for row in rows])
            else:
                cases = [row.case() for row in rows]
                formula = case_forecast(self.times, cases, CaseArrays(cases))
            self._neighbours[kind] = {
                name: Neighbours(
                    formula.features,
                    np.log(_column(rows, f"{name}_ms") / getattr(formula, name)),
                    _column(rows, f"{name}_doubt"),
                    [row.combination for row in rows],
                    self._similarities[kind + name],
                )
                for name in TIMES
            }
        return self._neighbours[kind]


def _column(rows: Sequence[MeasuredRow], name: str) -> Floats:
    return np.array([getattr(row, name) for row in rows])


@cache
def load_constants() -> tuple[Mapping[str, float], Mapping[str, Similarity]]:
    """Return the fitted constants, and how corrections weigh their rows."""
    content = read_yaml(DATA / "constants.yaml")
    similarities: Mapping[str, Any] = content["similarity"]
    return content["constants"], {
        name: msgspec.convert(value, Similarity) for name, value in similarities.items()
    }


def row_split(row: MeasuredRow) -> Split:
    """Return the workers of a measured row."""
    return Split(row.prefill_case(), row.case(), row.prefill_workers, max(1, row.decode_workers))


def case_forecast(times: StepTimes, cases: Sequence[Case], arrays: CaseArrays) -> Formula:
    """Return the times of replicas in closed form."""
    forecast = times.forecast(arrays)
    numbers = {
        "isl": np.log(np.maximum(arrays.isl, 1)),
        "osl": np.log(np.maximum(arrays.osl, 1)),
        "concurrency": np.log(np.maximum(arrays.concurrency, 1)),
        "gpus": np.log(arrays.gpus),
        "load": np.clip(forecast.load, *LOAD_RANGE),
    }
    return Formula(forecast.ttft_ms, forecast.tpot_ms, Features(_names(cases), numbers))


def _names(cases: Sequence[Case]) -> Mapping[str, Sequence[str]]:
    return {
        "engine": [case.engine for case in cases],
        "model": [case.family for case in cases],
        "gpu": [case.gpu.name for case in cases],
        "precision": [case.shape.precision for case in cases],
        "first_wave": [str(case.first_wave or case.campaign_wave) for case in cases],
        "version": [case.version for case in cases],
        "day": [case.day for case in cases],
        "attention_dp": [str(case.attention_dp) for case in cases],
        "split_experts": [str(case.split_experts) for case in cases],
        "experts": [str(case.shape.experts > 0) for case in cases],
    }


def split_forecast(times: StepTimes, splits: Sequence[Split]) -> Formula:
    """Return the times of prefill with decode workers in closed form. Prefill workers are one
    queue; a decode worker runs what has had its first token."""
    prefill = CaseArrays([split.prefill for split in splits])
    cases = [split.decode for split in splits]
    decode = CaseArrays(cases)
    workers = np.array([float(split.prefill_workers) for split in splits])
    everywhere = np.array([split.concurrency for split in splits])
    ahead = times.forecast(prefill, prefill=False)
    context = decode.isl + decode.osl / 2
    held = decode.concurrency
    running = np.maximum(held, 0.5)
    tpot = times.step_ms(decode, running, context, running)
    ttft = ahead.first_prompt_ms + FEED_SLACK_MS
    for _ in range(FEED_TURNS):
        rate = everywhere / (ttft + decode.osl * tpot)
        load = np.minimum(rate * ahead.prompt_ms / workers, MOST_FEED_LOAD)
        queue = ahead.prompt_ms * load / (1 - load)
        ttft = FEED_SLACK_MS + ahead.first_prompt_ms + queue
        running = np.maximum(held * decode.osl * tpot / (ttft + decode.osl * tpot), 0.5)
        tpot = times.step_ms(decode, running, context, running)
    numbers = {
        "isl": np.log(decode.isl),
        "osl": np.log(np.maximum(decode.osl, 1)),
        "concurrency": np.log(np.maximum(held, 0.1)),
        "gpus": np.log(decode.gpus),
        "prefill_gpus": np.log(prefill.gpus),
        "feed": load,
    }
    trend = (
        np.log(ttft) - 6,
        np.log(np.maximum(everywhere, 0.1)) - 5,
        np.log(workers),
        np.log(ahead.prompt_ms) - 4,
        np.log(tpot) - 2.5,
        np.log([float(split.decode_workers) for split in splits]),
        numbers["isl"] - 8,
        numbers["osl"] - 7,
        load,
        np.ones(len(splits)),
    )
    names = {**_names(cases), "reshard": [str(split.divides_kv) for split in splits]}
    return Formula(ttft, tpot, Features(names, numbers, np.stack(trend, 1)))


def predict_rows(
    path: Path, predictor: Predictor, *, hide_combination: bool
) -> Sequence[dict[str, Any]]:
    """Return a prediction for each row, in the file's order: its `id`, `ttft_ms` and `tpot_ms`,
    each with the ends of a bar (`_low`, `_high`), and `extrapolated`. A row that cannot be read has
    `error` in their place. With `hide_combination` no measured row of the same model, GPU, engine
    and precision is looked at. Measured times in the file are not read."""
    read = list(read_silicon(path))
    results: list[dict[str, Any]] = [
        {"id": "", "error": str(row)} if isinstance(row, ConfigError) else {"id": row.id}
        for row in read
    ]
    for split in (False, True):
        numbers = [
            number
            for number, row in enumerate(read)
            if isinstance(row, MeasuredRow) and bool(row.prefill_workers) == split
        ]
        for start in range(0, len(numbers), ROWS_AT_ONCE):
            some = numbers[start : start + ROWS_AT_ONCE]
            rows = [row for number in some if isinstance(row := read[number], MeasuredRow)]
            hidden = [row.combination for row in rows] if hide_combination else ()
            if split:
                estimates = predictor.predict_split([row_split(row) for row in rows], hidden)
            else:
                estimates = predictor.predict([row.case() for row in rows], hidden)
            for place, number in enumerate(some):
                results[number] |= row_result(estimates, place)
    return results


def row_result(estimates: Estimates, place: int) -> dict[str, Any]:
    """Return the fields of one prediction."""
    values = {
        name + end: finite(float(row[place]))
        for name in ("ttft_ms", "tpot_ms")
        for end, row in zip(("", "_low", "_high"), getattr(estimates, name), strict=True)
    }
    return {**values, "extrapolated": estimates.extrapolated[place]}


def finite(value: float) -> float:
    """Return a time for a file: rounded, never infinite."""
    return (
        round(min(max(value, SHORTEST_MS), LONGEST_MS), 3) if math.isfinite(value) else LONGEST_MS
    )
