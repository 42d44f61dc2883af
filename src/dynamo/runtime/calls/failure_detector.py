"""The failure detector: distinguishes frozen workers from slow ones without a timer per request.

All streams from a worker share one connection, so the detector watches the silence of whole workers
that have calls. A silent worker gets a ping over the same connection. Slow, busy or overloaded
processes answer the ping; stopped or unreachable processes do not. A worker that answers only a
direct ping, past the plane's server, is not declared failed: its calls bypass the server. A worker
that still takes the bytes that wait for it is not silent: the ping stands behind those bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

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
"""A worker that has calls and sends no frame for this time gets a ping."""
PING_TIMEOUT_S = 0.65
"""A worker that does not answer a ping within this time is declared failed."""
PING_TIMEOUT_FACTOR = 4.0
"""The timeout is at least this multiple of the worker's slowest recent answer."""
LATE_CHECK_S = 0.25
"""A check that runs later than this shows a pause of this process: frames may be unread."""
REMOVAL_GRACE_S = 0.1
"""A dead instance's connection breaks within this time after the instance left discovery."""


@dataclass
class PingState:
    """The state of a worker that has calls. `frames_received` and `sent_bytes` are the connection's
    totals."""

    frames_received: int
    last_heard_at: float
    sent_bytes: int = 0
    ping_task: asyncio.Task[None] | None = None
    direct_ping_task: asyncio.Task[bool] | None = None
    pinged_at: float = 0.0
    slowest_ping_s: float = 0.0

    @property
    def reachable_directly(self) -> bool:
        """Whether the worker answered the ping past the plane's server."""
        task = self.direct_ping_task
        return task is not None and task.done() and not task.cancelled() and task.result()

    def cancel_pings(self) -> None:
        """Cancel pings without an answer."""
        for task in (self.ping_task, self.direct_ping_task):
            if task is not None:
                task.cancel()

    def ping_timeout_s(self) -> float:
        """Seconds that the present ping may remain unanswered."""
        return max(PING_TIMEOUT_S, PING_TIMEOUT_FACTOR * self.slowest_ping_s)

    def on_ping_answered(self, now: float) -> None:
        """Record the end of the ping: an answer, an error, or a broken connection."""
        self.slowest_ping_s = max(0.9 * self.slowest_ping_s, now - self.pinged_at)
        self.ping_task = None
        if self.direct_ping_task is not None:
            self.direct_ping_task.cancel()
            self.direct_ping_task = None


class WatchedClient:
    """A client whose workers are watched, with the counters of its model."""

    def __init__(self, metrics: Registry, *, spares_last: bool) -> None:
        self.spares_last = spares_last
        self.failed_workers = metrics.counter(
            "dynamo_workers_frozen_total", "Workers declared failed because they did not answer"
        )
        self.moved_requests = metrics.counter(
            "dynamo_requests_moved_total", "Requests moved away from a draining worker"
        )


class FailureDetector:
    """Watches the workers of several clients with one timer, which runs while a worker has calls.
    Calls of a failed worker raise `WorkerFailed`, those of a worker that left discovery raise
    `WorkerDraining`, so that callers retry."""

    def __init__(
        self,
        requests: Requests,
        clock: Clock,
        tasks: BackgroundTasks,
        metrics: Registry,
    ) -> None:
        self._requests = requests
        self._clock = clock
        self._tasks = tasks
        self._metrics = metrics
        self._clients: dict[Client, WatchedClient] = {}
        self._ping_states: dict[str, PingState] = {}
        self._has_work = asyncio.Event()
        self._running = False

    def watch(
        self, client: Client, metrics: Registry | None = None, *, spares_last: bool = True
    ) -> Callable[[], None]:
        """Watch the workers of `client`. Calls of its last live worker are not interrupted if it
        `spares_last`. `metrics`: those of the client's model, else the detector's. Returns a
        function that ends the watch."""
        if not self._running:
            self._running = True
            self._tasks.start(self._run(), "watch workers")
        self._clients[client] = WatchedClient(metrics or self._metrics, spares_last=spares_last)
        client.on_instance_busy = self._has_work.set

        def move(instance: Instance) -> None:
            self._tasks.start(self._move_requests(client, instance), f"move from {instance.id}")

        unsubscribes = (
            client.view.on_instance_removed(move),
            client.view.on_instance_rejected(move),
        )

        def stop_watching() -> None:
            for unsubscribe in unsubscribes:
                unsubscribe()
            client.on_instance_busy = None
            del self._clients[client]

        return stop_watching

    async def _run(self) -> None:
        clock = self._clock
        while True:
            self._has_work.clear()
            due = clock.now() + CHECK_INTERVAL_S
            await clock.sleep_until(due)
            if not self._check_workers(clock.now(), late=clock.now() - due > LATE_CHECK_S):
                await self._has_work.wait()

    def _check_workers(self, now: float, *, late: bool) -> bool:
        """Check every worker that has calls. Returns whether there is such a worker."""
        busy = {
            instance.address: (client, instance)
            for client in self._clients
            for instance in client.busy_instances()
        }
        for address in self._ping_states.keys() - busy.keys():
            del self._ping_states[address]
        for address, (client, instance) in busy.items():
            frames = self._requests.count_received_frames(address)
            state = self._ping_states.get(address)
            if state is None:
                self._ping_states[address] = PingState(frames, now)
            elif late or frames != state.frames_received or self._is_sending(address, state):
                state.frames_received = frames
                state.last_heard_at = state.pinged_at = now
            elif state.ping_task is not None:
                if now - state.pinged_at > state.ping_timeout_s():
                    self._on_ping_timeout(client, instance, state, now - state.last_heard_at)
            elif now - state.last_heard_at > SUSPECT_AFTER_S:
                state.pinged_at = now
                state.ping_task = self._tasks.start(self._ping(address, state), f"ping {address}")
                state.direct_ping_task = self._tasks.start(self._ping_directly(address, state))
        return bool(busy)

    def _is_sending(self, address: str, state: PingState) -> bool:
        """Whether bytes wait for the worker and it has taken some since the last check."""
        sent_bytes, unsent_bytes = self._requests.count_sent_bytes(address)
        taken = sent_bytes > state.sent_bytes
        state.sent_bytes = sent_bytes
        return taken and unsent_bytes > 0

    async def _ping(self, address: str, state: PingState) -> None:
        context = Context(request_id="ping")
        try:
            await self._requests.call(address, PING_ENDPOINT, b"", context, lambda _: True)
        except (DynamoError, OSError):
            pass  # an error is an answer too
        finally:
            state.on_ping_answered(self._clock.now())

    async def _ping_directly(self, address: str, state: PingState) -> bool:
        answered = await self._requests.probe_directly(address, PING_ENDPOINT)
        state.frames_received = self._requests.count_received_frames(address)
        return answered

    def _on_ping_timeout(
        self, client: Client, instance: Instance, state: PingState, silent_s: float
    ) -> None:
        fields = {"worker": instance.id, "silent_s": round(silent_s, 2)}
        if state.reachable_directly:
            text = "worker answers pings over TCP and not over NATS; its requests use TCP"
            log.warning(text, extra={"fields": fields})
            self._ping_states.pop(instance.address).cancel_pings()
            self._requests.bypass(instance.address)
        elif self._has_other(client, instance):
            self._declare_failed(client, instance, fields)
        # The last worker keeps its calls: it may answer again.

    def _has_other(self, client: Client, instance: Instance) -> bool:
        """Whether interrupted calls of the instance have another place to go."""
        watched = self._clients.get(client)
        spares_last = watched is None or watched.spares_last
        return not spares_last or bool(client.instances.keys() - {instance.id})

    def _declare_failed(
        self, client: Client, instance: Instance, fields: dict[str, object]
    ) -> None:
        log.warning("worker does not answer; its requests move", extra={"fields": fields})
        self._clients[client].failed_workers.inc()
        error = WorkerFailed(f"instance {instance.id} does not answer")
        self._ping_states.pop(instance.address).cancel_pings()
        for each in self._clients:
            each.view.mark_unreachable(instance.address)
            each.interrupt(instance.id, error)
        self._requests.disconnect(instance.address)

    async def _move_requests(self, client: Client, instance: Instance) -> None:
        await self._clock.sleep(REMOVAL_GRACE_S)
        if not self._has_other(client, instance) or instance.id in client.instances:
            return
        error = WorkerDraining(f"instance {instance.id} was taken out of service")
        watched = self._clients.get(client)
        if watched is not None and (moved := client.interrupt(instance.id, error)):
            watched.moved_requests.inc(moved)
            fields = {"worker": instance.id, "requests": moved}
            log.info("worker drains; its requests move", extra={"fields": fields})
