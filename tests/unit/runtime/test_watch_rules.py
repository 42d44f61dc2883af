"""Whom the watch asks, how long it waits for an answer, and whom it gives up; with made-up workers."""

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

SOON_S = SUSPECT_AFTER_S + PING_TIMEOUT_S + 4 * CHECK_INTERVAL_S


class Workers:
    """Two workers at a client and a plane. `frames`: what they have said; `answer_s`: after which
    they answer a question (None: never)."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.everybody = {name: Instance(name, name, "n", "c", "e") for name in "ab"}
        self.instances = dict(self.everybody)
        self.working = {"a"}
        self.frames = {"a": 0, "b": 0}
        self.answer_s: float | None = None
        self.asked: list[float] = []
        self.questions = 0
        self.given_up: list[tuple[str, str]] = []
        self.broken_off: list[str] = []
        self.on_work: Callable[[], None] | None = None
        self.mourners: list[Callable[[Instance], None]] = []

    def busy(self) -> list[Instance]:
        return [self.everybody[name] for name in sorted(self.working)]

    def on_left(self, callback: Callable[[Instance], None]) -> Callable[[], None]:
        self.mourners.append(callback)
        return lambda: self.mourners.remove(callback)

    def withhold(self, instance: Instance) -> None:
        self.instances.pop(instance.id, None)

    def interrupt(self, name: str, error: DynamoError) -> int:
        self.given_up.append((name, type(error).__name__))
        return 3

    def heard(self, address: str) -> int:
        return self.frames[address]

    async def call(self, address: str, *_: Any) -> None:
        self.asked.append(self.clock.now())
        with self._open_question():
            if self.answer_s is None:
                await asyncio.Event().wait()
            else:
                await self.clock.sleep(self.answer_s)
                raise InstanceGone("an error is an answer, too")

    async def answers_beside(self, address: str, endpoint: str) -> bool:
        with self._open_question():
            await asyncio.Event().wait()
        return False

    @contextmanager
    def _open_question(self) -> Iterator[None]:
        self.questions += 1
        try:
            yield
        finally:
            self.questions -= 1

    def break_off(self, address: str) -> None:
        self.broken_off.append(address)
        self.working.discard(address)


class Scene:
    def __init__(self, clock: VirtualClock, tasks: BackgroundTasks) -> None:
        self.clock = clock
        self.workers = Workers(clock)
        self.metrics = Registry()
        parts: Any = self.workers
        self.watch = FailureDetector(parts, clock, tasks, self.metrics)
        self.leave = self.watch.watch(parts)


def play(what: Callable[[Scene], Any]) -> None:
    async def main(clock: VirtualClock) -> None:
        async with BackgroundTasks() as tasks:
            await what(Scene(clock, tasks))

    run_in_virtual_time(main)


def test_who_speaks_is_not_asked() -> None:
    async def what(scene: Scene) -> None:
        for _ in range(30):
            await scene.clock.sleep(0.2)
            scene.workers.frames["a"] += 1
        assert (scene.workers.asked, scene.workers.given_up) == ([], [])

    play(what)


def test_who_is_silent_is_asked_and_then_given_up_by_all() -> None:
    async def what(scene: Scene) -> None:
        workers = scene.workers
        await scene.clock.sleep(SOON_S)
        assert len(workers.asked) == 1
        assert SUSPECT_AFTER_S <= workers.asked[0] <= SUSPECT_AFTER_S + 3 * CHECK_INTERVAL_S
        assert workers.given_up == [("a", "WorkerFailed")]
        assert workers.broken_off == ["a"]
        assert workers.questions == 0
        assert workers.instances.keys() == {"b"}
        assert "dynamo_workers_frozen_total 1" in scene.metrics.render()

    play(what)


def test_who_answers_is_asked_again_and_never_given_up() -> None:
    async def what(scene: Scene) -> None:
        scene.workers.answer_s = 0.5
        await scene.clock.sleep(60.0)
        assert len(scene.workers.asked) > 20
        assert scene.workers.questions <= 2
        assert scene.workers.given_up == []

    play(what)


def test_who_was_slow_to_answer_is_waited_for_longer() -> None:
    async def what(scene: Scene) -> None:
        workers = scene.workers
        workers.answer_s = 0.6
        await scene.clock.sleep(5.0)
        workers.answer_s = None
        since = scene.clock.now()
        while not workers.given_up:
            await scene.clock.sleep(CHECK_INTERVAL_S)
            assert scene.clock.now() < since + 10.0
        waited_s = scene.clock.now() - workers.asked[-1]
        assert (
            0.6 * PING_TIMEOUT_FACTOR < waited_s < 0.6 * PING_TIMEOUT_FACTOR + 3 * CHECK_INTERVAL_S
        )

    play(what)


def test_who_speaks_before_its_answer_is_not_given_up() -> None:
    async def what(scene: Scene) -> None:
        for _ in range(40):
            await scene.clock.sleep(0.5)
            scene.workers.frames["a"] += 1
        assert scene.workers.given_up == []

    play(what)


def test_whose_work_ended_is_forgotten_and_begins_anew() -> None:
    async def what(scene: Scene) -> None:
        workers = scene.workers
        await scene.clock.sleep(SUSPECT_AFTER_S + 2 * CHECK_INTERVAL_S)
        workers.working.clear()
        await scene.clock.sleep(100.0)
        workers.working.add("a")
        assert workers.on_work is not None
        workers.on_work()
        began = scene.clock.now()
        workers.asked.clear()
        await scene.clock.sleep(SUSPECT_AFTER_S + PING_TIMEOUT_S - CHECK_INTERVAL_S)
        assert workers.given_up == []
        assert workers.asked
        assert workers.asked[0] - began >= SUSPECT_AFTER_S

    play(what)


def test_whom_it_follows_no_more_it_does_not_watch() -> None:
    async def what(scene: Scene) -> None:
        scene.leave()
        await scene.clock.sleep(10.0)
        assert (scene.workers.asked, scene.workers.given_up) == ([], [])
        assert (scene.workers.on_work, scene.workers.mourners) == (None, [])
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        play(what)


def test_what_a_leaver_had_moves_where_there_is_another() -> None:
    async def what(scene: Scene) -> None:
        workers = scene.workers
        workers.working.clear()
        (mourn,) = workers.mourners
        gone = workers.instances.pop("a")
        mourn(gone)
        await scene.clock.sleep(REMOVAL_GRACE_S / 2)
        assert workers.given_up == []
        await scene.clock.sleep(REMOVAL_GRACE_S)
        assert workers.given_up == [("a", "WorkerLeaving")]
        assert "dynamo_requests_moved_total 3" in scene.metrics.render()
        mourn(workers.instances.pop("b"))
        await scene.clock.sleep(1.0)
        assert len(workers.given_up) == 1

    play(what)


def test_who_has_come_back_at_once_keeps_its_work() -> None:
    async def what(scene: Scene) -> None:
        scene.workers.working.clear()
        (mourn,) = scene.workers.mourners
        mourn(scene.workers.instances["a"])
        await scene.clock.sleep(1.0)
        assert scene.workers.given_up == []

    play(what)


def test_while_we_were_held_up_ourselves_nobody_is_blamed() -> None:
    """As after a long pause of this process: what others said meanwhile is not read yet."""

    class Held(VirtualClock):
        async def sleep_until(self, when: float) -> None:
            await super().sleep_until(when + 2.0)

    async def main(clock: VirtualClock) -> None:
        held: Any = asyncio.get_running_loop()
        async with BackgroundTasks() as tasks:
            scene = Scene(Held(held), tasks)
            await clock.sleep(60.0)
            assert (scene.workers.asked, scene.workers.given_up) == ([], [])

    run_in_virtual_time(main)
