"""Plot of each worker's cache and load over time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dynamo.operations.plotting import check_matplotlib, make_panels

MAX_LINES = 10
"""With more workers, a panel is a heat map with a row for each worker."""

WorkerFields = Mapping[str, Any]

PANELS: Sequence[tuple[str, str, Callable[[WorkerFields], float]]] = (
    (
        "cached blocks, share of the worker's blocks",
        "%",
        lambda worker: 100 * worker["cached_blocks"] / max(1, worker["total_blocks"]),
    ),
    ("requests, running and waiting", "requests", lambda load: load["running"] + load["waiting"]),
    ("prompt tokens to compute", "tokens", lambda load: load["prefill_tokens"]),
    ("requests routed", "per second", lambda load: load["routed"]),
)


def draw_router_samples(samples: Sequence[Mapping[str, Any]], path: str, title: str = "") -> None:
    """Draw samples of /router/timeline into a PNG file. Raises `Unsupported` without matplotlib.
    Blocks."""
    check_matplotlib(", or write the page: --html FILE")
    names = sorted({name for sample in samples for name in sample["workers"]})
    figure, panels = make_panels()
    for panel, (panel_title, unit, measure) in zip(panels, PANELS, strict=True):
        series = _series_by_worker(samples, names, measure)
        if len(names) > MAX_LINES:
            _plot_heatmap(figure, panel, samples, series, unit)
        else:
            _plot_lines(panel, samples, series, unit)
        panel.set_title(panel_title)
    if 0 < len(names) <= MAX_LINES:
        panels[0].legend(fontsize=8)
    figure.suptitle(title or f"{len(names)} workers", fontsize=11)
    figure.savefig(path, format="png")


def _series_by_worker(
    samples: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    measure: Callable[[WorkerFields], float],
) -> dict[str, list[float]]:
    """Return one value a sample for each worker; NaN for samples without the worker."""
    return {
        name: [
            measure(sample["workers"][name]) if name in sample["workers"] else float("nan")
            for sample in samples
        ]
        for name in names
    }


def _elapsed_s(samples: Sequence[Mapping[str, Any]]) -> list[float]:
    return [sample["at"] - samples[0]["at"] for sample in samples]


def _plot_lines(
    panel: Any, samples: Sequence[Mapping[str, Any]], series: Mapping[str, list[float]], unit: str
) -> None:
    for name, values in series.items():
        panel.plot(_elapsed_s(samples), values, label=name, linewidth=1.3)
    panel.set(xlabel="seconds", ylabel=unit)
    panel.set_ylim(bottom=0)
    panel.grid(visible=True, alpha=0.3)


def _plot_heatmap(
    figure: Any,
    panel: Any,
    samples: Sequence[Mapping[str, Any]],
    series: Mapping[str, list[float]],
    unit: str,
) -> None:
    last = max(_elapsed_s(samples)[-1], 1.0)
    colours = panel.imshow(
        list(series.values()),
        aspect="auto",
        interpolation="nearest",
        extent=(0, last, len(series), 0),
        cmap="viridis",
        vmin=0,
    )
    figure.colorbar(colours, ax=panel, label=unit)
    panel.set(xlabel="seconds", ylabel="worker")
