"""Tasks that remove themselves from their owner."""

from __future__ import annotations

import asyncio

from dynamo.core.tasks import BackgroundTasks


async def test_a_self_removing_task_is_forgotten_at_once() -> None:
    tasks = BackgroundTasks()
    task_counts: list[int] = []

    async def work() -> None:
        await asyncio.sleep(0)
        tasks.discard(task)
        task_counts.append(len(tasks))

    task = tasks.start_self_removing(work())
    assert len(tasks) == 1
    await task
    assert task_counts == [0]


async def test_a_task_cancelled_before_it_ran_is_forgotten() -> None:
    tasks = BackgroundTasks()

    async def work() -> None:
        raise AssertionError("the cancelled task ran")

    tasks.cancel(tasks.start_self_removing(work()))
    await tasks.join()
    assert len(tasks) == 0


async def test_close_cancels_a_task_that_never_ran() -> None:
    tasks = BackgroundTasks()
    runs: list[bool] = []

    async def work() -> None:
        runs.append(True)

    task = tasks.start_self_removing(work())
    await tasks.close()
    assert task.cancelled()
    assert not runs
    assert len(tasks) == 0
