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
from dynamo.core.settings.reload import SettingChange, apply_reload
from dynamo.runtime.processes.child import ChildProcess, ChildSpec
from dynamo.runtime.processes.process_group import ProcessGroup
from dynamo.telemetry.logs import set_levels

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0

ReadSpecs = Callable[[], Sequence[ChildSpec]]
"""The processes as the settings describe them now. Raises `DynamoError`. Blocks."""
FileStamp = tuple[int, int, int]


class SettingsReloader:
    """Gives running processes what may change of their settings, and tells what may not; those that
    replace them get it all. `file`: looked at now and then; "" = none."""

    def __init__(self, read: ReadSpecs, file: str = "") -> None:
        self._read_specs = read
        self._file = file
        self._last_stamp: FileStamp | None = None
        self._requested = asyncio.Event()
        self._lock = asyncio.Lock()

    def request_reload(self) -> None:
        """Read again soon, whether the file changed or not."""
        self._requested.set()

    async def watch(self, crew: ProcessGroup, clock: Clock) -> None:
        """For ever."""
        self._last_stamp = await clock.offload(file_stamp, self._file)
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_INTERVAL_S if self._file else None):
                    await self._requested.wait()
            await self.refresh(crew, clock)

    async def refresh(self, crew: ProcessGroup, clock: Clock) -> None:
        """Read again, if somebody asked or the file changed."""
        async with self._lock:
            now = await clock.offload(file_stamp, self._file)
            asked = self._requested.is_set()
            self._requested.clear()
            if asked or (now is not None and now != self._last_stamp):
                self._last_stamp = now
                await self._reload(crew, clock)

    async def _reload(self, crew: ProcessGroup, clock: Clock) -> None:
        try:
            specs = await clock.offload(self._read_specs)
        except DynamoError as error:
            _log_error(error)
            return
        crew.update_specs(specs)
        wanted = {(spec.role, spec.stop_order): spec for spec in specs}
        changes: dict[str, SettingChange] = {}
        for child in crew.children:
            spec = wanted.get((child.spec.role, child.spec.stop_order))
            if spec is not None:
                changes |= {one.key: one for one in _apply(child, spec)}
        _log_changes(list(changes.values()))


def file_stamp(file: str) -> FileStamp | None:
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


def _apply(child: ChildProcess, spec: ChildSpec) -> Sequence[SettingChange]:
    settings, changes = apply_reload(child.spec.settings, spec.settings)
    if settings != child.spec.settings:
        child.reload_settings(settings)
        set_levels(settings.logging.level)
    if spec.task != child.spec.task:
        return [
            *changes,
            SettingChange(f"configuration of {child.spec.name}", "", "", applied=False),
        ]
    return changes


def _log_error(error: DynamoError) -> None:
    fields = {"error": error.message, "hint": error.hint}
    log.error("settings cannot be read again; all stays as it was", extra={"fields": fields})


def _log_changes(changes: Sequence[SettingChange]) -> None:
    if not changes:
        log.info("settings read again: nothing changed")
    for one in changes:
        fields = {"setting": one.key, "before": one.before, "after": one.after}
        if one.applied:
            log.info("setting changed", extra={"fields": fields})
        else:
            log.warning("a changed setting needs a restart", extra={"fields": fields})
