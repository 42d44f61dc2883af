"""Plots of replays."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from dynamo.operations.plotting import check_matplotlib, make_panels, plot_distribution
from dynamo.operations.replay.request_log import ReplayLog
from dynamo.operations.replay.result import LoadPoint, ReplayResult

MEAN_REQUESTS = 100
PARETO_INCHES = (8.0, 5.0)
TIMELINE_INCHES = (12.0, 12.0)
TIMELINE_BINS = 120


def draw_replay(result: ReplayResult, log: ReplayLog, path: str) -> None:
    """Draw TTFT over the trace, the distributions of TTFT and end-to-end latency, and the requests
    of each worker into one PNG file. If workers started or left, a timeline shows them above
    arrivals and broken promises. Raises `Unsupported` without matplotlib. Blocks."""
    check_matplotlib()
    figure, panels = make_panels(*((3, 2, TIMELINE_INCHES) if result.timeline else (2, 2)))
    _plot_ttft_over_time(panels[0], log)
    plot_distribution(panels[1], "time to first token", [("", result.ttft_ms)], xscale="log")
    plot_distribution(panels[2], "end-to-end latency", [("", result.e2e_ms)], xscale="log")
    _plot_requests_per_worker(panels[3], result.requests_per_worker)
    if result.timeline:
        _plot_workers(panels[4], result)
        _plot_arrivals(panels[5], result, log)
    figure.suptitle(_headline(result), fontsize=10)
    figure.savefig(path, format="png")


def draw_pareto(curves: Mapping[str, Sequence[LoadPoint]], title: str, path: str) -> None:
    """Draw tokens per second and GPU over tokens per second and user into one PNG file, a curve for
    each cluster. A label at each point is its speed. Raises `Unsupported` without matplotlib.
    Blocks."""
    check_matplotlib()
    figure, (panel,) = make_panels(1, 1, PARETO_INCHES)
    for name, points in curves.items():
        users = [point.tokens_per_s_per_user for point in points]
        gpus = [point.tokens_per_s_per_gpu for point in points]
        panel.plot(users, gpus, "o-", label=name)
        for point, user, gpu in zip(points, users, gpus, strict=True):
            panel.annotate(f"{point.speed:g}x", (user, gpu), (6, 4), textcoords="offset points")
    panel.margins(0.1)
    panel.set(title=title, xlabel="output tokens/s/user (1 / mean TPOT)", xlim=(0, None))
    panel.set(ylabel="output tokens/s/GPU", ylim=(0, None))
    panel.grid(visible=True, alpha=0.3)
    panel.legend(fontsize=8)
    figure.savefig(path, format="png")


def _plot_ttft_over_time(panel: Any, log: ReplayLog) -> None:
    order = sorted(range(len(log.arrived_s)), key=log.arrived_s.__getitem__)
    arrivals_s = [log.arrived_s[index] for index in order]
    ttft_ms = [log.ttft_s[index] * 1e3 for index in order]
    panel.plot(arrivals_s, ttft_ms, ".", markersize=1, alpha=0.4)
    panel.plot(arrivals_s, _running_mean(ttft_ms), label=f"mean of {MEAN_REQUESTS} requests")
    panel.set(title="time to first token", xlabel="arrival, s", ylabel="ms", yscale="log")
    panel.legend(fontsize=8)
    panel.grid(visible=True, alpha=0.3)


def _plot_requests_per_worker(panel: Any, counts: Sequence[int]) -> None:
    panel.bar(range(len(counts)), counts)
    panel.set(title="requests per worker", xlabel="worker")
    panel.grid(visible=True, alpha=0.3, axis="y")


def _plot_workers(panel: Any, result: ReplayResult) -> None:
    """Plot the workers of each kind: a line for those that serve, and areas for those that start
    or drain, which hold GPUs, too."""
    timeline, end_s = result.timeline, result.duration_s
    for kind in dict.fromkeys(change.kind for change in timeline):
        changes = [each for each in timeline if each.kind == kind and each.time_s <= end_s]
        times = [each.time_s for each in changes] + [end_s]
        changes.append(changes[-1])
        ready = [each.ready for each in changes]
        draining = [each.ready + each.draining for each in changes]
        held = [each.ready + each.draining + each.starting for each in changes]
        (line,) = panel.step(times, ready, where="post", label=f"{kind}: ready")
        style = {"step": "post", "color": line.get_color(), "linewidth": 0}
        panel.fill_between(times, ready, draining, alpha=0.6, label="draining", **style)
        panel.fill_between(times, draining, held, alpha=0.25, label="starting", **style)
    title = f"workers, {result.gpu_hours:.3g} GPU-hours"
    panel.set(title=title, xlabel="s", xlim=(0, end_s), ylim=(0, None))
    panel.legend(fontsize=8)
    panel.grid(visible=True, alpha=0.3)


def _plot_arrivals(panel: Any, result: ReplayResult, log: ReplayLog) -> None:
    """Plot the rate of all requests, and of those whose promise was broken, by their arrival."""
    bins, end_s = TIMELINE_BINS, max(1e-9, result.duration_s)
    answered, failed = list(log.arrived_s), list(log.failed_s)
    broken = list(log.broken_s) if result.broken_promises is not None else failed
    name = "broken promises" if result.broken_promises is not None else "rejected or failed"
    for label, arrivals in (("arrivals", answered + failed), (name, broken)):
        weights = [bins / end_s] * len(arrivals)
        style = {"bins": bins, "range": (0.0, end_s), "weights": weights}
        panel.hist(arrivals, histtype="stepfilled", alpha=0.5, label=label, **style)
    panel.set(title="requests by arrival", xlabel="s", ylabel="requests/s", xlim=(0, end_s))
    panel.legend(fontsize=8)
    panel.grid(visible=True, alpha=0.3)


def _running_mean(values: Sequence[float]) -> list[float]:
    window: deque[float] = deque(maxlen=MEAN_REQUESTS)
    means, total = [], 0.0
    for value in values:
        if len(window) == MEAN_REQUESTS:
            total -= window[0]
        window.append(value)
        total += value
        means.append(total / len(window))
    return means


def _headline(result: ReplayResult) -> str:
    settings = result.settings
    policy = f" {settings['router_policy']}" if settings.get("router_policy") else ""
    return (
        f"{result.trace}: {settings.get('workers')} workers, "
        f"{settings.get('router_mode')}{policy}, eviction {settings.get('eviction')}; "
        f"{result.reuse_first_admission:.1%} reused, TTFT {result.ttft_ms.mean:.0f} ms, "
        f"E2E {result.e2e_ms.mean:.0f} ms"
    )
