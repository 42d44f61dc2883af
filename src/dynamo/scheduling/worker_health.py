"""Which workers are fit for requests: told by the requests themselves, and by a probe through the
real path (an empty `generate`) at every worker from time to time.

What is out of order is ejected, never more than half of the workers, and comes back when a probe is
answered. Slowness is no reason: a worker that is late has work.
"""

from __future__ import annotations

import asyncio
import logging
from random import Random

import msgspec

from dynamo.core.clock import Clock
from dynamo.core.context import Context
from dynamo.core.errors import (
    DynamoError,
    InstanceGone,
    InternalError,
    ProtocolError,
    WorkerDraining,
    WorkerFailed,
)
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import GenerateRequest, ProbeResult
from dynamo.runtime.calls.client import Client
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.router.attempt import AttemptListener
from dynamo.telemetry import Registry

SAME_INCIDENT_S = 0.1
"""Requests that fail so close together failed of one cause."""
INITIAL_OPEN_S = 1.0
MAX_OPEN_S = 30.0


class Breaker:
    """One instance's. It opens after `threshold` failures in a row; a success between them closes
    it; half open, one failure opens it again, for twice as long."""

    __slots__ = (
        "_consecutive_trips",
        "_last_failure_s",
        "_threshold",
        "consecutive_failures",
        "half_open",
        "open",
    )

    def __init__(self, threshold: int) -> None:
        self._threshold = threshold
        self._last_failure_s = -SAME_INCIDENT_S
        self._consecutive_trips = 0
        self.consecutive_failures = 0
        self.open = False
        self.half_open = False

    def record_success(self) -> None:
        """A request was answered, which says that all is well."""
        self.consecutive_failures = 0
        if self.half_open:
            self.half_open = False
            self._consecutive_trips = 0

    def record_failure(self, now: float) -> bool:
        """A request failed. True: enough is enough, it is to be opened."""
        if self.open or now - self._last_failure_s < SAME_INCIDENT_S:
            return False
        self._last_failure_s = now
        self.consecutive_failures += 1
        return self.half_open or self.consecutive_failures >= self._threshold

    def trip(self, rng: Random) -> float:
        """Nothing is sent now. Seconds until it is tried: doubling, with jitter."""
        self.open, self.half_open = True, False
        bound = min(INITIAL_OPEN_S * 2.0**self._consecutive_trips, MAX_OPEN_S)
        self._consecutive_trips = min(self._consecutive_trips + 1, 16)
        return bound * (0.5 + 0.5 * rng.random())

    def enter_half_open(self) -> None:
        """A probe was answered: requests may come again."""
        self.open, self.half_open = False, True
        self.consecutive_failures = 0


log = logging.getLogger(__name__)

ENGINE_STALL_S = 60.0
"""An engine that has work and computes no step for so long will not."""
FAILURE_THRESHOLD = 3
"""So many failed requests in a row, none answered between them, open a worker's breaker."""
PROBE_REQUEST_ID = "probe"

_decode_probe_reply = msgspec.msgpack.Decoder(ProbeResult).decode


class ProbedWorker(AttemptListener):
    """The health of one worker. As a listener it follows every attempt at that worker."""

    __slots__ = ("_health", "breaker", "instance", "last_progress_s", "last_steps", "missed_probes")

    def __init__(self, instance: Instance, health: WorkerHealth, now: float) -> None:
        self.instance = instance
        self._health = health
        self.breaker = Breaker(FAILURE_THRESHOLD)
        self.missed_probes = 0
        self.last_steps = -1
        self.last_progress_s = now

    def on_ended(self, error: BaseException | None) -> None:
        if error is None:
            if self.breaker.consecutive_failures or self.breaker.half_open:
                self.breaker.record_success()
        elif isinstance(error, WorkerFailed | InternalError) and not isinstance(
            error, InstanceGone | WorkerDraining
        ):
            self._health.record_failure(self, error)

    def check_stalled(self, beat: ProbeResult, now: float) -> bool:
        """It has had work and has computed nothing since `STUCK_S`."""
        if beat.steps != self.last_steps or not beat.requests:
            self.last_steps, self.last_progress_s = beat.steps, now
        return now - self.last_progress_s >= ENGINE_STALL_S


class WorkerHealth:
    """Follows the instances of one client: a probe each `interval_s`, ejected after `threshold`
    probes without an answer."""

    def __init__(
        self,
        client: Client,
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
        registry = metrics or Registry()
        self._ejection_counter = registry.counter(
            "dynamo_workers_ejected_total",
            "Workers left out because their requests or probes failed",
            ("reason",),
        )
        self._unsubscribe = client.on_instance_removed(self._on_instance_removed)

    def start(self) -> None:
        """Probe from now on."""
        self._tasks.start(self._probe_loop(), "probe workers")

    async def close(self) -> None:
        """Probe no more. Who is ejected stays so."""
        self._unsubscribe()
        await self._tasks.close()

    def track_attempt(self, instance: Instance, request: GenerateRequest) -> AttemptListener:
        """Return the listener of that worker (a `ListenerFactory` of the router)."""
        del request
        return self._workers.get(instance.id) or self._get_worker(instance)

    def record_failure(self, worker: ProbedWorker, error: DynamoError) -> None:
        """Count a failed request, and eject its worker when its breaker opens."""
        if worker.breaker.record_failure(self._clock.now()):
            self._eject(worker, "failures", error.message)

    async def _probe_loop(self) -> None:
        while True:
            await self._clock.sleep(self._interval_s * (0.9 + 0.2 * self._rng.random()))
            for instance in tuple(self._client.instances.values()):
                self._tasks.start(self._check_worker(instance), f"probe {instance.id}")

    async def _check_worker(self, instance: Instance) -> None:
        patient = self._get_worker(instance)
        beat = await self._probe(instance)
        if beat is None:
            patient.missed_probes += 1
            if patient.missed_probes >= self._threshold:
                self._eject(patient, "probe", "does not answer probes")
        elif patient.check_stalled(beat, self._clock.now()):
            self._eject(patient, "stuck", "has work and computes nothing")
            self._client.interrupt(
                instance.id, WorkerFailed(f"the engine of instance {instance.id} is stuck")
            )
        else:
            patient.missed_probes = 0

    async def _probe(self, instance: Instance) -> ProbeResult | None:
        """None: it failed, or answered nothing in time."""
        found: list[ProbeResult] = []

        def sink(payload: bytes) -> bool:
            found.append(_decode_probe_reply(payload))
            return True

        try:
            async with asyncio.timeout(self._interval_s):
                await self._client.call(instance, b"", Context(request_id=PROBE_REQUEST_ID), sink)
        except ProtocolError:
            return ProbeResult()  # an older worker, which knows no probes
        except (
            DynamoError,
            OSError,
            TimeoutError,
            msgspec.DecodeError,
            UnicodeDecodeError,
        ) as error:
            fields = {"worker": instance.id, "error": str(error) or type(error).__name__}
            log.warning("a probe failed", extra={"fields": fields})
            return None
        return found[0] if found else None

    def _eject(self, patient: ProbedWorker, reason: str, why: str) -> None:
        instance = patient.instance
        if patient.breaker.open or not self._client.eject(instance.id):
            return
        pause_s = patient.breaker.trip(self._rng)
        self._ejection_counter.labels(reason).inc()
        fields = {"worker": instance.id, "reason": why, "probe_s": round(pause_s, 2)}
        log.warning("worker ejected", extra={"fields": fields})
        self._tasks.start(self._probe_until_healthy(patient, pause_s), f"heal {instance.id}")

    async def _probe_until_healthy(self, patient: ProbedWorker, pause_s: float) -> None:
        """Open until a probe is answered, and that by an engine that gets on."""
        instance = patient.instance
        while self._workers.get(instance.id) is patient:
            await self._clock.sleep(pause_s)
            beat = await self._probe(instance)
            if beat is not None and not patient.check_stalled(beat, self._clock.now()):
                patient.breaker.enter_half_open()
                patient.missed_probes = 0
                self._client.readmit(instance.id)
                log.info("worker readmitted", extra={"fields": {"worker": instance.id}})
                return
            pause_s = patient.breaker.trip(self._rng)

    def _get_worker(self, instance: Instance) -> ProbedWorker:
        patient = self._workers.get(instance.id)
        if patient is None:
            patient = self._workers[instance.id] = ProbedWorker(instance, self, self._clock.now())
        return patient

    def _on_instance_removed(self, instance: Instance) -> None:
        self._workers.pop(instance.id, None)
