"""Updates of a graph that is there: its generations step by step, and restarts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from dynamo.operations.operator.generations import RoleCount, next_step, shrink
from dynamo.operations.operator.kinds import GraphStatus, RestartStatus, RollingUpdate
from dynamo.operations.operator.names import TYPE_LABEL, bounded
from dynamo.operations.operator.status import time_text, time_value
from dynamo.operations.operator.view import Desired, GraphView
from dynamo.operations.operator.workloads import sort_generations

PROGRESS_LIMIT_S = 600.0


def plan_step(view: GraphView, result: Desired) -> Mapping[str, int]:
    """Return the replicas of the present generation by role, and order those of the others."""
    update, now = view.before.rolling_update, view.observed.now
    if not any(workload.ordered or workload.replicas for workload in view.others):
        if update is not None and update.phase == "InProgress":
            update = msgspec.structs.replace(update, phase="Completed", end_time=time_text(now))
        result.status.rolling_update = update
        return view.targets
    names = sorted(view.targets.keys() | {workload.component for workload in view.others})
    if update is None or update.to != view.generation or update.phase != "InProgress":
        update = RollingUpdate(
            "InProgress", time_text(now), to=view.generation, from_=_before(view, names),
            progress_time=time_text(now),
        )  # fmt: skip
        result.status_first = True
    counts = {}
    for name in names:
        live = view.current.get(name)
        counts[name] = RoleCount(
            view.targets.get(name, 0),
            update.from_.get(name, 0),
            live.ordered if live else 0,
            live.ready if live and live.is_current else 0,
        )
    step = next_step(counts, view.annotations)
    _shrink_others(view, result, step.old)
    updated = [view.name(role) for role in view.targets if view.is_settled(role)]
    result.status.rolling_update = msgspec.structs.replace(update, updated_components=updated)
    return step.new


def _before(view: GraphView, names: Sequence[str]) -> dict[str, int]:
    """Return the replicas before an update that begins. If its beginning was not noted, there were
    at least as many as are wanted. So the other generations do not shrink too early."""
    began = any(workload.ordered for workload in view.current.values())
    before = {name: view.targets.get(name, 0) if began else 0 for name in names}
    others = dict.fromkeys(names, 0)
    for workload in view.others:
        others[workload.component] += workload.ordered
    return {name: max(before[name], others[name]) for name in names}


def _shrink_others(view: GraphView, result: Desired, most: Mapping[str, int]) -> None:
    """Order fewer replicas of the other generations. The last frontends are gone before the last
    workers go."""
    order = sort_generations(view.others)
    generations = [
        [workload for workload in view.others if workload.generation == name] for name in order
    ]
    counts = [{workload.component: workload.ordered for workload in part} for part in generations]
    rests = shrink(counts, most)
    for name, part, rest in zip(order, generations, rests, strict=True):
        serving = any(
            pod["metadata"]["labels"].get(TYPE_LABEL) == "frontend" for pod in view.pods_of(name)
        )
        frontends = [workload for workload in part if workload.type == "frontend"]
        serving = serving or not all(workload.is_gone for workload in frontends)
        for workload in frontends if serving and not any(rest.values()) else part:
            wanted = rest.get(workload.component, 0)
            if wanted < workload.ordered:
                result.scales.append((workload.scaled, wanted))


def plan_restart(view: GraphView, result: Desired) -> Mapping[str, str]:
    """Return the restart that the pods of each component are to be of, and set its status."""
    order = view.spec.restart
    marks = {role: workload.restart for role, workload in view.current.items()}
    if order is None:
        result.status.restart = view.before.restart
        return marks
    strategy = order.strategy
    names = [bounded(name.lower()) for name in strategy.order] if strategy else []
    names += [role for role in view.components if role not in names]
    parallel = strategy is not None and strategy.type == "Parallel"
    waiting: list[str] = []
    for role in names:
        live = view.current.get(role)
        if live is None or parallel or not waiting:
            marks[role] = order.id
        if live is None or live.restart != order.id or not view.is_settled(role):
            waiting.append(role)
    phase: Literal["Restarting", "Completed"] = "Restarting" if waiting else "Completed"
    now = [view.name(role) for role in waiting if marks.get(role) == order.id]
    result.status.restart = RestartStatus(order.id, phase, now)
    return marks


def is_stuck(view: GraphView, result: Desired, update: RollingUpdate) -> bool:
    """Return whether an update has made no progress for too long, and note its last progress."""
    status, now = result.status, view.observed.now
    since = time_value(update.progress_time)
    if _progress(status) != _progress(view.before) or result.status_first or result.scales:
        since = now
    status.rolling_update = msgspec.structs.replace(update, progress_time=time_text(since))
    result.recheck_s = max(0.0, PROGRESS_LIMIT_S - (now - since))
    return now - since >= PROGRESS_LIMIT_S


def _progress(status: GraphStatus) -> Mapping[str, tuple[int, int]]:
    """Return the counts of which each change is progress of an update."""
    return {
        name: (part.updated_replicas, part.ready_replicas)
        for name, part in status.components.items()
    }
