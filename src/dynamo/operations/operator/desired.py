"""The objects and the status of a graph, from its manifest and from what is there.

`desired` is pure: it opens no connection and reads no clock. A loop calls it again after every
change, and after its own end at any point it comes to the same end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from dynamo.operations.operator import gangs, objects
from dynamo.operations.operator.gangs import is_gated, wants_gangs
from dynamo.operations.operator.kinds import ADAPTER, ComponentSpec, GraphStatus
from dynamo.operations.operator.names import COMPONENT_LABEL, GRAPH_LABEL
from dynamo.operations.operator.pods import PodMaker, PodOptions, with_gate, with_restart
from dynamo.operations.operator.rules import annotation_notes, check_graph
from dynamo.operations.operator.status import (
    NO_ROOM,
    Conditions,
    NotReady,
    component_status,
    pods_of,
    read_status,
    time_value,
    why_not_ready,
)
from dynamo.operations.operator.updates import is_stuck, plan_restart, plan_step
from dynamo.operations.operator.view import Desired, GraphView, Object, Observed, has_adapter
from dynamo.operations.operator.workloads import (
    DEPLOYMENT,
    SCALING_GROUP,
    WORKLOADS,
    Workload,
    WorkloadMaker,
    sort_generations,
    workload_kind,
)

DEFAULT_OPTIONS = PodOptions()


def desired(graph: Object, observed: Observed, options: PodOptions = DEFAULT_OPTIONS) -> Desired:
    """Return the objects and the status of a graph."""
    check = check_graph(graph.get("spec") or {})
    check.notes += annotation_notes(graph["metadata"].get("annotations") or {})
    before = read_status(graph)
    number = graph["metadata"].get("generation", 1)
    conditions = Conditions(before, number, observed.now)
    problems = [*check.problems, *observed.refused]
    conditions.spec_valid(problems, check.notes, observed.missing)
    status = GraphStatus(number, components=before.components)
    result = Desired(status, check)
    if check.spec is None or problems:
        status.state = "failed"
        status.rolling_update, status.restart = before.rolling_update, before.restart
        conditions.add("Ready", holds=False, reason="spec_invalid", message="see SpecValid")
    else:
        view = GraphView(graph, check.spec, observed)
        GraphPlan(view, options, result, conditions).fill()
    status.conditions = conditions.rows
    return result


class GraphPlan:
    """Fills in what is desired of a graph whose manifest is valid."""

    def __init__(
        self, view: GraphView, options: PodOptions, result: Desired, conditions: Conditions
    ) -> None:
        self._view = view
        self._pods = PodMaker(view.key, view.spec, view.generation, options)
        self._maker = WorkloadMaker(view.key, view.generation)
        self._result = result
        self._conditions = conditions

    def fill(self) -> None:
        """Set objects, changes and the status, and add the conditions."""
        view, result = self._view, self._result
        status, observed = result.status, view.observed
        if observed.secret is not None:
            result.objects.append(objects.plane_secret(view.key, observed.secret))
        result.objects += objects.graph_objects(view.key, view.spec)
        for role, (_, component) in view.components.items():
            workloads = [workload for workload in view.workloads if workload.component == role]
            status.components |= {component.name: component_status(workloads, view.generation)}
        kinds = {
            role: workload_kind(component, view.annotations, observed.groups)
            for role, (_, component) in view.components.items()
        }
        if "" in kinds.values():
            names = ", ".join(view.name(role) for role, kind in kinds.items() if not kind)
            text = f"{names}: replicas of several nodes need Grove or LeaderWorkerSet"
            reason = "MultinodeNeedsGroveOrLWS"
            self._conditions.add("Ready", holds=False, reason=reason, message=text)
            status.state = "failed"
            return
        self._add_workloads(kinds, plan_step(view, result), plan_restart(view, result))
        for role, (_, component) in view.components.items():
            result.objects += objects.component_objects(view.key, component)
            if has_adapter(component):
                if (ADAPTER, view.adapter_name(component)) not in observed.objects:
                    result.objects.append(objects.adapter(view.key, component))
                result.replicas[component.name] = view.targets[role]
        if all(view.targets[role] == part.replicas for role, (_, part) in view.components.items()):
            result.replicas.clear()
        self._add_deletions()
        self._add_ready()
        self._add_placed()
        if conflicts := observed.scaling_conflicts:
            text = "; ".join(
                f"{name}: {' and '.join(managers)} scale it in turn"
                for name, managers in conflicts.items()
            )
            self._conditions.add("ScalingConflict", holds=True, reason="TwoManagers", message=text)

    def _add_workloads(
        self, kinds: Mapping[str, str], replicas: Mapping[str, int], restarts: Mapping[str, str]
    ) -> None:
        """Add the workloads of the present generation, frontends last."""
        view, result = self._view, self._result
        gated = view.observed.has_gates and wants_gangs(view.spec, view.annotations)
        order = sorted(view.components.items(), key=lambda item: item[1][1].type == "frontend")
        for role, (number, component) in order:
            live = view.current.get(role)
            pod, text = self._defaults(component, live)
            template = self._pods.template(component, pod)
            if restarts.get(role):
                template = with_restart(template, restarts[role])
            if gated and kinds[role] == DEPLOYMENT:
                template = with_gate(template)
            count = replicas[role]
            if live is not None and live.scaled[0] == SCALING_GROUP:
                if live.ordered != count:
                    result.scales.append((live.scaled, count))
                first = view.observed.objects[live.key]["spec"]["template"]
                count = first["podCliqueScalingGroups"][0]["replicas"]
            item = self._maker.make(component, kinds[role], template, count, text)
            result.objects.append(item)
            result.templates[item["kind"], item["metadata"]["name"]] = (number, template)

    def _defaults(self, component: ComponentSpec, live: Workload | None) -> tuple[Object, str]:
        """Return the defaults of a component's pods, and their text: those that its workload was
        made with, as long as the user's own part is the same."""
        own = self._pods.own_digest(component)
        if live is not None and live.defaults:
            saved = msgspec.json.decode(live.defaults)
            if saved["own"] == own:
                return saved["pods"], live.defaults
        pods = self._pods.defaults(component)
        return pods, msgspec.json.encode({"own": own, "pods": pods}).decode()

    def _add_deletions(self) -> None:
        """Delete what nothing needs any more: generations that have gone, parts of components."""
        view, deletions = self._view, self._result.deletions
        for generation in sort_generations(view.others):
            part = [workload for workload in view.others if workload.generation == generation]
            if all(workload.is_gone for workload in part):
                keys = [workload.key for workload in part]
                deletions |= {key: view.observed.objects[key] for key in keys}
        wanted = {(item["kind"], item["metadata"]["name"]) for item in self._result.objects}
        for key, item in view.observed.objects.items():
            role = (item["metadata"].get("labels") or {}).get(COMPONENT_LABEL)
            if role and key not in wanted and key[0] not in (*WORKLOADS, SCALING_GROUP):
                row = view.components.get(role)
                if row is None or (key[0] == ADAPTER and not has_adapter(row[1])):
                    deletions[key] = item

    def _add_placed(self) -> None:
        """Add the condition on the places of gangs."""
        view, add = self._view, self._conditions.add
        if not wants_gangs(view.spec, view.annotations):
            return
        waiting = [pod for pod in view.observed.pods if is_gated(pod)]
        if not view.observed.has_gates:
            text = "the API server has no scheduling gates (1.30); pods start one by one"
            add("Placed", holds=False, reason="NoSchedulingGates", message=text)
        elif waiting:
            text = view.observed.waits or f"{len(waiting)} pods wait for the others of their gang"
            add("Placed", holds=False, reason="WaitsForRoom", message=text)
        else:
            add("Placed", holds=True, reason="AllPlaced")
        update = self._result.status.rolling_update
        if view.observed.has_gates and (update is None or update.phase != "InProgress"):
            self._add_breached()

    def _add_breached(self) -> None:
        """Add the condition on a gang that lacks pods, once it had them all. If it has lacked some
        for too long, all of its pods are to be made again."""
        view, result, kind = self._view, self._result, "MinAvailableBreached"
        lacking = ", ".join(gangs.lacking_components(view))
        before = next((row for row in view.before.conditions if row.type == kind), None)
        if not lacking:
            self._conditions.add(kind, holds=False, reason="SufficientAvailablePods")
        elif before is not None:
            since = time_value(before.last_transition_time) if before.status == "True" else 0.0
            waits_s = gangs.TERMINATION_S - (view.observed.now - (since or view.observed.now))
            if waits_s <= 0.0:
                pods = filter(gangs.is_active, view.pods_of(view.generation))
                result.deletions |= {("Pod", pod["metadata"]["name"]): pod for pod in pods}
                return
            text = f"{lacking}: fewer pods are ready than minAvailable"
            self._conditions.add(kind, holds=True, reason="InsufficientAvailablePods", message=text)
            result.recheck_s = min(result.recheck_s or waits_s, waits_s)

    def _add_ready(self) -> None:
        """Add the condition Ready, and set the state."""
        view, status = self._view, self._result.status
        waiting = [self._why(role) for role in view.targets if not view.is_settled(role)]
        update = status.rolling_update
        updating = update is not None and update.phase == "InProgress"
        if not waiting and not updating:
            status.state = "successful"
            self._conditions.add("Ready", holds=True, reason="all_resources_are_ready")
            return
        status.state = "pending" if view.workloads else "initializing"
        reasons = {part.reason for part in waiting}
        reason = "mixed_not_ready_reasons" if len(reasons) > 1 else "".join(reasons)
        if updating and update is not None:
            if is_stuck(view, self._result, update):
                reason = "RolloutStuck"
            elif NO_ROOM not in reasons:
                reason = "updating"
        text = "; ".join(part.message for part in waiting)
        self._conditions.add("Ready", holds=False, reason=reason, message=text)

    def _why(self, role: str) -> NotReady:
        """Return why a component is not ready."""
        view = self._view
        live = view.current.get(role)
        item = view.observed.objects.get(live.key) if live else None
        pods = pods_of(view.pods_of(view.generation), role)
        ready = live.ready if live else 0
        return why_not_ready(view.name(role), ready, view.targets[role], pods, item)


def adapter_status(item: Object, observed: Observed) -> dict[str, Any]:
    """Return the status of an adapter: the pods that there are, and their selector."""
    labels = item["metadata"].get("labels") or {}
    role, graph = labels.get(COMPONENT_LABEL, ""), labels.get(GRAPH_LABEL, "")
    parts = [workload for workload in observed.workloads() if workload.component == role]
    selector = f"{COMPONENT_LABEL}={role},{GRAPH_LABEL}={graph}"
    count = sum(workload.replicas for workload in parts)
    return {**(item.get("status") or {}), "replicas": count, "selector": selector}
