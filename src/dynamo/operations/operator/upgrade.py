"""Graphs of v1alpha1 as v1beta1: services become components with pod templates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from dynamo.core.errors import nearest_name_hint
from dynamo.operations.operator.kinds import WORKER_TYPES
from dynamo.operations.placement.quantity import GPU

MAIN = "main"
POD_FIELDS = {"livenessProbe", "readinessProbe"}
SAME_FIELDS = {
    "replicas",
    "minAvailable",
    "multinode",
    "modelRef",
    "globalDynamoNamespace",
    "topologyConstraint",
    "eppConfig",
}
IGNORED_FIELDS = {
    "serviceName": "the key of the service is its name",
    "dynamoNamespace": "a graph has one namespace of its own",
    "autoscaling": "use scalingAdapter with an autoscaler",
    "ingress": "make an Ingress to the Service of the frontend",
    "checkpoint": "there are no checkpoints of containers",
    "failover": "there are no shadow engines",
    "gpuMemoryService": "there is no GPU memory service",
    "frontendSidecar": "frontends are pods of their own",
}
OWN_FIELDS = {
    "annotations",
    "labels",
    "componentType",
    "subComponentType",
    "resources",
    "envs",
    "envFromSecret",
    "volumeMounts",
    "sharedMemory",
    "extraPodMetadata",
    "extraPodSpec",
    "scalingAdapter",
}
SERVICE_FIELDS = POD_FIELDS | SAME_FIELDS | IGNORED_FIELDS.keys() | OWN_FIELDS


MAIN_CONTAINER = ".podTemplate.spec.containers[0]"
MOVED = {
    "": "",
    ".type": ".componentType",
    ".sharedMemorySize": ".sharedMemory.size",
    ".podTemplate.metadata": ".extraPodMetadata",
    ".podTemplate.spec": ".extraPodSpec",
    MAIN_CONTAINER: ".extraPodSpec.mainContainer",
    **{f"{MAIN_CONTAINER}.{field}": f".{field}" for field in sorted(POD_FIELDS)},
}
"""Beginnings of paths of a component, and what a service has there."""


OLD_COMMANDS = {"planner_sla": "dynamo.planner"}
"""Modules that manifests of v1alpha1 start, and those that have replaced them."""


class Problem(msgspec.Struct, frozen=True, order=True):
    """A field of a manifest that is wrong or has no effect, and why."""

    path: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"


class Upgrade(msgspec.Struct):
    """A spec of v1beta1. `paths` has the beginnings of paths in it, each with what the manifest has
    there."""

    spec: dict[str, Any]
    problems: list[Problem] = []
    notes: list[Problem] = []
    paths: dict[str, str] = {}


def upgrade(spec: Mapping[str, Any]) -> Upgrade:
    """Return a spec with `services` as one with `components`. A value of a wrong type is a problem
    and left out."""
    result = Upgrade({key: spec[key] for key in spec if key not in {"services", "envs", "pvcs"}})
    if spec.get("envs"):
        result.spec["env"] = [*spec["envs"], *spec.get("env", ())]
    result.notes += [
        Problem(f"spec.pvcs[{number}].create", "claims are not made; make this one yourself")
        for number, claim in enumerate(spec.get("pvcs") or ())
        if claim.get("create")
    ]
    components = []
    for number, (name, service) in enumerate((spec.get("services") or {}).items()):
        path, place = f"spec.services.{name}", f"spec.components[{number}]"
        result.paths |= {f"{place}{new}": f"{path}{old}" for new, old in MOVED.items()}
        components.append(_ServiceUpgrade(name, service, path, place, result).component())
    result.spec["components"] = components
    return result


class _ServiceUpgrade:
    """The upgrade of one service."""

    def __init__(
        self, name: str, service: Mapping[str, Any], path: str, place: str, result: Upgrade
    ) -> None:
        self._name = name
        self._path = path
        self._main = f"{place}{MAIN_CONTAINER}"
        self._result = result
        self._service = {key: value for key, value in service.items() if value is not None}

    def component(self) -> dict[str, Any]:
        """Return the component."""
        service = self._service
        for field in sorted(service.keys() - SERVICE_FIELDS):
            hint = nearest_name_hint(field, sorted(SERVICE_FIELDS))
            self._problem(field, f"unknown field; {hint}")
        for field in sorted(service.keys() & IGNORED_FIELDS.keys()):
            text = f"no effect: {IGNORED_FIELDS[field]}"
            self._result.notes.append(Problem(f"{self._path}.{field}", text))
        component: dict[str, Any] = {"name": self._name}
        if kind := self._type():
            component["type"] = kind
        component |= {field: service[field] for field in SAME_FIELDS & service.keys()}
        if self._mapping("scalingAdapter").get("enabled"):
            component["scalingAdapter"] = {}
        shared = self._mapping("sharedMemory")
        if shared.get("disabled"):
            component["sharedMemorySize"] = "0"
        elif "size" in shared:
            component["sharedMemorySize"] = shared["size"]
        template = self._pod_template()
        for number, mount in enumerate(self._list("volumeMounts")):
            if mount.get("useAsCompilationCache"):
                claim = {"pvcName": mount["name"], "mountPath": mount.get("mountPoint", "")}
                component["compilationCache"] = {key: text for key, text in claim.items() if text}
            elif not mount.get("mountPoint"):
                self._problem(f"volumeMounts[{number}].mountPoint", "is missing")
        if template:
            component["podTemplate"] = template
        return component

    def _type(self) -> str:
        kind, part = (self._text(field) for field in ("componentType", "subComponentType"))
        return part if kind == "worker" and part in WORKER_TYPES else kind

    def _pod_template(self) -> dict[str, Any]:
        extra = dict(self._mapping("extraPodSpec"))
        main = {"name": MAIN, **(extra.pop("mainContainer", None) or {})}
        others = [box for box in extra.pop("containers", None) or () if box.get("name") != MAIN]
        if envs := self._list("envs"):
            for row in range(len(envs)):
                self._result.paths[f"{self._main}.env[{row}]"] = f"{self._path}.envs[{row}]"
            main["env"] = [*envs, *main.get("env", ())]
        if secret := self._text("envFromSecret"):
            row = len(main.get("envFrom", ()))
            place = f"{self._main}.envFrom[{row}].secretRef.name"
            self._result.paths[place] = f"{self._path}.envFromSecret"
            main["envFrom"] = [*main.get("envFrom", ()), {"secretRef": {"name": secret}}]
        if resources := self._resources():
            main["resources"] = {**main.get("resources", {}), **resources}
        main |= {field: self._service[field] for field in POD_FIELDS & self._service.keys()}
        self._add_mounts(main, extra)
        if "command" in main:
            main["command"] = [OLD_COMMANDS.get(word, word) for word in main["command"]]
        metadata: dict[str, Any] = {}
        for field in ("annotations", "labels"):
            own = {**self._mapping(field), **self._mapping("extraPodMetadata").get(field, {})}
            if own:
                metadata[field] = own
        spec = {**extra, "containers": [main, *others]}
        bare = main == {"name": MAIN} and not others and not extra
        return {**({"metadata": metadata} if metadata else {}), **({} if bare else {"spec": spec})}

    def _add_mounts(self, main: dict[str, Any], pod: dict[str, Any]) -> None:
        """Mount claims, which v1alpha1 names instead of volumes."""
        for mount in self._list("volumeMounts"):
            if mount.get("useAsCompilationCache") or not mount.get("mountPoint"):
                continue
            name = mount["name"]
            row = {"name": name, "mountPath": mount["mountPoint"]}
            main["volumeMounts"] = [*main.get("volumeMounts", ()), row]
            volumes = list(pod.get("volumes", ()))
            if not any(volume.get("name") == name for volume in volumes):
                claim = {"name": name, "persistentVolumeClaim": {"claimName": name}}
                pod["volumes"] = [*volumes, claim]

    def _resources(self) -> dict[str, Any]:
        resources = self._mapping("resources")
        result = {
            name: self._resource_item(resources[name], f"resources.{name}")
            for name in ("limits", "requests")
            if resources.get(name)
        }
        if claims := resources.get("claims"):
            result["claims"] = claims
        return result

    def _resource_item(self, item: Mapping[str, Any], field: str) -> dict[str, Any]:
        known: dict[str, Callable[[Any], dict[str, Any]]] = {
            "cpu": lambda amount: {"cpu": amount},
            "memory": lambda amount: {"memory": amount},
            "gpu": lambda amount: {item.get("gpuType") or GPU: amount},
            "gpuType": lambda _: {},
            "custom": dict,
        }
        result: dict[str, Any] = {}
        for name, amount in item.items():
            if name in known:
                added = known[name](amount)
                result |= added
                old = f"{self._path}.{field}.{name}"
                self._result.paths |= {f"{self._main}.{field}[{key}]": old for key in added}
            else:
                hint = nearest_name_hint(name, known)
                self._problem(f"{field}.{name}", f"unknown field; {hint}")
        return result

    def _mapping(self, field: str) -> Mapping[str, Any]:
        return self._typed(field, dict, "an object", {})  # type: ignore[no-any-return]

    def _list(self, field: str) -> list[Mapping[str, Any]]:
        return self._typed(field, list, "a list", [])  # type: ignore[no-any-return]

    def _text(self, field: str) -> str:
        return self._typed(field, str, "a text", "")  # type: ignore[no-any-return]

    def _typed(self, field: str, kind: type, noun: str, default: Any) -> Any:
        value = self._service.get(field, default)
        if isinstance(value, kind):
            return value
        self._problem(field, f"must be {noun}, not {msgspec.json.encode(value).decode()}")
        return default

    def _problem(self, field: str, text: str) -> None:
        problem = Problem(f"{self._path}.{field}", text)
        if problem not in self._result.problems:
            self._result.problems.append(problem)
