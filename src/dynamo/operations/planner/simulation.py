"""A planner in a fast replay: what a policy would have done to recorded requests."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from dynamo.operations.planner.connectors.simulated import SimulatedConnector, SimulatedDemand
from dynamo.operations.planner.planner import ScalePlanner, plan_once
from dynamo.operations.planner.values import Promise, ScaleDecision
from dynamo.operations.replay.fast.replay import FastReplay
from dynamo.operations.replay.fleet import FleetChange, ReplayFleet
from dynamo.operations.replay.replay import SECONDS_PER_HOUR, ReplayPlan
from dynamo.operations.replay.request_log import ReplayLog
from dynamo.operations.replay.trace import TraceConversation

TAIL_S = 60.0
"""Workers are counted until so long after the last arrival."""


class Trial(msgspec.Struct, frozen=True):
    """Requests to play, and how: `plan` has the workers of the start, and `plan.startup` the time
    of others. Arrivals from `from_s` on are scored by the promise. A first token may come later by
    `prompt_s` of the prompt's tokens."""

    plan: ReplayPlan
    conversations: Sequence[TraceConversation]
    promise: Promise
    from_s: float = 0.0
    prompt_s: Callable[[int], float] = lambda _: 0.0

    @property
    def end_s(self) -> float:
        """The time until which workers are counted."""
        return self.conversations[-1].start_s + TAIL_S


class TrialResult(msgspec.Struct, frozen=True):
    """The share of broken promises among the scored requests, the GPU-hours, what was decided, and
    the sizes over time."""

    broken: float
    gpu_hours: float
    decisions: Sequence[ScaleDecision] = ()
    timeline: Sequence[FleetChange] = ()


def play(
    trial: Trial, planner: ScalePlanner | None, drive: Callable[[ReplayFleet], None] | None = None
) -> TrialResult:
    """Play a trial with a planner, or with fixed workers. `drive` may change workers, too."""
    decisions: list[ScaleDecision] = []

    def on_start(fleet: ReplayFleet) -> None:
        if planner is not None:
            _schedule(planner, fleet, trial, decisions)
        if drive is not None:
            drive(fleet)

    replay = FastReplay(trial.plan, drive=on_start)
    _, log = replay.run(trial.conversations)
    broken, requests = _score(trial, log)
    held_s = sum(replay.fleet.lifetimes_s(trial.end_s, trial.from_s))
    hours = held_s / SECONDS_PER_HOUR * (trial.plan.worker_gpus or 1.0)
    timeline = tuple(replay.fleet.timeline)
    return TrialResult(broken / max(1, requests), hours, decisions, timeline)


def play_static(trial: Trial, size: int) -> TrialResult:
    """Play a trial with so many workers of the only kind."""
    return play(with_size(trial, size), None)


def with_size(trial: Trial, size: int) -> Trial:
    """Return the trial with so many workers of the only kind at the start."""
    workers = trial.plan.workers
    groups = [replace(workers.groups[0], count=size)]
    return replace(trial, plan=replace(trial.plan, workers=replace(workers, groups=groups)))


def _schedule(
    planner: ScalePlanner, fleet: ReplayFleet, trial: Trial, decisions: list[ScaleDecision]
) -> None:
    startup, gpus = trial.plan.startup, int(trial.plan.worker_gpus or 1)
    workers = trial.plan.workers
    connector = SimulatedConnector(fleet, workers, startup.high_s, gpus)
    measure = SimulatedDemand(fleet, workers).measure
    interval_s, clock = planner.policy.interval_s, fleet.clock

    def step() -> None:
        now = clock.now()
        complete(plan_once(planner, connector, measure, decisions.append, now))
        clock.call_at(now + interval_s, step)

    clock.call_at(interval_s, step)


def complete(work: Coroutine[Any, Any, Any]) -> None:
    """Run a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration:
        return
    raise RuntimeError("a simulated planner waits for something")


def _score(trial: Trial, log: ReplayLog) -> tuple[int, int]:
    """Return the broken promises and the number of the scored requests."""
    prompts = {
        request.row: request.prompt_tokens
        for conversation in trial.conversations
        for request in conversation.requests
    }
    promise, broken, requests = trial.promise, 0, 0
    for row, tokens, arrived_s, ttft_s, e2e_s in zip(
        log.rows, log.tokens, log.arrived_s, log.ttft_s, log.e2e_s, strict=True
    ):
        if arrived_s < trial.from_s:
            continue
        requests += 1
        late = ttft_s > promise.ttft_s + trial.prompt_s(prompts[row])
        slow = tokens > 1 and (e2e_s - ttft_s) * 1e3 > promise.itl_ms * (tokens - 1)
        broken += late or slow
    failed = sum(log.errors.values())  # without an answer
    return broken + failed, requests + failed
