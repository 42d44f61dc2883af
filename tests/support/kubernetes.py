"""A client of a cluster's API server, and pods without a kubelet."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import msgspec

from dynamo.communication.http.client import HttpClient
from dynamo.communication.kubernetes.link import ApiServerError, KubernetesLink
from dynamo.core.tasks import BackgroundTasks
from dynamo.operations.operator.crds import custom_resources
from dynamo.operations.operator.manifests import read_manifests

INSTALLATION = Path(__file__).parents[2] / "deploy" / "kubernetes" / "operator.yaml"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
APPLY = "application/apply-patch+yaml"


class KubernetesClient:
    """Sends requests to an API server, and returns status and body."""

    def __init__(self, url: str, token: str = "", ca: bytes = b"") -> None:
        tls = ssl.create_default_context(cadata=ca.decode()) if ca else None
        self._client = HttpClient(url, {"authorization": f"Bearer {token}"} if token else {}, tls)

    async def send(
        self, method: str, path: str, body: Any = None, form: str = "", **query: str
    ) -> tuple[int, Any]:
        """Send a request with a JSON body."""
        data = b"" if body is None else msgspec.json.encode(body)
        target = f"{path}?{urlencode(query)}" if query else path
        answer = await self._client.send(method, target, data, content_type=form)
        is_json = answer.body.startswith((b"{", b"["))  # paths that no kind has answer in words
        return answer.status, msgspec.json.decode(answer.body) if is_json else None

    async def get(self, path: str, **query: str) -> Any:
        """Return an object or a list. Raises `AssertionError` for another answer than 200."""
        status, body = await self.send("GET", path, **query)
        assert status == 200, body
        return body

    async def create(self, path: str, body: Any) -> Any:
        """Create an object and return it."""
        status, created = await self.send("POST", path, body)
        assert status == 201, created
        return created

    @asynccontextmanager
    async def watch(self, path: str, **query: str) -> AsyncIterator[asyncio.Queue[Any]]:
        """Queue the events of a watch as pairs of type and object."""
        events: asyncio.Queue[Any] = asyncio.Queue()
        rest = b""

        def on_data(data: bytes) -> bool:
            nonlocal rest
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                event = msgspec.json.decode(line)
                events.put_nowait((event["type"], event["object"]))
            return True

        target = f"{path}?{urlencode({'watch': 'true', **query})}"
        async with BackgroundTasks(lambda _: None) as tasks:
            tasks.start(self._client.send("GET", target, b"", on_data))
            yield events

    def close(self) -> None:
        """Close all connections."""
        self._client.close()


def definition(
    plural: str = "graphs", kind: str = "Graph", *, spec: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the definition of a kind in the group lab.example.com, with status and scale."""
    component = {
        "type": "object",
        "required": ["name"],
        "properties": {
            "name": {"type": "string", "maxLength": 63},
            "replicas": {"type": "integer", "default": 1},
        },
    }
    properties = {
        "replicas": {"type": "integer", "minimum": 0, "default": 1},
        "mode": {"type": "string", "enum": ["agg", "disagg"]},
        "components": {
            "type": "array",
            "maxItems": 3,
            "items": component,
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["name"],
        },
    }
    schema = {
        "type": "object",
        "properties": {
            "spec": spec or {"type": "object", "properties": properties},
            "status": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
        },
    }
    scale = {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas"}
    version = {
        "name": "v1",
        "served": True,
        "storage": True,
        "subresources": {"status": {}, "scale": scale},
        "schema": {"openAPIV3Schema": schema},
    }
    names = {"plural": plural, "singular": kind.lower(), "kind": kind, "listKind": f"{kind}List"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.lab.example.com"},
        "spec": {
            "group": "lab.example.com",
            "scope": "Namespaced",
            "names": names,
            "versions": [version],
        },
    }


GRAPH = "qwen"
SERVICE_LABELS = {
    "nvidia.com/dynamo-graph-deployment-name": GRAPH,
    "nvidia.com/dynamo-discovery-enabled": "true",
}
POD_LABELS = {"nvidia.com/dynamo-graph-deployment-name": GRAPH}


class GraphPods:
    """The pods of a graph without a kubelet: their objects, with the readiness that a test gives
    them, and the graph's Service for discovery. Everything goes through the API server."""

    def __init__(self, client: KubernetesClient, namespace: str) -> None:
        self._client = client
        self.namespace = namespace
        self._core = f"/api/v1/namespaces/{namespace}"
        self._addresses: dict[str, str] = {}  # pods of one address are one endpoint of a slice

    async def create(self) -> None:
        """Create the kinds, the namespace and the Service."""
        await self._client.send(
            "POST", "/api/v1/namespaces", {"metadata": {"name": self.namespace}}
        )
        for definition in custom_resources():
            await self._client.send(
                "POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition
            )
        await self._client.send("POST", "/api/v1/nodes", {"metadata": {"name": "node"}})
        objects = f"/apis/nvidia.com/v1alpha1/namespaces/{self.namespace}/dynamoworkermetadatas"
        while (await self._client.send("GET", objects))[0] != 200:
            await asyncio.sleep(0.05)
        spec = {"clusterIP": "None", "selector": POD_LABELS, "ports": [{"port": 9090}]}
        body = {"metadata": {"name": "discovery", "labels": SERVICE_LABELS}, "spec": spec}
        await self._client.create(f"{self._core}/services", body)

    async def add(self, name: str, *, ready: bool = True) -> str:
        """Create a pod, and return its uid once a slice lists it."""
        spec = {"containers": [{"name": "main", "image": "dynamo"}], "nodeName": "node"}
        body = {"metadata": {"name": name, "labels": POD_LABELS}, "spec": spec}
        pod = await self._client.create(f"{self._core}/pods", body)
        await self.set_ready(name, ready=ready)
        return str(pod["metadata"]["uid"])

    async def set_ready(self, name: str, *, ready: bool) -> None:
        """Change the readiness of a pod, and return once its slice has it."""
        conditions = [{"type": "Ready", "status": str(ready)}]
        address = self._addresses.setdefault(name, f"10.1.0.{len(self._addresses) + 1}")
        status = {"phase": "Running", "podIP": address, "conditions": conditions}
        path = f"{self._core}/pods/{name}/status"
        done, answer = await self._client.send("PATCH", path, {"status": status}, STRATEGIC)
        assert done == 200, answer
        while await self.readiness(name) is not ready:
            await asyncio.sleep(0.01)

    async def remove(self, name: str) -> None:
        """Delete a pod at once, and return once no slice lists it."""
        path = f"{self._core}/pods/{name}"
        await self._client.send("DELETE", path, {"gracePeriodSeconds": 0})
        while await self.readiness(name) is not None:
            await asyncio.sleep(0.01)

    async def readiness(self, name: str) -> bool | None:
        """Return whether the slices have a pod as ready; None: it is not listed."""
        for version in ("v1", "v1beta1"):
            path = f"/apis/discovery.k8s.io/{version}/namespaces/{self.namespace}/endpointslices"
            status, slices = await self._client.send("GET", path)
            if status == 200:
                break
        for endpoint in (e for s in slices["items"] for e in s.get("endpoints") or ()):
            if endpoint["targetRef"]["name"] == name:
                return bool(endpoint["conditions"]["ready"])
        return None

    def environment(self, name: str, uid: str) -> dict[str, str]:
        """Return the variables of a process in a pod."""
        return {
            "CONTAINER_NAME": "main",
            "POD_NAME": name,
            "POD_NAMESPACE": self.namespace,
            "POD_UID": uid,
            "DYN_PARENT_DGD_K8S_NAME": GRAPH,
            "DYN_PARENT_DGD_K8S_NAMESPACE": self.namespace,
        }


def account_environment(url: str, token: str, folder: Path, ca: bytes = b"") -> dict[str, str]:
    """Write the files of a service account, and return the variables by which processes in pods
    find them and the API server."""
    folder.mkdir(exist_ok=True)
    (folder / "token").write_text(token, encoding="ascii")
    if ca:
        (folder / "ca.crt").write_bytes(ca)
    parts = urlsplit(url)
    return {
        "KUBERNETES_SERVICE_HOST": parts.hostname or "",
        "KUBERNETES_SERVICE_PORT": str(parts.port),
        "DYN_SERVICE_ACCOUNT_FOLDER": str(folder),
    }


async def install_kinds(client: KubernetesClient) -> None:
    """Create the kinds of graphs, and return when they are served."""
    crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    for resource in custom_resources():
        status, body = await client.send("POST", crds, resource)
        assert status in (201, 409), body
        (path,) = {
            f"/apis/nvidia.com/{row['name']}/{resource['spec']['names']['plural']}"
            for row in resource["spec"]["versions"]
            if row["storage"]
        }
        while (await client.send("GET", path))[0] != 200:
            await asyncio.sleep(0.05)


async def install_account(
    client: KubernetesClient, manifests: str = "", namespace: str = "dynamo-system"
) -> str:
    """Create the objects of an installation of the operator but its Deployment, and return a token
    of its service account."""
    account = ""
    for item in read_manifests(manifests or INSTALLATION.read_text(), "installation"):
        kind, where = item["kind"], item["metadata"].get("namespace", "")
        if kind in ("Deployment", "CustomResourceDefinition"):
            continue
        base = RBAC if "rbac" in item["apiVersion"] else "/api/v1"
        path = f"{base}/namespaces/{where}" if where else base
        name = item["metadata"]["name"]
        path = f"{path}/{kind.lower()}s/{name}"
        status, body = await client.send(
            "PATCH", path, item, APPLY, fieldManager="installer", force="true"
        )
        assert status in (200, 201), body
        if kind == "ServiceAccount":
            account = name
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
    created = await client.create(path, {"spec": {}})
    return str(created["status"]["token"])


def note_refusals(link: KubernetesLink, refused: list[str]) -> KubernetesLink:
    """Note what an API server refuses to a link for want of rights."""
    send = link._send

    async def sending(*arguments: Any, **options: Any) -> Any:
        try:
            return await send(*arguments, **options)
        except ApiServerError as error:
            if error.status == 403:
                refused.append(error.message)
            raise

    link._send = sending  # type: ignore[method-assign]
    return link
