"""The price of a pause for answers, steered so that gaps between tokens keep a target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import exp, inf, log

from dynamo.core.values import Load
from dynamo.telemetry import Registry

START_WEIGHT = 30.0
"""Price of a pause for answers in mode flexible, as `predicted.HARM_WEIGHT`, and the first one with
a target. Lower prices mix prefill into workers that decode: shorter waits and longer gaps. Source:
replays of the conversation trace, smeared, with 8 flexible workers. At 30 and 1x, the first token
takes 2 % longer than with 8 separate workers, the answer 0.5 % less, the 99.9th percentile of gaps
is a fifth."""
MIN_WEIGHT, MAX_WEIGHT = 2.0, 200.0
"""Above the maximum, gaps do not get shorter. A higher weight only takes longer to come down."""

STEER_INTERVAL_S = 0.5
SHARE_WINDOW_S = 8.0
"""Time over which the share of slow gaps is measured."""

TARGET_SHARE = 0.0055
"""Share of gaps that may be slow, below 1 % because the share varies."""

GAIN, MAX_STEP = 0.05, 0.08
"""The logarithm of the weight changes by GAIN times that of share / target, at most MAX_STEP. So
the weight changes by a factor of 3 at most within the delay of 7 s until the share shows it."""

TRIAL_S = 2 * SHARE_WINDOW_S
"""Time after which a change of the weight is compared with what it did to the share."""

EFFECT = 0.9
"""Factor of the share of slow gaps in a trial from which on a higher weight was of use. Falling
weights hurt if the share grows by the inverse."""

RETURN_GAIN = 0.5
"""Steps down from a weight that is of no use, in units of steps up. A load that grows during a
trial looks like a useless weight, and must not undo it at once."""


class HarmSteering:
    """Hold the 99th percentile of gaps at `itl_slo_ms` by the weight of harm.

    Workers report how many gaps they measured and how many exceeded the target. Without a target,
    or without such reports, `weight` is constant. Where the target is missed and a higher weight
    does not lower the share of slow gaps, the weight falls, down to that without a target: prompts
    that are moved at any price lose their cached prefixes, and longer prompts make more slow gaps.
    """

    def __init__(self) -> None:
        self.weight = START_WEIGHT
        self.slow_share = 0.0
        self.itl_slo_ms = 0.0
        self._reported: dict[str, tuple[int, int]] = {}
        self._gaps = self._slow_gaps = 0.0
        self._counted_s = self._steered_s = 0.0
        self._constant_weight = START_WEIGHT
        self._begin_trial(rising=True, share=inf)

    def update_target(self, itl_slo_ms: float, constant_weight: float) -> None:
        """Apply reloaded settings: a target of 0 ends steering, another one continues from the
        present weight."""
        if not itl_slo_ms:
            self.weight = constant_weight
        elif not self.itl_slo_ms:
            self.weight = START_WEIGHT
            self._begin_trial(rising=True, share=inf)
        self._constant_weight = constant_weight
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

    def retain_workers(self, instances: Iterable[str]) -> None:
        """Forget the reports of all other instances."""
        reported = self._reported
        self._reported = {name: reported[name] for name in {*instances} & reported.keys()}

    def _steer(self) -> None:
        self.slow_share = share = self._slow_gaps / self._gaps
        step = GAIN * log(share / TARGET_SHARE) if share else -MAX_STEP
        step = max(-MAX_STEP, min(MAX_STEP, step))
        lowest = MIN_WEIGHT
        if step <= 0.0:
            self._begin_trial(rising=True, share=inf)
        elif self._steered_s - self._trial_s >= TRIAL_S:
            self._end_trial(share)
        if not self._rising:
            step *= -RETURN_GAIN
            lowest = min(self.weight, self._constant_weight)
        self.weight = max(lowest, min(MAX_WEIGHT, self.weight * exp(step)))

    def _begin_trial(self, *, rising: bool, share: float) -> None:
        self._rising, self._trial_share, self._trial_s = rising, share, self._steered_s

    def _end_trial(self, share: float) -> None:
        """Turn if raising the weight was of no use, or if lowering it hurt."""
        if self._rising:
            rising = share < EFFECT * self._trial_share
        else:
            rising = EFFECT * share > self._trial_share
        self._begin_trial(rising=rising, share=share)


def declare_harm_metrics(
    registry: Registry, find_steering: Callable[[], HarmSteering | None]
) -> None:
    """Declare gauges of a model's steering, which have no value while there is none."""

    def read(attribute: str) -> Mapping[tuple[str, ...], float]:
        steering = find_steering()
        return {} if steering is None else {(): getattr(steering, attribute)}

    registry.gauge(
        "dynamo_router_harm_weight_ratio",
        "Price of a pause for answers, steered by router.disaggregation.itl_slo.",
        callback=lambda: read("weight"),
        merge="max",
    )
    registry.gauge(
        "dynamo_router_slow_gap_ratio",
        "Share of times between tokens above router.disaggregation.itl_slo in the last 8 s.",
        callback=lambda: read("slow_share"),
        merge="max",
    )
