"""A replay as a picture."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from dynamo.operations.bench.bench_plot import check_drawable
from dynamo.operations.replay.replay_result import ReplayResult
from dynamo.operations.replay.request_log import ReplayLog

__all__ = ["check_drawable", "draw_replay"]

SIZE_INCHES = (12.0, 8.0)
DOTS_PER_INCH = 110
RUNNING_MEAN = 100
CURVE_POINTS = 500


def draw_replay(result: ReplayResult, log: ReplayLog, path: str) -> None:
    """Times to first token over the trace and as a distribution, whole times, and the requests of
    every worker, in one PNG file. Raises `Unsupported` without matplotlib. Blocks."""
    check_drawable()
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    panels: Any = figure.subplots(2, 2)
    _plot_ttft_over_time(panels[0][0], log)
    _plot_distribution(panels[0][1], "time to first token", log.ttft_s)
    _plot_distribution(panels[1][0], "whole answer", log.e2e_s)
    _plot_requests_per_worker(panels[1][1], result.requests_per_worker)
    figure.suptitle(_headline(result), fontsize=10)
    figure.savefig(path, format="png")


def _plot_ttft_over_time(panel: Any, log: ReplayLog) -> None:
    order = sorted(range(len(log.arrived_s)), key=log.arrived_s.__getitem__)
    times = [log.arrived_s[at] for at in order]
    first_ms = [log.ttft_s[at] * 1e3 for at in order]
    panel.plot(times, first_ms, ".", markersize=1, alpha=0.4)
    panel.plot(times, _running_mean(first_ms), label=f"mean of {RUNNING_MEAN} requests")
    panel.set(title="time to first token", xlabel="arrival, s", ylabel="ms", yscale="log")
    panel.legend(fontsize=8)
    panel.grid(visible=True, alpha=0.3)


def _plot_distribution(panel: Any, title: str, seconds: Sequence[float]) -> None:
    ordered = sorted(seconds)
    if ordered:
        shares = [at / CURVE_POINTS for at in range(CURVE_POINTS)]
        panel.plot([ordered[int(len(ordered) * share)] * 1e3 for share in shares], shares)
    panel.set(title=title, xlabel="ms", ylabel="share of requests", xscale="log", ylim=(0, 1))
    panel.grid(visible=True, alpha=0.3)


def _plot_requests_per_worker(panel: Any, counts: Sequence[int]) -> None:
    panel.bar(range(len(counts)), counts)
    panel.set(title="requests a worker", xlabel="worker")
    panel.grid(visible=True, alpha=0.3, axis="y")


def _running_mean(values: Sequence[float]) -> list[float]:
    window: deque[float] = deque(maxlen=RUNNING_MEAN)
    means, total = [], 0.0
    for value in values:
        if len(window) == RUNNING_MEAN:
            total -= window[0]
        window.append(value)
        total += value
        means.append(total / len(window))
    return means


def _headline(result: ReplayResult) -> str:
    about = result.settings
    policy = f" {about['router_policy']}" if about.get("router_policy") else ""
    return (
        f"{result.trace}: {about.get('workers')} workers, {about.get('router_mode')}{policy}, "
        f"eviction {about.get('eviction')}; {result.reuse_first_admission:.1%} reused, "
        f"TTFT {result.ttft_ms.mean:.0f} ms, E2E {result.e2e_ms.mean:.0f} ms"
    )
