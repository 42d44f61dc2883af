"""The pod template of a component: defaults, and over them what the user wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dynamo.operations.operator.kinds import WORKER_TYPES, ComponentSpec, GraphSpec
from dynamo.operations.operator.merge import merge
from dynamo.operations.operator.names import (
    GANG_GATE,
    RESTART,
    GraphKey,
    digest,
    dynamo_namespace,
    object_name,
)
from dynamo.operations.operator.upgrade import MAIN

HTTP_PORT, STATUS_PORT = 8000, 9090
GRACE_BEYOND_DRAIN_S = 15
HOME = "/home/dynamo"
USER_ID = 1000
START_LIMIT_S = 7200
"""A worker may load its model for so long."""
CONTAINER_SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
COMMANDS: Mapping[str, Sequence[str]] = {
    "frontend": ("python3", "-m", "dynamo.frontend"),
    "planner": ("python3", "-m", "dynamo.planner"),
    "router": ("python3", "-m", "dynamo.router"),
    "prefill": ("dynamo", "run", "in=none", "--prefill-workers", "1"),
    "decode": ("dynamo", "run", "in=none", "--decode-workers", "1"),
    "worker": ("dynamo", "run", "in=none"),
}


class PodOptions(msgspec.Struct, frozen=True):
    """The operator's own defaults of pods."""

    image: str = "dynamo:latest-vllm"
    drain_s: int = 30
    shared_memory: str = "8Gi"


class PodMaker:
    """Makes the pod templates of a graph's generation."""

    def __init__(
        self, graph: GraphKey, spec: GraphSpec, generation: str, options: PodOptions
    ) -> None:
        self._graph = graph
        self._spec = spec
        self._generation = generation
        self._options = options

    def own_digest(self, component: ComponentSpec) -> str:
        """Return digits that stand for all that the user wrote about a component's pods."""
        spec = self._spec
        parts = [
            component.pod_template, component.type, component.shared_memory_size,
            component.compilation_cache, component.multinode,
            spec.env, spec.labels, spec.annotations, spec.priority_class_name,
            spec.backend_framework,
        ]  # fmt: skip
        return digest(parts)

    def defaults(self, component: ComponentSpec) -> dict[str, Any]:
        """Return the template that the user's is merged over."""
        kind = component.type or "worker"
        pod: dict[str, Any] = {
            "serviceAccountName": object_name(self._graph.name, "k8s-service-discovery"),
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": self._drain_s(component) + GRACE_BEYOND_DRAIN_S,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER_ID,
                "runAsGroup": USER_ID,
                "fsGroup": USER_ID,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
        }
        if kind == "planner":
            pod["serviceAccountName"] = object_name(self._graph.name, "planner")
        volumes, mounts = self._volumes(component, kind)
        if self._spec.priority_class_name:
            pod["priorityClassName"] = self._spec.priority_class_name
        main = {
            "name": MAIN,
            "image": self._options.image,
            "env": self._environment(kind),
            "volumeMounts": mounts,
            "securityContext": {**CONTAINER_SECURITY, "readOnlyRootFilesystem": True},
            **self._ports_and_probes(component, kind),
        }
        own = main_container(component.pod_template)
        if command := self._command(kind) if not own.keys() & {"command", "args"} else ():
            main["command"] = list(command)
        pod |= {"containers": [main], "volumes": volumes}
        return {"spec": pod}

    def _volumes(
        self, component: ComponentSpec, kind: str
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the volumes of a pod, and where the container `main` has them."""
        volumes: list[dict[str, Any]] = [
            {"name": "dynamo-home", "emptyDir": {}},
            {"name": "dynamo-tmp", "emptyDir": {}},
        ]
        mounts = [
            {"name": "dynamo-home", "mountPath": HOME},
            {"name": "dynamo-tmp", "mountPath": "/tmp"},  # noqa: S108 - a volume of the pod's own
        ]
        size = component.shared_memory_size
        if size is None and kind in WORKER_TYPES:
            size = self._options.shared_memory
        if size is not None and str(size) != "0":
            memory = {"medium": "Memory", "sizeLimit": str(size)}
            volumes.append({"name": "dynamo-shm", "emptyDir": memory})
            mounts.append({"name": "dynamo-shm", "mountPath": "/dev/shm"})  # noqa: S108
        if (cache := component.compilation_cache) is not None:
            claim = {"claimName": cache.pvc_name}
            volumes.append({"name": "dynamo-kernels", "persistentVolumeClaim": claim})
            path = cache.mount_path or f"{HOME}/.cache"
            mounts.append({"name": "dynamo-kernels", "mountPath": path})
        return volumes, mounts

    def template(self, component: ComponentSpec, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return the template of a component's pods."""
        own = component.pod_template
        if self._spec.env:
            graph_env = {"spec": {"containers": [{"name": MAIN, "env": self._spec.env}]}}
            defaults = merge(defaults, graph_env)
        result = merge(defaults, own)
        pod = result["spec"]
        for field in ("containers", "initContainers"):
            if field in pod:
                pod[field] = [
                    merge({"securityContext": CONTAINER_SECURITY}, box) for box in pod[field]
                ]
        labels = self._graph.component_labels(
            component.name, component.type or "worker", self._generation
        )
        metadata = dict(own.get("metadata") or {})
        metadata["labels"] = {
            **self._spec.labels, **(metadata.get("labels") or {}), **self._graph.labels(), **labels,
        }  # fmt: skip
        annotations = {**self._spec.annotations, **(metadata.get("annotations") or {})}
        if annotations:
            metadata["annotations"] = annotations
        return {**result, "metadata": metadata}

    def _command(self, kind: str) -> Sequence[str]:
        command = COMMANDS.get(kind, ())
        backend = self._spec.backend_framework
        if kind in WORKER_TYPES and backend:
            return (*command[:3], f"out={backend}", *command[3:])
        return command

    def _environment(self, kind: str) -> list[dict[str, Any]]:
        graph = self._graph
        namespace = dynamo_namespace(graph.namespace, graph.name, self._generation)
        secret = {"name": object_name(graph.name, "planes"), "key": "secret"}
        fields = {
            "POD_NAME": "metadata.name",
            "POD_NAMESPACE": "metadata.namespace",
            "POD_UID": "metadata.uid",
            "POD_IP": "status.podIP",
        }
        texts = {
            "HOME": HOME,
            "DYN_PARENT_DGD_K8S_NAME": graph.name,
            "DYN_PARENT_DGD_K8S_NAMESPACE": graph.namespace,
            "DYNAMO_RUNTIME__DISCOVERY": "kubernetes:",
            "DYNAMO_RUNTIME__NAMESPACE": namespace,
            "DYNAMO_RUNTIME__PLANE_HOST": "0.0.0.0",
            "DYNAMO_RUNTIME__PUBLIC_HOST": "$(POD_IP)",
            "DYNAMO_RUNTIME__STATUS_HOST": "0.0.0.0",
            "DYNAMO_RUNTIME__STATUS_PORT": str(STATUS_PORT),
        }
        if kind == "frontend":
            texts["DYNAMO_SERVER__HTTP_HOST"] = "0.0.0.0"
        if kind == "planner":
            texts["DYNAMO_PLANNER__CONNECTOR"] = "kubernetes"
        return [
            *({"name": n, "valueFrom": {"fieldRef": {"fieldPath": p}}} for n, p in fields.items()),
            *({"name": name, "value": text} for name, text in texts.items()),
            {"name": "DYNAMO_SECURITY__SECRET", "valueFrom": {"secretKeyRef": secret}},
        ]

    def _ports_and_probes(self, component: ComponentSpec, kind: str) -> dict[str, Any]:
        ports = [{"name": "status", "containerPort": STATUS_PORT}]
        port = STATUS_PORT
        if kind == "frontend":
            port = http_port(self._spec, component)
            ports.insert(0, {"name": "http", "containerPort": port})

        def probe(path: str, period_s: int, failures: int) -> dict[str, Any]:
            get = {"path": path, "port": port}
            return {
                "httpGet": get,
                "periodSeconds": period_s,
                "timeoutSeconds": 5,
                "failureThreshold": failures,
            }

        return {
            "ports": ports,
            "startupProbe": probe("/live", 2, START_LIMIT_S // 2),
            "livenessProbe": probe("/live", 10, 6),
            "readinessProbe": probe("/ready", 2, 2),
        }

    def _drain_s(self, component: ComponentSpec) -> int:
        text = variable(self._spec, component, "DYNAMO_RUNTIME__DRAIN_S")
        text = text or argument(component, "--drain")
        try:
            return int(float(text)) if text else self._options.drain_s
        except ValueError:
            return self._options.drain_s


def main_container(template: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the container `main` of a user's template; empty without one."""
    containers = (template.get("spec") or {}).get("containers") or ()
    return next((box for box in containers if box.get("name") == MAIN), {})


def variable(spec: GraphSpec, component: ComponentSpec, name: str) -> str:
    """Return the value of an environment variable that the user wrote; "" without one."""
    rows = [*spec.env, *(main_container(component.pod_template).get("env") or ())]
    values = [row.get("value") for row in rows if row.get("name") == name]
    return str(values[-1]) if values and values[-1] is not None else ""


def argument(component: ComponentSpec, flag: str) -> str:
    """Return the value of a flag in the arguments of the container `main`; "" without it."""
    main = main_container(component.pod_template)
    words = [str(word) for word in (*(main.get("command") or ()), *(main.get("args") or ()))]
    for number, word in enumerate(words):
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
        if word == flag and number + 1 < len(words):
            return words[number + 1]
    return ""


def http_port(spec: GraphSpec, component: ComponentSpec) -> int:
    """Return the port at which a frontend serves."""
    text = argument(component, "--http-port") or variable(spec, component, "DYN_HTTP_PORT")
    text = text or variable(spec, component, "DYNAMO_SERVER__HTTP_PORT")
    return int(text) if text.isdecimal() else HTTP_PORT


def with_restart(template: Mapping[str, Any], restart: str) -> dict[str, Any]:
    """Return a template whose pods are those after a restart."""
    metadata = dict(template["metadata"])
    metadata["annotations"] = {**(metadata.get("annotations") or {}), RESTART: restart}
    return {**template, "metadata": metadata}


def with_gate(template: Mapping[str, Any]) -> dict[str, Any]:
    """Return a template whose pods are scheduled when the operator opens their gate."""
    pod = merge(template["spec"], {"schedulingGates": [{"name": GANG_GATE}]})
    return {**template, "spec": pod}
