"""Admission before simulated workers, as a frontend has it, under virtual time."""

from __future__ import annotations

from random import Random

import pytest
from tests.simulation.admitted import CAPACITY, HOLD_S, small, trial

from dynamo.core.errors import NoWorkers
from dynamo.core.tasks import BackgroundTasks, run_all
from dynamo.core.virtual_time import VirtualClock, run_in_virtual_time
from dynamo.scheduling.admission import SloLimits
from dynamo.telemetry import Registry


@pytest.mark.parametrize("times", [1.0, 3.0])
def test_frontends_share_the_workers(times: float) -> None:
    async def main(clock: VirtualClock) -> None:
        promise = SloLimits(ttft_s=2.0)
        async with trial(clock, promise, small()) as one:
            another = await one.cluster.second(one, promise)
            half = CAPACITY / 2
            await run_all(one.offer(half, 10, Random(7)), another.offer(half, 10, Random(8)))
            before = len(one.first) + len(another.first)
            half *= times
            await run_all(one.offer(half, 40, Random(3)), another.offer(half, 40, Random(4)))
            took = [*one.first.values(), *another.first.values()]
            assert sum(seconds > 2.0 for seconds in took) <= 0.01 * len(took)
            if times > 1:
                assert (len(took) - before) / 40 >= 0.95 * CAPACITY
                assert min(len(one.first), len(another.first)) > 0.3 * len(took)

    run_in_virtual_time(main)


def short_and_long(rng: Random) -> int:
    """Answers of very different lengths under one bound."""
    return min(400, max(2, int(rng.lognormvariate(3.6, 0.9))))


@pytest.mark.parametrize("mode", ["round_robin", "random", "kv"])
@pytest.mark.parametrize("times", [1.0, 2.0, 3.0])
def test_the_promise_is_kept_and_nothing_lost_by_it(mode: str, times: float) -> None:
    async def main(clock: VirtualClock) -> None:
        async with trial(clock, SloLimits(ttft_s=2.0), small(), mode) as made:
            await made.offer(CAPACITY, 10, Random(7))
            before = len(made.first)
            await made.offer(times * CAPACITY, 40, Random(3))
            late = [row for row, took in made.first.items() if took > 2.0]
            assert not late
            if times > 1:
                assert (len(made.first) - before) / 40 >= 0.97 * CAPACITY
            slow = [took for took, _ in made.refused.values() if took > 0.01]
            assert len(slow) <= 0.01 * len(made.refused)
            assert all((error.retry_after_s or 0) > 0 for _, error in made.refused.values())

    run_in_virtual_time(main)


def test_answers_of_unlike_lengths() -> None:
    async def main(clock: VirtualClock) -> None:
        async with trial(clock, SloLimits(ttft_s=2.0), small()) as made:
            await made.offer(30.0, 60, Random(5), lengths=short_and_long, bound=400)
            assert len(made.refused) > 200
            assert not [took for took in made.first.values() if took > 2.0]
            slow = [took for took, _ in made.refused.values() if took > 0.01]
            assert len(slow) <= 0.03 * len(made.refused)

    run_in_virtual_time(main)


def test_nobody_is_refused_while_a_worker_is_idle() -> None:
    async def main(clock: VirtualClock) -> None:
        async with (
            trial(clock, SloLimits(ttft_s=0.001), small(2)) as made,
            BackgroundTasks() as tasks,
        ):
            for _ in range(4):  # before that nothing is known of a prefill
                await made.one()
            tasks.start(made.one())
            tasks.start(made.one())
            await clock.sleep(0.5)
            assert not made.refused
            await made.one()
            assert [*made.refused] == [6]
            await tasks.join()

    run_in_virtual_time(main)


def test_users_of_a_laptop_wait_their_turn() -> None:
    async def main(clock: VirtualClock) -> None:
        workers = small(1, 1)
        async with trial(clock, SloLimits(), workers) as made, BackgroundTasks() as tasks:
            for _ in range(4):
                await made.one()
            for _ in range(40):
                tasks.start(made.one())
                await clock.sleep(0.001)
            waits = [took for took, _ in made.refused.values()]
            assert 15 <= len(waits) <= 20  # 30 s of 1.4 s each find a place in the queue
            assert max(waits) == 0.0
            told = [error.retry_after_s or 0.0 for _, error in made.refused.values()]
            assert told[-1] - told[0] == pytest.approx((len(told) - 1) * HOLD_S, rel=0.1)
            await tasks.join()
            order = [took + made.arrived[row] for row, took in sorted(made.first.items())]
            assert order == sorted(order)
            assert len(made.first) + len(waits) == 44

    run_in_virtual_time(main)


def test_memory_bounds_the_places() -> None:
    async def main(clock: VirtualClock) -> None:
        workers = small(1, 64, blocks=32)  # of 2,048 tokens, each wants 316
        async with trial(clock, SloLimits(), workers) as made, BackgroundTasks() as tasks:
            await made.one()
            for _ in range(20):
                tasks.start(made.one())
            await clock.sleep(0.5)
            held = sum(
                len(worker.reservations) for worker in made.admission.capacity.workers.values()
            )
            assert 4 <= held <= 7
            await tasks.join()
            assert len(made.first) == 21

    run_in_virtual_time(main)


def test_a_deadline_is_a_promise_too() -> None:
    async def main(clock: VirtualClock) -> None:
        async with trial(clock, SloLimits(), small(1, 1)) as made, BackgroundTasks() as tasks:
            await made.one()
            for _ in range(4):
                tasks.start(made.one())
            await clock.sleep(0.1)
            await made.one(timeout_s=2.0)
            took, error = made.refused[5]
            assert took == 0.0
            assert "2 s" in error.message
            tasks.start(made.one(timeout_s=20.0))
            await tasks.join()
            assert len(made.first) == 6

    run_in_virtual_time(main)


def test_priority_goes_first() -> None:
    async def main(clock: VirtualClock) -> None:
        async with trial(clock, SloLimits(), small(1, 1)) as made, BackgroundTasks() as tasks:
            await made.one()
            for _ in range(5):
                tasks.start(made.one())
            await clock.sleep(0.1)
            tasks.start(made.one(priority=10))
            await tasks.join()
            assert made.first[6] < made.first[3]

    run_in_virtual_time(main)


def test_the_queue_is_bounded() -> None:
    async def main(clock: VirtualClock) -> None:
        metrics = Registry()
        promise = SloLimits(queue_bound=3)
        async with (
            trial(clock, promise, small(1, 1), metrics=metrics) as made,
            BackgroundTasks() as tasks,
        ):
            for _ in range(6):
                tasks.start(made.one())
            await tasks.join()
            assert len(made.refused) == 2
            assert len(made.first) == 4
            text = metrics.render()
            assert 'dynamo_admission_rejected_total{reason="queue_full"} 2' in text
            assert "dynamo_admission_waiting_requests 0" in text

    run_in_virtual_time(main)


def test_a_cap_for_each_worker() -> None:
    async def main(clock: VirtualClock) -> None:
        promise = SloLimits(max_worker_requests=2)
        async with trial(clock, promise, small(2)) as made, BackgroundTasks() as tasks:
            for _ in range(10):
                tasks.start(made.one())
            await clock.sleep(0.5)
            assert [
                len(worker.reservations) for worker in made.admission.capacity.workers.values()
            ] == [2, 2]
            await tasks.join()

    run_in_virtual_time(main)


def test_who_waits_outlives_its_worker() -> None:
    async def main(clock: VirtualClock) -> None:
        async with trial(clock, SloLimits(), small(1, 1)) as made, BackgroundTasks() as tasks:
            for _ in range(3):
                tasks.start(made.one())
            await clock.sleep(0.1)
            await made.cluster.hide()
            await clock.sleep(10)
            assert [*made.first] == [0]
            await made.cluster.show()
            await tasks.join()
            assert [*made.first] == [0, 1, 2]
            tasks.start(made.one())
            waiting = tasks.start(made.one())
            await clock.sleep(0.1)
            await made.cluster.hide()
            with pytest.raises(NoWorkers):
                await waiting

    run_in_virtual_time(main)


def test_who_leaves_the_queue_blocks_nobody() -> None:
    async def main(clock: VirtualClock) -> None:
        async with trial(clock, SloLimits(), small(1, 1)) as made, BackgroundTasks() as tasks:
            running = tasks.start(made.one())
            await clock.sleep(0.1)
            waiting = [tasks.start(made.one()) for _ in range(3)]
            await clock.sleep(0.1)
            waiting[0].cancel()
            running.cancel()
            await clock.sleep(0)
            waiting[1].cancel()
            await tasks.join()
            assert [*made.first] == [3]
            assert made.admission.capacity.free_slots == 1

    run_in_virtual_time(main)


@pytest.mark.parametrize("mode", ["round_robin", "kv"])
def test_a_promise_may_change_while_requests_come(mode: str) -> None:
    async def main(clock: VirtualClock) -> None:
        async with trial(clock, SloLimits(), small(), mode) as made, BackgroundTasks() as tasks:
            await made.offer(2 * CAPACITY, 10, Random(7))
            assert not made.refused
            made.admission.update(SloLimits(ttft_s=2.0))
            await made.offer(2 * CAPACITY, 40, Random(3))
            assert len(made.refused) > CAPACITY * 20
            made.admission.update(SloLimits(max_worker_requests=1))
            before = len(made.refused)
            for _ in range(8):
                tasks.start(made.one())
            await clock.sleep(0.1)
            assert {
                len(worker.reservations) for worker in made.admission.capacity.workers.values()
            } == {1}
            assert len(made.refused) == before
            await tasks.join()

    run_in_virtual_time(main)


def test_who_waits_much_longer_than_predicted_is_turned_away() -> None:
    async def main(clock: VirtualClock) -> None:
        workers = small(1, 1)
        async with (
            trial(clock, SloLimits(max_queue_wait_s=5.0), workers) as made,
            BackgroundTasks() as tasks,
        ):
            for _ in range(6):
                await made.one(10)  # so short that a bound of 60 is thought to mean little
            tasks.start(made.one(2_000, bound=60))
            await clock.sleep(0.1)
            await made.one()
            ((took, error),) = made.refused.values()
            assert took == pytest.approx(10.0)
            assert "became free in 10 s" in error.message
            await tasks.join()

    run_in_virtual_time(main)


def test_an_unseen_bound_is_thought_to_be_filled_as_others_are() -> None:
    async def main(clock: VirtualClock) -> None:
        async with trial(clock, SloLimits(), small(1, 1)) as made, BackgroundTasks() as tasks:
            for _ in range(8):
                await made.one(60)
            for _ in range(30):
                tasks.start(made.one(240))
                await clock.sleep(0.001)
            assert 6 <= 30 - len(made.refused) <= 9  # 5.5 s each find a place within 30 s
            await tasks.join()

    run_in_virtual_time(main)
