"""Admission: the order of requests and workers, and that every slot is released."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.scheduling.fake_cluster import FakeCluster, make_worker, run_scenario

from dynamo.core.context import Context
from dynamo.core.errors import InvalidRequest, NoWorkers, Overloaded
from dynamo.core.settings.schema_router import RouterSettings
from dynamo.core.values import GenerateRequest, Load, SamplingParams, StopConditions
from dynamo.scheduling.router.features import LABELS_KEY
from dynamo.scheduling.workers.placed_request import PlacedRequest
from dynamo.testing.fakes import CollectedReply


def test_requests_beyond_the_slots_wait_for_a_release() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        for name in "uvwxy":
            cluster.start(name)
        await cluster.clock.sleep(0.5)
        assert cluster.served == ["u", "v"]
        await cluster.clock.sleep(1.0)
        assert cluster.served == ["u", "v", "w", "x"]
        await cluster.clock.sleep(1.0)
        assert cluster.served == ["u", "v", "w", "x", "y"]

    run_scenario(scenario, 2)


@pytest.mark.parametrize("error", [InvalidRequest("no"), NoWorkers("none"), RuntimeError("bug")])
def test_a_request_that_fails_before_dispatch_releases_its_slot(error: Exception) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        cluster.error = error
        for number in range(10):
            call = cluster.start(f"bad{number}")
            with pytest.raises(type(error)):
                await call
        cluster.error = None
        for name in "uvw":
            cluster.start(name)
        await cluster.clock.wait_until_idle()
        assert cluster.served == ["u", "v"]

    run_scenario(scenario, 2)


def test_a_dispatching_request_occupies_a_slot() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        cluster.hold = asyncio.Event()
        calls = [cluster.start(name) for name in "uvwx"]
        await cluster.clock.sleep(5.0)
        assert len(cluster.contexts) == 2
        calls[0].cancel()
        await cluster.clock.wait_until_idle()
        assert len(cluster.contexts) == 3
        cluster.hold.set()
        await cluster.clock.sleep(0.5)
        assert cluster.served == ["v", "w"]
        await cluster.clock.sleep(1.0)
        assert cluster.served == ["v", "w", "x"]

    run_scenario(scenario, 2)


def test_a_request_cancelled_in_the_queue_blocks_no_other() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        cluster.start("u")
        await cluster.clock.sleep(0.1)
        waiting = [cluster.start(name) for name in "vwx"]
        await cluster.clock.sleep(0.1)
        waiting[0].cancel()
        waiting[2].cancel()
        await cluster.clock.sleep(1.0)
        assert cluster.served == ["u", "w"]
        cluster.start("y")
        await cluster.clock.sleep(1.0)
        assert cluster.served == ["u", "w", "y"]
        assert "dynamo_admission_waiting_requests 0\n" in cluster.metrics.render()

    run_scenario(scenario, 1)


def test_a_request_cancelled_at_its_dequeue_passes_the_slot_on() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        cluster.start("u")
        await cluster.clock.sleep(0.1)
        waiting = [cluster.start(name) for name in "vw"]
        await cluster.clock.wait_until_idle()

        def cancel(placed: PlacedRequest, error: BaseException | None) -> None:
            waiting[0].cancel()
            cluster.ledger.on_ended.remove(cancel)

        cluster.ledger.on_ended.append(cancel)  # after admission has given the slot away
        await cluster.clock.sleep(1.5)
        assert cluster.served == ["u", "w"]
        cluster.start("x")
        await cluster.clock.sleep(1.0)
        assert cluster.served == ["u", "w", "x"]

    run_scenario(scenario, 1)


def test_full_workers_are_avoided_while_others_have_slots() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        for name in "uvw":
            cluster.start(name)
            await cluster.clock.wait_until_idle()
        assert cluster.attempts == [("u", "a"), ("v", "b"), ("w", "b")]

    run_scenario(scenario, 1, 2)


def test_a_full_worker_is_used_when_those_with_slots_are_gone() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        cluster.absent.add("b")
        cluster.start("u")
        await cluster.clock.wait_until_idle()
        cluster.start("v")
        await cluster.clock.wait_until_idle()
        assert cluster.attempts == [("u", "a"), ("v", "a")]
        assert [context.avoid for context in cluster.contexts] == [(), ("a",), ()]

    run_scenario(scenario, 1, 1)


def test_workers_avoided_by_the_context_stay_avoided() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        cluster.start("u")
        await cluster.clock.wait_until_idle()
        request = GenerateRequest("v", "m", bytes(16), SamplingParams(), StopConditions(10))
        context = Context("v", avoid=("b",))
        await cluster.admission.send(request, context, CollectedReply(), cluster.route)
        assert cluster.attempts[1] == ("v", "c")

    run_scenario(scenario, 1, 1, 1)


def test_a_request_with_labels_waits_for_its_worker_only() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        cluster.start("u")
        await cluster.clock.wait_until_idle()
        cluster.start("v", **{LABELS_KEY: "zone=a"})
        cluster.start("w")
        await cluster.clock.sleep(0.5)
        assert cluster.attempts == [("u", "a"), ("w", "b")]
        await cluster.clock.sleep(0.8)
        assert "v" in cluster.served

    run_scenario(scenario, 1, 1)


def test_waiting_requests_of_one_label_block_no_others() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        for number in range(71):
            cluster.start(f"a{number}", **{LABELS_KEY: "zone=a"})
        await cluster.clock.wait_until_idle()
        assert cluster.served == ["a0"]
        cluster.start("b", **{LABELS_KEY: "zone=b"})
        cluster.start("any")
        await cluster.clock.wait_until_idle()
        assert cluster.attempts[1:] == [("b", "b"), ("any", "b")]

    run_scenario(scenario, 1, 4)


def test_first_requests_of_all_labels_are_dequeued_in_order() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        for number in range(2):
            cluster.start(f"busy{number}")
        await cluster.clock.wait_until_idle()
        for name, zone in (("b0", "b"), ("a0", "a"), ("b1", "b"), ("any", ""), ("a1", "a")):
            cluster.start(name, **({LABELS_KEY: f"zone={zone}"} if zone else {}))
        await cluster.clock.sleep(5)
        assert cluster.attempts[2:] == [
            ("a0", "a"), ("b0", "b"), ("any", "a"), ("b1", "b"), ("a1", "a")
        ]  # fmt: skip

    run_scenario(scenario, 1, 1)


def test_wait_predictions_count_suitable_slots_only() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.learn_duration(10.0)
        calls = [cluster.start(f"a{number}", **{LABELS_KEY: "zone=a"}) for number in range(9)]
        calls += [cluster.start(f"b{number}", **{LABELS_KEY: "zone=b"}) for number in range(8)]
        await cluster.clock.wait_until_idle()
        late = [call for call in calls if call.done()]
        assert late == calls[4:9]  # a0 runs; a1 to a3 wait for 10, 20 and 30 s
        for call in late:
            assert isinstance(call.exception(), Overloaded)

    run_scenario(scenario, 1, 8)


def test_a_queued_request_follows_the_labels_of_new_workers() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        cluster.start("u")
        cluster.start("v", **{LABELS_KEY: "zone=a"})
        await cluster.clock.wait_until_idle()
        workers = {"a": make_worker("a", 1, zone="a"), "b": make_worker("b", 4, zone="b")}
        cluster.set_instances(**workers)
        await cluster.clock.sleep(0.5)
        assert cluster.served == ["u"]
        cluster.set_instances(**workers, c=make_worker("c", 1, zone="a"))
        await cluster.clock.sleep(0.1)
        assert cluster.attempts == [("u", "a"), ("v", "c")]

    run_scenario(scenario, 1)


def test_reported_requests_occupy_slots_until_reported_gone() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        for _ in range(3):
            cluster.report("a", Load(running=2))
        cluster.start("u")
        await cluster.clock.sleep(0.3)
        assert cluster.served == []
        for _ in range(3):
            cluster.report("a", Load())
        await cluster.clock.wait_until_idle()
        assert cluster.served == ["u"]

    run_scenario(scenario, 2)


def test_a_new_worker_takes_waiting_requests_and_close_unsubscribes() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        cluster.start("u")
        cluster.start("v")
        await cluster.clock.sleep(0.1)
        cluster.set_instances(**cluster.instances, b=make_worker("b", 1))
        await cluster.clock.wait_until_idle()
        assert cluster.attempts == [("u", "a"), ("v", "b")]
        cluster.admission.close()
        cluster.starts.close()
        cluster.ledger.close()
        assert cluster.listeners == []

    run_scenario(scenario, 1)


def test_an_updated_worker_limit_applies_at_once() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        for name in "uvw":
            cluster.start(name)
        await cluster.clock.wait_until_idle()
        assert cluster.served == ["u"]
        cluster.admission.update(RouterSettings(max_worker_requests=3))
        await cluster.clock.wait_until_idle()
        assert cluster.served == ["u", "v", "w"]

    run_scenario(scenario, 4, limits=RouterSettings(max_worker_requests=1))


def test_a_full_queue_rejects_with_retry_after() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        for name in "uvw":
            cluster.start(name)
        await cluster.clock.sleep(0.1)
        with pytest.raises(Overloaded) as caught:
            await cluster.start("x")
        assert (caught.value.retry_after_s or 0) > 0
        assert 'dynamo_admission_rejected_total{reason="queue_full"} 1' in cluster.metrics.render()
        await cluster.clock.sleep(3.0)
        assert cluster.served == ["u", "v", "w"]

    run_scenario(scenario, 1, limits=RouterSettings(queue_bound=2))


def test_an_emptied_queue_keeps_the_pace_that_retry_after_follows() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        cluster.duration_s = 7.0
        for name in ("u", "v", "w"):
            cluster.start(name)
        await cluster.clock.sleep(30.0)
        assert cluster.served == ["u", "v", "w"]
        for name in ("x", "y", "z"):
            cluster.start(name)
        await cluster.clock.sleep(0.1)
        with pytest.raises(Overloaded) as caught:
            await cluster.start("rejected")
        assert caught.value.retry_after_s == pytest.approx(14.0)

    run_scenario(scenario, 1, limits=RouterSettings(queue_bound=2))


def rejections(cluster: FakeCluster) -> list[str]:
    lines = cluster.metrics.render().splitlines()
    counts = [line for line in lines if line.startswith("dynamo_admission_rejected_total{")]
    return [line for line in counts if not line.endswith(" 0")]


def test_too_long_waits_are_rejected_with_growing_retry_after() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.learn_duration(4.0)
        calls = [cluster.start(name) for name in "uvwxyz"]
        await cluster.clock.sleep(0.1)
        assert [call.done() for call in calls] == [False] * 3 + [True] * 3
        retries = []
        for call in calls[3:]:
            with pytest.raises(Overloaded) as caught:
                await call
            retries.append(caught.value.retry_after_s or 0)
        assert 0 < retries[0] < retries[1] < retries[2] <= 60
        assert rejections(cluster) == ['dynamo_admission_rejected_total{reason="queue_wait"} 3']
        await cluster.clock.sleep(10.0)
        assert cluster.served == ["u", "v", "w"]

    run_scenario(scenario, 1, limits=RouterSettings(max_queue_wait=9.0))


def test_an_impossible_deadline_is_rejected_at_once() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.learn_duration(4.0)
        cluster.start("u", 5.0)
        await cluster.clock.sleep(0.1)
        with pytest.raises(Overloaded, match="beyond 3 s"):
            await cluster.start("v", 3.0)
        cluster.start("w", 5.0)
        await cluster.clock.sleep(4.5)
        assert cluster.served == ["u", "w"]
        assert rejections(cluster) == ['dynamo_admission_rejected_total{reason="deadline"} 1']

    run_scenario(scenario, 1)


def test_a_queued_request_is_rejected_when_its_ttft_limit_passes() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.learn_duration(1.0)
        cluster.duration_s = 50.0
        cluster.start("u")
        await cluster.clock.sleep(0.1)
        began, call = cluster.clock.now(), cluster.start("v")
        with pytest.raises(Overloaded, match="no worker became free"):
            await call
        assert 1.5 < cluster.clock.now() - began <= 2.0
        assert rejections(cluster) == ['dynamo_admission_rejected_total{reason="late"} 1']
        await cluster.clock.sleep(50.0)
        cluster.start("w")
        await cluster.clock.wait_until_idle()
        assert cluster.served == ["u", "w"]

    run_scenario(scenario, 1, limits=RouterSettings(ttft_slo=2.0))


def test_waits_are_measured_and_a_dequeue_ends_the_time_limit() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.learn_duration(1.0)
        cluster.start("u")
        await cluster.clock.sleep(0.0)
        cluster.start("v")
        await cluster.clock.sleep(0.5)
        cluster.duration_s = 5.0
        await cluster.clock.sleep(5.6)
        assert cluster.served == ["u", "v"]
        metrics = cluster.metrics.render()
        assert "dynamo_admission_wait_seconds_count 1\n" in metrics
        assert 'dynamo_admission_wait_seconds_bucket{le="0.3"} 0\n' in metrics
        assert 'dynamo_admission_wait_seconds_bucket{le="1.0"} 1\n' in metrics
        assert rejections(cluster) == []

    run_scenario(scenario, 1, limits=RouterSettings(ttft_slo=2.0))


def test_a_late_worker_gets_no_more_requests_than_slots() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.clock.sleep(100.0)
        cluster.set_instances(a=make_worker("a", 1))
        cluster.duration_s = 100.0
        for name in "uvw":
            cluster.start(name)
        await cluster.clock.sleep(45.0)
        assert cluster.served == ["u"]

    run_scenario(scenario)


def test_queued_requests_fail_after_a_while_without_workers() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        cluster.duration_s = 1000.0
        await cluster.clock.sleep(100.0)
        cluster.start("u")
        await cluster.clock.sleep(1.0)
        calls = [cluster.start(name) for name in "vw"]
        await cluster.clock.sleep(1.0)
        cluster.set_instances()
        gone_s = cluster.clock.now()
        await cluster.clock.sleep(29.0)
        assert not any(call.done() for call in calls)
        for call in calls:
            with pytest.raises(NoWorkers):
                await call
        assert 30.0 <= cluster.clock.now() - gone_s < 32.0

    run_scenario(scenario, 1)
