"""Tasks that remove themselves from their owner, and tasks that start in slices."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from dynamo.core.tasks import BackgroundTasks, run_in_slices, wait_for_first


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


async def test_close_cancels_tasks_in_the_order_of_their_start() -> None:
    tasks = BackgroundTasks()
    cancelled: list[int] = []

    async def work(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(number)

    for number in range(50):
        tasks.start(work(number))
    await asyncio.sleep(0)
    await tasks.close()
    assert cancelled == list(range(50))


async def test_of_simultaneous_errors_that_of_the_earliest_argument_is_raised() -> None:
    async def fail(number: int) -> None:
        raise ValueError(f"failure {number}")

    with pytest.raises(ValueError, match=r"^failure 0$"):
        await wait_for_first(*(fail(number) for number in range(50)))


async def test_slices_start_one_iteration_after_another() -> None:
    started: list[int] = []
    seen: list[int] = []

    async def work(number: int) -> None:
        started.append(number)

    async def watch() -> None:
        while len(started) < 10:
            seen.append(len(started))
            await asyncio.sleep(0)

    async with BackgroundTasks() as tasks:
        watching = tasks.start(watch())
        await run_in_slices((work(number) for number in range(10)), 3)
        await watching
    assert started == list(range(10))
    assert max(after - before for before, after in pairwise(seen)) <= 3


async def test_the_first_failure_of_a_slice_cancels_the_others() -> None:
    cancelled: list[int] = []

    async def work(number: int) -> None:
        if number == 2:
            raise ValueError("failed")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(number)
            raise

    with pytest.raises(ValueError, match="failed"):
        await run_in_slices((work(number) for number in range(100)), 2)
    assert {0, 1} <= set(cancelled)
    assert len(cancelled) < 10
