"""The rules for a graph: what is wrong in its manifest, and what has no effect here.

The API server refuses most of this by the schema and its CEL rules. Older servers do not know CEL,
and services of v1alpha1 have no schema.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

import msgspec

from dynamo.core.errors import nearest_name_hint
from dynamo.operations.operator.generations import DEFAULT_BATCH, MAX_SURGE, MAX_UNAVAILABLE
from dynamo.operations.operator.kinds import (
    NAME,
    WORKER_TYPES,
    Backend,
    ComponentSpec,
    ComponentType,
    GraphSpec,
    RestartType,
)
from dynamo.operations.operator.names import GANG_GATE
from dynamo.operations.operator.shapes import PodTemplate, Variable
from dynamo.operations.operator.upgrade import (
    MAIN,
    SERVICE_FIELDS,
    Problem,
    shape_problem,
    split_error,
    upgrade,
)
from dynamo.operations.placement.quantity import parse_quantity

NO_EFFECT_COMPONENT = {
    "model_ref": "the worker's own arguments name its model",
    "frontend_sidecar": "frontends are pods of their own",
    "runtime_version_override": "all images speak the same protocol",
    "global_dynamo_namespace": "a graph has one namespace of its own",
    "roles": "the pods of a replica are alike",
    "dynamo_sidecar": "workers run in the container main",
    "provider_override": "topologyConstraint packs the pods",
    "epp_config": "there is no endpoint picker",
    "experimental": "nothing of it is known here",
}
NO_EFFECT_GRAPH = {
    "provider_override": "topologyConstraint packs the pods",
    "experimental": "nothing of it is known here",
}
NO_PODS = {"epp": "there is no endpoint picker; frontends route by themselves"}


_WRONG_CHOICE = re.compile(r"invalid enum value '(.*)'", re.DOTALL)
CHOICES = {
    "type": get_args(ComponentType),
    "backendFramework": get_args(Backend),
    "strategy.type": get_args(RestartType),
}
"""Ends of paths of fields with choices."""


class GraphCheck(msgspec.Struct):
    """A graph's spec as v1beta1, None if it cannot be read, with its problems and notes."""

    spec: GraphSpec | None
    problems: list[Problem] = []
    notes: list[Problem] = []
    paths: Mapping[str, str] = {}
    """Beginnings of paths, each with what the manifest has there."""

    def field(self, number: int, path: str) -> str:
        """Return the path of a component's field as its manifest has it."""
        return manifest_path(f"spec.components[{number}].{path}", self.paths)


def check_graph(spec: Mapping[str, Any]) -> GraphCheck:
    """Return the spec of a graph of either version, and all that is wrong with it."""
    services, components = spec.get("services"), spec.get("components")
    if (services is None) == (components is None):
        text = "exactly one of components (v1beta1) and services (v1alpha1) must be set"
        return GraphCheck(None, [Problem("spec", text)])
    check = GraphCheck(None)
    if services is not None:
        upgraded = upgrade(spec)
        spec = upgraded.spec
        check.problems, check.notes, check.paths = upgraded.problems, upgraded.notes, upgraded.paths
        if "components" not in spec:
            return check
    try:
        check.spec = msgspec.convert(spec, GraphSpec)
    except msgspec.ValidationError as error:
        check.problems.append(type_problem(error, check.paths))
        return check
    if shapes := list(_shape_problems(check, check.spec)):
        check.problems += shapes
        check.spec = None
        return check
    rules: Sequence[Callable[[GraphCheck, GraphSpec], Iterator[Problem]]] = (
        _unknown_fields(spec),
        _name_problems,
        _type_problems,
        _count_problems,
        _restart_problems,
        _domain_problems,
        _template_problems,
    )
    for rule in rules:
        check.problems += rule(check, check.spec)
    check.notes += _notes(check, check.spec)
    return check


def manifest_path(path: str, moved: Mapping[str, str]) -> str:
    """Return the path of a field as the manifest has it, for services of v1alpha1."""
    begins = [new for new in moved if path == new or path.startswith((f"{new}.", f"{new}["))]
    if not begins:
        return path
    longest = max(begins, key=len)
    return moved[longest] + path.removeprefix(longest)


def type_problem(error: msgspec.ValidationError, moved: Mapping[str, str]) -> Problem:
    """Return the problem of a value whose type or bound is wrong."""
    text, path = split_error(error)
    if wrong := _WRONG_CHOICE.fullmatch(text):
        end = max((end for end in CHOICES if path.endswith(f".{end}")), key=len)
        text += f"; {nearest_name_hint(wrong[1], CHOICES[end])}"
    return Problem(manifest_path(f"spec{path}", moved), text)


def _shape_problems(check: GraphCheck, spec: GraphSpec) -> Iterator[Problem]:
    for number, component in enumerate(spec.components):
        path = f"spec.components[{number}].podTemplate"
        if problem := shape_problem(component.pod_template, PodTemplate, path):
            yield Problem(manifest_path(problem.path, check.paths), problem.text)
    if problem := shape_problem(spec.env, list[Variable], "spec.env"):
        yield problem


def _unknown_fields(spec: Mapping[str, Any]) -> Callable[..., Iterator[Problem]]:
    """Return the rule for fields that a component or the spec does not have."""
    known = {field.encode_name for field in msgspec.structs.fields(ComponentSpec)}
    known_of_graph = {field.encode_name for field in msgspec.structs.fields(GraphSpec)}

    def rule(check: GraphCheck, _: GraphSpec) -> Iterator[Problem]:
        for name in sorted(spec.keys() - known_of_graph):
            hint = nearest_name_hint(name, sorted(known_of_graph))
            yield Problem(f"spec.{name}", f"unknown field; {hint}")
        for number, component in enumerate(spec["components"]):
            for name in sorted(
                component.keys() - known - (SERVICE_FIELDS if check.paths else set())
            ):
                hint = nearest_name_hint(name, sorted(known))
                yield Problem(check.field(number, name), f"unknown field; {hint}")

    return rule


def _name_problems(check: GraphCheck, spec: GraphSpec) -> Iterator[Problem]:
    seen: dict[str, str] = {}
    for number, component in enumerate(spec.components):
        name, path = component.name, check.field(number, "name")
        if not re.fullmatch(NAME, name):
            yield Problem(path, f"{name!r} must be letters, digits, and hyphens between them")
        if name.lower() in seen:
            other = seen[name.lower()]
            yield Problem(path, f"{name!r} differs from {other!r} in upper and lower case at most")
        seen[name.lower()] = name


def _type_problems(check: GraphCheck, spec: GraphSpec) -> Iterator[Problem]:
    pickers = [n for n, component in enumerate(spec.components) if component.type == "epp"]
    for number in pickers[1:]:
        yield Problem(check.field(number, "type"), "at most one component may have the type epp")
    for number, component in enumerate(spec.components):
        if component.epp_config is not None and component.type != "epp":
            text = f"may only be set with the type epp, not {component.type or 'without one'}"
            yield Problem(check.field(number, "eppConfig"), text)


def _count_problems(check: GraphCheck, spec: GraphSpec) -> Iterator[Problem]:
    for number, component in enumerate(spec.components):
        least = component.min_available
        if least is not None and component.replicas and least > component.replicas:
            text = f"{least} must not exceed the {component.replicas} replicas, unless these are 0"
            yield Problem(check.field(number, "minAvailable"), text)
        if component.shared_memory_size is not None:
            yield from _quantity(
                check.field(number, "sharedMemorySize"), component.shared_memory_size
            )


def _quantity(path: str, value: Any) -> Iterator[Problem]:
    try:
        amount = parse_quantity(value)
    except ValueError as error:
        yield Problem(path, str(error))
        return
    if amount < 0:
        yield Problem(path, f"{value!r} is negative")


def _restart_problems(_: GraphCheck, spec: GraphSpec) -> Iterator[Problem]:
    strategy = spec.restart and spec.restart.strategy
    names = [component.name for component in spec.components]
    for number, name in enumerate(strategy.order if strategy else ()):
        if name not in names:
            hint = nearest_name_hint(name, names)
            path = f"spec.restart.strategy.order[{number}]"
            yield Problem(path, f"no component is named {name!r}; {hint}")


def _domain_problems(check: GraphCheck, spec: GraphSpec) -> Iterator[Problem]:
    constraints = [part.topology_constraint for part in spec.components]
    text = "is missing; a label of nodes, or zone, block, rack, host"
    for number, constraint in enumerate(constraints):
        if constraint is not None and not constraint.pack_domain:
            yield Problem(check.field(number, "topologyConstraint.packDomain"), text)
    own = spec.topology_constraint
    if own is not None and not own.pack_domain and not any(constraints):
        yield Problem("spec.topologyConstraint.packDomain", text)


def _template_problems(check: GraphCheck, spec: GraphSpec) -> Iterator[Problem]:
    for number, component in enumerate(spec.components):
        pod = component.pod_template.get("spec") or {}
        path = check.field(number, "podTemplate.spec.containers")
        containers = pod.get("containers")
        if containers is None:
            continue
        names = [str(container.get("name", "")) for container in containers]
        if MAIN not in names:
            text = (
                f"none is named {MAIN}, which is the component's own; "
                f"there are: {', '.join(names) or 'none'}"
            )
            yield Problem(path, text)
        for index, container in enumerate(containers):
            resources = container.get("resources") or {}
            for part in ("limits", "requests"):
                for name, value in (resources.get(part) or {}).items():
                    if value is None:
                        continue
                    field = f"podTemplate.spec.containers[{index}].resources.{part}[{name}]"
                    yield from _quantity(check.field(number, field), value)


def annotation_notes(annotations: Mapping[str, str]) -> Iterator[Problem]:
    """Yield the annotations of a graph whose values have no effect."""
    for name in (MAX_SURGE, MAX_UNAVAILABLE):
        text = annotations.get(name)
        if text and not re.fullmatch("[0-9]+%?", text):
            why = f"{text!r} is no number and no share such as {DEFAULT_BATCH}, the default"
            yield Problem(f"metadata.annotations[{name}]", f"no effect: {why}")
    text = annotations.get(GANG_GATE, "true")
    if text.lower() not in ("true", "false"):
        why = f"{text!r} is neither true nor false"
        yield Problem(f"metadata.annotations[{GANG_GATE}]", f"no effect: {why}")


def _notes(check: GraphCheck, spec: GraphSpec) -> Iterator[Problem]:
    for attribute, reason in NO_EFFECT_GRAPH.items():
        if getattr(spec, attribute):
            yield Problem(f"spec.{_camel(attribute)}", f"no effect: {reason}")
    if spec.topology_constraint and spec.topology_constraint.cluster_topology_name:
        text = "no effect: packDomain is a label of nodes, or zone, block, rack, host"
        yield Problem("spec.topologyConstraint.clusterTopologyName", text)
    for number, component in enumerate(spec.components):
        for attribute, reason in NO_EFFECT_COMPONENT.items():
            if getattr(component, attribute):
                yield Problem(check.field(number, _camel(attribute)), f"no effect: {reason}")
        if component.topology_constraint and component.multinode:
            text = "no effect: Grove or LeaderWorkerSet places replicas of several nodes"
            yield Problem(check.field(number, "topologyConstraint"), text)
        if component.type in NO_PODS:
            yield Problem(check.field(number, "type"), f"no pods: {NO_PODS[component.type]}")
    yield from _planner_notes(check, spec)


def _planner_notes(check: GraphCheck, spec: GraphSpec) -> Iterator[Problem]:
    """Yield the planner of a graph whose workers it cannot scale."""
    workers = [part for part in spec.components if (part.type or "worker") in WORKER_TYPES]
    if any(part.scaling_adapter and part.scaling_adapter.enabled for part in workers):
        return
    field = "scalingAdapter: {enabled: true}" if check.paths else "scalingAdapter: {}"
    text = f"no effect: a planner scales workers with `{field}`, and none has it"
    for number, component in enumerate(spec.components):
        if component.type == "planner":
            yield Problem(check.field(number, "type"), text)


def _camel(attribute: str) -> str:
    first, *rest = attribute.split("_")
    return first + "".join(word.capitalize() for word in rest)


class Reference(msgspec.Struct, frozen=True):
    """An object that a pod needs, and the path of its name in the manifest."""

    kind: str
    name: str
    path: str


PRIORITY_CLASS = "PriorityClass"
_VOLUMES = (
    ("secret", "secretName", "Secret"),
    ("configMap", "name", "ConfigMap"),
    ("persistentVolumeClaim", "claimName", "PersistentVolumeClaim"),
)
_NAMES = {"serviceAccountName": "ServiceAccount", "priorityClassName": PRIORITY_CLASS}
_SOURCES = {
    "secretRef": "Secret", "configMapRef": "ConfigMap",
    "secretKeyRef": "Secret", "configMapKeyRef": "ConfigMap",
}  # fmt: skip


def references(check: GraphCheck) -> Iterator[Reference]:
    """Yield the Secrets, ConfigMaps, claims, accounts and classes that the pods cannot start
    without."""
    if check.spec and check.spec.priority_class_name:
        yield Reference(PRIORITY_CLASS, check.spec.priority_class_name, "spec.priorityClassName")
    for number, component in enumerate(check.spec.components if check.spec else ()):
        base = f"spec.components[{number}].podTemplate.spec"
        pod = component.pod_template.get("spec") or {}
        wanted = list(_pod_references(pod, base))
        if component.compilation_cache is not None:
            path = f"spec.components[{number}].compilationCache.pvcName"
            claim = component.compilation_cache.pvc_name
            wanted.append(Reference("PersistentVolumeClaim", claim, path))
        for reference in wanted:
            path = manifest_path(reference.path, check.paths)
            yield msgspec.structs.replace(reference, path=path)


def _pod_references(pod: Mapping[str, Any], base: str) -> Iterator[Reference]:
    for field, kind in _NAMES.items():
        if name := pod.get(field):
            yield Reference(kind, name, f"{base}.{field}")
    yield from _volume_references(pod, base)
    for index, container in enumerate(pod.get("containers") or ()):
        yield from _variable_references(container, f"{base}.containers[{index}]")


def _volume_references(pod: Mapping[str, Any], base: str) -> Iterator[Reference]:
    for index, volume in enumerate(pod.get("volumes") or ()):
        for source, field, kind in _VOLUMES:
            wanted = volume.get(source) or {}
            if wanted.get(field) and not wanted.get("optional"):
                path = f"{base}.volumes[{index}].{source}.{field}"
                yield Reference(kind, wanted[field], path)


def _variable_references(container: Mapping[str, Any], base: str) -> Iterator[Reference]:
    origins = [
        (f"{base}.envFrom[{row}]", origin)
        for row, origin in enumerate(container.get("envFrom") or ())
    ] + [
        (f"{base}.env[{row}].valueFrom", variable.get("valueFrom") or {})
        for row, variable in enumerate(container.get("env") or ())
    ]
    for place, origin in origins:
        for field, kind in _SOURCES.items():
            wanted = origin.get(field) or {}
            if wanted.get("name") and not wanted.get("optional"):
                yield Reference(kind, wanted["name"], f"{place}.{field}.name")
