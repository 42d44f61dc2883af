"""Work that says itself when it is over."""

from __future__ import annotations

import asyncio

from dynamo.core.tasks import BackgroundTasks


async def test_what_is_over_is_forgotten_at_once() -> None:
    tasks = BackgroundTasks()
    left: list[int] = []

    async def work() -> None:
        await asyncio.sleep(0)
        tasks.discard(mine)
        left.append(len(tasks))

    mine = tasks.start_self_removing(work())
    assert len(tasks) == 1
    await mine
    assert left == [0]


async def test_what_is_dropped_before_its_first_turn_is_forgotten() -> None:
    tasks = BackgroundTasks()

    async def work() -> None:
        raise AssertionError("it has no turn")

    tasks.cancel(tasks.start_self_removing(work()))
    await tasks.join()
    assert len(tasks) == 0


async def test_closing_forgets_what_never_began() -> None:
    tasks = BackgroundTasks()
    began: list[bool] = []

    async def work() -> None:
        began.append(True)

    mine = tasks.start_self_removing(work())
    await tasks.close()
    assert mine.cancelled()
    assert not began
    assert len(tasks) == 0
