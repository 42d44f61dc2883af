"""Health of the workers: failed requests and periodic probes eject a worker, a probe re-admits it.

A probe is an empty `generate` call on the path of real requests. At most half of the workers are
ejected at a time. Slow answers do not count as failures: a slow worker is busy.
"""

from __future__ import annotations

import asyncio
import logging
from random import Random

import msgspec

from dynamo.core.clock import Backoff, Clock
from dynamo.core.context import Context
from dynamo.core.errors import (
    DECODE_ERRORS,
    DynamoError,
    InstanceGone,
    InternalError,
    MalformedAnswer,
    WorkerDraining,
    WorkerFailed,
)
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import ProbeResult
from dynamo.runtime.calls.client import Client
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.workers.ledger import Ledger
from dynamo.scheduling.workers.placed_request import PlacedRequest
from dynamo.telemetry import Registry

log = logging.getLogger(__name__)

SAME_INCIDENT_S = 0.1
"""Failures within this time have one cause and count once."""
INITIAL_OPEN_S = 1.0
MAX_OPEN_S = 30.0
ENGINE_STALL_S = 60.0
"""An engine that has requests and completes no step for this time is stuck."""
EJECTION_REASONS = ("failures", "probe", "stuck")
FAILURE_THRESHOLD = 3
"""This many failed requests in a row open a worker's breaker."""
PROBE_REQUEST_ID = "probe"

_decode_probe_reply = msgspec.msgpack.Decoder(ProbeResult).decode


class Breaker:
    """The circuit breaker of one worker.

    The breaker opens after `threshold` failures in a row. When it is half open, one failure opens
    it again for twice as long, and a success closes it.
    """

    def __init__(self, threshold: int) -> None:
        self._threshold = threshold
        self._last_failure_s = -SAME_INCIDENT_S
        self._backoff = Backoff(INITIAL_OPEN_S, MAX_OPEN_S, jitter=0.5)
        self.consecutive_failures = 0
        self.open = False
        self.half_open = False

    def record_success(self) -> None:
        """Record an answered request."""
        self.consecutive_failures = 0
        if self.half_open:
            self.half_open = False
            self._backoff.reset()

    def record_failure(self, now: float) -> bool:
        """Record a failed request. Return whether the breaker should be tripped."""
        if self.open or now - self._last_failure_s < SAME_INCIDENT_S:
            return False
        self._last_failure_s = now
        self.consecutive_failures += 1
        return self.half_open or self.consecutive_failures >= self._threshold

    def trip(self, rng: Random) -> float:
        """Open the breaker. Return the seconds until the next probe, which double, with jitter."""
        self.open, self.half_open = True, False
        return self._backoff.next_s(rng)

    def enter_half_open(self) -> None:
        """Allow requests again after a successful probe."""
        self.open, self.half_open = False, True
        self.consecutive_failures = 0


class ProbedWorker:
    """The health of one worker."""

    def __init__(self, instance: Instance, health: WorkerHealth, now: float) -> None:
        self.instance = instance
        self._health = health
        self.breaker = Breaker(FAILURE_THRESHOLD)
        self.missed_probes = 0
        self.last_steps = -1
        self.last_progress_s = now

    def on_ended(self, error: BaseException | None) -> None:
        """Note how an attempt at this worker has ended."""
        if error is None:
            self.breaker.record_success()
        elif isinstance(error, WorkerFailed | InternalError) and not isinstance(
            error, InstanceGone | WorkerDraining | MalformedAnswer
        ):
            if isinstance(error, WorkerFailed) and error.instance not in ("", self.instance.id):
                return  # the prefill worker of the request failed
            self._health.record_failure(self, error)

    def check_stalled(self, result: ProbeResult, now: float) -> bool:
        """Whether the engine has had requests and completed no step for `ENGINE_STALL_S`."""
        if result.steps != self.last_steps or not result.requests:
            self.last_steps, self.last_progress_s = result.steps, now
        return now - self.last_progress_s >= ENGINE_STALL_S


class WorkerHealth:
    """Probe the instances of one client every `interval_s`, and eject those that miss `threshold`
    probes in a row, fail requests or are stuck."""

    def __init__(
        self,
        client: Client,
        ledger: Ledger,
        clock: Clock,
        rng: Random,
        metrics: Registry | None = None,
        *,
        interval_s: float = 10.0,
        threshold: int = 3,
    ) -> None:
        self._client = client
        self._clock = clock
        self._rng = rng
        self._interval_s = interval_s
        self._threshold = threshold
        self._tasks = BackgroundTasks()
        self._workers: dict[str, ProbedWorker] = {}
        self._ejection_counter = (metrics or Registry()).counter(
            "dynamo_workers_ejected_total",
            "Workers ejected because their requests or probes failed",
            ("reason",),
            known=EJECTION_REASONS,
        )
        ledger.on_ended.append(self._on_attempt_ended)
        self._unsubscribe = client.view.on_instance_removed(self._on_instance_removed)

    def start(self) -> None:
        """Start probing."""
        self._tasks.start(self._probe_loop(), "probe workers")

    async def close(self) -> None:
        """Stop probing. Ejected workers stay ejected."""
        self._unsubscribe()
        await self._tasks.close()

    def _on_attempt_ended(self, placed: PlacedRequest, error: BaseException | None) -> None:
        instance = (placed.decode_worker or placed.worker).instance
        worker = self._workers.get(instance.id)
        if worker is None:
            if placed.peer or instance.id not in self._client.instances:
                return
            worker = self._get_worker(instance)
        breaker = worker.breaker
        if not placed.peer and (
            error is not None or breaker.consecutive_failures or breaker.half_open
        ):
            worker.on_ended(error)

    def record_failure(self, worker: ProbedWorker, error: DynamoError) -> None:
        """Count a failed request. Eject the worker when its breaker should trip."""
        if worker.breaker.record_failure(self._clock.now()):
            self._eject(worker, "failures", error.message)

    async def _probe_loop(self) -> None:
        while True:
            await self._clock.sleep(self._interval_s * (0.9 + 0.2 * self._rng.random()))
            for instance in tuple(self._client.instances.values()):
                self._tasks.start(self._check_worker(instance), f"probe {instance.id}")

    async def _check_worker(self, instance: Instance) -> None:
        worker = self._get_worker(instance)
        result = await self._probe(instance)
        if result is None:
            worker.missed_probes += 1
            if worker.missed_probes >= self._threshold:
                self._eject(worker, "probe", "does not answer probes")
        elif worker.check_stalled(result, self._clock.now()):
            self._eject(worker, "stuck", "has requests and completes no step")
            self._client.interrupt(
                instance.id, WorkerFailed(f"the engine of instance {instance.id} is stuck")
            )
        else:
            worker.missed_probes = 0

    async def _probe(self, instance: Instance) -> ProbeResult | None:
        """Return the result, or None after an error or a timeout."""
        context = Context(request_id=PROBE_REQUEST_ID)
        try:
            async with asyncio.timeout(self._interval_s):
                payloads = await self._client.collect(instance, b"", context)
            return _decode_probe_reply(payloads[0]) if payloads else None
        except (DynamoError, OSError, *DECODE_ERRORS) as error:
            fields = {"worker": instance.id, "error": str(error) or type(error).__name__}
            log.warning("a probe failed", extra={"fields": fields})
            return None

    def _eject(self, worker: ProbedWorker, reason: str, description: str) -> None:
        name = worker.instance.id
        if worker.breaker.open or not self._client.view.eject(name):
            return
        pause_s = worker.breaker.trip(self._rng)
        self._ejection_counter.labels(reason).inc()
        fields = {"worker": name, "reason": description, "probe_s": round(pause_s, 2)}
        log.warning("worker ejected", extra={"fields": fields})
        self._tasks.start(self._probe_until_healthy(worker, pause_s), f"probe ejected {name}")

    async def _probe_until_healthy(self, worker: ProbedWorker, pause_s: float) -> None:
        """Probe an ejected worker until it answers and its engine makes progress."""
        name = worker.instance.id
        while self._workers.get(name) is worker:
            await self._clock.sleep(pause_s)
            result = await self._probe(worker.instance)
            if result is not None and not worker.check_stalled(result, self._clock.now()):
                worker.breaker.enter_half_open()
                worker.missed_probes = 0
                self._client.view.readmit(name)
                log.info("worker readmitted", extra={"fields": {"worker": name}})
                return
            pause_s = worker.breaker.trip(self._rng)

    def _get_worker(self, instance: Instance) -> ProbedWorker:
        worker = self._workers.get(instance.id)
        if worker is None:
            worker = ProbedWorker(instance, self, self._clock.now())
            self._workers[instance.id] = worker
        return worker

    def _on_instance_removed(self, instance: Instance) -> None:
        self._workers.pop(instance.id, None)
