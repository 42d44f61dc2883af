"""Weights read from a worker of another host: equal, checked, and never at the cost of a start."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.support.shared_memory import MemoryUsers, descriptors
from tests.unit.inference_native.test_native_runner import PROMPTS, generate_all
from tests.unit.inference_native.test_shared_weights import CountedWeights
from tests.unit.processes import Processes

from dynamo.communication.transfer.backend import BackendPeer
from dynamo.core.settings import Settings
from dynamo.core.settings.schema import EngineSettings
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.native import weight_peers
from dynamo.inference.native.runner import NativeRunner
from dynamo.inference.native.shared_weights import SharedWeights
from dynamo.inference.native.weight_peers import WeightPeers, WeightsRecord
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.shared_memory import SEALS, SUPPORTED

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="needs memfd")
COUNT = 4
PREFIX = "/dynamo/weights/"


class Host:
    """A worker with a supervisor of its own. `reads` counts the tensors that its start read."""

    def __init__(self, folder: Path, runtime: DistributedRuntime, **settings: Any) -> None:
        self.users = MemoryUsers()
        self.runtime = runtime
        self.peers = WeightPeers(runtime)
        engine_settings = EngineSettings(
            **{"threads": 1, "num_blocks": 64, "block_size": 4} | settings
        )
        shared = SharedWeights(self.users.start(), folder, self.peers)
        self.runner = NativeRunner(
            lambda: CountedWeights(folder), engine_settings, shared_weights=shared
        )
        self.engine = BatchedEngine(self.runner)

    async def start(self) -> None:
        before = CountedWeights.reads
        await self.engine.start()
        self.reads = CountedWeights.reads - before

    async def answer(self, make_request: Any) -> list[list[int]]:
        requests = [make_request(prompt, COUNT) for prompt in PROMPTS]
        return [reply.ids for reply in await generate_all(self.engine, requests)]

    async def records(self) -> dict[str, bytes]:
        return dict(await self.runtime.discovery.get(PREFIX))

    async def wait_for_offer(self, count: int = 1) -> None:
        while len(await self.records()) != count:
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        await self.engine.stop()
        self.peers.release()
        self.users.close()


class Hosts:
    """Hosts of one cluster, which share a discovery plane."""

    def __init__(self, folder: Path, transfer: str) -> None:
        settings = Settings()
        settings = replace(settings, runtime=replace(settings.runtime, transfer=transfer))
        self._folder = folder
        self._processes = Processes(settings=settings)
        self._hosts: list[Host] = []

    async def start(self, **settings: Any) -> Host:
        host = Host(self._folder, await self._processes.open(), **settings)
        self._hosts.append(host)
        await host.start()
        return host

    async def close(self) -> None:
        for host in self._hosts:
            await host.close()
        await self._processes.close()


NIXL = pytest.param(
    "nixl:", marks=pytest.mark.skipif(find_spec("nixl_cu12") is None, reason="needs NIXL")
)


@pytest.fixture(params=["tcp:", "shm:"])
async def hosts(tiny_llama: Path, request: pytest.FixtureRequest) -> AsyncIterator[Hosts]:
    hosts = Hosts(tiny_llama, request.param)
    yield hosts
    await hosts.close()
    gc.collect()
    assert descriptors("dynamo-weights") == 0


@pytest.fixture
def expected(reference_llama: Any) -> list[list[int]]:
    return [reference_llama.greedy(prompt, COUNT) for prompt in PROMPTS]


@pytest.mark.parametrize("hosts", ["tcp:", "shm:", NIXL], indirect=True)
async def test_a_worker_of_another_host_reads_no_tensor(
    hosts: Hosts, make_request: Any, expected: list[list[int]]
) -> None:
    first = await hosts.start()
    await first.wait_for_offer()
    second = await hosts.start()
    assert (first.reads > 10, second.reads) == (True, 0)
    assert await second.answer(make_request) == expected
    assert second.users.broker.size_bytes == first.users.broker.size_bytes > 0
    assert second.runner.layout == first.runner.layout
    await first.wait_for_offer(2)
    await first.close()  # the second one offers what it has read
    await second.wait_for_offer(1)
    assert (await hosts.start()).reads == 0


async def test_another_number_of_threads_reads_the_file(
    hosts: Hosts, make_request: Any, expected: list[list[int]]
) -> None:
    first = await hosts.start()
    await first.wait_for_offer()
    second = await hosts.start(threads=2)
    assert second.reads > 10
    assert await second.answer(make_request) == expected


@pytest.mark.parametrize("level", [1, 2])
async def test_weights_of_a_worker_that_sleeps_are_not_offered(
    hosts: Hosts, make_request: Any, expected: list[list[int]], level: int
) -> None:
    host = await hosts.start()
    await host.wait_for_offer()
    await host.engine.sleep(level)
    assert await host.records() == {}
    if level == 2:
        host.users.broker.drop_unused()
        while host.users.broker.size_bytes:
            await asyncio.sleep(0.01)
        assert descriptors("dynamo-weights") == 0
    await host.engine.wake_up()
    await host.wait_for_offer()
    assert (await hosts.start()).reads == 0
    assert await host.answer(make_request) == expected


@pytest.mark.parametrize("fault", ["damaged", "gone", "slow", "refused", "large", "record"])
async def test_a_peer_that_fails_costs_the_start_nothing_but_the_file(
    hosts: Hosts,
    make_request: Any,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    first = await hosts.start()
    await first.wait_for_offer()
    ((key, value),) = (await first.records()).items()
    record = msgspec.json.decode(value, type=WeightsRecord)
    if fault == "damaged":
        value = msgspec.json.encode(replace(record, digest="0" * 32))
    elif fault == "gone":
        plane = first.peers._plane
        assert plane is not None
        await plane.close()
    elif fault == "slow":
        monkeypatch.setattr(weight_peers, "CONNECT_S", 0.5)
        for peer in BackendPeer.__subclasses__():
            monkeypatch.setattr(peer, "_copy", lambda self, reads: asyncio.sleep(3600))
    elif fault == "refused":
        region = replace(record.region, slot_bytes=4096)
        value = msgspec.json.encode(replace(record, region=region))
    elif fault == "large":
        region = replace(record.region, slots=1 << 23)  # 32 TB
        value = msgspec.json.encode(replace(record, region=region))
    else:
        value = b"{"
    await first.runtime.discovery.put(key, value)
    second = await hosts.start()
    assert second.reads > 10
    assert await second.answer(make_request) == expected
    assert "peer" in caplog.text
    errors = [
        record.__dict__["fields"].get("error", "")
        for record in caplog.records
        if "fields" in record.__dict__
    ]
    assert any("too large" in error for error in errors) == (fault == "large")
    assert "-- " not in caplog.text


async def test_fetched_memory_is_sealed(hosts: Hosts) -> None:
    import fcntl
    import os

    first = await hosts.start()
    await first.wait_for_offer()
    key = await asyncio.to_thread(first.runner.shared_weights.content_key)  # type: ignore[union-attr]
    fd = await asyncio.to_thread(WeightPeers(first.runtime).fetch, key, 1 << 30)
    try:
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) == SEALS
    finally:
        os.close(fd)
    assert await asyncio.to_thread(WeightPeers(first.runtime).fetch, "none", 0) == -1
