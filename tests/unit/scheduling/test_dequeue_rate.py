"""The rate of dequeues, and that a wrong one rejects no request beside other frontends."""

from __future__ import annotations

import pytest
from tests.unit.scheduling.fake_cluster import FakeCluster, make_worker, run_scenario

from dynamo.core.values import Load
from dynamo.scheduling.workers.durations import DequeueRate


def test_the_dequeue_rate() -> None:
    rate = DequeueRate()
    assert rate.predict_wait_s(3) == 0.0
    rate.record_dequeue(0.0, 5)
    rate.record_dequeue(0.5, 4)
    rate.record_dequeue(1.0, 0)
    rate.record_dequeue(60.0, 1)  # no request waited in between
    rate.record_dequeue(60.5, 1)
    assert rate.predict_wait_s(3) == pytest.approx(2.0)
    rate.skip_gap()  # the waiting request left without a slot
    rate.record_dequeue(96.0, 1)
    assert rate.predict_wait_s(3) == pytest.approx(2.0)


def test_a_dequeue_rate_needs_several_gaps_that_are_not_old() -> None:
    rate = DequeueRate()
    for at_s in range(4):
        rate.record_dequeue(at_s, 1)
        assert not rate.is_reliable(at_s)
    rate.record_dequeue(4.0, 1)
    assert rate.is_reliable(15.0)
    assert not rate.is_reliable(15.1)
    rate.record_dequeue(20.0, 1)
    assert rate.is_reliable(20.0)
    assert rate.predict_wait_s(0) == pytest.approx(4.0)  # (4 * 1 + 16) / 5
    rate.reset()
    assert not rate.is_reliable(20.0)


async def report_foreign_requests(cluster: FakeCluster, count: int) -> None:
    """Report twice a second that another frontend has this many requests at each worker."""
    while True:
        running = count + len(cluster.ledger.requests)
        for name in cluster.instances:
            cluster.report(name, Load(running=running))
        await cluster.clock.sleep(0.5)


def test_a_request_that_left_the_queue_does_not_lengthen_predictions() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        reports = cluster.tasks.start(report_foreign_requests(cluster, 2))
        await cluster.clock.wait_until_idle()
        for round_s in (0, 40, 80, 120, 160):
            await cluster.clock.sleep_until(round_s)
            calls = [cluster.start(f"{round_s}{name}") for name in "uvw"]
            await cluster.clock.sleep(1.5)
            calls[2].cancel()
        await cluster.clock.sleep_until(200.0)
        calls = [cluster.start(name) for name in "xyz"]
        await cluster.clock.sleep(4.0)
        assert [call.exception() for call in calls] == [None] * 3
        reports.cancel()

    run_scenario(scenario, 3)


def test_the_rate_of_other_workers_does_not_lengthen_predictions() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        reports = cluster.tasks.start(report_foreign_requests(cluster, 2))
        await cluster.clock.wait_until_idle()
        cluster.duration_s = 8.0
        for name in "stuvwx":
            cluster.start(name)
        await cluster.clock.sleep(50.0)
        assert cluster.served == ["s", "t", "u", "v", "w", "x"]
        cluster.set_instances(b=make_worker("b", 3))
        cluster.duration_s = 0.1
        await cluster.clock.sleep(0.6)
        calls = [cluster.start(str(number)) for number in range(8)]
        await cluster.clock.sleep(3.0)
        assert [call.exception() for call in calls] == [None] * 8
        reports.cancel()

    run_scenario(scenario, 3)
