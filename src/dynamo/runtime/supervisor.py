"""The supervisor: keeps the processes of one deployment alive, and leaves none behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import groupby

from dynamo.core.clock import Clock, SystemClock
from dynamo.core.errors import ConfigError
from dynamo.core.settings import Settings
from dynamo.core.tasks import Tasks, first_of
from dynamo.runtime.burials import Burials
from dynamo.runtime.child import Child, ProcessSpec
from dynamo.runtime.control import Control
from dynamo.runtime.crew import Crew
from dynamo.runtime.deployment import Deployment, ProcessRecord, ProcessState
from dynamo.runtime.health import PREPARATION
from dynamo.runtime.link import Report
from dynamo.runtime.pids import own_start_ticks
from dynamo.runtime.reload import Reload, has_terminal
from dynamo.runtime.standing import Standing
from dynamo.runtime.status import StatusServer
from dynamo.telemetry import Registry
from dynamo.telemetry.logs import Terminal

log = logging.getLogger(__name__)

SUPERVISOR = "supervisor"

Prepare = Callable[[Callable[[str], None]], Awaitable[None]]
"""Work that some processes need done before they start; it tells how far it is. Raises DynamoError
where it cannot be done, which ends the deployment."""
COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)


class LogLines:
    """Prefixes every line of a child with its name; coloured on a terminal. `bare`: without,
    for lines that are JSON and say their component themselves."""

    def __init__(self, names: Sequence[str], out: Terminal, *, bare: bool = False) -> None:
        self._out = out
        self._bare = bare
        self._tty = out.isatty()
        self._width = max(map(len, names), default=0)
        self._prefixes: dict[str, str] = {}
        for name in names:
            self._add(name)

    def __call__(self, name: str, line: bytes) -> None:
        """Write one line; a reader that went away hears nothing."""
        prefix = self._prefixes.get(name)
        if prefix is None:
            prefix = self._add(name)
        with contextlib.suppress(OSError):
            self._out.write(f"{prefix}{line.decode(errors='replace')}\n")
            self._out.flush()

    def _add(self, name: str) -> str:
        prefix = "" if self._bare else f"{name:<{self._width}} | "
        if self._tty and prefix:
            colour = COLOURS[len(self._prefixes) % len(COLOURS)]
            prefix = f"\x1b[{colour}m{prefix[:-1]}\x1b[0m "
        self._prefixes[name] = prefix
        return prefix


class Supervisor:
    """Starts `specs`, those that need it after `prepare`, restarts what dies, stops all on SIGTERM
    or SIGINT: in order of `stop_order`, each with time to drain; a second signal kills. SIGHUP has
    the settings read again, by `reload`; that of a terminal that is gone stops. `ready` is set when
    every process serves; `failure` is the report of a process that can never start, which ends the
    deployment."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        deployment: Deployment,
        settings: Settings,
        *,
        address: str = "",
        clock: Clock | None = None,
        out: Terminal | None = None,
        prepare: Prepare | None = None,
        reload: Reload | None = None,
    ) -> None:
        metrics = Registry()
        self._reload = reload
        self._terminal = has_terminal()
        self.ready = asyncio.Event()
        self.failure: Report | None = None
        self._prepare = prepare
        self._preparing = ""
        self._prepared = asyncio.Event()
        self._unprepared: Exception | None = None
        self._deployment = deployment
        self._address = address
        self._clock = clock or SystemClock()
        self._stop = asyncio.Event()
        self._at_once = asyncio.Event()
        self._standing: Standing | None = None
        self._restarts = metrics.counter(
            "dynamo_supervisor_restarts_total", "Processes started again", ("name",)
        )
        self._status = StatusServer(
            settings, self._clock, metrics, reasons=self._reasons, about=self._about
        )
        bare = settings.logging.format == "json"
        self._line = LogLines([spec.name for spec in specs], out or sys.stderr, bare=bare)
        self._tasks = Tasks()
        self._burials = Burials(settings)
        self._drain_s = settings.runtime.drain_s
        self._crew = Crew(specs, self._child, self._start, self._drain_s, self._look)
        self._control = Control(self._crew, deployment.folder)
        self.children = self._crew.children

    async def run(self) -> int:
        """Until stopped. Returns the exit code: 0, or that of `failure`. When all have stopped, it
        raises what `prepare` raised."""
        await self._clock.offload(self._deployment.prepare)
        self._signals(asyncio.get_running_loop())
        await self._status.start()
        try:
            async with self._tasks as tasks:
                self._crew.start()
                preparation = tasks.start(self._do_prepare(), PREPARATION)
                standing = await self._tell("starting")
                await self._control.start()
                beside = [
                    preparation,
                    tasks.start(self._follow(), "reload"),
                    tasks.start(standing.keep(self._control.keep), "process record"),
                ]
                await self._serve()
                for task in beside:
                    task.cancel()
                await self._control.stop()
                await self._say_stopping()
                for child in self.children:
                    child.hold()
                await first_of(self._stop_all(), self._at_once.wait())
                for child in self.children:
                    child.send(signal.SIGKILL)
                await tasks.join()
        finally:
            await self._status.stop()
            await self._burials.close()
            if self._standing is not None:
                await self._standing.end()
                await self._clock.offload(self._deployment.clear)
        if self._unprepared is not None:
            raise self._unprepared
        return 0 if self.failure is None else self.failure.code

    def stop(self) -> None:
        """Stop in order; called again, at once."""
        (self._at_once if self._stop.is_set() else self._stop).set()

    @property
    def stopping(self) -> asyncio.Event:
        """Set from the first request to stop; others only wait for it."""
        return self._stop

    def _signals(self, loop: asyncio.AbstractEventLoop) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stop)
        loop.add_signal_handler(signal.SIGHUP, self._hung_up)

    async def _follow(self) -> None:
        if self._reload is not None:
            await self._reload.follow(self._crew, self._clock)

    async def _look(self) -> None:
        if self._reload is not None:
            await self._reload.look(self._crew, self._clock)

    def _hung_up(self) -> None:
        if self._reload is None or (self._terminal and not has_terminal()):
            self.stop()
        else:
            self._reload.ask()

    async def _keep(self, child: Child) -> None:
        if child.spec.needs_preparation:
            await first_of(self._prepared.wait(), self._stop.wait())
        if not self._stop.is_set():
            await child.run()
        if not self._stop.is_set():
            self._burials.bury(child.report.key)

    async def _do_prepare(self) -> None:
        try:
            if self._prepare is not None:
                await self._prepare(self._note)
        except Exception as error:  # noqa: BLE001 - raised again when all have stopped
            if not self._stop.is_set():
                self._unprepared = error
                self._stop.set()
        else:
            self._prepared.set()
            self._note("")

    def _note(self, preparing: str) -> None:
        if preparing == self._preparing:
            return
        self._preparing = preparing
        for child in self.children:
            child.prepare(preparing)

    async def _serve(self) -> None:
        await first_of(self._stop.wait(), self.ready.wait())
        if not self._stop.is_set():
            await self._tell("ready")
            await self._stop.wait()

    async def _say_stopping(self) -> None:
        if self.failure is None and self._unprepared is None:
            fields = {"drain_s": self._drain_s}
            log.info(
                "stopping; a second Ctrl-C or signal ends it at once", extra={"fields": fields}
            )
        try:
            await self._tell("draining")
        except ConfigError as error:  # a full disk keeps nobody from draining
            log.warning("draining untold", extra={"fields": {"error": error.message}})

    async def _stop_all(self) -> None:
        order = sorted(self.children, key=lambda child: child.spec.stop_order)
        for _, group in groupby(order, key=lambda child: child.spec.stop_order):
            await self._crew.retire(list(group))

    def _reasons(self) -> Mapping[str, str]:
        own = {PREPARATION: self._preparing} if self._preparing else {}
        if self._stop.is_set():
            own["stopping"] = "the deployment is draining"
        waiting = {
            child.spec.name: child.trouble or (child.report.state if child.pid else "not running")
            for child in self.children
            if not child.ready
        }
        return waiting | own

    def _about(self) -> Mapping[str, object]:
        return {
            "role": SUPERVISOR,
            "deployment": self._deployment.id,
            "processes": {child.spec.name: child.pid for child in self.children},
        }

    def _child(self, spec: ProcessSpec) -> Child:
        return Child(spec, self._clock, line=self._line, changed=self._changed, died=self._died)

    def _start(self, child: Child) -> asyncio.Task[None]:
        return self._tasks.start(self._keep(child), child.spec.name)

    def _died(self, child: Child) -> None:
        self._burials.bury(child.report.key)
        self._crew.changed()
        self._restarts.labels(child.spec.name).inc()

    def _changed(self, child: Child) -> None:
        serving = self.ready.is_set()  # who fails later was added to what serves without it
        if child.report.fatal and not (child.ever_ready or serving) and self.failure is None:
            self.failure = child.report
            self._stop.set()
        self._crew.changed()
        if all(one.ready for one in self.children):
            self.ready.set()

    async def _tell(self, state: ProcessState) -> Standing:
        if self._standing is None:
            record = ProcessRecord(
                deployment=self._deployment.id,
                role=SUPERVISOR,
                name=SUPERVISOR,
                pid=os.getpid(),
                address=self._address,
                status_url=self._status.url,
                instance=secrets.token_hex(8),
                start_ticks=own_start_ticks(),
            )
            self._standing = Standing(self._deployment, record, self._clock)
        await self._standing.tell(state=state)
        return self._standing


def run_supervisor(supervisor: Supervisor, on_ready: Callable[[], None]) -> int:
    """Run it on an event loop of its own, and call `on_ready` once when all serve."""

    async def announced() -> int:
        async with Tasks() as tasks:
            tasks.start(_announce(supervisor, on_ready), "announce")
            return await supervisor.run()

    return asyncio.run(announced())


async def _announce(supervisor: Supervisor, on_ready: Callable[[], None]) -> None:
    await supervisor.ready.wait()
    on_ready()
