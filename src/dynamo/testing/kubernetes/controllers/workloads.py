"""Deployments, which roll their ReplicaSets, and ReplicaSets, which keep their pods."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import msgspec

from dynamo.testing.kubernetes.controllers.loop import Controller
from dynamo.testing.kubernetes.kinds import Object
from dynamo.testing.kubernetes.store import Change, Key

DEPLOYMENTS, REPLICA_SETS = "deployments.apps", "replicasets.apps"
REVISION = "deployment.kubernetes.io/revision"
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"


def controller_key(item: Object, kind: str) -> Key | None:
    """Return the key of the object of a kind that controls another."""
    for owner in item["metadata"].get("ownerReferences") or ():
        if owner.get("controller") and owner["kind"] == kind:
            return item["metadata"].get("namespace", ""), owner["name"]
    return None


def owner_reference(item: Object) -> Object:
    """Return the reference of an object to its controller."""
    metadata = item["metadata"]
    return {
        "apiVersion": item["apiVersion"], "kind": item["kind"], "name": metadata["name"],
        "uid": metadata["uid"], "controller": True, "blockOwnerDeletion": True,
    }  # fmt: skip


def is_ready(pod: Object) -> bool:
    """Return whether the condition Ready of a pod is true."""
    conditions = pod.get("status", {}).get("conditions") or ()
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def is_active(pod: Object) -> bool:
    """Return whether a pod counts: it is neither deleted nor ended."""
    ended = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
    return not ended and "deletionTimestamp" not in pod["metadata"]


class ReplicaSets(Controller):
    """Keeps the pods of each ReplicaSet."""

    kinds = (REPLICA_SETS, "pods")

    def keys_of(self, change: Change) -> Iterable[Hashable]:
        if change.kind == "pods":
            key = controller_key(change.after, "ReplicaSet")
            return (key,) if key else ()
        return ((change.after["metadata"]["namespace"], change.after["metadata"]["name"]),)

    def reconcile(self, key: Any) -> None:
        owner = self.store.get(REPLICA_SETS, key)
        if owner is None or "deletionTimestamp" in owner["metadata"]:
            return
        pods = [
            pod for pod in self.store.items("pods", key[0])
            if controller_key(pod, "ReplicaSet") == key and is_active(pod)
            and pod["metadata"]["ownerReferences"][0]["uid"] == owner["metadata"]["uid"]
        ]  # fmt: skip
        missing = owner["spec"]["replicas"] - len(pods)
        pods += [self._create_pod(owner) for _ in range(missing)]
        pods.sort(key=_deletion_rank)
        for pod in pods[: max(0, -missing)]:
            self.objects.delete(self.target("pods", pod), {})
        ready = sum(map(is_ready, pods[max(0, -missing) :]))
        status = {
            "replicas": len(pods) - max(0, -missing), "fullyLabeledReplicas": len(pods),
            "readyReplicas": ready, "availableReplicas": ready,
            "observedGeneration": owner["metadata"]["generation"],
        }  # fmt: skip
        self.put_status(REPLICA_SETS, owner, status)

    def _create_pod(self, owner: Object) -> Object:
        template = owner["spec"]["template"]
        metadata = {
            "generateName": f"{owner['metadata']['name']}-",
            "labels": template["metadata"].get("labels", {}),
            "annotations": template["metadata"].get("annotations", {}),
            "ownerReferences": [owner_reference(owner)],
        }
        target = self.objects.target("pods", owner["metadata"]["namespace"], "")
        return self.objects.create(target, {"metadata": metadata, "spec": template["spec"]})


def _deletion_rank(pod: Object) -> Any:
    """Order pods as ReplicaSets delete them: unbound, pending, unready, cheap, young ones first."""
    metadata = pod["metadata"]
    return (
        bool(pod["spec"].get("nodeName")),
        pod.get("status", {}).get("phase") == "Running",
        is_ready(pod),
        int((metadata.get("annotations") or {}).get(DELETION_COST, 0)),
        -int(metadata["resourceVersion"]),
    )


class Deployments(Controller):
    """Rolls the ReplicaSets of each Deployment."""

    kinds = (DEPLOYMENTS, REPLICA_SETS)

    def keys_of(self, change: Change) -> Iterable[Hashable]:
        if change.kind == REPLICA_SETS:
            key = controller_key(change.after, "Deployment")
            return (key,) if key else ()
        return ((change.after["metadata"]["namespace"], change.after["metadata"]["name"]),)

    def reconcile(self, key: Any) -> None:
        deployment = self.store.get(DEPLOYMENTS, key)
        if deployment is None or "deletionTimestamp" in deployment["metadata"]:
            return
        owned = [
            item for item in self.store.items(REPLICA_SETS, key[0])
            if controller_key(item, "Deployment") == key
            and item["metadata"]["ownerReferences"][0]["uid"] == deployment["metadata"]["uid"]
        ]  # fmt: skip
        digest = _template_hash(deployment["spec"]["template"])
        name = f"{key[1]}-{digest}"
        new = next((item for item in owned if item["metadata"]["name"] == name), None)
        old = [item for item in owned if item["metadata"]["name"] != name]
        if new is None:
            new = self._create_set(deployment, name, digest, old)
        wanted, olds = _next_sizes(deployment["spec"], new, old)
        for item, replicas in zip([new, *old], [wanted, *olds], strict=True):
            if item["spec"]["replicas"] != replicas:
                spec = item["spec"] | {"replicas": replicas}
                self.objects.replace(self.target(REPLICA_SETS, item), item | {"spec": spec})
        self._remove_old(deployment, old)
        self.put_status(DEPLOYMENTS, deployment, self._status(deployment, new, old))

    def _create_set(
        self, deployment: Object, name: str, digest: str, old: Sequence[Object]
    ) -> Object:
        spec = deployment["spec"]
        template = spec["template"]
        labels = (template["metadata"].get("labels") or {}) | {"pod-template-hash": digest}
        selector = dict(spec["selector"])
        selector["matchLabels"] = (selector.get("matchLabels") or {}) | {
            "pod-template-hash": digest
        }
        revisions = (int(_revision(item)) for item in old)
        revision = str(max(revisions, default=0) + 1)
        body = {
            "metadata": {
                "name": name, "labels": labels, "annotations": {REVISION: revision},
                "ownerReferences": [owner_reference(deployment)],
            },
            "spec": {
                "replicas": 0, "selector": selector,
                "template": template | {"metadata": template["metadata"] | {"labels": labels}},
            },
        }  # fmt: skip
        metadata = deployment["metadata"]
        target = self.objects.target(REPLICA_SETS, metadata["namespace"], "")
        created = self.objects.create(target, body)
        annotations = (metadata.get("annotations") or {}) | {REVISION: revision}
        patched = deployment | {"metadata": metadata | {"annotations": annotations}}
        self.objects.replace(self.target(DEPLOYMENTS, deployment), patched)
        return created

    def _remove_old(self, deployment: Object, old: Sequence[Object]) -> None:
        idle = [item for item in old if not item["spec"]["replicas"]
                and not item.get("status", {}).get("replicas")]  # fmt: skip
        idle.sort(key=lambda item: int(_revision(item)))
        for item in idle[: max(0, len(idle) - deployment["spec"]["revisionHistoryLimit"])]:
            self.objects.delete(self.target(REPLICA_SETS, item), {})

    def _status(self, deployment: Object, new: Object, old: Sequence[Object]) -> Object:
        def count(items: Sequence[Object], field: str) -> int:
            return sum(item.get("status", {}).get(field, 0) for item in items)

        items = [self.store.get(REPLICA_SETS, (i["metadata"]["namespace"], i["metadata"]["name"]))
                 or i for i in (new, *old)]  # fmt: skip
        wanted = deployment["spec"]["replicas"]
        replicas, available = count(items, "replicas"), count(items, "availableReplicas")
        updated = count(items[:1], "replicas")
        surge, unavailable = _limits(deployment["spec"])
        done = updated == replicas == available == wanted
        before = deployment.get("status", {})
        conditions = [
            _condition("Available", available >= wanted - unavailable, "MinimumReplicasAvailable",
                       "MinimumReplicasUnavailable"),
            _condition("Progressing", True, "NewReplicaSetAvailable" if done
                       else "ReplicaSetUpdated", ""),
        ]  # fmt: skip
        times = {(c["type"], c["status"]): c for c in before.get("conditions") or ()}
        now = self.objects.now()
        for condition in conditions:
            known = times.get((condition["type"], condition["status"]), {})
            condition["lastTransitionTime"] = known.get("lastTransitionTime", now)
        del surge
        return {
            "observedGeneration": deployment["metadata"]["generation"], "replicas": replicas,
            "updatedReplicas": updated, "readyReplicas": count(items, "readyReplicas"),
            "availableReplicas": available, "unavailableReplicas": max(0, wanted - available),
            "conditions": conditions,
        }  # fmt: skip


def _template_hash(template: Object) -> str:
    return hashlib.sha256(msgspec.json.encode(template, order="sorted")).hexdigest()[:10]


def _revision(item: Object) -> str:
    return str((item["metadata"].get("annotations") or {}).get(REVISION, "0"))


def _condition(name: str, holds: bool, reason: str, otherwise: str) -> Object:
    status = "True" if holds else "False"
    return {"type": name, "status": status, "reason": reason if holds else otherwise, "message": ""}


def _limits(spec: Object) -> tuple[int, int]:
    """Return the most pods beyond the wanted number, and the most that may be missing."""
    rolling = spec["strategy"].get("rollingUpdate") or {}
    wanted = spec["replicas"]

    def number(value: Any, rounded: Any) -> int:
        if isinstance(value, str):
            return int(rounded(wanted * float(value.rstrip("%")) / 100))
        return int(value)

    surge = number(rolling.get("maxSurge", "25%"), math.ceil)
    unavailable = number(rolling.get("maxUnavailable", "25%"), math.floor)
    return surge, unavailable if surge or unavailable else 1


def _next_sizes(spec: Object, new: Object, old: Sequence[Object]) -> tuple[int, list[int]]:
    """Return the next sizes of the new ReplicaSet and of the old ones."""
    wanted = spec["replicas"]
    sizes = [item["spec"]["replicas"] for item in old]
    present = new["spec"]["replicas"]
    if spec["strategy"]["type"] == "Recreate":
        gone = not any(item.get("status", {}).get("replicas") for item in old)
        return (wanted if gone else present), [0] * len(sizes)
    surge, unavailable = _limits(spec)
    total = present + sum(sizes)
    grown = min(wanted, max(present, present + wanted + surge - total))
    available = sum(i.get("status", {}).get("availableReplicas", 0) for i in (new, *old))
    for index, item in enumerate(old):  # first the pods that do not serve
        unready = sizes[index] - item.get("status", {}).get("availableReplicas", 0)
        sizes[index] -= max(0, unready)
    spare = available - (wanted - unavailable)
    for index, size in enumerate(sizes):
        taken = max(0, min(size, spare))
        sizes[index] -= taken
        spare -= taken
    return grown, sizes
