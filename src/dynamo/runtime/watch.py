"""Tells a frozen worker from a slow one, without a timer per request.

A worker speaks for all of a caller's streams at once, so what is watched is the silence of a whole
worker that has work. Who is silent is asked ("ping", over the same connection); a process that is
merely slow, busy or overloaded answers, a stopped or unreachable one does not. One that answers
only beside the plane's server is not given up: its calls go that way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from dynamo.communication.requests import Requests
from dynamo.core.clock import Clock
from dynamo.core.context import Context
from dynamo.core.errors import DynamoError, WorkerFailed, WorkerLeaving
from dynamo.core.tasks import Tasks
from dynamo.runtime.client import Client
from dynamo.runtime.instances import PING, Instance
from dynamo.telemetry import Registry

log = logging.getLogger(__name__)

TICK_S = 0.1
SUSPECT_S = 0.3
"""A worker that has work and says nothing for so long is asked."""
PATIENCE_S = 0.65
"""A question that waits longer was put to a frozen process..."""
SLOWEST = 4.0
"""...unless that worker has needed a quarter of it before."""
LATE_S = 0.25
"""A tick so late says that we were held up ourselves: what others said meanwhile is not read."""
LAST_WORDS_S = 0.1
"""An instance that has left discovery may be dead: its connection says so within this time."""


class Pulse:
    """What is known of one worker that has work."""

    __slots__ = ("asked_at", "asking", "beside", "frames", "since", "slowest_s")

    def __init__(self, frames: int, now: float) -> None:
        self.frames = frames
        self.since = now
        self.asking: asyncio.Task[None] | None = None
        self.beside: asyncio.Task[bool] | None = None
        self.asked_at = 0.0
        self.slowest_s = 0.0

    @property
    def there(self) -> bool:
        """It answered beside the plane's server."""
        one = self.beside
        return one is not None and one.done() and not one.cancelled() and one.result()

    def drop(self) -> None:
        """Wait for no answer."""
        for one in (self.asking, self.beside):
            if one is not None:
                one.cancel()

    def patience_s(self) -> float:
        """How long a question may wait."""
        return max(PATIENCE_S, SLOWEST * self.slowest_s)

    def speaks(self, frames: int, now: float) -> None:
        """It said something."""
        self.frames = frames
        self.since = now

    def answered(self, now: float) -> None:
        """It answered a question (or it is known in another way that nobody does)."""
        self.slowest_s = max(0.9 * self.slowest_s, now - self.asked_at)
        self.asking = None
        if self.beside is not None:
            self.beside.cancel()
            self.beside = None


class Watch:
    """Watches the workers of the clients that it follows, from one timer that runs while any of
    them has work. What a frozen one had in work raises `WorkerFailed`, what one that left had
    raises `WorkerLeaving`, so that it goes on elsewhere; where there is no elsewhere it stays."""

    def __init__(
        self, requests: Requests, clock: Clock, tasks: Tasks, metrics: Registry | None = None
    ) -> None:
        self._requests = requests
        self._clock = clock
        self._tasks = tasks
        self._clients: list[Client] = []
        self._pulses: dict[str, Pulse] = {}
        self._work = asyncio.Event()
        self._running = False
        registry = metrics or Registry()
        self._frozen = registry.counter(
            "dynamo_workers_frozen_total", "Workers given up because they did not answer"
        )
        self._left = registry.counter(
            "dynamo_requests_moved_total", "Requests taken from a worker that was leaving"
        )

    def follow(self, client: Client) -> Callable[[], None]:
        """Watch the workers of `client`. Returns the way to stop that."""
        if not self._running:
            self._running = True
            self._tasks.start(self._run(), "watch workers")
        self._clients.append(client)
        client.on_work = self._work.set
        stop = client.on_left(lambda instance: self._leaves(client, instance))

        def leave() -> None:
            stop()
            client.on_work = None
            self._clients.remove(client)

        return leave

    async def _run(self) -> None:
        clock = self._clock
        while True:
            self._work.clear()
            due = clock.now() + TICK_S
            await clock.sleep_until(due)
            if not self._look(clock.now(), late=clock.now() - due > LATE_S):
                await self._work.wait()

    def _look(self, now: float, *, late: bool) -> bool:
        """One look at everybody who has work. False: nobody has."""
        busy = {one.address: (client, one) for client in self._clients for one in client.busy()}
        for address in self._pulses.keys() - busy.keys():
            del self._pulses[address]
        for address, (client, instance) in busy.items():
            frames = self._requests.heard(address)
            pulse = self._pulses.get(address)
            if pulse is None:
                self._pulses[address] = Pulse(frames, now)
            elif late or frames != pulse.frames:
                pulse.speaks(frames, now)
                pulse.asked_at = now
            elif pulse.asking is not None:
                if now - pulse.asked_at > pulse.patience_s():
                    self._miss(client, instance, now - pulse.since, there=pulse.there)
            elif now - pulse.since > SUSPECT_S:
                pulse.asked_at = now
                pulse.asking = self._tasks.start(self._ask(address, pulse), f"ask {address}")
                pulse.beside = self._tasks.start(self._ask_beside(address, pulse))
        return bool(busy)

    async def _ask(self, address: str, pulse: Pulse) -> None:
        context = Context(request_id="ping")
        try:
            await self._requests.call(address, PING, b"", context, lambda _: True)
        except (DynamoError, OSError):
            pass  # any answer will do
        finally:
            pulse.answered(self._clock.now())

    async def _ask_beside(self, address: str, pulse: Pulse) -> bool:
        there = await self._requests.answers_beside(address, PING)
        pulse.frames = self._requests.heard(address)
        return there

    def _miss(self, client: Client, instance: Instance, silent_s: float, *, there: bool) -> None:
        fields = {"worker": instance.id, "silent_s": round(silent_s, 2)}
        if there:
            text = "worker answers only directly, its requests go that way"
            log.warning(text, extra={"fields": fields})
            self._pulses.pop(instance.address).drop()
            self._requests.bypass(instance.address)
        elif client.instances.keys() - {instance.id}:
            self._give_up(instance, fields)
        # else there is nobody else: it may come back

    def _give_up(self, instance: Instance, fields: dict[str, object]) -> None:
        log.warning("worker does not answer, its requests go elsewhere", extra={"fields": fields})
        self._frozen.inc()
        error = WorkerFailed(f"instance {instance.id} does not answer")
        self._pulses.pop(instance.address).drop()
        for each in self._clients:
            each.withhold(instance)
            each.interrupt(instance.id, error)
        self._requests.break_off(instance.address)

    def _leaves(self, client: Client, instance: Instance) -> None:
        self._tasks.start(self._move(client, instance), f"leave {instance.id}")

    async def _move(self, client: Client, instance: Instance) -> None:
        await self._clock.sleep(LAST_WORDS_S)
        if not client.instances.keys() - {instance.id} or instance.id in client.instances:
            return
        error = WorkerLeaving(f"instance {instance.id} was taken out of service")
        if moved := client.interrupt(instance.id, error):
            self._left.inc(moved)
            fields = {"worker": instance.id, "requests": moved}
            log.info("worker leaves, its requests go elsewhere", extra={"fields": fields})
