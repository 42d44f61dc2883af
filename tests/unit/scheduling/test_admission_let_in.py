"""Who is let in to which worker, and that every place comes back, whatever becomes of a request."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.scheduling.house import House, play, worker

from dynamo.core.context import Context
from dynamo.core.errors import InvalidRequest, NoWorkers, Overloaded
from dynamo.core.values import GenerateRequest, Load, SamplingParams, StopConditions
from dynamo.scheduling.admission import SloLimits
from dynamo.scheduling.router.labels import LABELS_KEY
from dynamo.testing.fakes import CollectedReply


def test_as_many_as_there_are_places_and_the_next_when_one_leaves() -> None:
    async def what(house: House) -> None:
        for name in "uvwxy":
            house.ask(name)
        await house.clock.sleep(0.5)
        assert house.taken == ["u", "v"]
        await house.clock.sleep(1.0)
        assert house.taken == ["u", "v", "w", "x"]
        await house.clock.sleep(1.0)
        assert house.taken == ["u", "v", "w", "x", "y"]

    play(what, 2)


@pytest.mark.parametrize("error", [InvalidRequest("no"), NoWorkers("none"), RuntimeError("bug")])
def test_who_fails_before_it_has_a_worker_gives_its_place_back(error: Exception) -> None:
    async def what(house: House) -> None:
        house.fails = error
        for number in range(10):
            call = house.ask(f"bad{number}")
            with pytest.raises(type(error)):
                await call
        house.fails = None
        for name in "uvw":
            house.ask(name)
        await house.clock.wait_until_idle()
        assert house.taken == ["u", "v"]

    play(what, 2)


def test_who_is_on_its_way_to_a_worker_has_a_place_already() -> None:
    async def what(house: House) -> None:
        house.hold = asyncio.Event()
        calls = [house.ask(name) for name in "uvwx"]
        await house.clock.sleep(5.0)
        assert len(house.contexts) == 2
        calls[0].cancel()
        await house.clock.wait_until_idle()
        assert len(house.contexts) == 3
        house.hold.set()
        await house.clock.sleep(0.5)
        assert house.taken == ["v", "w"]
        await house.clock.sleep(1.0)
        assert house.taken == ["v", "w", "x"]

    play(what, 2)


def test_who_leaves_the_queue_holds_up_nobody() -> None:
    async def what(house: House) -> None:
        house.ask("u")
        await house.clock.sleep(0.1)
        waiting = [house.ask(name) for name in "vwx"]
        await house.clock.sleep(0.1)
        waiting[0].cancel()
        waiting[2].cancel()
        await house.clock.sleep(1.0)
        assert house.taken == ["u", "w"]
        house.ask("y")
        await house.clock.sleep(1.0)
        assert house.taken == ["u", "w", "y"]
        assert "dynamo_admission_waiting_requests 0\n" in house.metrics.render()

    play(what, 1)


def test_who_leaves_in_the_moment_of_its_turn_passes_it_on() -> None:
    async def what(house: House) -> None:
        house.ask("u")
        await house.clock.sleep(0.1)
        waiting = [house.ask(name) for name in "vw"]
        await house.clock.wait_until_idle()
        release = house.admission._in_flight.on_slot_released

        def and_leave() -> None:
            release()
            waiting[0].cancel()
            house.admission._in_flight.on_slot_released = release

        house.admission._in_flight.on_slot_released = and_leave
        await house.clock.sleep(1.5)
        assert house.taken == ["u", "w"]
        house.ask("x")
        await house.clock.sleep(1.0)
        assert house.taken == ["u", "w", "x"]

    play(what, 1)


def test_workers_without_a_place_are_left_out_while_others_have_one() -> None:
    async def what(house: House) -> None:
        for name in "uvw":
            house.ask(name)
            await house.clock.wait_until_idle()
        assert house.begun == [("u", "a"), ("v", "b"), ("w", "b")]

    play(what, 1, 2)


def test_where_those_with_a_place_are_gone_any_will_do() -> None:
    async def what(house: House) -> None:
        house.absent.add("b")
        house.ask("u")
        await house.clock.wait_until_idle()
        house.ask("v")
        await house.clock.wait_until_idle()
        assert house.begun == [("u", "a"), ("v", "a")]
        assert [one.avoid for one in house.contexts] == [(), ("a",), ()]

    play(what, 1, 1)


def test_what_a_client_avoids_stays_avoided() -> None:
    async def what(house: House) -> None:
        house.ask("u")
        await house.clock.wait_until_idle()
        request = GenerateRequest("v", "m", bytes(16), SamplingParams(), StopConditions(10))
        context = Context("v", avoid=("b",))
        await house.admission.send(request, context, CollectedReply(), house.below)
        assert house.begun[1] == ("v", "c")

    play(what, 1, 1, 1)


def test_who_may_only_go_to_one_worker_waits_for_that_one_and_alone() -> None:
    async def what(house: House) -> None:
        house.ask("u")
        await house.clock.wait_until_idle()
        house.ask("v", **{LABELS_KEY: "zone=a"})
        house.ask("w")
        await house.clock.sleep(0.5)
        assert house.begun == [("u", "a"), ("w", "b")]
        await house.clock.sleep(0.8)
        assert "v" in house.taken

    play(what, 1, 1)


def test_what_workers_report_takes_places_and_gives_them_back() -> None:
    async def what(house: House) -> None:
        now = house.clock.now
        for _ in range(3):
            house.admission.on_load_report("a", Load(running=2), now())
        house.ask("u")
        await house.clock.sleep(0.3)
        assert house.taken == []
        for _ in range(3):
            house.admission.on_load_report("a", Load(), now())
        await house.clock.wait_until_idle()
        assert house.taken == ["u"]

    play(what, 2)


def test_a_worker_that_comes_lets_in_who_waits_and_a_closed_one_follows_nobody() -> None:
    async def what(house: House) -> None:
        house.ask("u")
        house.ask("v")
        await house.clock.sleep(0.1)
        house.change(**house.instances, b=worker("b", 1))
        await house.clock.wait_until_idle()
        assert house.begun == [("u", "a"), ("v", "b")]
        house.admission.close()
        assert house.listeners == []

    play(what, 1)


def test_a_cap_that_changes_holds_at_once() -> None:
    async def what(house: House) -> None:
        for name in "uvw":
            house.ask(name)
        await house.clock.wait_until_idle()
        assert house.taken == ["u"]
        house.admission.update(SloLimits(max_worker_requests=3))
        await house.clock.wait_until_idle()
        assert house.taken == ["u", "v", "w"]

    play(what, 4, promise=SloLimits(max_worker_requests=1))


def test_who_finds_the_queue_full_is_told_when_to_come_again() -> None:
    async def what(house: House) -> None:
        for name in "uvw":
            house.ask(name)
        await house.clock.sleep(0.1)
        with pytest.raises(Overloaded) as caught:
            await house.ask("x")
        assert (caught.value.retry_after_s or 0) > 0
        assert 'dynamo_admission_rejected_total{reason="queue_full"} 1' in house.metrics.render()
        await house.clock.sleep(3.0)
        assert house.taken == ["u", "v", "w"]

    play(what, 1, promise=SloLimits(queue_bound=2))


def rejected(house: House) -> list[str]:
    lines = house.metrics.render().splitlines()
    return [line for line in lines if line.startswith("dynamo_admission_rejected_total{")]


def test_a_wait_that_would_be_too_long_is_refused_at_once_each_later_than_the_one_before() -> None:
    async def what(house: House) -> None:
        await house.learn(4.0)
        calls = [house.ask(name) for name in "uvwxyz"]
        await house.clock.sleep(0.1)
        assert [call.done() for call in calls] == [False] * 3 + [True] * 3
        retries = []
        for call in calls[3:]:
            with pytest.raises(Overloaded) as caught:
                await call
            retries.append(caught.value.retry_after_s or 0)
        assert 0 < retries[0] < retries[1] < retries[2] <= 60
        assert rejected(house) == ['dynamo_admission_rejected_total{reason="queue_wait"} 3']
        await house.clock.sleep(10.0)
        assert house.taken == ["u", "v", "w"]

    play(what, 1, promise=SloLimits(max_queue_wait_s=9.0))


def test_a_deadline_that_cannot_be_kept_is_told_at_once() -> None:
    async def what(house: House) -> None:
        await house.learn(4.0)
        house.ask("u", 5.0)
        await house.clock.sleep(0.1)
        with pytest.raises(Overloaded, match="beyond 3 s"):
            await house.ask("v", 3.0)
        house.ask("w", 5.0)
        await house.clock.sleep(4.5)
        assert house.taken == ["u", "w"]
        assert rejected(house) == ['dynamo_admission_rejected_total{reason="deadline"} 1']

    play(what, 1)


def test_whose_turn_does_not_come_in_the_promised_time_is_told_then() -> None:
    async def what(house: House) -> None:
        await house.learn(1.0)
        house.took_s = 50.0
        house.ask("u")
        await house.clock.sleep(0.1)
        began, call = house.clock.now(), house.ask("v")
        with pytest.raises(Overloaded, match="no worker became free"):
            await call
        assert 1.5 < house.clock.now() - began <= 2.0
        assert rejected(house) == ['dynamo_admission_rejected_total{reason="late"} 1']
        await house.clock.sleep(50.0)
        house.ask("w")
        await house.clock.wait_until_idle()
        assert house.taken == ["u", "w"]

    play(what, 1, promise=SloLimits(ttft_s=2.0))


def test_how_long_one_waited_is_counted_and_its_time_is_over_with_its_turn() -> None:
    async def what(house: House) -> None:
        await house.learn(1.0)
        house.ask("u")
        await house.clock.sleep(0.0)
        house.ask("v")
        await house.clock.sleep(0.5)
        house.took_s = 5.0
        await house.clock.sleep(5.6)
        assert house.taken == ["u", "v"]
        told = house.metrics.render()
        assert "dynamo_admission_wait_seconds_count 1\n" in told
        assert 'dynamo_admission_wait_seconds_bucket{le="0.3"} 0\n' in told
        assert 'dynamo_admission_wait_seconds_bucket{le="1"} 1\n' in told
        assert rejected(house) == []

    play(what, 1, promise=SloLimits(ttft_s=2.0))


def test_a_worker_that_came_late_has_its_places_and_no_more() -> None:
    async def what(house: House) -> None:
        await house.clock.sleep(100.0)
        house.change(a=worker("a", 1))
        house.took_s = 100.0
        for name in "uvw":
            house.ask(name)
        await house.clock.sleep(45.0)
        assert house.taken == ["u"]

    play(what)


def test_who_waits_for_workers_that_are_gone_is_told_after_a_while_if_none_comes() -> None:
    async def what(house: House) -> None:
        house.took_s = 1000.0
        await house.clock.sleep(100.0)
        house.ask("u")
        await house.clock.sleep(1.0)
        calls = [house.ask(name) for name in "vw"]
        await house.clock.sleep(1.0)
        house.change()
        gone_s = house.clock.now()
        await house.clock.sleep(29.0)
        assert not any(call.done() for call in calls)
        for call in calls:
            with pytest.raises(NoWorkers):
                await call
        assert 30.0 <= house.clock.now() - gone_s < 32.0

    play(what, 1)
