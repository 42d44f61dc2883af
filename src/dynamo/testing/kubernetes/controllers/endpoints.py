"""EndpointSlices of Services, by the readiness of their pods."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable
from typing import Any

from dynamo.testing.kubernetes.controllers.loop import Controller
from dynamo.testing.kubernetes.controllers.workloads import is_ready, owner_reference
from dynamo.testing.kubernetes.kinds import Object
from dynamo.testing.kubernetes.store import Change

SLICES = "endpointslices.discovery.k8s.io"
MOST_ENDPOINTS = 100
"""Endpoints of one slice."""


class EndpointSlices(Controller):
    """Keeps the slices of each Service with a selector."""

    kinds = ("services", "pods")

    def keys_of(self, change: Change) -> Iterable[Hashable]:
        metadata = change.after["metadata"]
        namespace = metadata["namespace"]
        if change.kind == "services":
            return ((namespace, metadata["name"]),)
        return tuple(
            (namespace, service["metadata"]["name"])
            for service in self.store.items("services", namespace)
            if any(_selects(service, pod) for pod in (change.before, change.after) if pod)
        )

    def reconcile(self, key: Any) -> None:
        service = self.store.get("services", key)
        if service is None or not service["spec"].get("selector"):
            return
        pods = [
            pod
            for pod in self.store.items("pods", key[0])
            if _selects(service, pod)
            and pod.get("status", {}).get("podIP")
            and pod["status"].get("phase") not in ("Succeeded", "Failed")
        ]
        endpoints = [_endpoint(service, pod) for pod in pods]
        ports = [
            {"name": port.get("name", ""), "port": number, "protocol": port["protocol"]}
            for port in service["spec"].get("ports") or ()
            if (number := _target_port(port["targetPort"], pods)) is not None
        ]
        count = max(1, -(-len(endpoints) // MOST_ENDPOINTS))
        for index in range(count):
            part = endpoints[index * MOST_ENDPOINTS : (index + 1) * MOST_ENDPOINTS]
            self._put(service, index, part, ports)
        index = count
        while (old := self.store.get(SLICES, (key[0], _name(key[1], index)))) is not None:
            self.objects.delete(self.target(SLICES, old), {})
            index += 1

    def _put(self, service: Object, index: int, endpoints: list[Object], ports: Any) -> None:
        metadata = service["metadata"]
        labels = (metadata.get("labels") or {}) | {
            "kubernetes.io/service-name": metadata["name"],
            "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
        }
        name = _name(metadata["name"], index)
        content = {"addressType": "IPv4", "endpoints": endpoints, "ports": ports}
        target = self.objects.target(SLICES, metadata["namespace"], name)
        old = self.store.get(SLICES, target.key)
        if old is not None:
            changed = old["metadata"] | {"labels": labels}
            self.objects.replace(target, old | content | {"metadata": changed})
            return
        own = {"name": name, "labels": labels, "ownerReferences": [owner_reference(service)]}
        self.objects.create(target, {"metadata": own, **content})


def _name(service: str, index: int) -> str:
    return f"{service}-{hashlib.sha256(f'{service}/{index}'.encode()).hexdigest()[:5]}"


def _selects(service: Object, pod: Object) -> bool:
    labels = pod["metadata"].get("labels") or {}
    selector = service["spec"].get("selector") or {}
    return bool(selector) and all(labels.get(key) == value for key, value in selector.items())


def _target_port(port: int | str, pods: Iterable[Object]) -> int | None:
    """Return the number of a pods' port, which may be given by name."""
    if isinstance(port, int):
        return port
    known = (p for pod in pods for c in pod["spec"]["containers"] for p in c.get("ports") or ())
    return next((p["containerPort"] for p in known if p.get("name") == port), None)


def _endpoint(service: Object, pod: Object) -> Object:
    metadata = pod["metadata"]
    terminating = "deletionTimestamp" in metadata
    ready = is_ready(pod)
    shown = (ready and not terminating) or bool(service["spec"].get("publishNotReadyAddresses"))
    endpoint = {
        "addresses": [pod["status"]["podIP"]],
        "conditions": {"ready": shown, "serving": ready, "terminating": terminating},
        "targetRef": {
            "kind": "Pod", "name": metadata["name"], "namespace": metadata["namespace"],
            "uid": metadata["uid"],
        },
    }  # fmt: skip
    if pod["spec"].get("nodeName"):
        endpoint["nodeName"] = pod["spec"]["nodeName"]
    return endpoint
