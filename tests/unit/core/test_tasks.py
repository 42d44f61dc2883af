"""Work that says itself when it is over."""

from __future__ import annotations

import asyncio

from dynamo.core.tasks import Tasks


async def test_what_is_over_is_forgotten_at_once() -> None:
    tasks = Tasks()
    left: list[int] = []

    async def work() -> None:
        await asyncio.sleep(0)
        tasks.over(mine)
        left.append(len(tasks))

    mine = tasks.run(work())
    assert len(tasks) == 1
    await mine
    assert left == [0]


async def test_what_is_dropped_before_its_first_turn_is_forgotten() -> None:
    tasks = Tasks()

    async def work() -> None:
        raise AssertionError("it has no turn")

    tasks.drop(tasks.run(work()))
    await tasks.join()
    assert len(tasks) == 0


async def test_closing_forgets_what_never_began() -> None:
    tasks = Tasks()
    began: list[bool] = []

    async def work() -> None:
        began.append(True)

    mine = tasks.run(work())
    await tasks.close()
    assert mine.cancelled()
    assert not began
    assert len(tasks) == 0
