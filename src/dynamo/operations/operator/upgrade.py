"""Graphs of v1alpha1 as v1beta1: services become components with pod templates."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from dynamo.core.errors import nearest_name_hint
from dynamo.operations.operator.kinds import WORKER_TYPES
from dynamo.operations.operator.shapes import Service, Variable
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


ALPHA_FIELDS = {
    "services": dict[str, dict[str, Any]],
    "envs": list[Variable],
    "pvcs": list[dict[str, Any]],
    "env": list[dict[str, Any]],
}
"""Fields of the spec that an upgrade reads, and their types."""


OLD_COMMANDS = {"planner_sla": "dynamo.planner"}
"""Modules that manifests of v1alpha1 start, and those that have replaced them."""


class Problem(msgspec.Struct, frozen=True, order=True):
    """A field of a manifest that is wrong or has no effect, and why."""

    path: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"


_MSGSPEC_PATH = re.compile(r"(.*?)(?: - at `\$(.*)`)?", re.DOTALL)


def shape_problem(value: Any, kind: Any, path: str) -> Problem | None:
    """Return the first field of `value` that has another type than `kind` has, at `path`."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        text, place = split_error(error)
        return Problem(f"{path}{place}", text)
    return None


def split_error(error: msgspec.ValidationError) -> tuple[str, str]:
    """Return the text of an error, and the path of its field behind the value itself."""
    match = _MSGSPEC_PATH.fullmatch(str(error))
    text, place = (match[1], match[2] or "") if match else (str(error), "")
    return text[:1].lower() + text[1:].replace(" | null", ""), place


class Upgrade(msgspec.Struct):
    """A spec of v1beta1. `paths` has the beginnings of paths in it, each with what the manifest has
    there."""

    spec: dict[str, Any]
    problems: list[Problem] = []
    notes: list[Problem] = []
    paths: dict[str, str] = {}


def upgrade(spec: Mapping[str, Any]) -> Upgrade:
    """Return a spec with `services` as one with `components`, and without either if a value has a
    wrong type."""
    result = Upgrade({key: spec[key] for key in spec if key not in {"services", "envs", "pvcs"}})
    for field, kind in ALPHA_FIELDS.items():
        if problem := shape_problem(spec.get(field), kind | None, f"spec.{field}"):
            result.problems.append(problem)
    if result.problems:
        return result
    if spec.get("envs"):
        result.spec["env"] = [*spec["envs"], *(spec.get("env") or ())]
    result.notes += [
        Problem(f"spec.pvcs[{number}].create", "claims are not made; make this one yourself")
        for number, claim in enumerate(spec.get("pvcs") or ())
        if claim.get("create")
    ]
    components: list[dict[str, Any]] = []
    for name, service in (spec.get("services") or {}).items():
        path, place = f"spec.services.{name}", f"spec.components[{len(components)}]"
        if problem := shape_problem(service, Service, path):
            result.problems.append(problem)
            continue
        result.paths |= {f"{place}{new}": f"{path}{old}" for new, old in MOVED.items()}
        components.append(_ServiceUpgrade(name, service, path, place, result).component())
    if len(components) == len(spec.get("services") or {}):
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
        self._volumes = f"{place}.podTemplate.spec.volumes"
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
        if self._get("scalingAdapter", {}).get("enabled"):
            component["scalingAdapter"] = {}
        shared = self._get("sharedMemory", {})
        if shared.get("disabled"):
            component["sharedMemorySize"] = "0"
        elif shared.get("size") is not None:
            component["sharedMemorySize"] = shared["size"]
        template = self._pod_template()
        for number, mount in enumerate(self._get("volumeMounts", [])):
            if mount.get("useAsCompilationCache"):
                claim = {"pvcName": mount["name"], "mountPath": mount.get("mountPoint")}
                component["compilationCache"] = {key: text for key, text in claim.items() if text}
            elif not mount.get("mountPoint"):
                self._problem(f"volumeMounts[{number}].mountPoint", "is missing")
        if template:
            component["podTemplate"] = template
        return component

    def _type(self) -> str:
        kind: str = self._get("componentType", "")
        part: str = self._get("subComponentType", "")
        if kind == "worker" and part in WORKER_TYPES:
            return part
        if part and part != kind:
            text = f"no effect: {part!r} with componentType {kind!r}; "
            text += "prefill and decode have one, with componentType 'worker'"
            self._result.notes.append(Problem(f"{self._path}.subComponentType", text))
        return kind

    def _pod_template(self) -> dict[str, Any]:
        extra = dict(self._get("extraPodSpec", {}))
        main = {"name": MAIN, **(extra.pop("mainContainer", None) or {})}
        others = [box for box in extra.pop("containers", None) or () if box.get("name") != MAIN]
        if envs := self._get("envs", []):
            for row in range(len(envs)):
                self._result.paths[f"{self._main}.env[{row}]"] = f"{self._path}.envs[{row}]"
            main["env"] = [*envs, *(main.get("env") or ())]
        if secret := self._get("envFromSecret", ""):
            row = len(main.get("envFrom") or ())
            place = f"{self._main}.envFrom[{row}].secretRef.name"
            self._result.paths[place] = f"{self._path}.envFromSecret"
            main["envFrom"] = [*(main.get("envFrom") or ()), {"secretRef": {"name": secret}}]
        if resources := self._resources():
            main["resources"] = {**(main.get("resources") or {}), **resources}
        main |= {field: self._service[field] for field in POD_FIELDS & self._service.keys()}
        self._add_mounts(main, extra)
        if main.get("command"):
            main["command"] = [OLD_COMMANDS.get(word, word) for word in main["command"]]
        metadata: dict[str, Any] = {}
        for field in ("annotations", "labels"):
            own = {**self._get(field, {}), **(self._get("extraPodMetadata", {}).get(field) or {})}
            if own:
                metadata[field] = own
        spec = {**extra, "containers": [main, *others]}
        bare = main == {"name": MAIN} and not others and not extra
        return {**({"metadata": metadata} if metadata else {}), **({} if bare else {"spec": spec})}

    def _add_mounts(self, main: dict[str, Any], pod: dict[str, Any]) -> None:
        """Mount claims, which v1alpha1 names instead of volumes."""
        for number, mount in enumerate(self._get("volumeMounts", [])):
            if mount.get("useAsCompilationCache") or not mount.get("mountPoint"):
                continue
            name = mount["name"]
            row = {"name": name, "mountPath": mount["mountPoint"]}
            main["volumeMounts"] = [*(main.get("volumeMounts") or ()), row]
            volumes = list(pod.get("volumes") or ())
            if not any(volume.get("name") == name for volume in volumes):
                claim = {"name": name, "persistentVolumeClaim": {"claimName": name}}
                pod["volumes"] = [*volumes, claim]
                for field in ("name", "persistentVolumeClaim.claimName"):
                    new = f"{self._volumes}[{len(volumes)}].{field}"
                    self._result.paths[new] = f"{self._path}.volumeMounts[{number}].name"

    def _resources(self) -> dict[str, Any]:
        resources = self._get("resources", {})
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
            if amount is None:
                continue
            if name in known:
                added = known[name](amount)
                result |= added
                old = f"{self._path}.{field}.{name}"
                self._result.paths |= {f"{self._main}.{field}[{key}]": old for key in added}
            else:
                hint = nearest_name_hint(name, known)
                self._problem(f"{field}.{name}", f"unknown field; {hint}")
        return result

    def _get(self, field: str, default: Any) -> Any:
        """Return a field's value, whose type is known to be right."""
        return self._service.get(field, default)

    def _problem(self, field: str, text: str) -> None:
        problem = Problem(f"{self._path}.{field}", text)
        if problem not in self._result.problems:
            self._result.problems.append(problem)
