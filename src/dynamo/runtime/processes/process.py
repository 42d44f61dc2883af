"""The main function of every process: event loop, logs, signals, status port, process record,
and the settings of malloc and the garbage collector."""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import gc
import itertools
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from dynamo.communication.http import PortInUse, raise_open_file_limit
from dynamo.core.errors import (
    ConfigError,
    DynamoError,
    ModelUnavailable,
    PlaneUnavailable,
    Unsupported,
    encode_error,
)
from dynamo.core.host.pids import start_ticks
from dynamo.core.settings import Settings
from dynamo.core.tasks import wait_for_first
from dynamo.runtime.cancellation import CancellationToken
from dynamo.runtime.deployment import Deployment, ProcessRecord, ProcessState, deployment_of
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.health import PREPARATION_REASON
from dynamo.runtime.loop_lag import GcPauseMonitor, LoopLagMonitor
from dynamo.runtime.processes.parent_pipe import (
    EXIT_USAGE,
    STACKS_SIGNAL,
    ChildNotice,
    ChildOrder,
    ChildReport,
    ParentPipe,
)
from dynamo.runtime.processes.ports import add_port_owner
from dynamo.runtime.processes.process_names import STANDBY_SUFFIX, kind_of_process
from dynamo.runtime.processes.process_record import ProcessRecordWriter, process_key
from dynamo.runtime.processes.status import status_server_of
from dynamo.runtime.supervisors import supervised_kind
from dynamo.telemetry.log_output import open_log_output
from dynamo.telemetry.logs import configure_logging, set_levels
from dynamo.telemetry.stderr import unblock_stdout

log = logging.getLogger(__name__)
T = TypeVar("T")

ProcessMain = Callable[[DistributedRuntime], Awaitable[None]]
STARTING_REASON = "start"
START_REPORT_INTERVAL_S = 2.0
GC_THRESHOLDS = (50_000, 20, 50)
"""Rare young collections, since each pauses the loop. Long-lived objects are frozen when ready."""
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
MMAP_THRESHOLD_BYTES = 128 << 10


def run_process(
    main: ProcessMain,
    settings: Settings,
    role: str,
    name: str = "",
    *,
    parent: ParentPipe | None = None,
) -> int:
    """Run a process and return its exit code: 0 success, 1 failure, 2 wrong usage. `main(runtime)`
    sets the process up and returns. The process is `ready` when it is healthy for the first time
    after that. SIGTERM or SIGINT drains the process. A second signal, or the death of the parent,
    ends it at once."""
    output = None if parent is not None else open_log_output(settings.logging.output)
    configure_logging(settings.logging.level, settings.logging.format, name or role, output)
    unblock_stdout()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    raise_open_file_limit()
    if parent is not None:
        parent.die_with_parent()
    return run_on_loop(_run(main, settings, role, name, parent))


def run_on_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the same kind of event loop as processes, and return its result."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def tune_malloc() -> None:
    """Return freed large blocks to the system, and share one heap among all threads but the loop's.
    A frontend uses 6 MB less. By default glibc raises its threshold of "large" to 32 MB, which
    suits engines: they allocate new arrays in every step. Does nothing without `mallopt`."""
    tune = getattr(ctypes.CDLL(None), "mallopt", None)
    if tune is not None:
        tune(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        tune(M_TRIM_THRESHOLD, MMAP_THRESHOLD_BYTES)
        tune(M_ARENA_MAX, 2)


async def _run(
    main: ProcessMain, settings: Settings, role: str, name: str, parent: ParentPipe | None
) -> int:
    loop = asyncio.get_running_loop()
    stopping = CancellationToken()
    _add_signal_handlers(loop, stopping, parent)
    try:
        instance_name = name.partition(STANDBY_SUFFIX)[0]
        created = DistributedRuntime.create(
            settings, role=role, name=instance_name, stopping=stopping
        )
        async with await created as runtime:
            await ProcessRunner(runtime, parent).run(main)
    except DynamoError as error:
        return report_failure(error, parent)
    except OSError as error:  # a fault of the machine, such as a full disk: no traceback
        log.error("process failed", extra={"fields": {"error": str(error)}})  # noqa: TRY400
        return 1
    except Exception:  # logged here; the supervisor restarts the process
        log.exception("process failed")
        return 1
    return 0


def _add_signal_handlers(
    loop: asyncio.AbstractEventLoop, stopping: CancellationToken, parent: ParentPipe | None
) -> None:
    signals = itertools.count()

    def stop_or_exit() -> None:
        if next(signals):
            os._exit(1)
        stopping.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop_or_exit)
    if parent is not None:
        parent.watch_parent(loop, lambda: os._exit(1))


def report_failure(error: DynamoError, parent: ParentPipe | None) -> int:
    """Log why the process ends and return its exit code. Errors that a restart cannot fix are
    reported to the supervisor as fatal."""
    usage = isinstance(error, ConfigError)
    if isinstance(error, PortInUse):
        add_port_owner(error)
        usage = False
    code = EXIT_USAGE if usage else 1
    log.error("process ends", extra={"fields": {"error": error.message, "hint": error.hint}})
    if parent is not None and isinstance(error, ConfigError | ModelUnavailable | Unsupported):
        parent.send_report(ChildReport(fatal=error.message, hint=error.hint, code=code))
    return code


class ProcessRunner:
    """Runs `main` with a status port, a process record, readiness and draining."""

    def __init__(self, runtime: DistributedRuntime, parent: ParentPipe | None) -> None:
        self._runtime = runtime
        self._parent = parent
        self._leaves = parent is None
        self._is_standby = parent is not None and parent.start_message.standby
        self._place_given = asyncio.Event()
        self._status = status_server_of(runtime)
        self._deployment: Deployment = deployment_of(runtime.settings)
        record = ProcessRecord(
            deployment=self._deployment.id,
            role=runtime.role,
            name=runtime.name,
            pid=os.getpid(),
            namespace=runtime.settings.runtime.namespace,
            address=runtime.requests.address,
            instance=runtime.instance_id,
            start_ticks=start_ticks(os.getpid()),
        )
        self._key = process_key(record)
        self._report = ChildReport()
        self._record_writer = ProcessRecordWriter(self._deployment, record, runtime.clock)
        runtime.on_role_change(self._publish_role)

    async def run(self, main: ProcessMain) -> None:
        """Run until drained. Raises errors of `main` and the runtime's `failure`."""
        runtime = self._runtime
        runtime.health.set_unhealthy(STARTING_REASON, "the process is starting")
        runtime.health.on_change(self._update_reason)
        runtime.on_settings_change(lambda settings: set_levels(settings.logging.level))
        if self._parent is not None:
            start = self._parent.start_message
            runtime.task = start.task
            self._take_place(start.name)
            if start.standby:
                runtime.stand_by = self._stand_by
            self._parent.on_notice(self._on_notice)
            self._parent.count_calls = runtime.requests.count_calls
            runtime.on_serving = self._parent.answer_pings
            runtime.shared_memory = self._parent.shared_memory
            runtime.report = self._send_report
        runtime.publish_state = self._publish_state
        await self._status.start()
        loop_lag = LoopLagMonitor(runtime.metrics, runtime.loop_pauses)
        gc_pauses = GcPauseMonitor(runtime.metrics)
        refresh = runtime.tasks.start(self._record_writer.keep_alive(), "process record")
        runtime.tasks.start(self._report_start(), "start report")
        try:
            await runtime.clock.offload(self._deployment.create_folder)
            await self._publish_state("starting")
            stopped = runtime.stopping.wait
            await wait_for_first(self._set_up(main), stopped())
            await wait_for_first(self._become_ready(), stopped())
            loop_lag.start()
            gc_pauses.start()
            await stopped()
            await self._announce_draining()
            await runtime.shutdown(await self._leave())
            if runtime.failure is not None:
                raise runtime.failure
        finally:
            loop_lag.stop()
            gc_pauses.stop()
            refresh.cancel()
            if runtime.shared_memory is not None:
                runtime.shared_memory.close()
            await self._status.stop()
            await self._record_writer.remove()

    async def _report_start(self) -> None:
        """Update the process record while the process starts: it may wait for a server."""
        while self._record_writer.record.state == "starting":
            await self._runtime.clock.sleep(START_REPORT_INTERVAL_S)
            self._update_reason()

    def _update_reason(self) -> None:
        """Write why the process does not serve to the process record, for `dynamo ps`."""
        reasons = dict(self._runtime.health.reasons)
        reasons.pop(STARTING_REASON, None)
        if self._record_writer.record.state == "starting":
            reasons |= self._runtime.unreachable_planes()
        reason = "; ".join(f"{name}: {text}" for name, text in reasons.items())
        record = self._record_writer.record
        if reason != record.reason and record.state != "standby":
            self._runtime.tasks.start(self._record_writer.update(reason=reason), "process record")

    def _on_notice(self, notice: ChildNotice) -> None:
        self._leaves |= notice.leaving
        if notice.place and self._is_standby:
            self._take_place(notice.place)
            self._is_standby = False
            self._place_given.set()
        if notice.settings is not None:
            self._runtime.update_settings(notice.settings)
        if notice.order is not None:
            self._runtime.tasks.start(self._execute_order(notice.order), "order")
        if notice.preparing:
            self._runtime.health.set_unhealthy(PREPARATION_REASON, notice.preparing)
        else:
            self._runtime.health.set_healthy(PREPARATION_REASON)

    async def _set_up(self, main: ProcessMain) -> None:
        await main(self._runtime)
        self._runtime.on_serving()
        self._runtime.health.set_healthy(STARTING_REASON)

    def _take_place(self, name: str) -> None:
        """Serve under this name."""
        if self._parent is not None:
            supervisor_id = self._parent.start_message.supervisor_id
            self._runtime.name = name
            self._runtime.supervisor = supervised_kind(supervisor_id, kind_of_process(name))

    async def _stand_by(self) -> None:
        """Wait until a process has died, whose place this one takes."""
        gc.collect()
        gc.freeze()
        self._runtime.on_serving()
        self._runtime.health.set_unhealthy(STARTING_REASON, "it serves when another process dies")
        await self._publish_state("standby")
        await self._place_given.wait()
        logging = self._runtime.settings.logging
        configure_logging(logging.level, logging.format, self._runtime.name)

    async def _become_ready(self) -> None:
        """Wait until the process is healthy for the first time, and publish `ready`."""
        health = self._runtime.health
        changed = asyncio.Event()
        health.on_change(changed.set)
        while not health.healthy:
            changed.clear()
            await changed.wait()
        if not self._place_given.is_set():
            gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        await self._publish_state("ready")

    async def _leave(self) -> float:
        """Let clients go elsewhere, unless all of the deployment ends and has no others elsewhere.
        Returns the rest of the time for draining."""
        runtime = self._runtime
        drain_s, began = runtime.settings.runtime.drain_s, runtime.clock.now()
        if runtime.on_leaving is not None and (self._leaves or runtime.planes.behind_service):
            await runtime.on_leaving(drain_s)
        return max(0.0, drain_s - (runtime.clock.now() - began))

    async def _announce_draining(self) -> None:
        try:
            await self._publish_state("draining")
        except OSError as error:  # a full disk must not prevent draining
            fields = {"error": str(error)}
            log.warning("the state 'draining' was not published", extra={"fields": fields})

    async def _publish_state(self, state: ProcessState) -> None:
        """Publish the state to the state folder, to discovery and to the supervisor."""
        runtime = self._runtime
        address = runtime.public_address or runtime.requests.address
        await self._record_writer.update(
            name=runtime.name,
            role=runtime.role,
            state=state,
            status_url=self._status.url,
            address=address,
            engine=runtime.engine,
            model=runtime.model,
            reason="" if state == "standby" else self._record_writer.record.reason,
        )
        if not self._is_standby:
            await self._publish_record()
        url = self._status.url
        self._send_report(state=state, address=address, status_url=url, key=self._key)

    def _send_report(self, **changes: Any) -> None:
        """Tell the supervisor what has changed of the fields of `ChildReport`."""
        report = replace(self._report, **changes)
        if self._parent is not None and report != self._report:
            self._parent.send_report(report)
        self._report = report

    async def _execute_order(self, order: ChildOrder) -> None:
        refused = b""
        try:
            await self._runtime.execute_order(order.adapter)
        except DynamoError as error:
            refused = encode_error(error)
        self._send_report(answered=order.number, refused=refused)

    async def _publish_role(self, role: str) -> None:
        if self._parent is not None:
            name = "both" if role == "worker" else role.removesuffix("_worker")
            self._parent.send_report(replace(self._report, worker_role=name))
        await self._record_writer.update(role=role)
        with suppress(PlaneUnavailable):  # only Prometheus reads the role there
            await self._publish_record()

    async def _publish_record(self) -> None:
        """Put the record of the process into discovery, with the status port's address there."""
        published = replace(self._record_writer.record, status_url=self._status.public_url)
        await self._runtime.discovery.put(self._key, msgspec.json.encode(published))
