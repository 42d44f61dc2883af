"""The supervisor: keeps the processes of a deployment alive and stops all of them at its end."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from itertools import groupby

from msgspec.structs import replace

from dynamo.communication.http import raise_open_file_limit
from dynamo.core.clock import Clock, SystemClock
from dynamo.core.settings import Settings
from dynamo.core.tasks import BackgroundTasks, run_all, wait_for_first
from dynamo.runtime.deployment import Deployment, report_unsafe_roots
from dynamo.runtime.health import PREPARATION_REASON
from dynamo.runtime.planes import UNENCRYPTED_HINT, UNENCRYPTED_TEXT, planes_of
from dynamo.runtime.processes.child import ChildProcess
from dynamo.runtime.processes.child_logs import PrefixedLogWriter
from dynamo.runtime.processes.child_spec import ChildSpec
from dynamo.runtime.processes.control import ControlServer
from dynamo.runtime.processes.disk_space import DiskSpaceMonitor
from dynamo.runtime.processes.fork_server import ForkServer
from dynamo.runtime.processes.host_memory import HostMemory
from dynamo.runtime.processes.model_loader import ModelLoader
from dynamo.runtime.processes.parent_pipe import ChildReport
from dynamo.runtime.processes.process_group import ProcessGroup
from dynamo.runtime.processes.process_record import (
    SUPERVISOR,
    ProcessRecordWriter,
    SupervisorDiscovery,
    describe_children,
    describe_restarts,
    describe_workers,
    process_key,
    supervisor_record,
)
from dynamo.runtime.processes.reload import SettingsReloader, has_terminal
from dynamo.runtime.processes.served_models import ModelSources, ServedModels
from dynamo.runtime.processes.standby import take_over
from dynamo.runtime.processes.status import StatusServer, unready_reason
from dynamo.runtime.processes.supervisor_metrics import (
    AlertWatch,
    declare_supervisor_metrics,
    list_scraped,
)
from dynamo.runtime.processes.supervisor_report import make_reporter
from dynamo.runtime.processes.watchdog import watch_children
from dynamo.runtime.shared_memory import SharedMemoryBroker
from dynamo.runtime.supervisors import KindRecord, supervisor_record_key, uses_prefix
from dynamo.telemetry import Registry
from dynamo.telemetry.logs import LogStream

log = logging.getLogger(__name__)

Prepare = Callable[[Callable[[str], None]], Awaitable[Coroutine[None, None, None] | None]]
"""Work that some processes need before they start, with a callback for progress. Returns work to do
beside them. A raised `DynamoError` ends the deployment."""


class Supervisor:
    """Starts the processes of `specs` and restarts those that die.

    SIGTERM or SIGINT stops all processes in `stop_order`, each with time to drain; a second signal
    kills them. SIGHUP reloads the settings, or stops the deployment if its terminal was closed.
    `ready` is set when every process serves. `failure` is the report of a process that can never
    start, which ends the deployment.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        deployment: Deployment,
        settings: Settings,
        *,
        address: str = "",
        clock: Clock | None = None,
        out: LogStream | None = None,
        prepare: Prepare | None = None,
        reload: SettingsReloader | None = None,
        models: ModelSources | None = None,
        alerts: AlertWatch | None = None,
        fork_server: ForkServer | None = None,
    ) -> None:
        self._metrics = metrics = Registry()
        self._alerts, self._can_reload = alerts, reload is not None
        self._is_unencrypted = planes_of(settings).unencrypted
        self._had_terminal, self.ready = has_terminal(), asyncio.Event()
        self.failure: ChildReport | None = None
        self._prepare, self._reloader = prepare, reload or SettingsReloader(lambda: specs)
        self._preparation_status, self._preparation_done = "", asyncio.Event()
        self._preparation_error: Exception | None = None
        self._deployment = deployment
        self._clock = clock or SystemClock()
        self._stop_requested, self._kill_requested = asyncio.Event(), asyncio.Event()
        cards = {spec.name: spec.cards for spec in specs if spec.cards}
        record = supervisor_record(deployment, settings.runtime.namespace, address, cards)
        self._record_writer = ProcessRecordWriter(deployment, record, self._clock)
        reasons, details, ready = self._unhealthy_reasons, self._health_details, self._unready
        self._status = StatusServer(
            settings, self._clock, metrics, reasons=reasons, details=details, ready=ready
        )
        names, bare = [spec.name for spec in specs], settings.logging.format == "json"
        self._log_writer = PrefixedLogWriter(names, out or sys.stderr, bare=bare)
        self._tasks, self._forker = BackgroundTasks(), fork_server or ForkServer()
        self._disk_space = DiskSpaceMonitor(deployment, self._clock)
        self._shared_memory = SharedMemoryBroker(self._clock, self._record_child_status)
        self._discovery = SupervisorDiscovery(settings)
        self._start_s, self._kinds = dict[str, float](), dict[str, KindRecord]()
        self._drain_s = settings.runtime.drain_s
        self._group = self._create_group(specs)
        self._loader = self._create_loader(settings, specs)
        self._models = self._create_models(models, specs)
        self.children = self._group.children
        self._status.list_processes = partial(list_scraped, self.children)
        report = make_reporter(self.children, self._log_writer, settings, self._clock)
        self._control = ControlServer(self._group, self._models, deployment.folder, report)
        declare_supervisor_metrics(metrics, self.children, self._disk_space, settings)

    async def run(self) -> int:
        """Run until stopped. Returns the exit code, 0 or that of `failure`. Raises the error of
        `prepare` after all processes have stopped."""
        report_unsafe_roots()
        if self._is_unencrypted:
            log.warning("%s; %s", UNENCRYPTED_TEXT, UNENCRYPTED_HINT)
        raise_open_file_limit()
        await self._clock.offload(self._deployment.create_folder)
        self._add_signal_handlers(asyncio.get_running_loop())
        await self._status.start()
        try:
            async with self._tasks as tasks:
                self._group.start()
                self._announce_processes()
                published = replace(self._record_writer.record, status_url=self._status.public_url)
                self._discovery.announce(process_key(published), published)
                preparation = tasks.start(self._run_preparation(), PREPARATION_REASON)
                await self._record_writer.create(status_url=self._status.url)
                await self._control.start()
                side_tasks = [preparation, *self._start_side_tasks(tasks)]
                await self._wait_for_stop()
                for task in side_tasks:
                    task.cancel()
                await self._control.stop()
                await self._announce_draining()
                for child in self.children:
                    child.stop_restarting()
                await wait_for_first(self._stop_in_order(), self._kill_requested.wait())
                for child in self.children:
                    child.send_signal(signal.SIGKILL)
                await tasks.join()
        finally:
            await self._status.stop()
            await self._discovery.close()
            await self._record_writer.remove()
            self._shared_memory.close()
            self._forker.close()
            await self._clock.offload(self._disk_space.close)
            await self._clock.offload(self._deployment.remove_if_unused)
        if self._preparation_error is not None:
            raise self._preparation_error
        return 0 if self.failure is None else self.failure.code

    def _start_side_tasks(self, tasks: BackgroundTasks) -> Sequence[asyncio.Task[None]]:
        work = {
            "reload": self._reloader.watch(self._group, self._clock),
            "process record": self._record_writer.keep_alive(self._refresh_announcements),
            "disk space": self._disk_space.watch(),
            "model loader": self._loader.run(),
            "watchdog": watch_children(self.children, self._clock),
        }
        if self._alerts is not None:
            work["alerts"] = self._alerts.run(self._metrics, self._status.list_processes)
        return [tasks.start(each, name) for name, each in work.items()]

    def stop(self) -> None:
        """Stop the processes in order. A second call kills them."""
        (self._kill_requested if self._stop_requested.is_set() else self._stop_requested).set()

    @property
    def stopping(self) -> asyncio.Event:
        """Set by the first request to stop. Callers may only wait for it."""
        return self._stop_requested

    def _add_signal_handlers(self, loop: asyncio.AbstractEventLoop) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stop)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)

    def _on_hangup(self) -> None:
        if not self._can_reload or (self._had_terminal and not has_terminal()):
            self.stop()
        else:
            self._reloader.request_reload()

    async def _run_child(self, child: ChildProcess) -> None:
        if child.spec.needs_preparation:
            await wait_for_first(self._preparation_done.wait(), self._stop_requested.wait())
        if not self._stop_requested.is_set():
            await child.run()
        if not self._stop_requested.is_set():
            self._discovery.delete(child.report.key)

    async def _run_preparation(self) -> None:
        try:
            prepare = self._prepare
            if prepare is not None and (rest := await prepare(self._set_preparation_status)):
                self._tasks.start(rest, "after the preparation")
        except Exception as error:  # noqa: BLE001 - `run` raises it after all have stopped
            if not self._stop_requested.is_set():
                self._preparation_error = error
                self._stop_requested.set()
        else:
            self._preparation_done.set()
            self._set_preparation_status("")

    def _set_preparation_status(self, preparing: str) -> None:
        if preparing != self._preparation_status:
            self._preparation_status = preparing
            for child in self.children:
                child.notify_preparing(preparing)

    async def _wait_for_stop(self) -> None:
        await wait_for_first(self._stop_requested.wait(), self.ready.wait())
        if not self._stop_requested.is_set():
            await self._record_writer.update(state="ready")
            await self._stop_requested.wait()

    async def _announce_draining(self) -> None:
        if self.failure is None and self._preparation_error is None:
            text = "stopping; a second Ctrl-C or signal kills the processes"
            log.info(text, extra={"fields": {"drain_s": self._drain_s}})
        await self._record_writer.update(state="draining")

    async def _stop_in_order(self) -> None:
        order = sorted(self.children, key=lambda child: child.spec.stop_order)
        for _, group in groupby(order, key=lambda child: child.spec.stop_order):
            await self._group.stop_children(list(group))

    def _unhealthy_reasons(self) -> Mapping[str, str]:
        reasons = {
            child.spec.name: reason for child in self.children if (reason := child.unhealthy_reason)
        }
        if self._preparation_status:
            reasons[PREPARATION_REASON] = self._preparation_status
        if self._stop_requested.is_set():
            reasons["stopping"] = "the deployment is draining"
        return reasons

    def _unready(self) -> str:
        return unready_reason(self.children, self._unhealthy_reasons())

    def _health_details(self) -> Mapping[str, object]:
        return {
            "role": SUPERVISOR,
            "deployment": self._deployment.id,
            "processes": {child.spec.name: child.pid for child in self.children},
            "warnings": [warning] if (warning := self._disk_space.warning) else [],
            "alerts": [] if self._alerts is None else self._alerts.list_active(),
            "restarts": describe_restarts(self.children),
        }

    def _create_group(self, specs: Sequence[ChildSpec]) -> ProcessGroup:
        return ProcessGroup(
            specs,
            self._create_child,
            self._start_child,
            self._drain_s,
            lambda: run_all(self._reloader.refresh(self._group, self._clock), self._forker.renew()),
            self._disk_space.require_space,
            lambda specs: self._loader.check_room(specs),  # noqa: PLW0108 - it is created later
            self._on_child_removed,
        )

    def _create_loader(self, settings: Settings, specs: Sequence[ChildSpec]) -> ModelLoader:
        memory = HostMemory(settings.runtime.memory)
        follow = partial(self._discovery.follow, uses_prefix(settings.runtime.namespace))
        announce = self._announce_processes
        loader = ModelLoader(self._group, memory, self._clock, self._tasks, follow, announce)
        loader.add(specs)
        return loader

    def _create_models(
        self, sources: ModelSources | None, specs: Sequence[ChildSpec]
    ) -> ServedModels:
        return ServedModels(
            self._group,
            self._loader,
            specs,
            sources,
            self._record_writer.record.namespace,
            self._drain_s,
            self._clock,
            on_change=self._on_models_changed,
            list_keys=self._discovery.list_keys,
        )

    def _create_child(self, spec: ChildSpec) -> ChildProcess:
        return ChildProcess(
            spec,
            self._clock,
            on_line=self._log_writer,
            on_change=self._on_child_change,
            on_death=self._on_child_death,
            state_root=self._deployment.folder.parent,
            supervisor_id=self._record_writer.record.instance,
            shared_memory=self._shared_memory,
            fork_server=self._forker,
        )

    def _start_child(self, child: ChildProcess) -> asyncio.Task[None]:
        return self._tasks.start(self._run_child(child), child.spec.name)

    def _on_child_death(self, child: ChildProcess) -> None:
        self._discovery.delete(child.report.key)
        if not self._stop_requested.is_set():
            take_over(child, self.children)
        self._group.on_child_change()
        self._announce_processes()
        self._record_child_status()

    def _on_child_change(self, child: ChildProcess) -> None:
        if child.start_error and self._needs(child) and self.failure is None:
            self.failure = child.report
            self._stop_requested.set()
        self._group.on_child_change()
        self._loader.on_child_change()
        self._models.adapters.on_report(child)
        if self.failure is None and all(
            child.ready or child.start_error or child.spec.standby or child.spec.on_demand
            for child in self.children
        ):
            self.ready.set()
        self._record_child_status()
        self._announce_processes()

    def _needs(self, child: ChildProcess) -> bool:
        """Whether the deployment cannot start without a child. A child that is added later is not
        needed, nor are those of a model beside others."""
        if self.ready.is_set() or child.spec.on_demand:
            return False
        startable = {each.spec.model for each in self.children if not each.start_error}
        return not child.spec.model or not startable - {child.spec.model, ""}

    def _on_models_changed(self) -> None:
        """Announce the models. Processes of removed ones are forgotten when they have left."""
        models = {child.spec.model for child in self.children} | self._models.aliases.keys()
        for kind in [kind for kind, record in self._kinds.items() if record.model not in models]:
            del self._kinds[kind]
            self._start_s.pop(kind, None)
        self._announce_processes()

    def _on_child_removed(self) -> None:
        if self._loader.records:
            self._shared_memory.drop_unused()  # another model may wait for it
        if not self._stop_requested.is_set():
            self._announce_processes()

    def _announce_processes(self) -> None:
        """Announce in discovery which workers this supervisor keeps running."""
        record = describe_workers(self.children, self._start_s, self._kinds)
        own, models = self._record_writer.record, self._models
        adapters, on_demand = models.adapters.of_models(), self._loader.records
        record = replace(record, models=models.aliases, on_demand=on_demand, adapters=adapters)
        record = replace(record, namespace=own.namespace)
        self._discovery.announce(supervisor_record_key(own.instance), record)

    async def _refresh_announcements(self) -> None:
        self._discovery.refresh()
        await self._control.refresh_socket()

    def _record_child_status(self) -> None:
        """Write which children hang or wait for their restart, how often each was restarted, and
        how much memory they share, for `dynamo ps`."""
        status, waiting = describe_children(self.children)
        record = self._record_writer.record
        shared = self._shared_memory.size_bytes
        if (status, waiting, shared) != (record.children, record.waiting, record.shared_bytes):
            update = self._record_writer.update(
                children=status, waiting=waiting, shared_bytes=shared
            )
            self._tasks.start(update, "process record")


def run_supervisor(supervisor: Supervisor, on_ready: Callable[[], None]) -> int:
    """Run a supervisor on a new event loop, and call `on_ready` when all processes serve."""

    async def announce() -> None:
        await supervisor.ready.wait()
        on_ready()

    async def run() -> int:
        async with BackgroundTasks() as tasks:
            tasks.start(announce())
            return await supervisor.run()

    return asyncio.run(run())
