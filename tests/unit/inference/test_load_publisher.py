"""A worker's load report tells the last pause of its event loop."""

from __future__ import annotations

import asyncio

import msgspec

from dynamo.core.clock import SystemClock
from dynamo.core.values import Load
from dynamo.inference.load_publisher import LoadPublisher


class Engine:
    """An engine with the same load always."""

    def report_load(self) -> Load:
        return Load(running=1)


class Source:
    """Keeps what is published."""

    def __init__(self) -> None:
        self.loads: list[Load] = []
        self.published = asyncio.Event()

    def publish(self, payload: bytes) -> None:
        self.loads.append(msgspec.msgpack.decode(payload, type=Load))
        self.published.set()


def test_a_pause_of_the_event_loop_is_a_new_load() -> None:
    async def main() -> None:
        source, pauses = Source(), list[tuple[float, float]]()
        publisher = LoadPublisher(Engine(), source, SystemClock(), pauses)  # type: ignore[arg-type]
        task = asyncio.create_task(publisher.run())
        await source.published.wait()
        source.published.clear()
        pauses.append((1_000.0, 0.5))
        await source.published.wait()
        task.cancel()
        assert source.loads == [Load(running=1), Load(running=1, last_pause=(1_000.0, 0.5))]

    asyncio.run(main())
