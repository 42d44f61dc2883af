"""The processes of one deployment as they change while it serves: more, fewer, one after the other
anew. Nobody is stopped before somebody else serves, where there is to be somebody else."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Sequence

from msgspec.structs import replace

from dynamo.core.errors import ConfigError, ModelUnavailable, NotFound
from dynamo.runtime.processes.child import ChildProcess, ChildSpec

log = logging.getLogger(__name__)

MAX_REPLICAS = 1024
"""More of a kind on one host are a slip of the finger."""
KILL_GRACE_S = 5.0
"""A child that has not gone so long after its drain time is killed."""

ControlProgressCallback = Callable[[str], None]
"""How far an order is, in words for who gave it."""


def kind_of_process(name: str) -> str:
    """What replicas have in common: `worker` of `worker-2`."""
    head, _, tail = name.rpartition("-")
    return head if head and tail.isdecimal() else name


def check_replicas(kind: str, count: int) -> None:
    """Raises `ConfigError` for a number that no host runs."""
    if not 0 <= count <= MAX_REPLICAS:
        raise ConfigError(f"{count} processes {kind}: 0 to {MAX_REPLICAS} are possible on a host")


class ProcessGroup:
    """Starts, retires and replaces children. `children`: all of them, in order of their start;
    `keep(child)` runs one to its end; `look()`: see whether other specs are wanted by now."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        make: Callable[[ChildSpec], ChildProcess],
        keep: Callable[[ChildProcess], asyncio.Task[None]],
        drain_s: float,
        look: Callable[[], Awaitable[None]],
    ) -> None:
        self._refresh_specs = look
        self._create_child = make
        self._run_child = keep
        self._drain_s = drain_s
        self._specs = {kind_of_process(spec.name): spec for spec in specs}
        self._run_tasks: dict[ChildProcess, asyncio.Task[None]] = {}
        self._lock = asyncio.Lock()
        self._child_changed = asyncio.Event()
        self.children = [make(spec) for spec in specs]

    def start(self) -> None:
        """Start everybody."""
        for child in self.children:
            self._start_child(child)

    def on_child_change(self) -> None:
        """Some child reported something."""
        self._child_changed.set()

    def update_specs(self, specs: Sequence[ChildSpec]) -> None:
        """Those that come from now on in the place of others are to be so."""
        self._specs |= {kind_of_process(spec.name): spec for spec in specs}

    async def stop_children(self, leaving: Sequence[ChildProcess]) -> None:
        """Stop these, each with time to drain; then they are killed."""
        for child in leaving:
            child.stop_restarting()
            child.send_signal(signal.SIGTERM)
        runs = {self._run_tasks[child]: child for child in leaving}
        _, left = await asyncio.wait(runs, timeout=self._drain_s + KILL_GRACE_S)
        for run in left:
            child = runs[run]
            fields = {"name": child.spec.name, "pid": child.pid}
            log.error("killed after its drain time", extra={"fields": fields})
            child.send_signal(signal.SIGKILL)
        if left:
            await asyncio.wait(left)

    async def scale(self, kind: str, count: int, tell: ControlProgressCallback) -> None:
        """So many replicas of one kind. Raises `NotFound`, `ConfigError`; `ModelUnavailable` where
        a new one cannot start."""
        async with self._lock:
            there = self._children_of_kind(kind)
            check_replicas(kind, count)
            if len(there) < count:
                await self._add_replicas(kind, count - len(there), tell)
            elif len(there) > count:
                fit = sorted(there, key=lambda child: not child.ready)  # then by age
                await self._stop_and_remove(
                    [child for child in there if child not in fit[:count]], tell
                )
            else:
                tell(f"{kind}: {count} as before")

    async def drain(self, name: str, tell: ControlProgressCallback) -> None:
        """Take one out of service for good. Raises `NotFound`."""
        async with self._lock:
            await self._stop_and_remove([self._child_named(name)], tell)

    async def restart(self, what: str, tell: ControlProgressCallback) -> None:
        """Replace one child, or one after the other of a kind, by what is wanted now: the old one
        drains when the new one serves. Raises `NotFound`; `ModelUnavailable` where a new one
        cannot start."""
        async with self._lock:
            await self._refresh_specs()
            named = [child for child in self.children if child.spec.name == what]
            for old in named or self._children_of_kind(what):
                wanted = self._specs.get(kind_of_process(old.spec.name), old.spec)
                new = self._start_new_child(replace(wanted, name=old.spec.name))
                await self._wait_until_ready(new)
                await self.stop_children([old])
                self._remove_child(old)
                tell(f"{old.spec.name} was replaced")

    async def _add_replicas(self, kind: str, count: int, tell: ControlProgressCallback) -> None:
        taken = {child.spec.name for child in self.children}
        free = (name for at in range(1, 1 << 20) if (name := f"{kind}-{at}") not in taken)
        there = self._children_of_kind(kind)
        spec = there[0].spec if there else self._specs[kind]
        started = [self._start_new_child(replace(spec, name=next(free))) for _ in range(count)]
        for child in started:
            await self._wait_until_ready(child)
            tell(f"{child.spec.name} serves")

    async def _stop_and_remove(
        self, leaving: Sequence[ChildProcess], tell: ControlProgressCallback
    ) -> None:
        await self.stop_children(leaving)
        for child in leaving:
            self._remove_child(child)
            tell(f"{child.spec.name} has left")

    def _start_new_child(self, spec: ChildSpec) -> ChildProcess:
        child = self._create_child(spec)
        self.children.append(child)
        self._start_child(child)
        return child

    def _start_child(self, child: ChildProcess) -> None:
        run = self._run_tasks[child] = self._run_child(child)
        run.add_done_callback(lambda _: self._child_changed.set())

    async def _wait_until_ready(self, child: ChildProcess) -> None:
        """Wait until it serves; one that never will is forgotten."""
        run = self._run_tasks[child]
        while not child.ready:
            if run.done() or child.crash_loop_reason:
                why = child.report.fatal or child.crash_loop_reason or "it was stopped"
                await self.stop_children([child])
                self._remove_child(child)
                raise ModelUnavailable(
                    f"{child.spec.name} cannot start: {why}",
                    hint=child.report.hint or "its log says more; all else is as it was",
                )
            self._child_changed.clear()
            await self._child_changed.wait()

    def _remove_child(self, child: ChildProcess) -> None:
        self.children.remove(child)
        del self._run_tasks[child]

    def _children_of_kind(self, kind: str) -> list[ChildProcess]:
        found = [child for child in self.children if kind_of_process(child.spec.name) == kind]
        if not found and kind not in self._specs:
            raise NotFound(
                f"no process is called {kind!r}", hint=f"there are: {self._list_names()}"
            )
        return found

    def _child_named(self, name: str) -> ChildProcess:
        for child in self.children:
            if child.spec.name == name:
                return child
        raise NotFound(f"no process is called {name!r}", hint=f"there are: {self._list_names()}")

    def _list_names(self) -> str:
        return ", ".join(child.spec.name for child in self.children)
