"""Results as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynamo.core.errors import Unsupported
from dynamo.operations.bench.bench_result import CURVE_POINTS, BenchResult, LatencySummary

PANELS = (("ttft_ms", "time to first token"), ("itl_ms", "between tokens"), ("e2e_ms", "whole"))
SIZE_INCHES = (12.0, 8.0)
DOTS_PER_INCH = 110


def check_drawable() -> None:
    """Raises `Unsupported` where nothing can be drawn."""
    try:
        import matplotlib as mpl  # noqa: F401
    except ImportError:
        raise Unsupported(
            "pictures need matplotlib, which is not installed",
            hint="pip install 'dynamo-python[bench]'; the JSON file can be drawn later: "
            "dynamo bench draw FILE.json --picture FILE.png",
        ) from None


def draw_bench_results(results: Sequence[BenchResult], path: str) -> None:
    """Distributions of latencies, and text over time, of all `results` in one PNG file. Raises
    `Unsupported` without matplotlib. Blocks."""
    check_drawable()
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    panels: Any = figure.subplots(2, 2)
    for panel, (name, title) in zip(panels.flat, PANELS, strict=False):
        _plot_distribution(panel, title, [(_label(one), getattr(one, name)) for one in results])
    _plot_timeline(panels.flat[-1], results)
    figure.suptitle("; ".join(_headline(one) for one in results), fontsize=10)
    figure.savefig(path, format="png")


def _plot_distribution(
    panel: Any, title: str, spreads: Sequence[tuple[str, LatencySummary]]
) -> None:
    for label, spread in spreads:
        if spread.curve:
            shares = [at / CURVE_POINTS for at in range(len(spread.curve))]
            panel.plot(spread.curve, shares, label=f"{label} p99 {spread.p99:g} ms")
    panel.set(title=title, xlabel="ms", ylabel="share of requests or tokens", ylim=(0, 1))
    panel.grid(visible=True, alpha=0.3)
    if any(spread.curve for _, spread in spreads):
        panel.legend(fontsize=8)


def _plot_timeline(panel: Any, results: Sequence[BenchResult]) -> None:
    for one in results:
        panel.plot(range(1, len(one.timeline) + 1), one.timeline, label=_label(one))
    panel.set(title="events with text a second", xlabel="seconds", ylim=(0, None))
    panel.grid(visible=True, alpha=0.3)


def _label(result: BenchResult) -> str:
    return result.name or "run"


def _headline(result: BenchResult) -> str:
    return (
        f"{_label(result)}: {result.requests} requests, {result.requests_per_s:g}/s, "
        f"{result.output_tokens_per_s:g} tokens/s"
    )
