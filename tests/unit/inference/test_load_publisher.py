"""A worker's load report tells the last pause of its event loop."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from dynamo.core.clock import SystemClock
from dynamo.core.values import Load
from dynamo.inference.load_publisher import CoreWait, LoadPublisher


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


def test_the_wait_for_a_core_is_that_of_the_thread_that_waited_longest(tmp_path: Path) -> None:
    waits = CoreWait(tmp_path)

    def measure(**waited_ms: int) -> float:
        for thread, ms in waited_ms.items():
            (tmp_path / thread).mkdir(exist_ok=True)
            (tmp_path / thread / "schedstat").write_text(f"5 {ms * 10**6} 7\n")
        return waits.measure()

    assert measure(a=1_000, b=50) == 0.0
    assert measure(a=1_030, b=450) == 0.4
    assert measure(a=1_100, c=9_000) == 0.47
    (tmp_path / "a" / "schedstat").write_text("")
    assert measure() == 0.47
    assert CoreWait(tmp_path / "none").measure() == 0.0


def test_a_wait_for_a_core_is_in_the_load() -> None:
    async def main() -> None:
        source = Source()
        publisher = LoadPublisher(
            Engine(),  # type: ignore[arg-type]
            source,  # type: ignore[arg-type]
            SystemClock(),
            core_wait=lambda: 0.25,
        )
        task = asyncio.create_task(publisher.run())
        await source.published.wait()
        task.cancel()
        assert source.loads == [Load(running=1, core_wait_s=0.25)]

    asyncio.run(main())
