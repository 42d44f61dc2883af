"""`SleepEndpoint`: a worker leaves discovery and gives its memory back, until it is woken."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from dynamo.communication.requests import ResponseWriter
from dynamo.core.errors import Unsupported, WorkerFailed
from dynamo.core.reply import Engine
from dynamo.core.tasks import BackgroundTasks, run_all
from dynamo.inference.data_parallel import batched_engines
from dynamo.inference.probe import answer_probe
from dynamo.runtime.sleep import (
    SLEEP_ENDPOINT,
    SLEEP_LEVEL_KEY,
    SLEEP_LEVELS,
    SleepAnswer,
    SleepOrder,
    decode_sleep_order,
    encode_sleep_order,
)

if TYPE_CHECKING:
    from dynamo.runtime.component import Component, ServedEndpoint
    from dynamo.runtime.distributed import DistributedRuntime

log = logging.getLogger(__name__)

SLEEP_HEALTH_KEY = "sleep"


class SleepEndpoint:
    """Executes orders to sleep and to wake up, one after the other and to their end. `endpoints`
    are those that need the engine's memory: they are withdrawn while the worker sleeps. `prepare`
    runs before they are served again. `level` is 0 while the worker is awake."""

    def __init__(
        self,
        runtime: DistributedRuntime,
        engine: Engine,
        endpoints: Sequence[ServedEndpoint],
        prepare: Callable[[], Awaitable[None]],
    ) -> None:
        self._runtime = runtime
        self._engine = engine
        self._endpoints = endpoints
        self._prepare = prepare
        self._tasks = BackgroundTasks(lambda _: None)  # the caller gets the errors
        self._lock = asyncio.Lock()
        self._served: ServedEndpoint
        self.level = 0
        runtime.metrics.gauge(
            "dynamo_worker_sleeping_ratio",
            "1 while the worker sleeps at a level, otherwise 0.",
            ("level",),
            callback=lambda: {(str(each),): float(self.level == each) for each in SLEEP_LEVELS},
            merge="max",
        )

    async def serve(
        self, component: Component, capabilities: Mapping[str, object]
    ) -> ServedEndpoint:
        """Serve the endpoint with the `capabilities` of the worker."""
        endpoint = component.endpoint(SLEEP_ENDPOINT)
        self._served = await endpoint.serve(
            self._handle, capabilities={**capabilities, SLEEP_LEVEL_KEY: 0}
        )
        return self._served

    async def close(self) -> None:
        """Wait until the order that is being executed has ended: endpoints are withdrawn, and the
        engine can be stopped."""
        await self._tasks.join()

    async def _handle(self, payload: bytes, outgoing: ResponseWriter) -> None:
        """Execute an order and answer with a `SleepAnswer`. Raises `Unsupported` for an engine that
        cannot sleep, and `WorkerFailed` after an error, which ends the process."""
        order = decode_sleep_order(payload)
        answer = await asyncio.shield(self._tasks.start(self._execute(order), "sleep"))
        outgoing.send(encode_sleep_order(answer))

    async def _execute(self, order: SleepOrder) -> SleepAnswer:
        async with self._lock:
            if bool(order.level) == bool(self.level):
                return SleepAnswer(self.level, changed=False)
            if order.level and (reason := self._engine.sleep_refusal(order.level)):
                kind = self._runtime.settings.engine.kind
                raise Unsupported(f"the engine {kind} of this worker cannot sleep: {reason}")
            seconds = await (self._sleep(order.level) if order.level else self._wake_up())
            fields = {"level": order.level, "seconds": round(seconds, 3)}
            log.info(
                "worker sleeps" if order.level else "worker is awake", extra={"fields": fields}
            )
            return SleepAnswer(order.level, changed=True, seconds=seconds)

    async def _sleep(self, level: int) -> float:
        """Leave the views of routers and peers, let requests end or move, then give memory back."""
        runtime = self._runtime
        log.info("worker falls asleep", extra={"fields": {"level": level}})
        await self._served.announce({SLEEP_LEVEL_KEY: level})
        drain_s = runtime.settings.runtime.drain_s
        await run_all(*(served.withdraw(drain_s) for served in self._endpoints))
        began = runtime.clock.now()
        await self._run_or_fail(self._engine.sleep(level), "fall asleep")
        self.level = level
        reason = f"the worker sleeps at level {level}; `dynamo wake` or a request wakes it"
        runtime.health.set_unhealthy(SLEEP_HEALTH_KEY, reason)
        await runtime.publish_state("sleeping")
        return runtime.clock.now() - began

    async def _wake_up(self) -> float:
        """Take the memory again, prove that the engine answers, then serve. Our engines keep the
        weights where they are at level 1, so that there is nothing to prove."""
        runtime = self._runtime
        began = runtime.clock.now()
        await self._run_or_fail(self._start_again(), "wake up")
        self.level = 0
        runtime.health.set_healthy(SLEEP_HEALTH_KEY)
        seconds = runtime.clock.now() - began
        await self._served.announce({SLEEP_LEVEL_KEY: 0})
        await runtime.publish_state("ready")
        return seconds

    async def _start_again(self) -> None:
        await self._engine.wake_up()
        if self.level > 1 or not batched_engines(self._engine):
            await answer_probe(self._engine)
        await self._prepare()
        for served in self._endpoints:
            if not self._runtime.stopping.cancelled:
                await served.resume()

    async def _run_or_fail(self, work: Awaitable[None], what: str) -> None:
        """Await work. If it fails, the process ends: its engine may answer wrongly from now on."""
        try:
            await work
        except Exception as error:
            log.exception("the worker could not %s", what)
            failure = WorkerFailed(f"the worker could not {what} and ends: {error}")
            self._runtime.fail(failure)
            raise failure from error
