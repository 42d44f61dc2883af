"""Worker discovery with the names of Dynamo's documents, over the discovery plane."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec

from dynamo.communication.discovery import Discovery
from dynamo.runtime.calls.instances import instances_prefix

log = logging.getLogger(__name__)


class WorkerInfo(msgspec.Struct, frozen=True):
    """The record of a worker. `nats_endpoint` is its address on any transport. `lease_id` is the
    last part of its discovery key."""

    component_type: str
    endpoint: str
    namespace: str = "dynamo"
    lease_id: str = ""
    nats_endpoint: str = ""
    capabilities: dict[str, Any] = {}
    nixl_metadata: Any = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Convert a discovery record or a dict of this class's fields. Raises `ValueError`."""
        component = data.get("component_type") or data.get("component")
        transport, capabilities = data.get("transport") or {}, data.get("capabilities") or {}
        if not isinstance(transport, Mapping) or not isinstance(capabilities, Mapping):
            raise ValueError("transport and capabilities of the worker record must be objects")  # noqa: TRY004
        address = data.get("nats_endpoint") or transport.get("nats_tcp")
        if not component or not data.get("endpoint"):
            raise ValueError("the worker record has no component or no endpoint")
        return cls(
            component_type=str(component),
            endpoint=str(data["endpoint"]),
            namespace=str(data.get("namespace") or "dynamo"),
            lease_id=str(data.get("lease_id") or ""),
            nats_endpoint=str(address or next(iter(transport.values()), "")),
            capabilities=dict(capabilities),
            nixl_metadata=data.get("nixl_metadata"),
        )

    def to_dict(self) -> dict[str, Any]:
        """Convert to a discovery record."""
        scheme = self.nats_endpoint.split(":", 1)[0]
        transport = {"nats_tcp" if scheme in {"", "nats"} else scheme: self.nats_endpoint}
        return {
            "component": self.component_type,
            "endpoint": self.endpoint,
            "namespace": self.namespace,
            "lease_id": self.lease_id,
            "transport": transport if self.nats_endpoint else {},
            "capabilities": self.capabilities,
            "nixl_metadata": self.nixl_metadata,
        }


class EtcdClientRecords:
    """The two calls of a discovery plane over an etcd client with `put` and `get_prefix`."""

    def __init__(self, etcd_client: Any) -> None:
        self._etcd_client = etcd_client

    async def get(self, prefix: str) -> Mapping[str, bytes]:
        """Return the records under `prefix`."""
        records = await self._etcd_client.get_prefix(prefix)
        pairs = records.items() if isinstance(records, Mapping) else records
        return {_to_bytes(key).decode(): _to_bytes(value) for key, value in pairs}

    async def put(self, key: str, value: bytes) -> None:
        """Write a record."""
        await self._etcd_client.put(key=key, value=value.decode())


def _to_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


class WorkerDiscovery:
    """Registers and discovers workers. `client` is an open discovery plane (`runtime.discovery`),
    whose lease and heartbeat keep the records alive. An etcd client with `put(key, value)` and
    `get_prefix(prefix)` is accepted, too; its owner then deletes the records."""

    def __init__(self, client: Discovery | Any, namespace: str = "dynamo") -> None:
        is_etcd_client = hasattr(client, "get_prefix")
        self._client = EtcdClientRecords(client) if is_etcd_client else client
        self._namespace = namespace

    async def register_worker(self, worker: WorkerInfo) -> str:
        """Register `worker` for the lifetime of this process. Returns its key."""
        if not worker.lease_id:
            worker = msgspec.structs.replace(worker, lease_id=secrets.token_hex(8))
        prefix = instances_prefix(worker.namespace, worker.component_type, worker.endpoint)
        key = prefix + worker.lease_id
        await self._client.put(key, msgspec.json.encode(worker.to_dict()))
        return key

    async def discover_workers(self, component_type: str | None = None) -> Sequence[WorkerInfo]:
        """Live workers, optionally of one component. Bad records are skipped with a warning."""
        records = await self._client.get(instances_prefix(self._namespace, component_type or ""))
        workers: list[WorkerInfo] = []
        for key, value in sorted(records.items()):
            try:
                record = msgspec.json.decode(value, type=dict[str, Any])
                workers.append(WorkerInfo.from_dict(record))
            except ValueError as error:
                fields = {"key": key, "error": str(error)}
                log.warning("bad worker record", extra={"fields": fields})
        return workers
