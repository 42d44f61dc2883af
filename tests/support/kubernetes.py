"""A client of the test cluster's API server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlencode

import msgspec

from dynamo.communication.http.client import HttpClient
from dynamo.core.tasks import BackgroundTasks

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
APPLY = "application/apply-patch+yaml"


class KubernetesClient:
    """Sends requests to an API server, and returns status and body."""

    def __init__(self, url: str, token: str = "") -> None:
        self._client = HttpClient(url, {"authorization": f"Bearer {token}"} if token else {}, None)

    async def send(
        self, method: str, path: str, body: Any = None, form: str = "", **query: str
    ) -> tuple[int, Any]:
        """Send a request with a JSON body."""
        data = b"" if body is None else msgspec.json.encode(body)
        target = f"{path}?{urlencode(query)}" if query else path
        answer = await self._client.send(method, target, data, content_type=form)
        return answer.status, msgspec.json.decode(answer.body or b"null")

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
