"""Settings changed while a deployment serves: read again when the file changed, or when told to."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from dynamo.core.clock import Clock
from dynamo.core.errors import DynamoError
from dynamo.core.settings.reload import Change, reloaded
from dynamo.runtime.child import Child, ProcessSpec
from dynamo.runtime.crew import Crew
from dynamo.telemetry.logs import set_levels

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0

Read = Callable[[], Sequence[ProcessSpec]]
"""The processes as the settings describe them now. Raises `DynamoError`. Blocks."""
Stamp = tuple[int, int, int]


class Reload:
    """Gives running processes what may change of their settings, and tells what may not; those that
    replace them get it all. `file`: looked at now and then; "" = none."""

    def __init__(self, read: Read, file: str = "") -> None:
        self._read = read
        self._file = file
        self._seen: Stamp | None = None
        self._asked = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()

    def ask(self) -> None:
        """Read again soon, whether the file changed or not."""
        self._asked.set()

    async def follow(self, crew: Crew, clock: Clock) -> None:
        """For ever."""
        self._seen = await clock.offload(stamp, self._file)
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S if self._file else None):
                    await self._asked.wait()
            await self.look(crew, clock)

    async def look(self, crew: Crew, clock: Clock) -> None:
        """Read again, if somebody asked or the file changed."""
        async with self._one_at_a_time:
            now = await clock.offload(stamp, self._file)
            asked = self._asked.is_set()
            self._asked.clear()
            if asked or (now is not None and now != self._seen):
                self._seen = now
                await self._again(crew, clock)

    async def _again(self, crew: Crew, clock: Clock) -> None:
        try:
            specs = await clock.offload(self._read)
        except DynamoError as error:
            _refuse(error)
            return
        crew.want(specs)
        wanted = {(spec.role, spec.stop_order): spec for spec in specs}
        changes: dict[str, Change] = {}
        for child in crew.children:
            spec = wanted.get((child.spec.role, child.spec.stop_order))
            if spec is not None:
                changes |= {one.key: one for one in _give(child, spec)}
        _tell(list(changes.values()))


def stamp(file: str) -> Stamp | None:
    """What differs when a file was written or replaced; None: it is not there. Blocks."""
    try:
        found = Path(file).stat() if file else None
    except OSError:
        return None
    return found and (found.st_mtime_ns, found.st_size, found.st_ino)


def has_terminal() -> bool:
    """Is there a terminal that could hang up?"""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _give(child: Child, spec: ProcessSpec) -> Sequence[Change]:
    settings, changes = reloaded(child.spec.settings, spec.settings)
    if settings != child.spec.settings:
        child.reload(settings)
        set_levels(settings.logging.level)
    if spec.task != child.spec.task:
        return [*changes, Change(f"configuration of {child.spec.name}", "", "", applied=False)]
    return changes


def _refuse(error: DynamoError) -> None:
    fields = {"error": error.message, "hint": error.hint}
    log.error("settings cannot be read again; all stays as it was", extra={"fields": fields})


def _tell(changes: Sequence[Change]) -> None:
    if not changes:
        log.info("settings read again: nothing changed")
    for one in changes:
        fields = {"setting": one.key, "before": one.before, "after": one.after}
        if one.applied:
            log.info("setting changed", extra={"fields": fields})
        else:
            log.warning("a changed setting needs a restart", extra={"fields": fields})
