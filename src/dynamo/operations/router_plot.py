"""Plot of each worker's cache and load over time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from dynamo.operations.plotting import check_matplotlib, make_panels

MAX_LINES = 10
"""With more workers, a panel is a heat map with a row for each worker."""

WorkerFields = Mapping[str, Any]
"""The values of one worker in one sample."""

PANELS: Sequence[tuple[str, str, Callable[[WorkerFields, float], float]]] = (
    (
        "cached blocks, share of the worker's blocks",
        "%",
        lambda worker, _: 100 * worker["cached_blocks"] / max(1, worker["total_blocks"]),
    ),
    (
        "requests, running and waiting",
        "requests",
        lambda worker, _: worker["running"] + worker["waiting"],
    ),
    ("prompt tokens to compute", "tokens", lambda worker, _: worker["prefill_tokens"]),
    ("requests routed", "per second", lambda worker, seconds: worker["routed"] / seconds),
)
"""Title, unit and measure of each panel. A measure gets the seconds since the sample before."""


def draw_timeline(timeline: Mapping[str, Any], path: str, title: str = "") -> None:
    """Draw the answer of /router/timeline into a PNG file. Raises `Unsupported` without matplotlib.
    Blocks."""
    check_matplotlib("write the page (--html FILE), or run: ")
    times = [at - timeline["at"][0] for at in timeline["at"]]
    figure, panels = make_panels()
    for panel, (panel_title, unit, measure) in zip(panels, PANELS, strict=True):
        series = _series_by_worker(timeline, times, measure)
        if len(series) > MAX_LINES:
            _plot_heatmap(figure, panel, times, series, unit)
        else:
            _plot_lines(panel, times, series, unit)
        panel.set_title(panel_title)
    count = len(timeline["workers"])
    if 0 < count <= MAX_LINES:
        panels[0].legend(fontsize=8)
    figure.suptitle(title or f"{count} workers", fontsize=11)
    figure.savefig(path, format="png")


def _series_by_worker(
    timeline: Mapping[str, Any],
    times: Sequence[float],
    measure: Callable[[WorkerFields, float], float],
) -> dict[str, list[float]]:
    """Return one value a sample for each worker; NaN for samples without the worker."""
    gaps = [1.0, *(later - time for time, later in pairwise(times))]
    series = {}
    for name, worker in timeline["workers"].items():
        columns = {
            field: values if isinstance(values, list) else [values] * len(times)
            for field, values in worker.items()
        }
        samples = [
            dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
        ]
        series[name] = [
            float("nan") if sample["running"] is None else measure(sample, gap)
            for sample, gap in zip(samples, gaps, strict=True)
        ]
    return series


def _plot_lines(
    panel: Any, times: Sequence[float], series: Mapping[str, list[float]], unit: str
) -> None:
    for name, values in series.items():
        panel.plot(times, values, label=name, linewidth=1.3)
    panel.set(xlabel="seconds", ylabel=unit)
    panel.set_ylim(bottom=0)
    panel.grid(visible=True, alpha=0.3)


def _plot_heatmap(
    figure: Any, panel: Any, times: Sequence[float], series: Mapping[str, list[float]], unit: str
) -> None:
    """Draw a row for each worker. A value covers the time since the sample before."""
    edges = [times[0] - 1.0, *times]
    rows = range(len(series) + 1)
    colours = panel.pcolormesh(edges, rows, list(series.values()), cmap="viridis", vmin=0)
    figure.colorbar(colours, ax=panel, label=unit)
    panel.invert_yaxis()
    panel.set(xlabel="seconds", ylabel="worker")
