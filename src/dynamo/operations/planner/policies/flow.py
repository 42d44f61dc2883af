"""The policy `flow`: forecast work, with headroom that is learnt from what followed forecasts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median

from msgspec.structs import replace

from dynamo.operations.planner.capacity import PromiseCapacity
from dynamo.operations.planner.policies.policy import (
    WorkPolicy,
    at_least_one,
    held_size,
    is_split,
    kinds_of,
    ready,
    series,
    size_fact,
    spread,
    start_s,
)
from dynamo.operations.planner.policies.roles import propose_roles
from dynamo.operations.planner.policies.simple import RulePolicy
from dynamo.operations.planner.values import KindState, Proposal, Scene

RATIOS = 400
"""Past forecasts that are compared with what followed."""
MIN_HOLD_S = 60.0
MIN_CLEAR_S = 30.0
"""A queue is to be worked off in this time, or in that of a start."""
QUEUED_SHARE = 0.1
"""Queues count once they take this part of the promised time to the first token."""
PEAK_SHARE = 1.3
"""Headroom above the largest size that the record needed is given only to forecasts and queues."""


class FlowPolicy(WorkPolicy):
    """Wants the forecast work, times what usually followed a forecast, over the share `eta` of a
    worker that the backtest found. Without a backtest it is `rule`."""

    def propose_by(self, scene: Scene, capacity: PromiseCapacity) -> Proposal:
        if is_split(scene):
            return propose_roles(scene, capacity, self.options.predictor)
        if not self.options.eta:
            ruled = RulePolicy(self.options).propose_by(scene, capacity)
            note = f"policy flow acts as rule: {self.options.eta_missing or 'no backtest yet'}"
            return replace(ruled, notes=[note])
        kinds, eta = kinds_of(scene, "both"), self.options.eta
        lead_s = start_s(kinds)
        work = capacity.work(scene.demand)
        forecast = self.options.predictor(series(scene, "work", work))
        factor = growth_factor(scene, lead_s + self.interval_s, work)
        queued = queued_workers(scene, capacity, kinds, lead_s)
        needed = forecast / eta + queued
        wanted = at_least_one(scene, forecast * factor / eta + queued)
        if self.options.peak:
            most = max(math.ceil(PEAK_SHARE * self.options.peak), at_least_one(scene, needed))
            wanted = min(wanted, most)
        held = held_size(scene, "both", max(MIN_HOLD_S, lead_s))
        why = (
            f"{work:.2f} workers of work arrived, {forecast:.2f} are forecast and "
            f"{factor:.2f} times that usually follows within a start of {lead_s:.0f} s, and each "
            f"takes {eta:g}"
        )
        if queued:
            why += f"; prompts that wait want {queued:.1f} more"
        if held > wanted:
            why += f"; {held} were wanted within the last {max(MIN_HOLD_S, lead_s):.0f} s"
        facts = {
            "work": work,
            "forecast": forecast,
            "factor": factor,
            "eta": eta,
            "peak": float(self.options.peak),
            **size_fact("both", wanted),
        }
        return Proposal(spread(max(wanted, held), kinds), why, facts)


def growth_factor(scene: Scene, horizon_s: float, work: float) -> float:
    """Return the median of what work grew to within a horizon, over the forecast before it."""
    past = [each for each in scene.past if "forecast" in each.facts][-RATIOS:]
    times = [*(each.now_s for each in past), scene.now_s]
    works = [*(each.facts["work"] for each in past), work]
    ratios = []
    end = 0
    for index, sample in enumerate(past):
        until = sample.now_s + horizon_s + 1e-6
        if until < times[end]:
            continue
        while end + 1 < len(times) and times[end + 1] <= until:
            end += 1
        if until > scene.now_s + 2e-6:
            break
        if sample.facts["forecast"] > 0 and end > index:
            ratios.append(max(works[index + 1 : end + 1]) / sample.facts["forecast"])
    return median(ratios) if ratios else 1.0


def queued_workers(
    scene: Scene, capacity: PromiseCapacity, kinds: Mapping[str, KindState], lead_s: float
) -> float:
    """Return the workers that waiting prompts want beyond those for arrivals."""
    queued_s = capacity.prompt_work_ms(scene.demand.queued_tokens) / 1e3
    if queued_s / max(1, ready(kinds)) <= QUEUED_SHARE * scene.promise.ttft_s:
        return 0.0
    return queued_s / max(MIN_CLEAR_S, lead_s)
