"""Predictions of a file of rows in AI Configurator's columns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dynamo.core.errors import ConfigError
from dynamo.operations.configure.measured import MeasuredRow, read_silicon
from dynamo.operations.configure.predictor import Estimates, Predictor, finite, row_split

ROWS_AT_ONCE = 2000


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
    names = [name for name in Estimates.__struct_fields__ if name != "novelty"]
    values = {
        name.replace("_low_ms", "_ms_low").replace("_high_ms", "_ms_high"): finite(
            float(getattr(estimates, name)[place])
        )
        for name in names
    }
    return {**values, "extrapolated": estimates.extrapolated[place]}
