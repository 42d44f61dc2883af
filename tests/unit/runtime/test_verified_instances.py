"""Instances that count once they were reached: probes, reasons, large fleets."""

from __future__ import annotations

import msgspec
from tests.unit.runtime.test_instances import UNREACHABLE, FakeCluster, instance, play, put

from dynamo.core.errors import WorkerFailed
from dynamo.runtime.calls.instances import PROBE_INTERVAL_S


def test_a_verified_instance_counts_after_its_first_answer() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        assert cluster.view.verifying
        await cluster.clock.wait_until_idle()
        assert cluster.live == {"a", "b"}
        assert not cluster.view.verifying
        assert cluster.clock.now() == 0.0
        cluster.dead.add("memory:c")
        await cluster.announce(put(instance("c")))
        assert cluster.live == {"a", "b"}
        assert cluster.view.unreachable_reasons() == {"c": UNREACHABLE}
        await cluster.clock.sleep(10.0)
        cluster.dead.clear()
        await cluster.announce(put(instance("c")))  # the next probe is due in 2 s
        assert cluster.live == {"a", "b", "c"}
        assert cluster.view.unreachable_reasons() == {}

    play(scenario, "a", "b", verify=True)


def test_changed_reasons_of_verified_instances_are_reported_once() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        reports = 0

        def report() -> None:
            nonlocal reports
            reports += 1

        cluster.view.on_reason_change(report)
        cluster.call_error = WorkerFailed("tcp://a cannot be reached: it has another secret")
        await cluster.clock.sleep(30.0)
        assert reports == 2  # two addresses
        assert cluster.view.describe_unavailable() == "2 unreachable: it has another secret"
        cluster.call_error = WorkerFailed("tcp://a cannot be reached: no answer")
        await cluster.clock.sleep(30.0)
        assert reports == 4
        cluster.call_error = None
        await cluster.clock.sleep(3.0)
        assert cluster.live == {"a", "b"}

    play(scenario, "a", "b", verify=True)


def test_a_verified_instance_stays_while_its_record_changes_and_is_probed_at_a_new_address() -> (
    None
):
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.clock.wait_until_idle()
        cluster.dead.add("memory:a")
        await cluster.announce(put(msgspec.structs.replace(instance("a"), lease_id="7")))
        assert cluster.live == {"a"}
        cluster.dead.add("memory:moved")
        await cluster.announce(put(instance("a", "memory:moved")))
        assert cluster.live == set()
        cluster.dead.clear()
        await cluster.clock.sleep(PROBE_INTERVAL_S + 0.01)
        assert cluster.live == {"a"}

    play(scenario, "a", verify=True)


def test_the_answers_of_a_large_fleet_change_the_view_a_few_times() -> None:
    names = [f"w{number}" for number in range(2000)]

    async def scenario(cluster: FakeCluster) -> None:
        await cluster.clock.sleep(1.0)
        assert cluster.live == set(names)
        assert cluster.changes <= 3

    play(scenario, *names, verify=True)
