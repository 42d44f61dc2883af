"""Admission before simulated workers, under virtual time."""

from __future__ import annotations

from random import Random

import pytest
from tests.simulation.admission_trial import (
    CAPACITY,
    HOLD_S,
    make_workers,
    make_workers_apart,
    open_trial,
)

from dynamo.core.errors import NoWorkers
from dynamo.core.settings.schema_router import DisaggregationSettings, RouterSettings
from dynamo.core.tasks import BackgroundTasks, run_all
from dynamo.core.virtual_time import VirtualClock, run_in_virtual_time
from dynamo.telemetry import Registry


@pytest.mark.parametrize("times", [1.0, 3.0])
def test_frontends_share_the_workers(times: float) -> None:
    async def main(clock: VirtualClock) -> None:
        limits = RouterSettings(ttft_slo=2.0)
        async with open_trial(clock, limits, make_workers()) as first:
            another = await first.cluster.add_frontend(first, limits)
            half = CAPACITY / 2
            await run_all(
                first.offer_load(half, 10, Random(7)), another.offer_load(half, 10, Random(8))
            )
            before = len(first.first_token_s) + len(another.first_token_s)
            half *= times
            await run_all(
                first.offer_load(half, 40, Random(3)), another.offer_load(half, 40, Random(4))
            )
            took = [*first.first_token_s.values(), *another.first_token_s.values()]
            assert sum(seconds > 2.0 for seconds in took) <= 0.01 * len(took)
            if times > 1:
                assert (len(took) - before) / 40 >= 0.95 * CAPACITY
                assert min(len(first.first_token_s), len(another.first_token_s)) > 0.3 * len(took)

    run_in_virtual_time(main)


@pytest.mark.parametrize(
    ("mode", "disaggregation", "least", "late"),
    [
        ("round_robin", "auto", 1.2, 0.2),
        ("kv", "always", 1.2, 0.05),
        ("kv", "predicted", 1.2, 0.05),
        ("kv", "off", 2.5, 0.05),
    ],
)
def test_the_ttft_slo_counts_the_workers_that_compute_prompts(
    mode: str, disaggregation: str, least: float, late: float
) -> None:
    """The prefill worker computes 1.6 prompts a second, and the decode workers are nearly idle."""

    async def main(clock: VirtualClock) -> None:
        settings = DisaggregationSettings(mode=disaggregation)
        limits = RouterSettings(ttft_slo=2.0, disaggregation=settings)
        async with open_trial(clock, limits, make_workers_apart(), mode) as run:
            await run.offer_load(1.0, 10, Random(7), prompt=6_000)
            before = len(run.first_token_s)
            await run.offer_load(5.0, 30, Random(3), prompt=6_000)
            took = run.first_token_s.values()
            assert max(took) < 2 * limits.ttft_slo
            assert sum(seconds > 2.0 for seconds in took) < late * len(took)
            assert len(run.rejected) > 30
            assert len(run.first_token_s) - before > least * 30

    run_in_virtual_time(main)


def short_and_long(rng: Random) -> int:
    """Return an answer length from a wide distribution with one limit."""
    return min(400, max(2, int(rng.lognormvariate(3.6, 0.9))))


@pytest.mark.parametrize("mode", ["round_robin", "random", "kv"])
@pytest.mark.parametrize("times", [1.0, 2.0, 3.0])
def test_the_ttft_slo_is_met_without_losing_throughput(mode: str, times: float) -> None:
    async def main(clock: VirtualClock) -> None:
        async with open_trial(clock, RouterSettings(ttft_slo=2.0), make_workers(), mode) as run:
            await run.offer_load(CAPACITY, 10, Random(7))
            before = len(run.first_token_s)
            await run.offer_load(times * CAPACITY, 40, Random(3))
            late = [row for row, took in run.first_token_s.items() if took > 2.0]
            assert not late
            if times > 1:
                assert (len(run.first_token_s) - before) / 40 >= 0.97 * CAPACITY
            slow = [took for took, _ in run.rejected.values() if took > 0.01]
            assert len(slow) <= 0.01 * len(run.rejected)
            assert all((error.retry_after_s or 0) > 0 for _, error in run.rejected.values())

    run_in_virtual_time(main)


def test_the_slo_is_met_with_unequal_answer_lengths() -> None:
    async def main(clock: VirtualClock) -> None:
        async with open_trial(clock, RouterSettings(ttft_slo=2.0), make_workers()) as run:
            await run.offer_load(30.0, 60, Random(5), lengths=short_and_long, bound=400)
            assert len(run.rejected) > 200
            assert not [took for took in run.first_token_s.values() if took > 2.0]
            slow = [took for took, _ in run.rejected.values() if took > 0.01]
            assert len(slow) <= 0.03 * len(run.rejected)

    run_in_virtual_time(main)


def test_no_request_is_rejected_while_a_worker_is_idle() -> None:
    async def main(clock: VirtualClock) -> None:
        async with (
            open_trial(clock, RouterSettings(ttft_slo=0.001), make_workers(2)) as run,
            BackgroundTasks() as tasks,
        ):
            for _ in range(4):  # the prefill time is learnt from these
                await run.send_request()
            tasks.start(run.send_request())
            tasks.start(run.send_request())
            await clock.sleep(0.5)
            assert not run.rejected
            await run.send_request()
            assert [*run.rejected] == [6]
            await tasks.join()

    run_in_virtual_time(main)


def test_a_single_slot_serves_requests_in_order() -> None:
    async def main(clock: VirtualClock) -> None:
        workers = make_workers(1, 1)
        async with open_trial(clock, RouterSettings(), workers) as run, BackgroundTasks() as tasks:
            for _ in range(4):
                await run.send_request()
            for _ in range(40):
                tasks.start(run.send_request())
                await clock.sleep(0.001)
            waits = [took for took, _ in run.rejected.values()]
            assert 15 <= len(waits) <= 20  # 30 s of 1.4 s each fit into the queue
            assert max(waits) == 0.0
            retry_after_s = [error.retry_after_s or 0.0 for _, error in run.rejected.values()]
            assert retry_after_s[-1] - retry_after_s[0] == pytest.approx(
                (len(retry_after_s) - 1) * HOLD_S, rel=0.1
            )
            await tasks.join()
            order = [took + run.arrived[row] for row, took in sorted(run.first_token_s.items())]
            assert order == sorted(order)
            assert len(run.first_token_s) + len(waits) == 44

    run_in_virtual_time(main)


def test_memory_limits_the_slots() -> None:
    async def main(clock: VirtualClock) -> None:
        workers = make_workers(1, 64, blocks=32)  # 2,048 tokens; each request needs 316
        async with open_trial(clock, RouterSettings(), workers) as run, BackgroundTasks() as tasks:
            await run.send_request()
            for _ in range(20):
                tasks.start(run.send_request())
            await clock.sleep(0.5)
            held = sum(worker.slots.occupied for worker in run.admission.capacity.workers)
            assert 4 <= held <= 7
            await tasks.join()
            assert len(run.first_token_s) == 21

    run_in_virtual_time(main)


def test_a_request_deadline_limits_the_wait() -> None:
    async def main(clock: VirtualClock) -> None:
        async with (
            open_trial(clock, RouterSettings(), make_workers(1, 1)) as run,
            BackgroundTasks() as tasks,
        ):
            await run.send_request()
            for _ in range(4):
                tasks.start(run.send_request())
            await clock.sleep(0.1)
            await run.send_request(timeout_s=2.0)
            took, error = run.rejected[5]
            assert took == 0.0
            assert "2 s" in error.message
            tasks.start(run.send_request(timeout_s=20.0))
            await tasks.join()
            assert len(run.first_token_s) == 6

    run_in_virtual_time(main)


def test_a_higher_priority_goes_first() -> None:
    async def main(clock: VirtualClock) -> None:
        async with (
            open_trial(clock, RouterSettings(), make_workers(1, 1)) as run,
            BackgroundTasks() as tasks,
        ):
            await run.send_request()
            for _ in range(5):
                tasks.start(run.send_request())
            await clock.sleep(0.1)
            tasks.start(run.send_request(priority=10))
            await tasks.join()
            assert run.first_token_s[6] < run.first_token_s[3]

    run_in_virtual_time(main)


def test_the_queue_is_bounded() -> None:
    async def main(clock: VirtualClock) -> None:
        metrics = Registry()
        limits = RouterSettings(queue_bound=3)
        async with (
            open_trial(clock, limits, make_workers(1, 1), metrics=metrics) as run,
            BackgroundTasks() as tasks,
        ):
            for _ in range(6):
                tasks.start(run.send_request())
            await tasks.join()
            assert len(run.rejected) == 2
            assert len(run.first_token_s) == 4
            text = metrics.render()
            assert 'dynamo_admission_rejected_total{reason="queue_full"} 2' in text
            assert "dynamo_admission_waiting_requests 0" in text

    run_in_virtual_time(main)


def test_max_worker_requests_limits_each_worker() -> None:
    async def main(clock: VirtualClock) -> None:
        limits = RouterSettings(max_worker_requests=2)
        async with open_trial(clock, limits, make_workers(2)) as run, BackgroundTasks() as tasks:
            for _ in range(10):
                tasks.start(run.send_request())
            await clock.sleep(0.5)
            assert [worker.slots.occupied for worker in run.admission.capacity.workers] == [2, 2]
            await tasks.join()

    run_in_virtual_time(main)


def test_queued_requests_survive_the_loss_of_the_worker() -> None:
    async def main(clock: VirtualClock) -> None:
        async with (
            open_trial(clock, RouterSettings(), make_workers(1, 1)) as run,
            BackgroundTasks() as tasks,
        ):
            for _ in range(3):
                tasks.start(run.send_request())
            await clock.sleep(0.1)
            await run.cluster.withdraw_worker()
            await clock.sleep(10)
            assert [*run.first_token_s] == [0]
            await run.cluster.announce_worker()
            await tasks.join()
            assert [*run.first_token_s] == [0, 1, 2]
            tasks.start(run.send_request())
            waiting = tasks.start(run.send_request())
            await clock.sleep(0.1)
            await run.cluster.withdraw_worker()
            with pytest.raises(NoWorkers):
                await waiting

    run_in_virtual_time(main)


def test_a_cancelled_request_does_not_block_the_queue() -> None:
    async def main(clock: VirtualClock) -> None:
        async with (
            open_trial(clock, RouterSettings(), make_workers(1, 1)) as run,
            BackgroundTasks() as tasks,
        ):
            running = tasks.start(run.send_request())
            await clock.sleep(0.1)
            waiting = [tasks.start(run.send_request()) for _ in range(3)]
            await clock.sleep(0.1)
            waiting[0].cancel()
            running.cancel()
            await clock.sleep(0)
            waiting[1].cancel()
            await tasks.join()
            assert [*run.first_token_s] == [3]
            assert run.admission.capacity.free_slots == 1

    run_in_virtual_time(main)


@pytest.mark.parametrize("mode", ["round_robin", "kv"])
def test_limits_can_change_under_load(mode: str) -> None:
    async def main(clock: VirtualClock) -> None:
        async with (
            open_trial(clock, RouterSettings(), make_workers(), mode) as run,
            BackgroundTasks() as tasks,
        ):
            await run.offer_load(2 * CAPACITY, 10, Random(7))
            assert not run.rejected
            run.admission.update(RouterSettings(ttft_slo=2.0))
            await run.offer_load(2 * CAPACITY, 40, Random(3))
            assert len(run.rejected) > CAPACITY * 20
            run.admission.update(RouterSettings(max_worker_requests=1))
            before = len(run.rejected)
            for _ in range(8):
                tasks.start(run.send_request())
            await clock.sleep(0.1)
            assert {worker.slots.occupied for worker in run.admission.capacity.workers} == {1}
            assert len(run.rejected) == before
            await tasks.join()

    run_in_virtual_time(main)


def test_a_request_that_waits_much_longer_than_predicted_is_rejected() -> None:
    async def main(clock: VirtualClock) -> None:
        workers = make_workers(1, 1)
        async with (
            open_trial(clock, RouterSettings(max_queue_wait=5.0), workers) as run,
            BackgroundTasks() as tasks,
        ):
            for _ in range(6):
                await run.send_request(
                    10
                )  # short answers, so the model expects less than the limit of 60
            tasks.start(run.send_request(2_000, bound=60))
            await clock.sleep(0.1)
            await run.send_request()
            ((took, error),) = run.rejected.values()
            assert took == pytest.approx(10.0)
            assert "became free in 10 s" in error.message
            await tasks.join()

    run_in_virtual_time(main)


def test_a_new_max_tokens_is_predicted_from_the_usual_fill() -> None:
    async def main(clock: VirtualClock) -> None:
        async with (
            open_trial(clock, RouterSettings(), make_workers(1, 1)) as run,
            BackgroundTasks() as tasks,
        ):
            for _ in range(8):
                await run.send_request(60)
            for _ in range(30):
                tasks.start(run.send_request(240))
                await clock.sleep(0.001)
            assert 6 <= 30 - len(run.rejected) <= 9  # requests of 5.5 s each fit into 30 s
            await tasks.join()

    run_in_virtual_time(main)
