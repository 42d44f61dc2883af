"""The processes of one deployment as they change while it serves: more, fewer, one after the other
anew. Nobody is stopped before somebody else serves, where there is to be somebody else."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Sequence

from msgspec.structs import replace

from dynamo.core.errors import ConfigError, ModelUnavailable, NotFound
from dynamo.runtime.child import Child, ProcessSpec

log = logging.getLogger(__name__)

MAX_REPLICAS = 1024
"""More of a kind on one host are a slip of the finger."""
KILL_AFTER_S = 5.0
"""A child that has not gone so long after its drain time is killed."""

Tell = Callable[[str], None]
"""How far an order is, in words for who gave it."""


def kind_of(name: str) -> str:
    """What replicas have in common: `worker` of `worker-2`."""
    head, _, tail = name.rpartition("-")
    return head if head and tail.isdecimal() else name


def check_replicas(kind: str, count: int) -> None:
    """Raises `ConfigError` for a number that no host runs."""
    if not 0 <= count <= MAX_REPLICAS:
        raise ConfigError(f"{count} processes {kind}: 0 to {MAX_REPLICAS} are possible on a host")


class Crew:
    """Starts, retires and replaces children. `children`: all of them, in order of their start;
    `keep(child)` runs one to its end; `look()`: see whether other specs are wanted by now."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        make: Callable[[ProcessSpec], Child],
        keep: Callable[[Child], asyncio.Task[None]],
        drain_s: float,
        look: Callable[[], Awaitable[None]],
    ) -> None:
        self._look = look
        self._make = make
        self._keep = keep
        self._drain_s = drain_s
        self._specs = {kind_of(spec.name): spec for spec in specs}
        self._runs: dict[Child, asyncio.Task[None]] = {}
        self._one_at_a_time = asyncio.Lock()
        self._changed = asyncio.Event()
        self.children = [make(spec) for spec in specs]

    def start(self) -> None:
        """Start everybody."""
        for child in self.children:
            self._run(child)

    def changed(self) -> None:
        """Some child reported something."""
        self._changed.set()

    def want(self, specs: Sequence[ProcessSpec]) -> None:
        """Those that come from now on in the place of others are to be so."""
        self._specs |= {kind_of(spec.name): spec for spec in specs}

    async def retire(self, leaving: Sequence[Child]) -> None:
        """Stop these, each with time to drain; then they are killed."""
        for child in leaving:
            child.hold()
            child.send(signal.SIGTERM)
        runs = {self._runs[child]: child for child in leaving}
        _, left = await asyncio.wait(runs, timeout=self._drain_s + KILL_AFTER_S)
        for run in left:
            child = runs[run]
            fields = {"name": child.spec.name, "pid": child.pid}
            log.error("killed after its drain time", extra={"fields": fields})
            child.send(signal.SIGKILL)
        if left:
            await asyncio.wait(left)

    async def scale(self, kind: str, count: int, tell: Tell) -> None:
        """So many replicas of one kind. Raises `NotFound`, `ConfigError`; `ModelUnavailable` where
        a new one cannot start."""
        async with self._one_at_a_time:
            there = self._of(kind)
            check_replicas(kind, count)
            if len(there) < count:
                await self._grow(kind, count - len(there), tell)
            elif len(there) > count:
                fit = sorted(there, key=lambda child: not child.ready)  # then by age
                await self._leave([child for child in there if child not in fit[:count]], tell)
            else:
                tell(f"{kind}: {count} as before")

    async def drain(self, name: str, tell: Tell) -> None:
        """Take one out of service for good. Raises `NotFound`."""
        async with self._one_at_a_time:
            await self._leave([self._named(name)], tell)

    async def restart(self, what: str, tell: Tell) -> None:
        """Replace one child, or one after the other of a kind, by what is wanted now: the old one
        drains when the new one serves. Raises `NotFound`; `ModelUnavailable` where a new one
        cannot start."""
        async with self._one_at_a_time:
            await self._look()
            named = [child for child in self.children if child.spec.name == what]
            for old in named or self._of(what):
                wanted = self._specs.get(kind_of(old.spec.name), old.spec)
                new = self._add(replace(wanted, name=old.spec.name))
                await self._serving(new)
                await self.retire([old])
                self._forget(old)
                tell(f"{old.spec.name} was replaced")

    async def _grow(self, kind: str, count: int, tell: Tell) -> None:
        taken = {child.spec.name for child in self.children}
        free = (name for at in range(1, 1 << 20) if (name := f"{kind}-{at}") not in taken)
        there = self._of(kind)
        spec = there[0].spec if there else self._specs[kind]
        started = [self._add(replace(spec, name=next(free))) for _ in range(count)]
        for child in started:
            await self._serving(child)
            tell(f"{child.spec.name} serves")

    async def _leave(self, leaving: Sequence[Child], tell: Tell) -> None:
        await self.retire(leaving)
        for child in leaving:
            self._forget(child)
            tell(f"{child.spec.name} has left")

    def _add(self, spec: ProcessSpec) -> Child:
        child = self._make(spec)
        self.children.append(child)
        self._run(child)
        return child

    def _run(self, child: Child) -> None:
        run = self._runs[child] = self._keep(child)
        run.add_done_callback(lambda _: self._changed.set())

    async def _serving(self, child: Child) -> None:
        """Wait until it serves; one that never will is forgotten."""
        run = self._runs[child]
        while not child.ready:
            if run.done() or child.trouble:
                why = child.report.fatal or child.trouble or "it was stopped"
                await self.retire([child])
                self._forget(child)
                raise ModelUnavailable(
                    f"{child.spec.name} cannot start: {why}",
                    hint=child.report.hint or "its log says more; all else is as it was",
                )
            self._changed.clear()
            await self._changed.wait()

    def _forget(self, child: Child) -> None:
        self.children.remove(child)
        del self._runs[child]

    def _of(self, kind: str) -> list[Child]:
        found = [child for child in self.children if kind_of(child.spec.name) == kind]
        if not found and kind not in self._specs:
            raise NotFound(f"no process is called {kind!r}", hint=f"there are: {self._names()}")
        return found

    def _named(self, name: str) -> Child:
        for child in self.children:
            if child.spec.name == name:
                return child
        raise NotFound(f"no process is called {name!r}", hint=f"there are: {self._names()}")

    def _names(self) -> str:
        return ", ".join(child.spec.name for child in self.children)
