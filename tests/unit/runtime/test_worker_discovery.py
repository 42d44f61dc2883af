"""Worker discovery with the names of Dynamo's documents."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from dynamo.communication.discovery.memory import MemoryDiscovery
from dynamo.runtime import WorkerDiscovery, WorkerInfo

RECORD = {
    "component": "VllmWorker",
    "endpoint": "generate",
    "namespace": "dynamo",
    "lease_id": "7587",
    "transport": {"nats_tcp": "nats://10.0.0.1:4222/inst"},
    "capabilities": {"model": "tiny"},
    "nixl_metadata": None,
}


def test_a_record_in_dynamos_format_is_converted() -> None:
    worker = WorkerInfo.from_dict(RECORD)
    assert worker.component_type == "VllmWorker"
    assert worker.nats_endpoint == "nats://10.0.0.1:4222/inst"
    assert worker.to_dict() == RECORD


def test_a_dict_of_its_own_fields_is_converted() -> None:
    worker = WorkerInfo.from_dict({"component_type": "w", "endpoint": "e", "nats_endpoint": "x"})
    assert (worker.component_type, worker.nats_endpoint) == ("w", "x")


COMPLETE = {"component": "w", "endpoint": "e"}


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"component": "w"},
        {"endpoint": "e"},
        COMPLETE | {"transport": 7},
        COMPLETE | {"capabilities": "many"},
    ],
)
def test_an_incomplete_record_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="worker record"):
        WorkerInfo.from_dict(bad)


async def test_register_and_discover(caplog: pytest.LogCaptureFixture) -> None:
    plane = await MemoryDiscovery.open("memory:workers")
    discovery = WorkerDiscovery(plane)
    first = WorkerInfo("VllmWorker", "generate", nats_endpoint="tcp://h:1/i")
    key = await discovery.register_worker(first)
    assert key.startswith("/dynamo/workers/VllmWorker/generate/")
    await discovery.register_worker(first)
    await discovery.register_worker(WorkerInfo("PrefillWorker", "generate", lease_id="1"))
    await plane.put("/dynamo/workers/VllmWorker/generate/bad", b"[]")
    await plane.put("/dynamo/workers/VllmWorker/generate/worse", b'{"component": "w"}')
    await plane.put("/dynamo/workers/VllmWorker/generate/worst", b'{"transport": 7}')
    with caplog.at_level(logging.WARNING):
        workers = await discovery.discover_workers("VllmWorker")
    assert [worker.nats_endpoint for worker in workers] == ["tcp://h:1/i"] * 2
    assert len({worker.lease_id for worker in workers}) == 2
    assert len([record for record in caplog.records if "bad worker" in record.message]) == 3
    assert len(await discovery.discover_workers()) == 3
    await plane.close()


class FakeEtcdClient:
    """The calls of an etcd client in Dynamo's documents."""

    def __init__(self) -> None:
        self.records: dict[str, str] = {}

    async def put(self, key: str, value: str) -> None:
        self.records[key] = value

    async def get_prefix(self, prefix: str) -> list[tuple[bytes, bytes]]:
        records = self.records.items()
        return [(key.encode(), text.encode()) for key, text in records if key.startswith(prefix)]


async def test_an_etcd_client_serves_as_well_as_a_plane() -> None:
    discovery = WorkerDiscovery(FakeEtcdClient())
    await discovery.register_worker(WorkerInfo("VllmWorker", "generate", nats_endpoint="tcp://h:1"))
    await discovery.register_worker(WorkerInfo("PrefillWorker", "generate"))
    (worker,) = await discovery.discover_workers("VllmWorker")
    assert worker.nats_endpoint == "tcp://h:1"
    assert len(await discovery.discover_workers()) == 2
