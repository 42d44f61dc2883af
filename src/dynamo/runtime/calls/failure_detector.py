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
from dynamo.core.errors import DynamoError, WorkerDraining, WorkerFailed
from dynamo.core.tasks import BackgroundTasks
from dynamo.runtime.calls.client import Client
from dynamo.runtime.calls.instances import PING_ENDPOINT, Instance
from dynamo.telemetry import Registry

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 0.1
SUSPECT_AFTER_S = 0.3
"""A worker that has work and says nothing for so long is asked."""
PING_TIMEOUT_S = 0.65
"""A question that waits longer was put to a frozen process..."""
PING_TIMEOUT_FACTOR = 4.0
"""...unless that worker has needed a quarter of it before."""
LATE_CHECK_S = 0.25
"""A tick so late says that we were held up ourselves: what others said meanwhile is not read."""
REMOVAL_GRACE_S = 0.1
"""An instance that has left discovery may be dead: its connection says so within this time."""


class PingState:
    """What is known of one worker that has work."""

    __slots__ = (
        "direct_ping_task",
        "frames_received",
        "last_heard_at",
        "ping_task",
        "pinged_at",
        "slowest_ping_s",
    )

    def __init__(self, frames: int, now: float) -> None:
        self.frames_received = frames
        self.last_heard_at = now
        self.ping_task: asyncio.Task[None] | None = None
        self.direct_ping_task: asyncio.Task[bool] | None = None
        self.pinged_at = 0.0
        self.slowest_ping_s = 0.0

    @property
    def reachable_directly(self) -> bool:
        """It answered beside the plane's server."""
        one = self.direct_ping_task
        return one is not None and one.done() and not one.cancelled() and one.result()

    def cancel_pings(self) -> None:
        """Wait for no answer."""
        for one in (self.ping_task, self.direct_ping_task):
            if one is not None:
                one.cancel()

    def ping_timeout_s(self) -> float:
        """How long a question may wait."""
        return max(PING_TIMEOUT_S, PING_TIMEOUT_FACTOR * self.slowest_ping_s)

    def on_frames(self, frames: int, now: float) -> None:
        """It said something."""
        self.frames_received = frames
        self.last_heard_at = now

    def on_ping_answered(self, now: float) -> None:
        """It answered a question (or it is known in another way that nobody does)."""
        self.slowest_ping_s = max(0.9 * self.slowest_ping_s, now - self.pinged_at)
        self.ping_task = None
        if self.direct_ping_task is not None:
            self.direct_ping_task.cancel()
            self.direct_ping_task = None


class FailureDetector:
    """Watches the workers of the clients that it follows, from one timer that runs while any of
    them has work. What a frozen one had in work raises `WorkerFailed`, what one that left had
    raises `WorkerLeaving`, so that it goes on elsewhere; where there is no elsewhere it stays."""

    def __init__(
        self,
        requests: Requests,
        clock: Clock,
        tasks: BackgroundTasks,
        metrics: Registry | None = None,
    ) -> None:
        self._requests = requests
        self._clock = clock
        self._tasks = tasks
        self._clients: list[Client] = []
        self._ping_states: dict[str, PingState] = {}
        self._has_work = asyncio.Event()
        self._running = False
        registry = metrics or Registry()
        self._failed_workers = registry.counter(
            "dynamo_workers_frozen_total", "Workers given up because they did not answer"
        )
        self._moved_requests = registry.counter(
            "dynamo_requests_moved_total", "Requests taken from a worker that was leaving"
        )

    def watch(self, client: Client) -> Callable[[], None]:
        """Watch the workers of `client`. Returns the way to stop that."""
        if not self._running:
            self._running = True
            self._tasks.start(self._run(), "watch workers")
        self._clients.append(client)
        client.on_instance_busy = self._has_work.set
        stop = client.on_instance_removed(
            lambda instance: self._on_instance_removed(client, instance)
        )

        def leave() -> None:
            stop()
            client.on_instance_busy = None
            self._clients.remove(client)

        return leave

    async def _run(self) -> None:
        clock = self._clock
        while True:
            self._has_work.clear()
            due = clock.now() + CHECK_INTERVAL_S
            await clock.sleep_until(due)
            if not self._check_workers(clock.now(), late=clock.now() - due > LATE_CHECK_S):
                await self._has_work.wait()

    def _check_workers(self, now: float, *, late: bool) -> bool:
        """One look at everybody who has work. False: nobody has."""
        busy = {
            one.address: (client, one)
            for client in self._clients
            for one in client.busy_instances()
        }
        for address in self._ping_states.keys() - busy.keys():
            del self._ping_states[address]
        for address, (client, instance) in busy.items():
            frames = self._requests.count_received_frames(address)
            pulse = self._ping_states.get(address)
            if pulse is None:
                self._ping_states[address] = PingState(frames, now)
            elif late or frames != pulse.frames_received:
                pulse.on_frames(frames, now)
                pulse.pinged_at = now
            elif pulse.ping_task is not None:
                if now - pulse.pinged_at > pulse.ping_timeout_s():
                    self._on_ping_timeout(
                        client, instance, now - pulse.last_heard_at, there=pulse.reachable_directly
                    )
            elif now - pulse.last_heard_at > SUSPECT_AFTER_S:
                pulse.pinged_at = now
                pulse.ping_task = self._tasks.start(self._ping(address, pulse), f"ask {address}")
                pulse.direct_ping_task = self._tasks.start(self._ping_directly(address, pulse))
        return bool(busy)

    async def _ping(self, address: str, pulse: PingState) -> None:
        context = Context(request_id="ping")
        try:
            await self._requests.call(address, PING_ENDPOINT, b"", context, lambda _: True)
        except (DynamoError, OSError):
            pass  # any answer will do
        finally:
            pulse.on_ping_answered(self._clock.now())

    async def _ping_directly(self, address: str, pulse: PingState) -> bool:
        there = await self._requests.probe_directly(address, PING_ENDPOINT)
        pulse.frames_received = self._requests.count_received_frames(address)
        return there

    def _on_ping_timeout(
        self, client: Client, instance: Instance, silent_s: float, *, there: bool
    ) -> None:
        fields = {"worker": instance.id, "silent_s": round(silent_s, 2)}
        if there:
            text = "worker answers only directly, its requests go that way"
            log.warning(text, extra={"fields": fields})
            self._ping_states.pop(instance.address).cancel_pings()
            self._requests.bypass(instance.address)
        elif client.instances.keys() - {instance.id}:
            self._declare_failed(instance, fields)
        # else there is nobody else: it may come back

    def _declare_failed(self, instance: Instance, fields: dict[str, object]) -> None:
        log.warning("worker does not answer, its requests go elsewhere", extra={"fields": fields})
        self._failed_workers.inc()
        error = WorkerFailed(f"instance {instance.id} does not answer")
        self._ping_states.pop(instance.address).cancel_pings()
        for each in self._clients:
            each.mark_unreachable(instance)
            each.interrupt(instance.id, error)
        self._requests.disconnect(instance.address)

    def _on_instance_removed(self, client: Client, instance: Instance) -> None:
        self._tasks.start(self._move_requests(client, instance), f"leave {instance.id}")

    async def _move_requests(self, client: Client, instance: Instance) -> None:
        await self._clock.sleep(REMOVAL_GRACE_S)
        if not client.instances.keys() - {instance.id} or instance.id in client.instances:
            return
        error = WorkerDraining(f"instance {instance.id} was taken out of service")
        if moved := client.interrupt(instance.id, error):
            self._moved_requests.inc(moved)
            fields = {"worker": instance.id, "requests": moved}
            log.info("worker leaves, its requests go elsewhere", extra={"fields": fields})
