"""The price of a pause for answers, steered so that gaps between tokens keep a target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import exp, log

from dynamo.core.kv_events import split_worker_name
from dynamo.core.values import Load
from dynamo.telemetry import Registry

START_WEIGHT = 100.0
MIN_WEIGHT, MAX_WEIGHT = 2.0, 500.0
"""Above the maximum, gaps do not get shorter. A higher weight only takes longer to come down."""

STEER_INTERVAL_S = 0.5
SHARE_WINDOW_S = 8.0
"""Time over which the share of slow gaps is measured."""

TARGET_SHARE = 0.0055
"""Share of gaps that may be slow, below 1 % because the share varies."""

GAIN, MAX_STEP = 0.05, 0.08
"""The logarithm of the weight changes by GAIN times that of share / target, at most MAX_STEP. So
the weight changes by a factor of 3 at most within the delay of 7 s until the share shows it."""


class HarmSteering:
    """Hold the 99th percentile of gaps at `itl_slo_ms` by the weight of harm.

    Workers report how many gaps they measured and how many exceeded the target. Without a target,
    or without such reports, `weight` is constant.
    """

    def __init__(self) -> None:
        self.weight = START_WEIGHT
        self.slow_share = 0.0
        self.itl_slo_ms = 0.0
        self._reported: dict[str, tuple[int, int]] = {}
        self._gaps = self._slow_gaps = 0.0
        self._counted_s = self._steered_s = 0.0

    def update_target(self, itl_slo_ms: float, constant_weight: float) -> None:
        """Apply reloaded settings: a target of 0 ends steering, another one goes on from the
        present weight."""
        if not itl_slo_ms:
            self.weight = constant_weight
        elif not self.itl_slo_ms:
            self.weight = START_WEIGHT
        self.itl_slo_ms = itl_slo_ms

    def on_load_report(self, worker: str, load: Load, now: float) -> None:
        """Add the gaps since the worker's last report, and steer if that is due."""
        if not self.itl_slo_ms:
            return
        gaps, slow_gaps = self._reported.get(worker, (load.gaps, load.slow_gaps))
        self._reported[worker] = load.gaps, load.slow_gaps
        if load.gaps > gaps:
            decay = exp((self._counted_s - now) / SHARE_WINDOW_S)
            self._gaps = self._gaps * decay + load.gaps - gaps
            self._slow_gaps = self._slow_gaps * decay + load.slow_gaps - slow_gaps
            self._counted_s = now
        if self._gaps and now - self._steered_s >= STEER_INTERVAL_S:
            self._steered_s = now
            self._steer()

    def on_workers_removed(self, names: Iterable[str]) -> None:
        """Forget the reports of workers, or of the workers of ranks, that are gone."""
        for name in names:
            self._reported.pop(split_worker_name(name)[0], None)

    def _steer(self) -> None:
        self.slow_share = share = self._slow_gaps / self._gaps
        step = GAIN * log(share / TARGET_SHARE) if share else -MAX_STEP
        weight = self.weight * exp(max(-MAX_STEP, min(MAX_STEP, step)))
        self.weight = max(MIN_WEIGHT, min(MAX_WEIGHT, weight))


def declare_harm_metrics(
    registry: Registry, steerings: Callable[[], Mapping[str, HarmSteering]]
) -> None:
    """Declare gauges over the steerings of all models, which `steerings` returns by name."""
    registry.gauge(
        "dynamo_router_harm_weight_ratio",
        "Price of a pause for answers, steered by router.disaggregation.itl_slo.",
        ("model",),
        callback=lambda: {(name,): each.weight for name, each in steerings().items()},
    )
    registry.gauge(
        "dynamo_router_slow_gap_ratio",
        "Share of times between tokens above router.disaggregation.itl_slo in the last 8 s.",
        ("model",),
        callback=lambda: {(name,): each.slow_share for name, each in steerings().items()},
    )
