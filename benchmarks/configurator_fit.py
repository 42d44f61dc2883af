"""Fit `dynamo configure` to measured runs, and write its data files.

    python benchmarks/configurator_fit.py silicon_sample.csv
    python benchmarks/configurator_fit.py silicon_sample.csv --search 900

The file has AI Configurator's columns. scipy fits the constants of the formulas. `--search` also
changes the weights of the corrections for so many seconds; put what it finds into `WEIGHTS` and
`SPLIT_WEIGHTS`. `data/constants.yaml` and `data/measured.csv` are written.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from configurator_accuracy import (
    HELD_OUT,
    Array,
    Sample,
    Scores,
    fit_neighbours,
    read_samples,
    report,
    score,
)

from dynamo.operations.configure.catalogue import DATA
from dynamo.operations.configure.measured import MeasuredRow
from dynamo.operations.configure.neighbours import Features, Similarity
from dynamo.operations.configure.predictor import load_constants
from dynamo.operations.configure.step_time import StepTimes

ENGINES = ("trtllm", "sglang", "vllm")


def by_engine(name: str, start: float, low: float, high: float) -> Mapping[str, Any]:
    return {f"{name}_{engine}": (start, low, high) for engine in ENGINES}


BOUNDS: Mapping[str, tuple[float, float, float]] = {
    **by_engine("layer_ms", 0.04, 0.005, 0.3),
    **by_engine("moe_layer_ms", 0.03, 0.001, 0.3),
    "latent_layer_ms": (0.03, 0.001, 0.3),
    "split_layer_ms": (0.01, 0.0005, 0.2),
    "launch_blackwell": (0.9, 0.5, 1.5),
    "launch_grace": (0.9, 0.5, 1.5),
    "weight_bandwidth_hopper": (0.7, 0.2, 1.0),
    "weight_bandwidth_blackwell": (0.7, 0.2, 1.0),
    **by_engine("reading", 0.95, 0.5, 1.0),
    "thin_weights": (0.1, 0.01, 0.3),
    **{
        f"arithmetic_{kind}": (0.5, 0.05, 1.0)
        for kind in (
            *(
                f"{gpu}_{bits}"
                for gpu in ("hopper", "blackwell")
                for bits in ("bf16", "fp8", "fp4")
            ),
            "int4",
        )
    },
    "moe_arithmetic": (0.6, 0.1, 1.0),
    "exchange_ms": (0.01, 0.001, 0.1),
    "link_bandwidth_hopper": (0.5, 0.05, 1.0),
    "link_bandwidth_blackwell": (0.5, 0.05, 1.0),
    **by_engine("kv_bandwidth", 0.6, 0.1, 1.0),
    **by_engine("latent_bandwidth", 0.5, 0.05, 1.0),
    **by_engine("interference", 0.5, 0.05, 2.0),
    **by_engine("overhead_ms", 20.0, 0.1, 500.0),
    **by_engine("wave_overhead_ms", 20.0, 0.1, 500.0),
    **by_engine("queue", 0.5, 0.01, 3.0),
    **by_engine("wave_queue", 1.0, 0.01, 3.0),
    "busy_queue": (0.3, 0.001, 3.0),
    "memory_share": (0.9, 0.87, 0.96),
    "waiting": (0.7, 0.01, 2.0),
    "reserved_answer": (0.65, 0.5, 1.2),
}
"""Fitted constants: start, lowest and highest value."""
TIED = {f"{name}_bandwidth_grace": f"{name}_bandwidth_blackwell" for name in ("weight", "link")}
FIXED = {"launch_hopper": 1.0}
WEIGHTS: Mapping[str, float] = {
    "engine": 4.6, "model": 2.6, "gpu": 0.67, "precision": 0.41, "first_wave": 2.6, "version": 1.7,
    "day": 0.27, "attention_dp": 0.33, "split_experts": 0.072, "isl": 0.33, "osl": 0.18,
    "concurrency": 0.33, "gpus": 0.16, "load": 0.44,
}  # fmt: skip
EXPERTS_WEIGHT = 1.0
"""Runs of models with and without experts are little alike; not searched, as few have none."""
SPLIT_WEIGHTS: Mapping[str, Mapping[str, float]] = {
    "split_tpot": {
        "engine": 8.2, "model": 0.0085, "gpu": 0.049, "precision": 0.07, "version": 0.056,
        "day": 0.083, "attention_dp": 1.3, "isl": 0.22, "osl": 0.01, "concurrency": 0.16,
        "gpus": 0.11, "prefill_gpus": 0.02, "feed": 0.26, "reshard": 14.0,
    },
    "split_ttft": {
        "engine": 23.0, "model": 0.16, "gpu": 0.16, "precision": 0.41, "version": 0.027,
        "day": 0.48, "attention_dp": 8.1, "isl": 0.44, "osl": 1.8, "concurrency": 0.15,
        "gpus": 0.89, "prefill_gpus": 0.14, "feed": 0.72, "reshard": 6.2,
    },
}  # fmt: skip
NOISE = {"ttft": 0.05, "tpot": 0.03, "split_ttft": 0.06, "split_tpot": 0.01}
TREND = {"split_ttft": 0.3}
SHIFT = {"tpot": 12.0, "split_tpot": 2.0}
"""Where unset, half: the estimate with the least expected relative error. For TPOT more lowers the
mean error with the combination hidden, and the mean regret of choices by it."""
GOALS = {
    "ttft": (0.2, 0.095, 0.38, 0.25),
    "tpot": (0.065, 0.037, 0.16, 0.11),
    "split_ttft": (0.6, 0.25, 0.9, 0.5),
    "split_tpot": (0.08, 0.05, 0.2, 0.2),
}
"""Wanted errors: mean and median with the key hidden, then with the combination hidden."""
COST = {
    "ttft": (0.6, 0.5, 0.0, 0.8),
    "tpot": (1.0, 0.0, 1.5, 0.0),
    "split_ttft": (0.5, 1.0, 0.0, 0.1),
    "split_tpot": (1.0, 0.3, 0.1, 0.0),
}


def fit_constants(together: Sample, apart: Sample) -> Mapping[str, float]:
    """Fit the constants by robust least squares on logarithms, from the present ones. TPOT counts
    more than TTFT."""
    from scipy.optimize import least_squares  # type: ignore[import-untyped,unused-ignore]

    low, high = (np.log([bounds[side] for bounds in BOUNDS.values()]) for side in (1, 2))
    start = np.log([bounds[0] for bounds in BOUNDS.values()])
    shipped, _ = load_constants()
    first = np.clip(np.log([shipped.get(name, BOUNDS[name][0]) for name in BOUNDS]), low, high)
    weights = np.sqrt(HELD_OUT + together.chance)

    def residuals(logarithms: Array) -> Array:
        times = StepTimes(_constants(np.exp(logarithms)))
        errors = together.errors(together.formula(times))
        decode = apart.errors(apart.formula(times))["tpot"] * 0.7
        tpot, ttft = errors["tpot"] * weights, errors["ttft"] * weights * 0.4
        return np.concatenate([tpot, ttft, decode, 0.2 * (logarithms - start)])

    fitted = least_squares(
        residuals, first, bounds=(low - 1e-9, high + 1e-9), loss="cauchy", f_scale=0.15, max_nfev=60
    )
    return {name: float(f"{value:.5g}") for name, value in _constants(np.exp(fitted.x)).items()}


def _constants(values: Array) -> Mapping[str, float]:
    fitted = dict(zip(BOUNDS, map(float, values), strict=True))
    return {**fitted, **FIXED, **{name: fitted[other] for name, other in TIED.items()}}


def search_weights(
    sample: Sample,
    features: Features,
    errors: Mapping[str, Array],
    start: Mapping[str, float],
    seconds: float,
) -> Mapping[str, float]:
    """Change one weight after the other at random, and keep what lowers the errors with the key,
    and with the combination, hidden."""

    def cost(weights: Mapping[str, float]) -> float:
        total = 0.0
        for name, error in errors.items():
            similarity = Similarity(weights=weights, noise=NOISE[name], trend=TREND.get(name, 0.0))
            neighbours, _, _ = fit_neighbours(sample, features, error, similarity)
            scores = Scores(sample, error, neighbours)
            near, far = (
                score(scores.hidden(groups)[0], sample.chance)
                for groups in (sample.keys, sample.combinations)
            )
            total += sum(
                share * error / goal
                for share, error, goal in zip(COST[name], (*near, *far), GOALS[name], strict=True)
            )
        return total

    chance = random.Random(0)
    weights, best = dict(start), cost(start)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        name = chance.choice(list(weights))
        changed = {**weights, name: weights[name] * math.exp(chance.gauss(0, 0.6))}
        if (lower := cost(changed)) < best:
            weights, best = changed, lower
            print(f"cost {best:.4f}: {name} {weights[name]:.3g}", flush=True)
    return {name: float(f"{value:.2g}") for name, value in weights.items()}


def write_fit(
    together: Sample, apart: Sample, seconds: float
) -> tuple[Mapping[str, float], Mapping[str, Similarity]]:
    """Fit everything and write the data files."""
    constants = fit_constants(together, apart)
    times = StepTimes(constants)
    similarity: dict[str, Similarity] = {}
    rows: list[MeasuredRow] = []
    for sample in (together, apart):
        prefix = "split_" if sample.split else ""
        formula = sample.formula(times)
        features, errors = formula.features, sample.errors(formula)
        doubts = {}
        shared = WEIGHTS
        if seconds and not sample.split:
            shared = search_weights(sample, features, errors, WEIGHTS, seconds)
        for name, error in errors.items():
            full = prefix + name
            own = SPLIT_WEIGHTS.get(full, shared)
            if seconds and sample.split:
                own = search_weights(sample, features, {full: error}, own, seconds / 8)
            if sample.split:
                own = {**own, "experts": EXPERTS_WEIGHT}
            start = Similarity(
                weights=own,
                noise=NOISE[full],
                trend=TREND.get(full, 0.0),
                shift=SHIFT.get(full, 0.5),
            )
            _, doubts[name], similarity[full] = fit_neighbours(sample, features, error, start)
        rows += [
            msgspec.structs.replace(row, ttft_doubt=float(first), tpot_doubt=float(later))
            for row, first, later in zip(sample.rows, doubts["ttft"], doubts["tpot"], strict=True)
        ]
    write_rows(rows, DATA / "measured.csv", NOTES)
    write_constants(constants, similarity)
    return constants, similarity


def write_rows(rows: Sequence[MeasuredRow], path: Path, notes: Sequence[str]) -> None:
    """Write rows as `shipped_rows` reads them. Zeros and ones of no meaning stay empty."""
    fields = [name for name in MeasuredRow.__struct_fields__ if name != "id"]
    with path.open("w", newline="") as file:
        file.writelines(f"# {note}\n" for note in notes)
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(fields)
        for row in rows:
            values = [getattr(row, name) for name in fields]
            writer.writerow(
                [f"{value:.6g}" if isinstance(value, float) else value or "" for value in values]
            )


NOTES = (
    "Runs of a closed loop, made of part of the measured rows that AI Configurator 0.12.0 ships",
    "(systems/silicon_sample.csv, Copyright (c) NVIDIA CORPORATION & AFFILIATES, Apache-2.0;",
    "those of InferenceX and of AI Configurator's own runs). Changed: copies of a run are one row,",
    "sizes of parallelism are GPUs of one replica, sources are days. Written by",
    "benchmarks/configurator_fit.py.",
)


def write_constants(constants: Mapping[str, float], similarity: Mapping[str, Similarity]) -> None:
    """Write `data/constants.yaml`."""
    lines = [
        "# Fitted by benchmarks/configurator_fit.py on data/measured.csv. Shares of a",
        "# GPU's rates are at most 1. Times are in milliseconds.",
        "constants:",
        *(f"  {name}: {value:g}" for name, value in constants.items()),
        "# How a correction weighs measured rows; see the class Similarity.",
        "similarity:",
    ]
    for name, own in similarity.items():
        lines.append(f"  {name}:")
        for field, value in msgspec.to_builtins(own).items():
            text = (
                "{" + ", ".join(f"{key}: {weight:g}" for key, weight in value.items()) + "}"
                if isinstance(value, dict)
                else f"{value:g}"
            )
            lines.append(f"    {field}: {text}")
    (DATA / "constants.yaml").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="measured rows in AI Configurator's columns")
    parser.add_argument("--search", type=float, default=0.0, metavar="SECONDS")
    args = parser.parse_args()
    together, apart = read_samples(args.data)
    constants, similarity = write_fit(together, apart, args.search)
    print(f"{len(BOUNDS)} fitted constants")
    for sample in (together, apart):
        report(sample, constants, similarity)


if __name__ == "__main__":
    main()
