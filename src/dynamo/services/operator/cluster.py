"""The objects of a cluster as the operator sees them, and its writes.

Kinds are followed by reflectors. The answer of a write counts until the reflector has it, so that
no write is repeated for want of its event.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlencode

import msgspec

from dynamo.communication.kubernetes.link import (
    CONFLICT,
    INVALID,
    JSON_PATCH,
    MERGE_PATCH,
    NOT_FOUND,
    AllowedStatuses,
    KubernetesLink,
)
from dynamo.communication.kubernetes.reflector import Metadata, ObjectChange, Reflector
from dynamo.core.errors import ConfigError, PlaneUnavailable, nearest_name_hint
from dynamo.core.tasks import BackgroundTasks
from dynamo.operations.operator.difference import lacks
from dynamo.operations.operator.kinds import ADAPTER, BETA, GRAPH, GROUP
from dynamo.operations.operator.names import APPLIED, GRAPH_LABEL, OPERATOR, bounded, digest
from dynamo.operations.operator.rules import PRIORITY_CLASS, Reference
from dynamo.operations.operator.upgrade import Problem
from dynamo.operations.operator.workloads import (
    API_VERSIONS,
    CLIQUE_SET,
    DEPLOYMENT,
    LEADER_SET,
    SCALING_GROUP,
)

Object = dict[str, Any]
APPLY: Final = "application/apply-patch+yaml"
RBAC = "rbac.authorization.k8s.io/v1"
PATHS: Final[Mapping[str, tuple[str, str]]] = {
    GRAPH: (f"{GROUP}/{BETA}", "dynamographdeployments"),
    ADAPTER: (f"{GROUP}/{BETA}", f"{ADAPTER.lower()}s"),
    DEPLOYMENT: (API_VERSIONS[DEPLOYMENT], "deployments"),
    "Pod": ("v1", "pods"),
    "Service": ("v1", "services"),
    "ServiceAccount": ("v1", "serviceaccounts"),
    "Role": (RBAC, "roles"),
    "RoleBinding": (RBAC, "rolebindings"),
    "PodDisruptionBudget": ("policy/v1", "poddisruptionbudgets"),
    "NetworkPolicy": ("networking.k8s.io/v1", "networkpolicies"),
    CLIQUE_SET: (API_VERSIONS[CLIQUE_SET], "podcliquesets"),
    SCALING_GROUP: (API_VERSIONS[CLIQUE_SET], "podcliquescalinggroups"),
    LEADER_SET: (API_VERSIONS[LEADER_SET], "leaderworkersets"),
}
UNFOLLOWED: Final[Mapping[str, tuple[str, str]]] = {
    "Secret": ("v1", "secrets"),
    "ConfigMap": ("v1", "configmaps"),
    "PersistentVolumeClaim": ("v1", "persistentvolumeclaims"),
    "Event": ("v1", "events"),
    "Node": ("v1", "nodes"),
    PRIORITY_CLASS: ("scheduling.k8s.io/v1", "priorityclasses"),
    "Lease": ("coordination.k8s.io/v1", "leases"),
}
OPTIONAL: Final = (CLIQUE_SET, SCALING_GROUP, LEADER_SET)
OLDER: Final[Mapping[str, str]] = {"policy/v1": "policy/v1beta1"}
"""Versions for servers that lack the newer one, with the same fields."""
CONCURRENT_WRITES: Final = 16
OLDEST_MINOR: Final = 20
GATES_MINOR: Final = 30
Owner = tuple[str, str]
"""Namespace, and label of the graph."""


def decode_object(data: bytes, kind: str, version: str) -> Object:
    """Decode an object, without the owners of its fields except those of an adapter. Objects in a
    list of a built-in kind do not tell their kind and version."""
    item: Object = {"kind": kind, "apiVersion": version, **msgspec.json.decode(data)}
    if kind != ADAPTER:
        item["metadata"].pop("managedFields", None)
    return item


def version_of(item: Object) -> int:
    """Return the resource version of an object."""
    return int(item["metadata"]["resourceVersion"])


class ClusterView:
    """Follows the kinds that matter, and writes. All methods raise `PlaneUnavailable`."""

    def __init__(
        self,
        link: KubernetesLink,
        namespace: str,
        on_owner: Callable[[Owner], None],
        may_write: Callable[[], bool],
    ) -> None:
        """`namespace`: only graphs of it; "": of all. `on_owner` is called with each graph of which
        something has changed."""
        self._link = link
        self._namespace = namespace
        self._on_owner = on_owner
        self._may_write = may_write
        self._reflectors: dict[str, Reflector[Object]] = {}
        self._written: dict[tuple[str, str], Object | None] = {}
        """The answers of writes, by kind and NAMESPACE/NAME; None for a deleted object."""
        self._owned: dict[Owner, dict[tuple[str, str], Object]] = {}
        self._owners: dict[tuple[str, str], Owner] = {}
        self._older: Mapping[str, str] = {}
        self.groups: frozenset[str] = frozenset()
        self._minor: int | None = None
        self._slots = asyncio.Semaphore(CONCURRENT_WRITES)

    @property
    def has_gates(self) -> bool:
        """Whether the API server has scheduling gates."""
        return (self._minor or 0) >= GATES_MINOR

    async def read_version(self) -> None:
        """Read the version of the API server. Raises `ConfigError` for one that is too old."""
        version = msgspec.json.decode(await self._link.request("GET", "/version"))
        digits = re.match(r"\d+", str(version.get("minor", "")))
        self._minor = int(digits[0]) if digits else 0
        if version.get("major") == "1" and digits and self._minor < OLDEST_MINOR:
            text = f"the API server is {version.get('gitVersion')}"
            raise ConfigError(text, hint="1.20 and newer are supported")

    async def start(self, tasks: BackgroundTasks) -> None:
        """Follow all kinds that the cluster serves, and return when they are listed."""
        if self._minor is None:
            await self.read_version()
        listed = msgspec.json.decode(await self._link.request("GET", "/apis"))
        self.groups = frozenset(group["name"] for group in listed["groups"])
        served = {row["groupVersion"] for group in listed["groups"] for row in group["versions"]}
        self._older = {new: old for new, old in OLDER.items() if new not in served}
        for kind, (version, _) in PATHS.items():
            if kind in OPTIONAL and version.partition("/")[0] not in self.groups:
                continue
            self._follow(kind, tasks)
        for reflector in self._reflectors.values():
            await reflector.listed.wait()

    def _follow(self, kind: str, tasks: BackgroundTasks) -> None:
        def on_changes(changes: Sequence[ObjectChange[Object]], after_outage: bool) -> None:
            if after_outage:
                self._forget_answers(kind)
            for change in changes:
                self._on_change(kind, change)

        version = self._served(PATHS[kind][0])

        def decode(metadata: Metadata, data: bytes) -> Object:
            del metadata
            return decode_object(data, kind, version)

        selector = "" if kind in (GRAPH, SCALING_GROUP) else GRAPH_LABEL
        path = self._path(kind, self._namespace)
        reflector = Reflector(self._link, path, decode, on_changes, selector=selector)
        self._reflectors[kind] = reflector
        tasks.start(reflector.run(), f"kubernetes {kind}")

    @property
    def connection_error(self) -> str:
        """Why the API server cannot be reached, or ""."""
        errors = (reflector.connection_error for reflector in self._reflectors.values())
        return next((error for error in errors if error), "")

    def _on_change(self, kind: str, change: ObjectChange[Object]) -> None:
        written = self._written.get((kind, change.key))
        if (
            change.value is None
            or written is None
            or version_of(written) <= version_of(change.value)
        ):
            self._written.pop((kind, change.key), None)
            self._put(kind, change.key, change.value)

    def _forget_answers(self, kind: str) -> None:
        """Trust the list alone, since a restored server counts versions from an older one."""
        for where in [where for where in self._written if where[0] == kind]:
            del self._written[where]
            self._put(kind, where[1], self._reflectors[kind].objects.get(where[1]))

    def _served(self, version: str) -> str:
        return self._older.get(version, version)

    def _path_of(self, kind: str, item: Mapping[str, Any]) -> str:
        metadata = item["metadata"]
        return f"{self._path(kind, metadata['namespace'])}/{metadata['name']}"

    def _path(self, kind: str, namespace: str) -> str:
        """Return the path of the objects of a kind, of all namespaces for ""."""
        version, plural = PATHS.get(kind) or UNFOLLOWED[kind]
        version = self._served(version)
        base = f"/apis/{version}" if "/" in version else f"/api/{version}"
        return f"{base}/namespaces/{namespace}/{plural}" if namespace else f"{base}/{plural}"

    def _put(self, kind: str, key: str, item: Object | None) -> None:
        """Note an object, or its end, and report the graph that it belongs to."""
        where = (kind, key)
        owner = self._owners.get(where)
        if item is not None:
            owner = self._owners[where] = self._owner_of(kind, item)
            self._owned.setdefault(owner, {})[where] = item
        elif owner is not None:
            del self._owners[where]
            self._owned[owner].pop(where, None)
            if not self._owned[owner]:
                del self._owned[owner]
        if owner is not None:
            self._on_owner(owner)

    def _owner_of(self, kind: str, item: Object) -> Owner:
        metadata = item["metadata"]
        namespace = metadata.get("namespace", "")
        if kind == GRAPH:
            return namespace, bounded(metadata["name"])
        if kind == SCALING_GROUP:  # these have the labels of Grove
            for owner in metadata.get("ownerReferences") or ():
                place = (CLIQUE_SET, f"{namespace}/{owner['name']}")
                if place in self._owners:
                    return self._owners[place]
        return namespace, (metadata.get("labels") or {}).get(GRAPH_LABEL, "")

    def owned(self, owner: Owner) -> Mapping[tuple[str, str], Object]:
        """Return the objects of a graph by kind and NAMESPACE/NAME, itself included."""
        return self._owned.get(owner, {})

    def owners(self) -> Sequence[Owner]:
        """Return all graphs of which anything is there."""
        return list(self._owned)

    def taken(self, owner: Owner, objects: Sequence[Object]) -> list[Problem]:
        """Return the problem that objects of a graph have the names of another one's."""
        for item in objects:
            place = f"{owner[0]}/{item['metadata']['name']}"
            other = self._owners.get((item["kind"], place), owner)
            if other != owner:
                text = f"{item['kind']} {item['metadata']['name']} is of the graph {other[1]!r}"
                return [Problem("metadata.name", f"{text}; rename this graph or its component")]
        return []

    async def read(self, kind: str, namespace: str, name: str) -> Object | None:
        """Return an object as it is now, None if there is none."""
        with AllowedStatuses(NOT_FOUND):
            body = await self._link.request("GET", f"{self._path(kind, namespace)}/{name}")
            item: Object = msgspec.json.decode(body)
            return item
        return None

    async def missing_hint(self, reference: Reference, namespace: str) -> str | None:
        """Return what to add to the message that an object is missing, None if it is there."""
        name = reference.name
        if reference.kind != PRIORITY_CLASS:
            return None if await self.read(reference.kind, namespace, name) else ""
        names = [item["metadata"]["name"] for item in await self.list(PRIORITY_CLASS)]
        return None if name in names else f"; {nearest_name_hint(name, names)}"

    async def list(self, kind: str) -> list[Object]:
        """Return all objects of a kind in the cluster, as they are now."""
        path, token, items = self._path(kind, ""), "", list[Object]()
        while True:
            query = urlencode({"limit": "500", **({"continue": token} if token else {})})
            page = msgspec.json.decode(await self._link.request("GET", f"{path}?{query}"))
            items += [{**item, "kind": kind} for item in page["items"]]
            token = page["metadata"].get("continue", "")
            if not token:
                return items

    async def patch_pod(self, pod: Mapping[str, Any], patch: Sequence[Any]) -> None:
        """Patch a pod. Nothing happens if it is gone, or another one has its name."""
        with AllowedStatuses(NOT_FOUND, INVALID):
            await self._change("Pod", self._path_of("Pod", pod), patch, JSON_PATCH)

    async def create(self, kind: str, item: Object) -> bool:
        """Create an object. False: there is one already."""
        path = self._path(kind, item["metadata"]["namespace"])
        with AllowedStatuses(CONFLICT):
            await self._send("POST", path, item)
            return True
        return False

    async def apply(self, item: Object, live: Object | None) -> bool:
        """Apply an object if the live one lacks anything of it. Returns whether it was written."""
        marked = marked_object({**item, "apiVersion": self._served(item["apiVersion"])})
        if live is not None and not lacks(live, marked):
            return False
        await self.apply_fields(marked, OPERATOR)
        return True

    async def dry_run(self, item: Object) -> None:
        """Let the API server check an object."""
        path = self._path_of(item["kind"], item)
        query = {"fieldManager": OPERATOR, "force": "true", "dryRun": "All"}
        query["fieldValidation"] = "Strict"
        await self._link.request("PATCH", f"{path}?{urlencode(query)}", item, content_type=APPLY)

    async def apply_fields(self, item: Object, manager: str) -> None:
        """Apply an object, or some fields of an object that others own."""
        path = self._path_of(item["kind"], item)
        query = urlencode({"fieldManager": manager, "force": "true"})
        await self._change(item["kind"], f"{path}?{query}", item, APPLY)

    async def scale(self, kind: str, namespace: str, name: str, replicas: int) -> None:
        """Order another number of replicas."""
        path = f"{self._path(kind, namespace)}/{name}/scale?fieldManager={OPERATOR}"
        await self._send("PATCH", path, {"spec": {"replicas": replicas}}, MERGE_PATCH)

    async def annotate(
        self, kind: str, namespace: str, name: str, texts: Mapping[str, str]
    ) -> None:
        """Set annotations of an object. Nothing happens if there is none."""
        path = f"{self._path(kind, namespace)}/{name}?fieldManager={OPERATOR}"
        body = {"metadata": {"annotations": dict(texts)}}
        with AllowedStatuses(NOT_FOUND):
            await self._change(kind, path, body, MERGE_PATCH)

    async def put_status(self, item: Object, status: Object) -> None:
        """Write the status of an object if it differs."""
        if item.get("status") == status:
            return
        patch = [
            {"op": "test", "path": "/metadata/uid", "value": item["metadata"]["uid"]},
            {"op": "add", "path": "/status", "value": status},
        ]
        path = f"{self._path_of(item['kind'], item)}/status?fieldManager={OPERATOR}"
        await self._change(item["kind"], path, patch, JSON_PATCH)

    async def delete(self, kind: str, item: Object) -> None:
        """Delete an object, with what it owns, unless another one has taken its name."""
        metadata = item["metadata"]
        key = f"{metadata['namespace']}/{metadata['name']}"
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": {"uid": metadata["uid"]},
        }
        with AllowedStatuses(NOT_FOUND, CONFLICT):
            await self._send("DELETE", self._path_of(kind, item), body)
        self._written[kind, key] = None
        self._put(kind, key, None)

    async def _change(self, kind: str, path: str, body: Any, form: str) -> None:
        """Patch an object of a kind that is followed, and take its new state from the answer."""
        data = await self._send("PATCH", path, body, form)
        item = decode_object(data, kind, "")
        metadata = item["metadata"]
        where = (kind, f"{metadata['namespace']}/{metadata['name']}")
        known = self._reflectors[kind].objects.get(where[1])
        if known is None or version_of(known) < version_of(item):
            self._written[where] = item
            self._put(*where, item)

    async def _send(
        self, method: str, path: str, body: Any, form: str = "application/json"
    ) -> bytes:
        async with self._slots:
            if not self._may_write():
                raise PlaneUnavailable("this operator does not hold the Lease")
            return await self._link.request(method, path, body, content_type=form)


def marked_object(item: Object) -> Object:
    """Return an object with the hash of itself, by which fields that are no longer in it are
    noticed."""
    metadata = item["metadata"]
    annotations = {**metadata.get("annotations", {}), APPLIED: digest(item)}
    return {**item, "metadata": {**metadata, "annotations": annotations}}
