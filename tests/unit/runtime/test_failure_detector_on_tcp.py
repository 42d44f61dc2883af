"""The failure detector over TCP, with a worker that reads a large request slowly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from dynamo.communication.handshake import pack_hello
from dynamo.communication.requests.tcp import TcpRequests
from dynamo.core.clock import SystemClock
from dynamo.core.context import Context
from dynamo.core.errors import WorkerFailed
from dynamo.core.tasks import BackgroundTasks
from dynamo.runtime.calls.failure_detector import (
    PING_TIMEOUT_S,
    SUSPECT_AFTER_S,
    FailureDetector,
)
from dynamo.runtime.calls.instances import Instance
from dynamo.telemetry import Registry

READ_BYTES = 1 << 20
PAUSE_S = 0.05


class SlowWorker:
    """Completes the handshake, reads a MiB every 50 ms while `reading`, and answers nothing."""

    def __init__(self) -> None:
        self.reading = True
        self.ended = asyncio.Event()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(pack_hello("requests", "abc"))
        with suppress(ConnectionError):
            while not reader.at_eof():
                if self.reading:
                    await reader.read(READ_BYTES)
                await asyncio.sleep(PAUSE_S)
        writer.transport.abort()
        self.ended.set()


class WatchedClient:
    """A client with two instances, of which the first one has calls."""

    def __init__(self, address: str) -> None:
        self.instances = {name: Instance(name, address, "n", "c", "e") for name in "ab"}
        self.interrupted: list[str] = []
        self.on_instance_busy: Callable[[], None] | None = None
        self.view = SimpleNamespace(
            on_instance_removed=lambda _: lambda: None,
            on_instance_rejected=lambda _: lambda: None,
            mark_unreachable=lambda _: None,
        )

    def busy_instances(self) -> list[Instance]:
        return [self.instances["a"]]

    def interrupt(self, name: str, error: WorkerFailed) -> int:
        self.interrupted.append(name)
        return 1


async def test_a_worker_that_takes_a_large_request_is_not_frozen_until_it_stops() -> None:
    worker = SlowWorker()
    listener = await asyncio.start_server(worker.accept, "127.0.0.1", 0, limit=READ_BYTES)
    address = f"tcp://127.0.0.1:{listener.sockets[0].getsockname()[1]}/abc"
    requests = await TcpRequests.open("tcp:")
    client: Any = WatchedClient(address)
    loop = asyncio.get_running_loop()
    async with BackgroundTasks(on_failure=lambda _: None) as tasks:
        detector = FailureDetector(requests, SystemClock(), tasks, Registry())
        big = bytes(60 << 20)
        tasks.start(requests.call(address, "e", big, Context("r"), lambda _: True))
        while not requests.count_sent_bytes(address)[1]:
            await asyncio.sleep(0.01)
        detector.watch(client)
        client.on_instance_busy()
        await asyncio.sleep(1.5 * (SUSPECT_AFTER_S + PING_TIMEOUT_S))
        assert requests.count_sent_bytes(address)[1] > 0
        assert client.interrupted == []
        worker.reading, stopped_at = False, loop.time()
        while not client.interrupted:
            await asyncio.sleep(0.01)
        assert loop.time() - stopped_at < 3 * (SUSPECT_AFTER_S + PING_TIMEOUT_S)
    await requests.close()
    worker.reading = True
    await worker.ended.wait()
    listener.close()
