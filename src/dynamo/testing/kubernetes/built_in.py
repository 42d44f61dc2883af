"""Built-in kinds: first states, defaults, immutable fields."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator
from typing import Any

from dynamo.testing.kubernetes.failures import WrongField
from dynamo.testing.kubernetes.kinds import Kind, Object
from dynamo.testing.kubernetes.selectors import structured_selector

_QUANTITY = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+|[KMGTPE]i|[numkMGTPE])?")
_LABEL = re.compile("(([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9])?")
_SCALES = {
    "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60,
}  # fmt: skip
_POD_DEFAULTS = {
    "restartPolicy": "Always",
    "terminationGracePeriodSeconds": 30,
    "dnsPolicy": "ClusterFirst",
    "schedulerName": "default-scheduler",
    "securityContext": {},
}
_CONTAINER_DEFAULTS = {
    "terminationMessagePath": "/dev/termination-log",
    "terminationMessagePolicy": "File",
    "imagePullPolicy": "IfNotPresent",
    "resources": {},
}
_PROBE_DEFAULTS = {
    "timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3,
}  # fmt: skip
_DEPLOYMENT_DEFAULTS = {
    "replicas": 1,
    "revisionHistoryLimit": 10,
    "progressDeadlineSeconds": 600,
    "strategy": {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxUnavailable": "25%", "maxSurge": "25%"},
    },
}


def quantity(value: Any) -> float:
    """Return the number that a quantity such as "500m" or "1Gi" stands for. Raises `ValueError`."""
    text = str(value)
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(text)
    suffix = match[2] or ""
    if suffix[:1] in ("e", "E") and len(suffix) > 1 and suffix[1:] != "i":
        return float(text)
    return float(match[1]) * _SCALES.get(suffix, 1)


def initial(kind: Kind, item: Object, now: str) -> Object:
    """Return a new object in its first state: without a status, except that of pods."""
    if not kind.has_status:
        return item
    item.pop("status", None)
    if kind.id == "pods":
        item["status"] = {"phase": "Pending"}
    elif kind.id == "namespaces":
        item["status"] = {"phase": "Active"}
    elif kind.id == "customresourcedefinitions.apiextensions.k8s.io":
        done = ("NamesAccepted", "NoConflicts"), ("Established", "InitialNamesAccepted")
        item["status"] = {
            "conditions": [
                {"type": name, "status": "True", "reason": reason, "lastTransitionTime": now,
                 "message": ""}
                for name, reason in done
            ],
            "acceptedNames": item["spec"]["names"],
            "storedVersions": [v["name"] for v in item["spec"]["versions"] if v.get("storage")],
        }  # fmt: skip
    return item


def deletion_grace_s(kind: Kind, item: Object, options: Object) -> int:
    """Return the seconds that a deleted object stays: only bound pods that have not ended do."""
    if kind.id != "pods" or not item["spec"].get("nodeName"):
        return 0
    if item.get("status", {}).get("phase") in ("Succeeded", "Failed"):
        return 0
    wanted = options.get("gracePeriodSeconds")
    return int(item["spec"]["terminationGracePeriodSeconds"] if wanted is None else wanted)


def fill_defaults(kind: Kind, item: Object) -> Object:
    """Return a built-in object with its defaults."""
    if kind.id == "secrets":
        return _secret_defaults(item)
    spec = item.get("spec")
    if not isinstance(spec, dict):
        return item
    if kind.id == "pods":
        return item | {"spec": {"serviceAccountName": "default"} | _pod_defaults(spec)}
    if kind.id in ("deployments.apps", "replicasets.apps", "statefulsets.apps", "jobs.batch"):
        defaults = _DEPLOYMENT_DEFAULTS if kind.id == "deployments.apps" else {"replicas": 1}
        defaults = {} if kind.id == "jobs.batch" else defaults
        spec = {**defaults, **spec}
        template = spec.get("template")
        if isinstance(template, dict) and isinstance(template.get("spec"), dict):
            spec["template"] = template | {"spec": _pod_defaults(template["spec"])}
        return item | {"spec": spec}
    if kind.id == "services":
        return item | {"spec": _service_defaults(item["metadata"], spec)}
    return item


def _secret_defaults(item: Object) -> Object:
    texts = item.pop("stringData", None) or {}
    data = {name: base64.b64encode(str(text).encode()).decode() for name, text in texts.items()}
    return {"type": "Opaque", **item, "data": (item.get("data") or {}) | data}


def _pod_defaults(spec: Object) -> Object:
    filled = {**_POD_DEFAULTS, **spec}
    for field in ("containers", "initContainers"):
        if isinstance(spec.get(field), list):
            filled[field] = [_container_defaults(item) for item in spec[field]]
    return filled


def _container_defaults(container: Object) -> Object:
    filled = {**_CONTAINER_DEFAULTS, **container}
    if filled.get("image", "").endswith(":latest") or ":" not in filled.get("image", ":"):
        filled["imagePullPolicy"] = container.get("imagePullPolicy", "Always")
    if "ports" in filled:
        filled["ports"] = [{"protocol": "TCP", **port} for port in filled["ports"]]
    limits = filled["resources"].get("limits")
    if limits:
        requests = {**limits, **filled["resources"].get("requests", {})}
        filled["resources"] = {**filled["resources"], "requests": requests}
    for name in ("livenessProbe", "readinessProbe", "startupProbe"):
        if name in filled:
            probe = {**_PROBE_DEFAULTS, **filled[name]}
            if "httpGet" in probe:
                probe["httpGet"] = {"path": "/", "scheme": "HTTP", **probe["httpGet"]}
            filled[name] = probe
    return filled


def _service_defaults(metadata: Object, spec: Object) -> Object:
    filled = {"type": "ClusterIP", "sessionAffinity": "None", **spec}
    if "clusterIP" not in filled and filled["type"] != "ExternalName":
        high, middle, low = bytes.fromhex(str(metadata.get("uid", "100000"))[:6])
        filled["clusterIP"] = f"10.{128 + high % 126}.{middle}.{low}"
    filled["ports"] = [
        {"protocol": "TCP", "targetPort": port.get("port"), **port}
        for port in spec.get("ports", ())
    ]
    return filled


def check(kind: Kind, item: Object, old: Object | None) -> Iterator[WrongField]:
    """Yield what is wrong with a built-in object, or with its change."""
    spec = item.get("spec")
    before = (old or {}).get("spec") or {}
    yield from _check_labels(item["metadata"], "metadata.labels")
    if not isinstance(spec, dict):
        return
    if kind.id == "pods":
        if old is None:
            yield from check_pod(spec, "spec")
        else:
            yield from _check_pod_change(spec, before)
    elif kind.id in ("deployments.apps", "replicasets.apps"):
        selector, template = spec.get("selector"), spec.get("template") or {}
        if not selector:
            yield WrongField("spec.selector", "FieldValueRequired", "Required value")
        if old is not None and before.get("selector") != selector:
            text = "Invalid value: field is immutable"
            yield WrongField("spec.selector", "FieldValueInvalid", text)
        yield from _check_labels(template.get("metadata") or {}, "spec.template.labels")
        labels = (template.get("metadata") or {}).get("labels") or {}
        if selector and not structured_selector(selector)(labels):
            text = "Invalid value: `selector` does not match template `labels`"
            yield WrongField("spec.template.metadata.labels", "FieldValueInvalid", text)
        yield from check_pod(template.get("spec") or {}, "spec.template.spec")
    elif kind.id == "services" and before.get("clusterIP") not in (None, spec.get("clusterIP")):
        text = "Invalid value: may not change once set"
        yield WrongField("spec.clusterIP", "FieldValueInvalid", text)
    replicas = spec.get("replicas", 0)
    if isinstance(replicas, int) and replicas < 0:
        text = f"Invalid value: {replicas}: must be greater than or equal to 0"
        yield WrongField("spec.replicas", "FieldValueInvalid", text)


def check_pod(spec: Object, path: str) -> Iterator[WrongField]:
    """Yield what is wrong with a pod's spec."""
    if not spec.get("containers"):
        yield WrongField(f"{path}.containers", "FieldValueRequired", "Required value")
    volumes = {volume.get("name") for volume in spec.get("volumes") or ()}
    seen = set[str]()
    for index, container in enumerate(spec.get("containers") or ()):
        below = f"{path}.containers[{index}]"
        for field in ("name", "image"):
            if not container.get(field):
                yield WrongField(f"{below}.{field}", "FieldValueRequired", "Required value")
        if container.get("name") in seen:
            text = f'Duplicate value: "{container["name"]}"'
            yield WrongField(f"{below}.name", "FieldValueDuplicate", text)
        seen.add(container.get("name", ""))
        for number, mount in enumerate(container.get("volumeMounts") or ()):
            if mount.get("name") not in volumes:
                text = f'Not found: "{mount.get("name")}"'
                yield WrongField(f"{below}.volumeMounts[{number}].name", "FieldValueNotFound", text)
        for number, port in enumerate(container.get("ports") or ()):
            if not 1 <= port["containerPort"] <= 65535:
                text = f"Invalid value: {port['containerPort']}: must be between 1 and 65535, "
                where = f"{below}.ports[{number}].containerPort"
                yield WrongField(where, "FieldValueInvalid", f"{text}inclusive")
        yield from _check_resources(container.get("resources") or {}, f"{below}.resources")
    policy = spec.get("restartPolicy", "Always")
    if policy not in (choices := ("Always", "OnFailure", "Never")):
        yield _unsupported(f"{path}.restartPolicy", policy, choices)


def _check_labels(metadata: Object, path: str) -> Iterator[WrongField]:
    for value in (metadata.get("labels") or {}).values():
        if not _LABEL.fullmatch(value):
            text = (
                f'Invalid value: "{value}": a valid label must be an empty string or consist of '
                "alphanumeric characters, '-', '_' or '.', and must start and end with an "
                "alphanumeric character"
            )
            yield WrongField(path, "FieldValueInvalid", text)


def _check_resources(resources: Object, path: str) -> Iterator[WrongField]:
    numbers: dict[tuple[str, str], float] = {}
    for group in ("limits", "requests"):
        for name, value in (resources.get(group) or {}).items():
            below = f"{path}.{group}[{name}]"
            try:
                numbers[group, name] = quantity(value)
            except ValueError:
                text = (
                    f'Invalid value: "{value}": quantities must match the regular expression '
                    "'^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
                )
                yield WrongField(below, "FieldValueInvalid", text)
                continue
            if numbers[group, name] < 0:
                text = f'Invalid value: "{value}": must be greater than or equal to 0'
                yield WrongField(below, "FieldValueInvalid", text)
    for (group, name), value in numbers.items():
        limit = numbers.get(("limits", name))
        if group == "requests" and limit is not None and value > limit:
            shown = resources["requests"][name]
            text = f'Invalid value: "{shown}": must be less than or equal to {name} limit of '
            text += str(resources["limits"][name])
            yield WrongField(f"{path}.requests", "FieldValueInvalid", text)


def _check_pod_change(spec: Object, before: Object) -> Iterator[WrongField]:
    """Only images, tolerations, gates, and what narrows the places of a gated pod may change."""
    gated = bool(before.get("schedulingGates"))
    free = {"nodeName", "tolerations", "activeDeadlineSeconds", "schedulingGates", "containers"}
    if gated:
        free |= {"nodeSelector", "affinity"}
    old_gates = [gate["name"] for gate in before.get("schedulingGates") or ()]
    for index, gate in enumerate(spec.get("schedulingGates") or ()):
        if gate["name"] not in old_gates:
            text = "Forbidden: only deletion is allowed, but found new scheduling gate "
            text += f"'{gate['name']}'"
            yield WrongField(f"spec.schedulingGates[{index}].name", "FieldValueForbidden", text)
    changed = sorted(f for f in spec.keys() | before.keys() if spec.get(f) != before.get(f))
    if "containers" in changed and _shapes(spec) == _shapes(before):
        changed.remove("containers")
    if "containers" in changed or not free.issuperset(changed):
        text = (
            "Forbidden: pod updates may not change fields other than `spec.containers[*].image`,"
            "`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only "
            "additions to existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to "
            "be set to 1 if it was previously negative)"
        )
        yield WrongField("spec", "FieldValueForbidden", text)


def _shapes(spec: Object) -> list[Object]:
    return [{k: v for k, v in c.items() if k != "image"} for c in spec.get("containers") or ()]


def _unsupported(path: str, value: Any, choices: Iterable[str]) -> WrongField:
    listed = ", ".join(f'"{choice}"' for choice in choices)
    text = f'Unsupported value: "{value}": supported values: {listed}'
    return WrongField(path, "FieldValueNotSupported", text)
