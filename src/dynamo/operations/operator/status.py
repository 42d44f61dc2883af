"""The status of a graph: the pods of its components, and conditions that say why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from dynamo.operations.operator.kinds import ComponentStatus, Condition, GraphStatus
from dynamo.operations.operator.names import COMPONENT_LABEL
from dynamo.operations.operator.upgrade import Problem
from dynamo.operations.operator.workloads import Workload

MESSAGE_CHARACTERS = 2000
SHOWN_PROBLEMS = 20
QUIET_REASONS = {"ContainerCreating", "PodInitializing"}
CRASH_LOOP = "CrashLoopBackOff"
"""Its message has the name of the pod and the wait, and not why the container ended."""
NO_ROOM = "insufficient_capacity"
NOT_READY = "pods_not_ready"


def time_text(now: float) -> str:
    """Return a wall clock time as Kubernetes writes it."""
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def time_value(text: str) -> float:
    """Return the wall clock time of a text; 0 for none."""
    return datetime.fromisoformat(text).timestamp() if text else 0.0


def read_status(graph: Mapping[str, Any]) -> GraphStatus:
    """Return the status that a graph has; an empty one for what cannot be read."""
    try:
        return msgspec.convert(graph.get("status") or {}, GraphStatus)
    except msgspec.ValidationError:
        return GraphStatus()


class Conditions:
    """Collects the conditions of a graph. Times of those that stay as they were are kept."""

    def __init__(self, before: GraphStatus, generation: int, now: float) -> None:
        self._before = {condition.type: condition for condition in before.conditions}
        self._generation = generation
        self._now = time_text(now)
        self.rows: list[Condition] = []

    def add(self, kind: str, holds: bool, reason: str, message: str = "") -> None:
        """Add a condition."""
        status: Literal["True", "False"] = "True" if holds else "False"
        past = self._before.get(kind)
        since = past.last_transition_time if past and past.status == status else self._now
        text = message[:MESSAGE_CHARACTERS]
        self.rows.append(Condition(kind, status, reason, text, self._generation, since))

    def spec_valid(
        self, problems: Sequence[Problem], notes: Sequence[Problem], missing: Sequence[Problem]
    ) -> None:
        """Add the condition on the manifest: what is wrong, is missing, or has no effect."""
        if problems:
            self.add("SpecValid", holds=False, reason="Invalid", message=join_problems(problems))
        elif missing:
            self.add(
                "SpecValid", holds=False, reason="ReferenceMissing", message=join_problems(missing)
            )
        else:
            reason = "NoEffect" if notes else "Valid"
            self.add("SpecValid", holds=True, reason=reason, message=join_problems(notes))


def join_problems(problems: Sequence[Problem]) -> str:
    """Return problems as a text, the first ones of many."""
    texts = [str(problem) for problem in problems[:SHOWN_PROBLEMS]]
    if len(problems) > SHOWN_PROBLEMS:
        texts.append(f"and {len(problems) - SHOWN_PROBLEMS} more")
    return "; ".join(texts)


def component_status(workloads: Sequence[Workload], generation: str) -> ComponentStatus:
    """Return the pods of a component in all of its workloads."""
    current = [workload for workload in workloads if workload.generation == generation]
    kinds = [workload.kind for workload in [*current, *workloads]]
    return ComponentStatus(
        kinds[0] if kinds else "Deployment",
        [workload.name for workload in workloads],
        sum(workload.replicas for workload in workloads),
        sum(workload.updated for workload in current),
        sum(workload.ready for workload in workloads),
        sum(workload.available for workload in workloads),
    )


def is_settled(workload: Workload | None, target: int) -> bool:
    """Whether a workload has all replicas that are wanted, all of its present spec and ready."""
    if workload is None or not workload.is_current or workload.ordered != target:
        return False
    return workload.replicas == workload.updated == workload.ready == target


class NotReady(msgspec.Struct, frozen=True):
    """A component that is not ready, and why."""

    reason: str
    message: str


def why_not_ready(
    component: str,
    ready: int,
    target: int,
    pods: Iterable[Mapping[str, Any]],
    workload: Mapping[str, Any] | None,
) -> NotReady:
    """Return why a component is not ready: by its pods, or by the conditions of a workload whose
    pods cannot be made, such as a quota."""
    reasons = Counter(problem for pod in pods if (problem := pod_problem(pod)))
    crowded = any(reason.startswith("Unschedulable") for reason in reasons)
    for condition in ((workload or {}).get("status") or {}).get("conditions") or ():
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            reasons[condition.get("message", "")] += 1
    text = f"{component}: {ready} of {target} ready"
    if reasons:
        text += f" ({'; '.join(reason for reason, _ in reasons.most_common(3))})"
    return NotReady(NO_ROOM if crowded else NOT_READY, text)


def is_ready(pod: Mapping[str, Any]) -> bool:
    """Whether the condition Ready of a pod is true."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(row["type"] == "Ready" and row["status"] == "True" for row in conditions)


def pod_problem(pod: Mapping[str, Any]) -> str:
    """Return why a pod does not run, "" if it runs or begins to."""
    status = pod.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"{condition.get('reason', '')}: {condition.get('message', '')}"
    for container in status.get("containerStatuses") or ():
        state = container.get("state") or {}
        waiting = state.get("waiting") or {}
        reason = waiting.get("reason", "ContainerCreating")
        if reason not in QUIET_REASONS:
            message = "" if reason == CRASH_LOOP else waiting.get("message")
            return ": ".join(filter(None, (reason, message, _last_exit(container))))
        if ended := state.get("terminated"):
            return f"ended with {ended.get('exitCode')}"
    return ""


def _last_exit(container: Mapping[str, Any]) -> str:
    ended = (container.get("lastState") or {}).get("terminated") or {}
    if "exitCode" not in ended:
        return ""
    reason = ended.get("reason", "Error")
    return f"{container.get('name', '')} ended with {ended['exitCode']} ({reason})"


def pods_of(pods: Sequence[Mapping[str, Any]], component: str) -> list[Mapping[str, Any]]:
    """Return the pods of a component."""
    return [
        pod
        for pod in pods
        if (pod["metadata"].get("labels") or {}).get(COMPONENT_LABEL) == component
    ]
