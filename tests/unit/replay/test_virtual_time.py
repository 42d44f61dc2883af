"""The event loop in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from dynamo.core.tasks import BackgroundTasks, run_all
from dynamo.core.virtual_time import Deadlock, VirtualClock, run_in_virtual_time


def test_hours_pass_immediately_and_in_order():
    wakeups: list[tuple[float, str]] = []

    async def sleeper(clock: VirtualClock, name: str, seconds: float) -> None:
        for _ in range(3):
            await clock.sleep(seconds)
            wakeups.append((round(clock.now(), 6), name))

    async def main(clock: VirtualClock) -> float:
        await run_all(sleeper(clock, "a", 3600), sleeper(clock, "b", 5000))
        return clock.now()

    assert run_in_virtual_time(main) == 15_000
    assert wakeups == [
        (3600, "a"), (5000, "b"), (7200, "a"), (10_000, "b"), (10_800, "a"), (15_000, "b"),
    ]  # fmt: skip


def test_a_deadlock_is_raised_with_its_time():
    async def main(clock: VirtualClock) -> None:
        await clock.sleep(7)
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match=r"7\.000 s"):
        run_in_virtual_time(main)


def test_work_offloaded_takes_no_time_and_timers_can_be_stopped():
    async def main(clock: VirtualClock) -> tuple[int, list[str], float]:
        called: list[str] = []
        clock.call_at(2.0, lambda: called.append("two"))
        stop = clock.call_at(1.0, lambda: called.append("one"))
        stop()
        product = await clock.offload(int.__mul__, 6, 7)
        before = clock.now()
        await clock.sleep(3)
        return product, called, before

    assert run_in_virtual_time(main) == (42, ["two"], 0.0)


def test_wait_until_idle_returns_after_all_other_tasks_of_the_instant():
    async def main(clock: VirtualClock) -> list[str]:
        order: list[str] = []

        async def chain(turns: int) -> None:
            for _ in range(turns):
                await asyncio.sleep(0)
            order.append(f"chain {turns}")

        async def quiet() -> None:
            await clock.wait_until_idle()
            order.append(f"idle at {clock.now():g}")

        async with BackgroundTasks() as tasks:
            tasks.start(quiet())
            tasks.start(chain(9))
            tasks.start(chain(3))
            await clock.sleep(1)
        return order

    assert run_in_virtual_time(main) == ["chain 3", "chain 9", "idle at 0"]


def test_a_listener_is_called_at_every_jump_of_the_clock():
    async def main(clock: VirtualClock) -> list[float]:
        times: list[float] = []
        clock.on_time_advanced(lambda: times.append(clock.now()))
        await clock.sleep(1)
        await asyncio.sleep(0)
        await clock.sleep(2)
        return times

    assert run_in_virtual_time(main) == [1.0, 3.0]
