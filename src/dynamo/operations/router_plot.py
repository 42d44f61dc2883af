"""Cache and load of every worker over time, as a PNG file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dynamo.core.errors import Unsupported

SIZE_INCHES = (12.0, 7.5)
DOTS_PER_INCH = 110
MAX_LINES = 10
"""More workers than this are rows of a map of colours."""

WorkerFields = Mapping[str, Any]

PANELS: Sequence[tuple[str, str, Callable[[WorkerFields], float]]] = (
    (
        "cache, share of a worker's blocks",
        "%",
        lambda one: 100 * one["cached_blocks"] / one["total_blocks"] if one["total_blocks"] else 0,
    ),
    ("requests, running and waiting", "requests", lambda one: one["running"] + one["waiting"]),
    ("prompt tokens to compute", "tokens", lambda one: one["prefill_tokens"]),
    ("requests routed there", "a second", lambda one: one["routed"]),
)


def draw_router_samples(samples: Sequence[Mapping[str, Any]], path: str, title: str = "") -> None:
    """Of samples as /router/timeline gives them. Raises `Unsupported` without matplotlib.
    Blocks."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise Unsupported(
            "pictures need matplotlib, which is not installed",
            hint="pip install 'dynamo-python[bench]', or write the page: --html FILE",
        ) from None
    mpl.use("Agg")
    from matplotlib.figure import Figure

    names = sorted({name for sample in samples for name in sample["workers"]})
    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    panels: Any = figure.subplots(2, 2)
    for panel, (about, unit, measure) in zip(panels.flat, PANELS, strict=True):
        series = _series_by_worker(samples, names, measure)
        if len(names) > MAX_LINES:
            _plot_heatmap(figure, panel, samples, series, unit)
        else:
            _plot_lines(panel, samples, series, unit)
        panel.set_title(about)
    if 0 < len(names) <= MAX_LINES:
        panels.flat[0].legend(fontsize=8)
    figure.suptitle(title or f"{len(names)} workers", fontsize=11)
    figure.savefig(path, format="png")


def _series_by_worker(
    samples: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    measure: Callable[[WorkerFields], float],
) -> dict[str, list[float]]:
    """By worker, one value a sample; NaN where it was not there."""
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
