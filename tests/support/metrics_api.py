"""The custom metrics API of a cluster, by the metrics of the processes of its pods."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec
from tests.support.kubernetes import KubernetesClient

from dynamo.communication.http.scrape import scrape
from dynamo.core.errors import PlaneUnavailable
from dynamo.core.tasks import BackgroundTasks
from dynamo.operations.alerts.evaluator import parse_samples
from dynamo.testing.kubernetes.kubelet.proxies import host_address, make_certificate

GROUP = "custom.metrics.k8s.io"
VERSION = f"{GROUP}/v1beta1"


class MetricsApi:
    """Serves sums of metrics of pods as prometheus-adapter does, and is registered at the API
    server. `metrics` has the names of what is summed by the name of a custom metric. Used with
    `async with`."""

    def __init__(
        self, client: KubernetesClient, folder: Path, metrics: Mapping[str, frozenset[str]]
    ) -> None:
        self._client, self._folder, self._metrics = client, folder, metrics
        self._tasks = BackgroundTasks()
        self.read: list[float] = []
        """The sums that were answered, of all pods."""

    async def __aenter__(self) -> Self:
        tls = await asyncio.to_thread(make_certificate, self._folder)
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=tls)
        port = self._server.sockets[0].getsockname()[1]
        service = {
            "metadata": {"name": "metrics"},
            "spec": {"type": "ExternalName", "externalName": "localhost"},
        }
        await self._client.create("/api/v1/namespaces/kube-system/services", service)
        spec = {
            "group": GROUP, "version": "v1beta1", "insecureSkipTLSVerify": True,
            "groupPriorityMinimum": 100, "versionPriority": 100,
            "service": {"namespace": "kube-system", "name": "metrics", "port": port},
        }  # fmt: skip
        path = "/apis/apiregistration.k8s.io/v1/apiservices"
        await self._client.create(path, {"metadata": {"name": f"v1beta1.{GROUP}"}, "spec": spec})
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._tasks.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.start(self._serve(reader, writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            answer = await self._answer(head.split(b" ", 2)[1].decode())
            body = msgspec.json.encode(answer or {"kind": "Status", "apiVersion": "v1"})
            status = b"200 OK" if answer else b"404 Not Found"
            writer.write(
                b"HTTP/1.1 %b\r\ncontent-type: application/json\r\nconnection: close\r\n"
                b"content-length: %d\r\n\r\n%b" % (status, len(body), body)
            )
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, target: str) -> dict[str, Any] | None:
        parts = urlsplit(target)
        path = unquote(parts.path).removeprefix(f"/apis/{VERSION}").strip("/")
        if parts.path == f"/apis/{VERSION}":
            rows = [
                {"name": f"pods/{name}", "singularName": "", "namespaced": True,
                 "kind": "MetricValueList", "verbs": ["get"]}
                for name in self._metrics
            ]  # fmt: skip
            return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": VERSION,
                    "resources": rows}  # fmt: skip
        words = path.split("/")
        if words[0] != "namespaces" or words[2:4] != ["pods", "*"] or words[4] not in self._metrics:
            return None
        selector = parse_qs(parts.query).get("labelSelector", [""])[0]
        pods = await self._client.get(f"/api/v1/namespaces/{words[1]}/pods", labelSelector=selector)
        items = [
            {
                "describedObject": {"kind": "Pod", "apiVersion": "/v1", "namespace": words[1],
                                    "name": pod["metadata"]["name"]},
                "metricName": words[4], "value": str(int(value)), "selector": None,
                "timestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            }
            for pod in pods["items"]
            if (value := await self._sum(pod, self._metrics[words[4]])) is not None
        ]  # fmt: skip
        self.read.append(sum(int(item["value"]) for item in items))
        return {"kind": "MetricValueList", "apiVersion": VERSION, "metadata": {}, "items": items}

    async def _sum(self, pod: Any, names: frozenset[str]) -> float | None:
        return await sum_of(pod, names)


async def sum_of(pod: Mapping[str, Any], names: frozenset[str]) -> float | None:
    """Return a sum of metrics of a pod's processes, None if they do not tell it."""
    address = (pod.get("status") or {}).get("podIP")
    if not address:
        return None
    try:
        text = await scrape(f"http://{host_address(address)}:9090", "/metrics/all", 2.0)
    except PlaneUnavailable:
        return None
    samples = list(parse_samples(text, names, {}))
    return sum(sample.value for sample in samples) if samples else None
