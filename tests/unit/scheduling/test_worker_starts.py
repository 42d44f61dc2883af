"""Requests while a model has no worker: held while a supervisor starts one, otherwise refused."""

from __future__ import annotations

import asyncio
from math import inf

import pytest
from tests.unit.scheduling.fake_cluster import FakeCluster, make_worker, run_scenario

from dynamo.core.errors import NoWorkers, Overloaded
from dynamo.core.settings.schema_router import RouterSettings


async def error_of(call: asyncio.Task[None]) -> NoWorkers:
    with pytest.raises(NoWorkers) as raised:
        await call
    return raised.value


def test_requests_wait_in_order_while_the_only_worker_is_restarted() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        cluster.announce(1, start_s=5.0)
        cluster.set_instances()
        for name in "uvwxyz":
            cluster.start(name)
        await cluster.clock.sleep(5.0)
        assert cluster.served == []
        cluster.set_instances(a=make_worker("a", 4))
        await cluster.clock.sleep(0.1)
        assert cluster.served == ["u", "v", "w", "x"]
        await cluster.clock.sleep(1.0)
        assert cluster.served == ["u", "v", "w", "x", "y", "z"]

    run_scenario(scenario, 4)


def test_without_a_supervisor_or_desired_worker_a_request_fails_at_once() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        before = cluster.clock.now()
        cluster.set_instances()
        assert (await error_of(cluster.start("no supervisor"))).message == "no worker"
        for desired, kind in ((0, "worker"), (1, "frontend")):
            cluster.announce(desired, start_s=5.0, kind=kind)
            assert (await error_of(cluster.start(f"{desired} {kind}"))).message == "no worker"
        assert cluster.clock.now() == before

    run_scenario(scenario, 4)


def test_a_held_request_fails_when_its_supervisor_starts_no_worker_any_more() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        cluster.announce(1, start_s=5.0)
        cluster.set_instances()
        held = cluster.start("u")
        await cluster.clock.sleep(1.0)
        cluster.announce(0)
        assert (await error_of(held)).message == "no worker"
        assert cluster.clock.now() < 1.5

        cluster.announce(1, start_s=5.0)
        held = cluster.start("v")
        await cluster.clock.sleep(0.1)
        cluster.supervisors.records.clear()  # the supervisor died
        assert (await error_of(held)).message == "no worker"

    run_scenario(scenario, 4)


def test_a_request_on_its_way_to_the_last_worker_is_held_when_that_dies() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        cluster.announce(1, start_s=5.0)
        cluster.hold = asyncio.Event()
        calls = [cluster.start(name) for name in "uv"]
        await cluster.clock.sleep(0.1)
        cluster.set_instances()
        cluster.hold.set()
        await cluster.clock.sleep(4.0)
        assert not any(call.done() for call in calls)
        cluster.set_instances(a=make_worker("a", 4))
        await asyncio.gather(*calls)
        assert cluster.served == ["u", "v"]
        assert cluster.admission.count_requests() == (0, 0, 0)

    run_scenario(scenario, 4)


def test_a_start_beyond_the_limit_is_refused_with_the_remaining_time() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        cluster.announce(1, start_s=45.0)
        cluster.set_instances()
        error = await error_of(cluster.start("u"))
        assert error.retry_after_s == 45.0
        assert "expected in 45.0 s" in error.message
        assert "router.max_queue_wait" in error.hint
        await cluster.clock.sleep(20.0)
        held = cluster.start("v")  # 25 s are left of 45
        await cluster.clock.sleep(25.0)
        cluster.set_instances(a=make_worker("a", 4))
        await held
        assert cluster.served == ["v"]

    run_scenario(scenario, 4)


@pytest.mark.parametrize(
    ("limits", "timeout_s"), [(RouterSettings(ttft_slo=2.0), None), (RouterSettings(), 2.0)]
)
def test_limits_of_the_first_token_hold_for_a_start(
    limits: RouterSettings, timeout_s: float | None
) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        cluster.announce(1, start_s=5.0)
        cluster.set_instances()
        error = await error_of(cluster.start("u", timeout_s))
        assert error.retry_after_s == 5.0
        await cluster.clock.sleep(4.0)
        held = cluster.start("v", timeout_s)
        await cluster.clock.sleep(1.0)
        cluster.set_instances(a=make_worker("a", 4))
        await held

    run_scenario(scenario, 4, limits=limits)


def test_a_start_that_does_not_come_holds_a_request_no_longer_than_the_limit() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        cluster.announce(1, start_s=5.0)
        cluster.set_instances()
        held = cluster.start("u")
        error = await error_of(held)
        assert cluster.clock.now() == 30.0
        assert error.retry_after_s == 25.0  # as long again as the start is overdue
        await cluster.clock.sleep(10.0)
        error = await error_of(cluster.start("v"))
        assert (error.retry_after_s, cluster.clock.now()) == (35.0, 40.0)

    run_scenario(scenario, 4)


def test_the_time_before_the_first_measured_start_is_assumed() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        cluster.announce(1)
        cluster.set_instances()
        held = cluster.start("u")
        await cluster.clock.sleep(29.0)
        cluster.set_instances(a=make_worker("a", 4))
        await held

    run_scenario(scenario, 4)


def test_a_crash_loop_is_named() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        cluster.announce(0, failing="worker died 5 times before it served, last by exit 7")
        cluster.set_instances()
        error = await error_of(cluster.start("u"))
        assert "died 5 times before it served, last by exit 7" in error.message
        assert error.retry_after_s == 10.0

    run_scenario(scenario, 4)


def test_the_bound_of_the_queue_holds_for_held_requests() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        cluster.announce(1, start_s=5.0)
        cluster.set_instances()
        for name in "uv":
            cluster.start(name)
        with pytest.raises(Overloaded):
            await cluster.start("w")
        await cluster.clock.sleep(1.0)
        cluster.set_instances(a=make_worker("a", 4))
        await cluster.clock.sleep(0.1)
        assert cluster.served == ["u", "v"]

    run_scenario(scenario, 4, limits=RouterSettings(queue_bound=2))


def test_another_lost_worker_is_expected_after_the_last_one_was_drained() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        cluster.announce(1, start_s=5.0)
        drained = make_worker("b", 4)
        drained.capabilities.clear()
        cluster.set_instances(a=cluster.instances["a"], b=drained)
        cluster.set_instances(b=drained)  # "a" died
        cluster.set_instances()
        held = cluster.start("u")
        await cluster.clock.sleep(3.0)
        assert not held.done()
        cluster.set_instances(a=make_worker("a", 4))
        await held

    run_scenario(scenario, 4, limits=RouterSettings(ttft_slo=inf))


def test_a_worker_that_changed_its_role_is_not_expected_to_start() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        cluster.announce(1, start_s=5.0)
        cluster.rejected = dict(cluster.instances)
        cluster.set_instances()
        assert (await error_of(cluster.start("u"))).message == "no worker"

    run_scenario(scenario, 4)
