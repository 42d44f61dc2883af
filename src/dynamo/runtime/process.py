"""One process of a deployment from birth to death: loop, logs, signals, parent, status, record."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec

from dynamo.communication.http import PortInUse
from dynamo.core.errors import ConfigError, DynamoError, ModelUnavailable
from dynamo.core.settings import Settings
from dynamo.core.tasks import first_of
from dynamo.runtime.cancellation import CancellationToken
from dynamo.runtime.deployment import (
    Deployment,
    ProcessRecord,
    ProcessState,
    deployment_of,
    process_key,
)
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.health import PREPARATION
from dynamo.runtime.link import Notice, ParentLink, Report
from dynamo.runtime.pauses import LoopPauses
from dynamo.runtime.pids import own_start_ticks
from dynamo.runtime.sockets import name_owner
from dynamo.runtime.standing import Standing
from dynamo.runtime.status import status_of
from dynamo.telemetry.logs import configure, set_levels

log = logging.getLogger(__name__)
T = TypeVar("T")

Main = Callable[[DistributedRuntime], Awaitable[None]]
STARTING = "start"
GC_THRESHOLDS = (50_000, 20, 50)
"""A young collection costs the loop a pause; what lives long is frozen when ready."""


def run_process(
    main: Main, settings: Settings, role: str, name: str = "", *, parent: ParentLink | None = None
) -> int:
    """Run one process and return its exit code: 0, 1 failure, 2 usage.

    `main(runtime)` sets the process up and returns; then it serves until SIGTERM or SIGINT drains
    it, a second signal or the parent's death ends it at once. It is `ready` when `main` has
    returned and the process was well for the first time.
    """
    import uvloop

    configure(settings.logging.level, settings.logging.format, name or role)
    if parent is not None:
        parent.die_with_parent()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(main, settings, role, name, parent))


def run_on_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run one coroutine on the kind of loop that processes use, and return what it returns."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


async def _run(
    main: Main, settings: Settings, role: str, name: str, parent: ParentLink | None
) -> int:
    loop = asyncio.get_running_loop()
    stopping = CancellationToken()
    _listen(loop, stopping, parent)
    try:
        created = DistributedRuntime.create(settings, role=role, name=name, stopping=stopping)
        async with await created as runtime:
            await Process(runtime, parent).live(main)
    except DynamoError as error:
        return _failed(error, parent)
    except OSError as error:  # the disk is full, say: what the machine lacks
        log.error("process failed", extra={"fields": {"error": str(error)}})  # noqa: TRY400
        return 1
    except Exception:  # the last line of defence: told, and restarted by the supervisor
        log.exception("process failed")
        return 1
    return 0


def _listen(
    loop: asyncio.AbstractEventLoop, stopping: CancellationToken, parent: ParentLink | None
) -> None:
    signals = itertools.count()

    def stop_or_exit() -> None:
        if next(signals):
            os._exit(1)
        stopping.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop_or_exit)
    if parent is not None:
        parent.watch(loop, lambda: os._exit(1))


def _failed(error: DynamoError, parent: ParentLink | None) -> int:
    """Tell why the process ends; what trying again cannot mend is fatal."""
    usage = isinstance(error, ConfigError)
    if isinstance(error, PortInUse):
        name_owner(error)
        usage = False
    code = 2 if usage else 1
    log.error("cannot go on", extra={"fields": {"error": error.message, "hint": error.hint}})
    if parent is not None and isinstance(error, ConfigError | ModelUnavailable):
        parent.tell(Report(fatal=error.message, hint=error.hint, code=code))
    return code


class Process:
    """What surrounds `main`: status port, record, readiness, the way down."""

    def __init__(self, runtime: DistributedRuntime, parent: ParentLink | None) -> None:
        self._runtime = runtime
        self._parent = parent
        self._status = status_of(runtime)
        self._deployment: Deployment = deployment_of(runtime.settings)
        record = ProcessRecord(
            deployment=self._deployment.id,
            role=runtime.role,
            name=runtime.name,
            pid=os.getpid(),
            address=runtime.requests.address,
            instance=runtime.instance_id,
            start_ticks=own_start_ticks(),
        )
        self._standing = Standing(self._deployment, record, runtime.clock)

    async def live(self, main: Main) -> None:
        """From status port to drained. Raises what `main` raises, and the runtime's failure."""
        runtime = self._runtime
        runtime.supervised = self._parent is not None
        runtime.health.unwell(STARTING, "the process is starting")
        runtime.on_settings(lambda settings: set_levels(settings.logging.level))
        if self._parent is not None:
            self._parent.on_notice(self._noticed)
        await self._status.start()
        pauses = LoopPauses(runtime.metrics)
        keeping = runtime.tasks.start(self._standing.keep(), "process record")
        try:
            await runtime.clock.offload(self._deployment.prepare)
            await self._tell("starting")
            stopped = runtime.stopping.wait
            await first_of(self._set_up(main), stopped())
            await first_of(self._ready(), stopped())
            pauses.start()
            await stopped()
            await self._say_draining()
            await runtime.shutdown()
            if runtime.failure is not None:
                raise runtime.failure
        finally:
            pauses.stop()
            keeping.cancel()
            await self._status.stop()
            await self._standing.end()

    def _noticed(self, notice: Notice) -> None:
        if notice.settings is not None:
            self._runtime.reload(notice.settings)
        if notice.preparing:
            self._runtime.health.unwell(PREPARATION, notice.preparing)
        else:
            self._runtime.health.well_again(PREPARATION)

    async def _set_up(self, main: Main) -> None:
        await main(self._runtime)
        self._runtime.health.well_again(STARTING)

    async def _ready(self) -> None:
        """Wait until the process is well for the first time, and say so."""
        health = self._runtime.health
        changed = asyncio.Event()
        health.on_change(changed.set)
        while not health.well:
            changed.clear()
            await changed.wait()
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        await self._tell("ready")

    async def _say_draining(self) -> None:
        try:
            await self._tell("draining")
        except (ConfigError, OSError) as error:  # a full disk keeps nobody from draining
            log.warning("draining untold", extra={"fields": {"error": str(error)}})

    async def _tell(self, state: ProcessState) -> None:
        """The same to the state folder, to discovery and to the supervisor."""
        runtime = self._runtime
        address = runtime.public_address or runtime.requests.address
        await self._standing.tell(state=state, status_url=self._status.url, address=address)
        record = self._standing.record
        key = process_key(record)
        await runtime.discovery.put(key, msgspec.json.encode(record))
        if self._parent is not None:
            url = self._status.url
            self._parent.tell(Report(state=state, address=address, status_url=url, key=key))
