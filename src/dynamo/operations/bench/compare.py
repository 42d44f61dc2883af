"""Comparison of two bench results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from dynamo.operations.bench.bench_result import BenchResult

COMPARED_METRICS = (
    "requests_per_s", "output_tokens_per_s", "cached_ratio", "failed", "goodput.ratio",
    "ttft_ms.mean", "ttft_ms.p50", "ttft_ms.p99", "itl_ms.mean", "itl_ms.p50", "itl_ms.p99",
    "tpot_ms.p50", "tpot_ms.p99", "e2e_ms.p50", "e2e_ms.p99",
)  # fmt: skip
IGNORED_SETTINGS = ("name", "target.url")
HIGHER_IS_BETTER = {"requests_per_s", "output_tokens_per_s", "cached_ratio", "goodput.ratio"}


class ResultDifference(msgspec.Struct, frozen=True):
    """A metric of two results, named by its dotted path. `change` is relative to the first value
    (0.1 = 10 % more), None if that is zero. `better` is None for equal values."""

    figure: str
    first: float
    second: float
    change: float | None
    better: bool | None


def compare(first: BenchResult, second: BenchResult) -> Iterator[ResultDifference]:
    """Yield the differences of the metrics that both results have."""
    cpu_metrics = [f"processes.{role}.us_per_token" for role in first.processes]
    for name in [*COMPARED_METRICS, *cpu_metrics]:
        before, after = metric_value(first, name), metric_value(second, name)
        if before is None or after is None:
            continue
        change = (after - before) / before if before else None
        better = None if before == after else (after > before) == (name in HIGHER_IS_BETTER)
        yield ResultDifference(name, before, after, change, better)


def differing_settings(first: BenchResult, second: BenchResult) -> Sequence[str]:
    """Return the dotted keys of settings that differ, since such runs are hard to compare."""
    left, right = _flatten(first.settings), _flatten(second.settings)
    return [
        key
        for key in sorted(left.keys() | right.keys())
        if key not in IGNORED_SETTINGS and left.get(key) != right.get(key)
    ]


def metric_value(result: BenchResult, name: str) -> float | None:
    """Return a number of the result by its dotted path; None if there is none."""
    value: object = result
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
    return value if isinstance(value, int | float) else None


def _flatten(settings: object, prefix: str = "") -> dict[str, object]:
    if not isinstance(settings, dict):
        return {prefix.rstrip("."): settings}
    flat: dict[str, object] = {}
    for key, value in settings.items():
        flat |= _flatten(value, f"{prefix}{key}.")
    return flat
