"""Figures with matplotlib: the parts that all plots of `dynamo` share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynamo.core.errors import Unsupported
from dynamo.core.installation import install_command
from dynamo.operations.latency_summary import CURVE_POINTS, LatencySummary

SIZE_INCHES = (12.0, 8.0)
DOTS_PER_INCH = 110
MAX_LIMIT_RATIO = 4.0
"""A limit up to this multiple of the largest latency is drawn."""
LIMIT_STYLE: Mapping[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 1}


def check_matplotlib(alternative: str = "") -> None:
    """Raise `Unsupported` without matplotlib, with a hint that begins with `alternative`."""
    try:
        import matplotlib as mpl  # noqa: F401
    except ImportError:
        raise Unsupported(
            "plots need matplotlib, which is not installed",
            hint=f"{alternative}{install_command('bench')}",
        ) from None


def make_panels(
    rows: int = 2, columns: int = 2, size_inches: tuple[float, float] = SIZE_INCHES
) -> tuple[Any, Sequence[Any]]:
    """Return a new figure and its panels, row by row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size_inches, dpi=DOTS_PER_INCH, layout="constrained")
    panels: Any = figure.subplots(rows, columns, squeeze=False)
    return figure, panels.flat


def plot_distribution(
    panel: Any,
    title: str,
    summaries: Sequence[tuple[str, LatencySummary]],
    *,
    samples: str = "requests",
    xscale: str = "linear",
    limits: Sequence[tuple[str, float]] = (),
) -> None:
    """Plot the cumulative distribution of labelled latencies, and labelled `limits` as lines. A
    limit that would squeeze the distribution into a corner is only named."""
    for label, summary in summaries:
        if summary.curve:
            shares = [percent / CURVE_POINTS for percent in range(len(summary.curve))]
            panel.plot(summary.curve, shares, label=f"{label} p99 {summary.p99:g} ms".lstrip())
    largest_ms = max((summary.max for _, summary in summaries), default=0.0)
    for label, limit_ms in limits:
        if limit_ms <= MAX_LIMIT_RATIO * largest_ms:
            panel.axvline(limit_ms, label=label, **LIMIT_STYLE)
        else:
            panel.plot([], [], label=f"{label} (not drawn: far above)", **LIMIT_STYLE)
    panel.set(title=title, xlabel="ms", ylabel=f"share of {samples}", xscale=xscale, ylim=(0, 1))
    panel.grid(visible=True, alpha=0.3)
    if limits or any(summary.curve for _, summary in summaries):
        panel.legend(fontsize=8)
