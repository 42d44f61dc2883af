"""The rules of the failure detector, with fake workers on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dynamo.core.errors import DynamoError, InstanceGone
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.virtual_time import Deadlock, VirtualClock, run_in_virtual_time
from dynamo.runtime.calls.failure_detector import (
    CHECK_INTERVAL_S,
    PING_TIMEOUT_FACTOR,
    PING_TIMEOUT_S,
    REMOVAL_GRACE_S,
    SUSPECT_AFTER_S,
    FailureDetector,
)
from dynamo.runtime.calls.instances import Instance
from dynamo.telemetry import Registry

DETECTED_WITHIN_S = SUSPECT_AFTER_S + PING_TIMEOUT_S + 4 * CHECK_INTERVAL_S


class FakeWorkers:
    """Two workers, seen both as a client and as a request plane.

    `frames` counts the frames of each worker. Pings are answered after `answer_s`, or never when
    it is None.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.view = self
        self.all_instances = {name: Instance(name, name, "n", "c", "e") for name in "ab"}
        self.instances = dict(self.all_instances)
        self.busy = {"a"}
        self.frames = {"a": 0, "b": 0}
        self.sent_bytes = 0
        self.unsent_bytes = 0
        self.answer_s: float | None = None
        self.pinged_at: list[float] = []
        self.open_pings = 0
        self.interrupted: list[tuple[str, str]] = []
        self.disconnected: list[str] = []
        self.on_instance_busy: Callable[[], None] | None = None
        self.removal_listeners: list[Callable[[Instance], None]] = []
        self.rejection_listeners: list[Callable[[Instance], None]] = []

    def busy_instances(self) -> list[Instance]:
        return [self.all_instances[name] for name in sorted(self.busy)]

    def on_instance_removed(self, callback: Callable[[Instance], None]) -> Callable[[], None]:
        self.removal_listeners.append(callback)
        return lambda: self.removal_listeners.remove(callback)

    def on_instance_rejected(self, callback: Callable[[Instance], None]) -> Callable[[], None]:
        self.rejection_listeners.append(callback)
        return lambda: self.rejection_listeners.remove(callback)

    def mark_unreachable(self, address: str) -> None:
        self.instances.pop(address, None)

    def interrupt(self, name: str, error: DynamoError) -> int:
        self.interrupted.append((name, type(error).__name__))
        return 3

    def count_received_frames(self, address: str) -> int:
        return self.frames[address]

    def count_sent_bytes(self, address: str) -> tuple[int, int]:
        return self.sent_bytes, self.unsent_bytes

    async def call(self, address: str, *_: Any) -> None:
        self.pinged_at.append(self.clock.now())
        with self._count_ping():
            if self.answer_s is None:
                await asyncio.Event().wait()
            else:
                await self.clock.sleep(self.answer_s)
                raise InstanceGone("an error is an answer, too")

    async def probe_directly(self, address: str, endpoint: str) -> bool:
        with self._count_ping():
            await asyncio.Event().wait()
        return False

    @contextmanager
    def _count_ping(self) -> Iterator[None]:
        self.open_pings += 1
        try:
            yield
        finally:
            self.open_pings -= 1

    def disconnect(self, address: str) -> None:
        self.disconnected.append(address)
        self.busy.discard(address)


class Scenario:
    def __init__(self, clock: VirtualClock, tasks: BackgroundTasks) -> None:
        self.clock = clock
        self.workers = FakeWorkers(clock)
        self.metrics = Registry()
        fake: Any = self.workers
        self.detector = FailureDetector(fake, clock, tasks, self.metrics)
        self.stop_watching = self.detector.watch(fake)


def run_scenario(play: Callable[[Scenario], Any]) -> None:
    async def main(clock: VirtualClock) -> None:
        async with BackgroundTasks() as tasks:
            await play(Scenario(clock, tasks))

    run_in_virtual_time(main)


def test_a_worker_that_sends_frames_is_not_pinged() -> None:
    async def play(scenario: Scenario) -> None:
        for _ in range(30):
            await scenario.clock.sleep(0.2)
            scenario.workers.frames["a"] += 1
        assert (scenario.workers.pinged_at, scenario.workers.interrupted) == ([], [])

    run_scenario(play)


def test_a_silent_worker_is_pinged_and_then_declared_failed() -> None:
    async def play(scenario: Scenario) -> None:
        workers = scenario.workers
        await scenario.clock.sleep(DETECTED_WITHIN_S)
        assert len(workers.pinged_at) == 1
        assert SUSPECT_AFTER_S <= workers.pinged_at[0] <= SUSPECT_AFTER_S + 3 * CHECK_INTERVAL_S
        assert workers.interrupted == [("a", "WorkerFailed")]
        assert workers.disconnected == ["a"]
        assert workers.open_pings == 0
        assert workers.instances.keys() == {"b"}
        assert "dynamo_workers_frozen_total 1" in scenario.metrics.render()

    run_scenario(play)


def test_the_last_worker_is_declared_failed_where_none_is_spared() -> None:
    async def play(scenario: Scenario) -> None:
        del scenario.workers.instances["b"]
        await scenario.clock.sleep(2 * DETECTED_WITHIN_S)
        assert scenario.workers.interrupted == []
        scenario.stop_watching()
        fake: Any = scenario.workers
        scenario.detector.watch(fake, spares_last=False)
        await scenario.clock.sleep(2 * DETECTED_WITHIN_S)
        assert scenario.workers.interrupted == [("a", "WorkerFailed")]

    run_scenario(play)


def test_a_worker_that_takes_waiting_bytes_is_not_declared_failed() -> None:
    async def play(scenario: Scenario) -> None:
        workers = scenario.workers
        workers.unsent_bytes = 50_000_000
        for _ in range(50):
            await scenario.clock.sleep(0.1)
            workers.sent_bytes += 1_000_000
            workers.unsent_bytes -= 1_000_000
        assert workers.interrupted == []
        assert workers.unsent_bytes == 0
        await scenario.clock.sleep(DETECTED_WITHIN_S)
        assert workers.interrupted == [("a", "WorkerFailed")]

    run_scenario(play)


def test_a_worker_that_takes_no_waiting_bytes_is_declared_failed_in_time() -> None:
    async def play(scenario: Scenario) -> None:
        scenario.workers.sent_bytes, scenario.workers.unsent_bytes = 4_000_000, 50_000_000
        await scenario.clock.sleep(DETECTED_WITHIN_S + CHECK_INTERVAL_S)
        assert scenario.workers.interrupted == [("a", "WorkerFailed")]

    run_scenario(play)


def test_small_requests_to_a_frozen_worker_do_not_hide_it() -> None:
    async def play(scenario: Scenario) -> None:
        for _ in range(14):
            await scenario.clock.sleep(0.1)
            scenario.workers.sent_bytes += 1000  # the host takes them, nothing waits
        assert scenario.workers.interrupted == [("a", "WorkerFailed")]

    run_scenario(play)


def test_a_worker_that_answers_pings_is_pinged_again_and_never_declared_failed() -> None:
    async def play(scenario: Scenario) -> None:
        scenario.workers.answer_s = 0.5
        await scenario.clock.sleep(60.0)
        assert len(scenario.workers.pinged_at) > 20
        assert scenario.workers.open_pings <= 2
        assert scenario.workers.interrupted == []

    run_scenario(play)


def test_the_ping_timeout_grows_with_slow_answers() -> None:
    async def play(scenario: Scenario) -> None:
        workers = scenario.workers
        workers.answer_s = 0.6
        await scenario.clock.sleep(5.0)
        workers.answer_s = None
        since = scenario.clock.now()
        while not workers.interrupted:
            await scenario.clock.sleep(CHECK_INTERVAL_S)
            assert scenario.clock.now() < since + 10.0
        waited_s = scenario.clock.now() - workers.pinged_at[-1]
        assert (
            0.6 * PING_TIMEOUT_FACTOR < waited_s < 0.6 * PING_TIMEOUT_FACTOR + 3 * CHECK_INTERVAL_S
        )

    run_scenario(play)


def test_a_worker_that_sends_frames_before_its_ping_answer_is_not_declared_failed() -> None:
    async def play(scenario: Scenario) -> None:
        for _ in range(40):
            await scenario.clock.sleep(0.5)
            scenario.workers.frames["a"] += 1
        assert scenario.workers.interrupted == []

    run_scenario(play)


def test_the_state_of_an_idle_worker_is_dropped() -> None:
    async def play(scenario: Scenario) -> None:
        workers = scenario.workers
        await scenario.clock.sleep(SUSPECT_AFTER_S + 2 * CHECK_INTERVAL_S)
        workers.busy.clear()
        await scenario.clock.sleep(100.0)
        workers.busy.add("a")
        assert workers.on_instance_busy is not None
        workers.on_instance_busy()
        busy_since = scenario.clock.now()
        workers.pinged_at.clear()
        await scenario.clock.sleep(SUSPECT_AFTER_S + PING_TIMEOUT_S - CHECK_INTERVAL_S)
        assert workers.interrupted == []
        assert workers.pinged_at
        assert workers.pinged_at[0] - busy_since >= SUSPECT_AFTER_S

    run_scenario(play)


def test_a_client_is_not_watched_any_more_after_the_watch_ended() -> None:
    async def play(scenario: Scenario) -> None:
        scenario.stop_watching()
        await scenario.clock.sleep(10.0)
        assert (scenario.workers.pinged_at, scenario.workers.interrupted) == ([], [])
        assert scenario.workers.on_instance_busy is None
        assert scenario.workers.removal_listeners == []
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run_scenario(play)


def test_requests_of_a_removed_worker_move_if_another_worker_is_live() -> None:
    async def play(scenario: Scenario) -> None:
        workers = scenario.workers
        workers.busy.clear()
        (on_removed,) = workers.removal_listeners
        on_removed(workers.instances.pop("a"))
        await scenario.clock.sleep(REMOVAL_GRACE_S / 2)
        assert workers.interrupted == []
        await scenario.clock.sleep(REMOVAL_GRACE_S)
        assert workers.interrupted == [("a", "WorkerDraining")]
        assert "dynamo_requests_moved_total 3" in scenario.metrics.render()
        on_removed(workers.instances.pop("b"))
        await scenario.clock.sleep(1.0)
        assert len(workers.interrupted) == 1

    run_scenario(play)


def test_a_worker_that_returns_at_once_keeps_its_requests() -> None:
    async def play(scenario: Scenario) -> None:
        scenario.workers.busy.clear()
        (on_removed,) = scenario.workers.removal_listeners
        on_removed(scenario.workers.instances["a"])
        await scenario.clock.sleep(1.0)
        assert scenario.workers.interrupted == []

    run_scenario(play)


def test_no_worker_is_blamed_for_a_pause_of_this_process() -> None:
    """Frames that arrived during the pause are not read yet when the check runs late."""

    class LateClock(VirtualClock):
        async def sleep_until(self, when: float) -> None:
            await super().sleep_until(when + 2.0)

    async def main(clock: VirtualClock) -> None:
        loop: Any = asyncio.get_running_loop()
        async with BackgroundTasks() as tasks:
            scenario = Scenario(LateClock(loop), tasks)
            await clock.sleep(60.0)
            assert (scenario.workers.pinged_at, scenario.workers.interrupted) == ([], [])

    run_in_virtual_time(main)
