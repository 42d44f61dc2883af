"""The scheduler: binds pods to nodes by resources, selectors, affinity and taints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any

from dynamo.testing.kubernetes.built_in import quantity
from dynamo.testing.kubernetes.controllers.loop import Controller
from dynamo.testing.kubernetes.kinds import Object
from dynamo.testing.kubernetes.selectors import structured_selector
from dynamo.testing.kubernetes.store import Change


def requests_of(spec: Object) -> Counter[str]:
    """Return the resources that a pod requests."""
    total: Counter[str] = Counter({"pods": 1})
    for container in spec.get("containers") or ():
        resources = container.get("resources") or {}
        for name, value in {**resources.get("limits", {}), **resources.get("requests", {})}.items():
            total[name] += quantity(value)  # type: ignore[assignment]
    return total


class Scheduler(Controller):
    """Binds pods, one after the other, in the order of their creation."""

    kinds = ("pods", "nodes")

    def keys_of(self, change: Change) -> Iterable[Hashable]:
        if change.kind == "nodes" or change.deleted:
            return (0,)
        return () if change.after["spec"].get("nodeName") else (0,)

    def reconcile(self, key: Any) -> None:
        del key
        nodes = self.store.items("nodes")
        free = {node["metadata"]["name"]: _allocatable(node) for node in nodes}
        waiting = []
        for pod in self.store.items("pods"):
            phase = pod.get("status", {}).get("phase")
            name = pod["spec"].get("nodeName")
            if name in free and phase not in ("Succeeded", "Failed"):
                free[name].subtract(requests_of(pod["spec"]))
            elif not name and "deletionTimestamp" not in pod["metadata"]:
                waiting.append(pod)
        for pod in sorted(waiting, key=lambda pod: str(pod["metadata"]["creationTimestamp"])):
            self._schedule(pod, nodes, free)

    def _schedule(self, pod: Object, nodes: list[Object], free: dict[str, Counter[str]]) -> None:
        if pod["spec"].get("schedulingGates"):
            self._tell(pod, "SchedulingGated", "Scheduling is blocked due to non-empty gates")
            return
        wanted = requests_of(pod["spec"])
        reasons: Counter[str] = Counter()
        fitting = []
        for node in nodes:
            name = node["metadata"]["name"]
            reason = _refusal(pod["spec"], node) or next(
                (f"Insufficient {k}" for k, v in wanted.items() if free[name][k] < v), ""
            )
            if reason:
                reasons[reason] += 1
            else:
                fitting.append(name)
        if not fitting:
            counts = ", ".join(f"{count} {text}" for text, count in sorted(reasons.items()))
            text = f"0/{len(nodes)} nodes are available: {counts or 'no nodes'}."
            self._tell(pod, "Unschedulable", text)
            return
        name = max(fitting, key=lambda name: (free[name]["pods"], free[name]["cpu"]))
        free[name].subtract(wanted)
        spec = pod["spec"] | {"nodeName": name}
        bound = self.objects.replace(self.target("pods", pod), pod | {"spec": spec})
        self._tell(bound, "", "")

    def _tell(self, pod: Object, reason: str, message: str) -> None:
        """Write the condition PodScheduled."""
        condition = {"type": "PodScheduled", "status": "False" if reason else "True"}
        if reason:
            condition |= {"reason": reason, "message": message}
        status = pod.get("status", {})
        others = [c for c in status.get("conditions") or () if c["type"] != "PodScheduled"]
        self.put_status("pods", pod, status | {"conditions": [*others, condition]})


def _allocatable(node: Object) -> Counter[str]:
    resources = node.get("status", {}).get("allocatable") or {}
    return Counter({name: quantity(value) for name, value in resources.items()})


def _refusal(spec: Object, node: Object) -> str:
    """Return why a pod may not run on a node at all, or ""."""
    labels = node["metadata"].get("labels") or {}
    conditions = node.get("status", {}).get("conditions") or ()
    if not any(c["type"] == "Ready" and c["status"] == "True" for c in conditions):
        return "node(s) were not ready"
    if node.get("spec", {}).get("unschedulable"):
        return "node(s) were unschedulable"
    for taint in node.get("spec", {}).get("taints") or ():
        tolerations = spec.get("tolerations") or ()
        if taint["effect"] != "PreferNoSchedule" and not any(
            _tolerates(toleration, taint) for toleration in tolerations
        ):
            return f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value', '')}}}"
    if any(labels.get(k) != v for k, v in (spec.get("nodeSelector") or {}).items()):
        return "node(s) didn't match Pod's node affinity/selector"
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if required and not any(
        structured_selector(term)(labels) for term in required["nodeSelectorTerms"]
    ):
        return "node(s) didn't match Pod's node affinity/selector"
    return ""


def _tolerates(toleration: Object, taint: Object) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    same_value = toleration.get("value", "") == taint.get("value", "")
    return bool(toleration.get("key") == taint["key"] and same_value)
