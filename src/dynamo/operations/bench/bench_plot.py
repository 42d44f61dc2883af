"""Plot of bench results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynamo.operations.bench.bench_result import BenchResult
from dynamo.operations.plotting import check_matplotlib, make_panels, plot_distribution

PANELS = (
    ("ttft_ms", "time to first token", "requests"),
    ("itl_ms", "inter-token latency", "tokens"),
    ("e2e_ms", "end-to-end latency", "requests"),
)
OBJECTIVES = {"ttft_ms": "--slo-ttft", "itl_ms": "--slo-itl"}
"""Latencies with an objective -> the flag that sets it."""
DRAW_LATER = (
    "draw the file of --out later (dynamo bench draw FILE.json --picture FILE.png), or run: "
)


def draw_bench_results(results: Sequence[BenchResult], path: str) -> None:
    """Draw latency distributions and throughput over time of all `results` into one PNG file.
    Raises `Unsupported` without matplotlib. Blocks."""
    check_matplotlib(DRAW_LATER)
    figure, panels = make_panels()
    for panel, (name, title, samples) in zip(panels, PANELS, strict=False):
        summaries = [(_label(result), getattr(result, name)) for result in results]
        limits = _objectives(name, results)
        plot_distribution(panel, title, summaries, samples=samples, limits=limits)
    _plot_timeline(panels[-1], results)
    figure.suptitle("; ".join(_headline(result) for result in results), fontsize=10)
    figure.savefig(path, format="png")


def _objectives(name: str, results: Sequence[BenchResult]) -> Sequence[tuple[str, float]]:
    """Return label and milliseconds of each different objective of the latency `name`."""
    goodputs = [result.goodput for result in results if result.goodput is not None]
    values_ms = {getattr(goodput.objectives, name, 0.0) for goodput in goodputs} - {0.0}
    return [(f"{OBJECTIVES[name]} {value_ms:g} ms", value_ms) for value_ms in sorted(values_ms)]


def _plot_timeline(panel: Any, results: Sequence[BenchResult]) -> None:
    for result in results:
        panel.plot(range(1, len(result.timeline) + 1), result.timeline, label=_label(result))
    panel.set(title="text events per second", xlabel="seconds", ylim=(0, None))
    panel.grid(visible=True, alpha=0.3)


def _label(result: BenchResult) -> str:
    return result.name or "run"


def _headline(result: BenchResult) -> str:
    return (
        f"{_label(result)}: {result.requests} requests, {result.requests_per_s:g}/s, "
        f"{result.output_tokens_per_s:g} tokens/s"
    )
