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
    WorkerFailed,
    WorkerLeaving,
)
from dynamo.core.tasks import Tasks
from dynamo.core.values import Beat
from dynamo.runtime.client import Client
from dynamo.runtime.instances import Instance
from dynamo.scheduling.breaker import Breaker
from dynamo.telemetry import Registry

log = logging.getLogger(__name__)

STUCK_S = 60.0
"""An engine that has work and computes no step for so long will not."""
FAILURES = 3
"""So many failed requests in a row, none answered between them, open a worker's breaker."""
PROBE = "probe"

_decode = msgspec.msgpack.Decoder(Beat).decode


class Patient:
    """What is known of one worker."""

    __slots__ = ("breaker", "missed", "moved_at", "steps")

    def __init__(self, now: float) -> None:
        self.breaker = Breaker(FAILURES)
        self.missed = 0
        self.steps = -1
        self.moved_at = now

    def stuck(self, beat: Beat, now: float) -> bool:
        """It has had work and has computed nothing since `STUCK_S`."""
        if beat.steps != self.steps or not beat.requests:
            self.steps, self.moved_at = beat.steps, now
        return now - self.moved_at >= STUCK_S


class Health:
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
        self._tasks = Tasks()
        self._patients: dict[str, Patient] = {}
        registry = metrics or Registry()
        self._ejected = registry.counter(
            "dynamo_workers_ejected_total",
            "Workers left out because their requests or probes failed",
            ("reason",),
        )
        self._stop = client.on_left(self._forget)

    def start(self) -> None:
        """Probe from now on."""
        self._tasks.start(self._rounds(), "probe workers")

    async def close(self) -> None:
        """Probe no more. Who is ejected stays so."""
        self._stop()
        await self._tasks.close()

    def left(self, instance: Instance, error: BaseException | None) -> None:
        """For the router's `left`: requests tell how their workers are."""
        if error is None:
            if (patient := self._patients.get(instance.id)) is not None:
                patient.breaker.succeeded()
        elif isinstance(error, WorkerFailed | InternalError) and not isinstance(
            error, InstanceGone | WorkerLeaving
        ):
            self._failed(instance, error)

    async def _rounds(self) -> None:
        while True:
            await self._clock.sleep(self._interval_s * (0.9 + 0.2 * self._rng.random()))
            for instance in tuple(self._client.instances.values()):
                self._tasks.start(self._visit(instance), f"probe {instance.id}")

    async def _visit(self, instance: Instance) -> None:
        patient = self._patient(instance)
        beat = await self._probe(instance)
        if beat is None:
            patient.missed += 1
            if patient.missed >= self._threshold:
                self._eject(instance, patient, "probe", "does not answer probes")
        elif patient.stuck(beat, self._clock.now()):
            self._eject(instance, patient, "stuck", "has work and computes nothing")
            self._client.interrupt(
                instance.id, WorkerFailed(f"the engine of instance {instance.id} is stuck")
            )
        else:
            patient.missed = 0

    async def _probe(self, instance: Instance) -> Beat | None:
        """None: it failed, or answered nothing in time."""
        found: list[Beat] = []

        def sink(payload: bytes) -> bool:
            found.append(_decode(payload))
            return True

        try:
            async with asyncio.timeout(self._interval_s):
                await self._client.call(instance, b"", Context(request_id=PROBE), sink)
        except ProtocolError:
            return Beat()  # an older worker, which knows no probes
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

    def _failed(self, instance: Instance, error: DynamoError) -> None:
        patient = self._patient(instance)
        if patient.breaker.failed(self._clock.now()):
            self._eject(instance, patient, "failures", error.message)

    def _eject(self, instance: Instance, patient: Patient, reason: str, why: str) -> None:
        if patient.breaker.open or not self._client.eject(instance.id):
            return
        pause_s = patient.breaker.opened(self._rng)
        self._ejected.labels(reason).inc()
        fields = {"worker": instance.id, "reason": why, "probe_s": round(pause_s, 2)}
        log.warning("worker ejected", extra={"fields": fields})
        self._tasks.start(self._heal(instance, patient, pause_s), f"heal {instance.id}")

    async def _heal(self, instance: Instance, patient: Patient, pause_s: float) -> None:
        """Open until a probe is answered, and that by an engine that gets on."""
        while self._patients.get(instance.id) is patient:
            await self._clock.sleep(pause_s)
            beat = await self._probe(instance)
            if beat is not None and not patient.stuck(beat, self._clock.now()):
                patient.breaker.tried()
                patient.missed = 0
                self._client.readmit(instance.id)
                log.info("worker readmitted", extra={"fields": {"worker": instance.id}})
                return
            pause_s = patient.breaker.opened(self._rng)

    def _patient(self, instance: Instance) -> Patient:
        patient = self._patients.get(instance.id)
        if patient is None:
            patient = self._patients[instance.id] = Patient(self._clock.now())
        return patient

    def _forget(self, instance: Instance) -> None:
        self._patients.pop(instance.id, None)
