"""Two results side by side."""

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
    """One figure. `change`: of the second against the first (0.1: a tenth more); None: from zero.
    `better`: None where they are equal."""

    figure: str
    first: float
    second: float
    change: float | None
    better: bool | None


def compare(first: BenchResult, second: BenchResult) -> Iterator[ResultDifference]:
    """The figures that both have."""
    for name in [*COMPARED_METRICS, *_cpu_metrics(first)]:
        one, other = metric_value(first, name), metric_value(second, name)
        if one is None or other is None:
            continue
        change = (other - one) / one if one else None
        better = None if one == other else (other > one) == (name in HIGHER_IS_BETTER)
        yield ResultDifference(name, one, other, change, better)


def differing_settings(first: BenchResult, second: BenchResult) -> Sequence[str]:
    """Keys of what was asked for and is not the same: such runs compare badly."""
    one, other = _flatten(first.settings), _flatten(second.settings)
    return [
        key
        for key in sorted(one.keys() | other.keys())
        if key not in IGNORED_SETTINGS and one.get(key) != other.get(key)
    ]


def metric_value(result: BenchResult, name: str) -> float | None:
    """A figure by its dotted name."""
    value: object = result
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
    return value if isinstance(value, int | float) else None


def _cpu_metrics(result: BenchResult) -> Sequence[str]:
    return [f"processes.{role}.us_per_token" for role in result.processes]


def _flatten(settings: object, prefix: str = "") -> dict[str, object]:
    if not isinstance(settings, dict):
        return {prefix.rstrip("."): settings}
    found: dict[str, object] = {}
    for key, value in settings.items():
        found |= _flatten(value, f"{prefix}{key}.")
    return found
