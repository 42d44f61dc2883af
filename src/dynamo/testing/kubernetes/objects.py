"""Reads and writes of objects, with what an API server does about them: names, versions, defaults,
validation, owners of fields, subresources, finalizers."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, NamedTuple

from dynamo.core.clock import Clock
from dynamo.testing.kubernetes import built_in, ownership, patches, rules
from dynamo.testing.kubernetes.failures import ApiFailure, WrongField, invalid, not_found
from dynamo.testing.kubernetes.kinds import BUILT_IN, Kind, Object
from dynamo.testing.kubernetes.published import published_schema
from dynamo.testing.kubernetes.schema import fill_defaults, prune, validate
from dynamo.testing.kubernetes.selectors import get_path
from dynamo.testing.kubernetes.store import ClusterStore, Key

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_SERVER_FIELDS = ("uid", "creationTimestamp", "generation", "selfLink", "deletionTimestamp",
                  "deletionGracePeriodSeconds")  # fmt: skip


class Write(NamedTuple):
    """How a write is made. `warnings` gets what the client is told beside the answer."""

    manager: str = "kube-controller-manager"
    dry_run: bool = False
    force: bool = False
    validation: str = "Warn"
    tracked: bool = True
    warnings: list[str] | None = None


class Target(NamedTuple):
    """The target of a request: a kind in a version, an object, a subresource."""

    kind: Kind
    version: str
    key: Key
    subresource: str = ""


DEFINITIONS = "customresourcedefinitions.apiextensions.k8s.io"
INTERNAL = Write(tracked=False)
"""Writes of the cluster's own controllers."""


class ClusterObjects:
    """The objects of a cluster. Methods raise `ApiFailure`."""

    def __init__(self, store: ClusterStore, clock: Clock) -> None:
        self.store = store
        self.kinds: dict[str, Kind] = {kind.id: kind for kind in BUILT_IN}
        self._clock = clock

    def now(self) -> str:
        """Return the time as Kubernetes writes it."""
        return datetime.fromtimestamp(self._clock.wall(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def target(self, kind: str, namespace: str, name: str, subresource: str = "") -> Target:
        """Return the target for a kind by its id, in the version that is stored."""
        item = self.kinds[kind]
        return Target(item, item.versions[0], (namespace, name), subresource)

    def read(self, target: Target) -> Object:
        """Return an object in the version of the target."""
        item = self.store.get(target.kind.id, target.key)
        if item is None:
            raise not_found(target.kind.group, target.kind.plural, target.key[1])
        return self.in_version(target, item)

    def in_version(self, target: Target, item: Object) -> Object:
        """Return an object under the `apiVersion` of the target."""
        api_version = target.kind.api_version(target.version)
        if item.get("apiVersion") == api_version:
            return item
        return {**item, "apiVersion": api_version, "kind": target.kind.name}

    def create(self, target: Target, body: Object, write: Write = INTERNAL) -> Object:
        """Create an object and return it."""
        kind = target.kind
        item = self._checked_body(target, body)
        metadata = {k: v for k, v in item["metadata"].items() if k not in _SERVER_FIELDS}
        if "name" not in metadata and "generateName" in metadata:
            metadata["name"] = f"{metadata['generateName']}{uuid.uuid4().hex[:5]}"
        name = metadata.get("name", "")
        if not _NAME.fullmatch(name) and kind.group != "rbac.authorization.k8s.io":
            raise invalid(kind.group, kind.name, name, [_wrong_name(name)])
        key = (target.key[0], name)
        if kind.namespaced:
            metadata["namespace"] = key[0]
            if self.store.get("namespaces", ("", key[0])) is None:
                raise not_found("", "namespaces", key[0])
        if self.store.get(kind.id, key) is not None:
            text = f'{kind.id} "{name}" already exists'
            about = (kind.group, kind.plural, name)
            raise ApiFailure(409, text, "AlreadyExists", about=about)
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": self.now(), "generation": 1}
        item["metadata"] = {k: v for k, v in metadata.items() if v not in (None, {}, [])}
        item["metadata"].pop("resourceVersion", None)
        item = built_in.initial(kind, item, self.now())
        item = self._reviewed(target._replace(key=key), item, None, write)
        return self._put(target._replace(key=key), None, item, write)

    def replace(self, target: Target, body: Object, write: Write = INTERNAL) -> Object:
        """Replace an object, or what its subresource has, and return it."""
        old = self.read(target)
        item = self._checked_body(target, body)
        metadata = item["metadata"]
        for field, shown in (("uid", "Precondition failed: UID"), ("resourceVersion", "")):
            if metadata.get(field) not in (None, "", old["metadata"][field]):
                raise self._conflict(target, shown)
        if target.subresource == "scale":
            return self._replace_scale(target, old, body, write)
        metadata = {k: v for k, v in metadata.items() if k not in _SERVER_FIELDS}
        metadata["resourceVersion"] = old["metadata"]["resourceVersion"]
        metadata |= {f: old["metadata"][f] for f in _SERVER_FIELDS if f in old["metadata"]}
        item["metadata"] = {k: v for k, v in metadata.items() if v not in (None, {}, [])}
        if target.subresource == "status":
            item = {**old, "status": item.get("status")}
        elif target.kind.has_status:
            item["status"] = old.get("status")
        if item.get("status") is None:
            item.pop("status", None)
        item = self._reviewed(target, item, old, write)
        return self._put(target, old, item, write)

    def patch(self, target: Target, form: str, body: Any, write: Write = INTERNAL) -> Object:
        """Patch an object, or apply one, and return it. `form` is the patch's media type."""
        if form == "application/apply-patch+yaml":
            return self._apply(target, body, write)
        old = self.read(target)
        if target.subresource == "scale":
            old = self.scale_of(target, old)
        if form == "application/json-patch+json":
            item = patches.json_patch(old, body)
        elif form == "application/strategic-merge-patch+json":
            if target.kind.schemas:
                text = "the body of the request was in an unknown format - accepted media types"
                raise ApiFailure(415, f"{text} include: application/merge-patch+json")
            item = patches.strategic_merge(old, body)
        elif form == "application/merge-patch+json":
            item = patches.merge_patch(old, body)
        else:
            raise ApiFailure(415, f"the body of the request was in an unknown format: {form}")
        return self.replace(target, item, write)

    def delete(self, target: Target, options: Object, write: Write = INTERNAL) -> Object:
        """Delete an object, or mark it as deleted while something must be done before."""
        item = self.read(target)
        metadata = dict(item["metadata"])
        for field, value in (options.get("preconditions") or {}).items():
            if metadata.get(field) != value:
                text = f"Precondition failed: {field.upper()} in precondition: {value}"
                raise self._conflict(target, f"{text}, {field.upper()} in object meta: ")
        finalizers = list(metadata.get("finalizers") or ())
        policy = options.get("propagationPolicy")
        wanted = {"Foreground": "foregroundDeletion", "Orphan": "orphan"}.get(policy or "")
        if wanted and wanted not in finalizers:
            finalizers.append(wanted)
        grace = built_in.deletion_grace_s(target.kind, item, options)
        if write.dry_run:
            return item
        if not finalizers and grace == 0:
            return self.store.remove(target.kind.id, target.key)
        if "deletionTimestamp" not in metadata:
            metadata |= {"deletionTimestamp": self.now(), "deletionGracePeriodSeconds": grace}
        elif grace < metadata.get("deletionGracePeriodSeconds", 0):
            metadata["deletionGracePeriodSeconds"] = grace
        if finalizers:
            metadata["finalizers"] = finalizers
        if metadata == item["metadata"]:
            return item
        return self.store.put(target.kind.id, target.key, item | {"metadata": metadata})

    def scale_of(self, target: Target, item: Object) -> Object:
        """Return the `Scale` of an object."""
        if target.kind.scale is None:
            raise not_found(target.kind.group, target.kind.plural, f"{target.key[1]}/scale")
        wanted, present, selector = (
            get_path(item, path) if path else None for path in target.kind.scale
        )
        shown = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
        status: Object = {"replicas": present or 0}
        if isinstance(selector, dict):
            labels = selector.get("matchLabels") or {}
            selector = ",".join(f"{key}={value}" for key, value in labels.items())
        if not selector and target.kind.group == "apps":
            labels = get_path(item, ".spec.selector.matchLabels") or {}
            selector = ",".join(f"{key}={value}" for key, value in labels.items())
        if selector:
            status["selector"] = selector
        return {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": {k: v for k, v in item["metadata"].items() if k in shown},
            "spec": {"replicas": wanted or 0},
            "status": status,
        }

    def _replace_scale(self, target: Target, old: Object, body: Object, write: Write) -> Object:
        replicas = (body.get("spec") or {}).get("replicas", 0)
        if not isinstance(replicas, int) or replicas < 0:
            text = f"Invalid value: {replicas}: must be greater than or equal to 0"
            causes = [WrongField("spec.replicas", "FieldValueInvalid", text)]
            raise invalid("autoscaling", "Scale", target.key[1], causes)
        self.scale_of(target, old)
        path = (target.kind.scale or ("", "", ""))[0]
        patch: Any = replicas
        for part in reversed(path.strip(".").split(".")):
            patch = {part: patch}
        item = patches.merge_patch(old, patch)
        main = target._replace(subresource="")
        item = self._reviewed(main, item, old, write)
        return self.scale_of(target, self._put(target, old, item, write))

    def _apply(self, target: Target, body: Any, write: Write) -> Object:
        if not isinstance(body, dict):
            raise ApiFailure(400, "error decoding patch: the body is not an object")
        if (body.get("metadata") or {}).get("managedFields"):
            raise ApiFailure(400, "metadata.managedFields must be nil")
        metadata = {
            k: v for k, v in (body.get("metadata") or {}).items() if k not in _SERVER_FIELDS
        }
        body = body | {"metadata": metadata}
        api_version = target.kind.api_version(target.version)
        owner = (write.manager, "Apply", target.subresource, api_version)
        schema = target.kind.schemas.get(target.version)
        live = self.store.get(target.kind.id, target.key)
        if live is None:
            if target.subresource:
                raise not_found(target.kind.group, target.kind.plural, target.key[1])
            body["metadata"] = {"name": target.key[1]} | metadata
            _, owners = ownership.apply(owner, schema, {"metadata": {}}, body, force=True)
            item = self.create(target, body, write._replace(tracked=False, dry_run=True))
            item = self._with_owners(target, item, owners)
            return item if write.dry_run else self.store.put(target.kind.id, target.key, item)
        old = self.in_version(target, live)
        if metadata.get("resourceVersion") not in (None, "", old["metadata"]["resourceVersion"]):
            raise self._conflict(target, "")
        if target.subresource == "status":
            body = {name: part for name, part in body.items() if name == "status"}
        elif target.kind.has_status:
            body = {name: part for name, part in body.items() if name != "status"}
        item, owners = ownership.apply(owner, schema, old, body, force=write.force)
        item = self._reviewed(target, item, old, write)
        item = self._with_owners(target, item, owners)
        return self._put(target, old, item, write._replace(tracked=False))

    def _checked_body(self, target: Target, body: Any) -> Object:
        """Return a copy of a body whose kind and names are those of the request."""
        kind = target.kind
        if not isinstance(body, dict):
            raise ApiFailure(400, "the request's body is not an object")
        if target.subresource == "scale":
            return {**body, "metadata": dict(body.get("metadata") or {})}
        expected = kind.api_version(target.version), kind.name
        actual = body.get("apiVersion", expected[0]), body.get("kind", expected[1])
        if actual != expected:
            text = f"{actual[0]}, Kind={actual[1]} does not match {expected[0]}, Kind={expected[1]}"
            raise ApiFailure(400, f"the object provided is unrecognized: {text}")
        metadata = dict(body.get("metadata") or {})
        for field, wanted in (("namespace", target.key[0]), ("name", target.key[1])):
            if wanted and metadata.get(field) not in (None, "", wanted):
                text = f"the {field} of the object ({metadata[field]}) does not match the {field}"
                raise ApiFailure(400, f"{text} on the request ({wanted})")
            if wanted:
                metadata[field] = wanted
        return {**body, "apiVersion": expected[0], "kind": kind.name, "metadata": metadata}

    def _reviewed(self, target: Target, item: Object, old: Object | None, write: Write) -> Object:
        """Return an object with defaults, without unknown fields. Raises 422 for wrong ones."""
        kind = target.kind
        schema = kind.schemas.get(target.version)
        published = None if schema else published_schema(kind, target.version)
        dropped: list[str] = []
        if known := schema or published:
            item = prune(known, item, "", dropped, root=True)
            self._tell_unknown(dropped, write)
            item = fill_defaults(schema, item) if schema else item
        causes = list(validate(known, item, "")) if known else []
        if causes:
            pass
        elif schema:
            causes = list(rules.check(schema, item, old, ""))
        else:
            item = built_in.fill_defaults(kind, item)
            causes = list(built_in.check(kind, item, old))
        if not causes and kind.id == DEFINITIONS:
            causes = list(_wrong_rules(item))
        if causes:
            raise invalid(kind.group, kind.name, item["metadata"].get("name", ""), causes)
        return item

    def _tell_unknown(self, fields: list[str], write: Write) -> None:
        texts = [f'unknown field "{field}"' for field in fields]
        if texts and write.validation == "Strict":
            raise ApiFailure(400, f"strict decoding error: {', '.join(texts)}")
        if write.validation == "Warn" and write.warnings is not None:
            write.warnings.extend(texts)

    def _put(self, target: Target, old: Object | None, item: Object, write: Write) -> Object:
        """Write an object unless that changes nothing, and return it."""
        if old is not None:
            if _without_version(item) == _without_version(old):
                return old
            if _counted(target.kind, item) != _counted(target.kind, old):
                generation = old["metadata"].get("generation", 0) + 1
                item["metadata"] = item["metadata"] | {"generation": generation}
            metadata = item["metadata"]
            if "deletionTimestamp" in metadata and not metadata.get("finalizers"):
                ends = not metadata.get("deletionGracePeriodSeconds")
                if ends and not write.dry_run:
                    return self.store.remove(target.kind.id, target.key)
        if write.tracked:
            owner = (write.manager, "Update", target.subresource, item["apiVersion"])
            schema = target.kind.schemas.get(target.version)
            owners = ownership.take_ownership(owner, schema, old, item)
            item = self._with_owners(target, item, owners)
        if write.dry_run:
            return item
        return self.store.put(target.kind.id, target.key, item)

    def _with_owners(self, target: Target, item: Object, owners: Any) -> Object:
        present = ownership.leaves(target.kind.schemas.get(target.version), item)
        return ownership.write_owners(item, owners, present, self.now())

    def _conflict(self, target: Target, reason: str) -> ApiFailure:
        text = reason or (
            "the object has been modified; please apply your changes to the latest version and "
            "try again"
        )
        name = target.key[1]
        message = f'Operation cannot be fulfilled on {target.kind.id} "{name}": {text}'
        about = (target.kind.group, target.kind.plural, name)
        return ApiFailure(409, message, about=about)


def _wrong_name(name: str) -> WrongField:
    if not name:
        text = "Required value: name or generateName is required"
        return WrongField("metadata.name", "FieldValueRequired", text)
    text = (
        f'Invalid value: "{name}": a lowercase RFC 1123 subdomain must consist of lower case '
        "alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character"
    )
    return WrongField("metadata.name", "FieldValueInvalid", text)


def _wrong_rules(definition: Object) -> Iterable[WrongField]:
    for index, version in enumerate(definition["spec"]["versions"]):
        path = f"spec.versions[{index}].schema.openAPIV3Schema"
        schema = version.get("schema", {}).get("openAPIV3Schema", {})
        yield from rules.check_definition(schema, path, root=True)


def _without_version(item: Object) -> Object:
    metadata = {k: v for k, v in item["metadata"].items() if k != "resourceVersion"}
    return item | {"metadata": metadata}


def _counted(kind: Kind, item: Object) -> Object:
    """Return the part of an object whose changes count in its generation."""
    without = {"metadata", "apiVersion", "kind"} | ({"status"} if kind.has_status else set())
    return {name: part for name, part in item.items() if name not in without}
