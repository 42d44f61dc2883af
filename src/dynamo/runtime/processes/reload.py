"""Reloads settings while a deployment serves, when their file changes or on SIGHUP."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from dynamo.core.clock import Clock
from dynamo.core.errors import DynamoError
from dynamo.core.settings.reload import SettingChange, apply_reload
from dynamo.core.tasks import wait_at_most
from dynamo.runtime.processes.child import ChildProcess
from dynamo.runtime.processes.child_spec import ChildSpec
from dynamo.runtime.processes.process_group import ProcessGroup
from dynamo.runtime.processes.process_names import kind_of_process
from dynamo.telemetry.logs import set_levels

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0

ReadSpecs = Callable[[], Sequence[ChildSpec]]
"""Reads the settings and returns the processes that they describe. Raises `DynamoError`. Blocks."""
FileStamp = tuple[int, int, int]
"""Modification time, size and inode of a file."""


class SettingsReloader:
    """Sends reloadable settings to running processes and logs which others need a restart.
    Replacements of running processes get all new settings. `files` are polled."""

    def __init__(self, read_specs: ReadSpecs, files: Sequence[str] = ()) -> None:
        self._read_specs = read_specs
        self._files = files
        self._last_stamps: Mapping[str, FileStamp] = {}
        self._requested = asyncio.Event()
        self._lock = asyncio.Lock()

    def request_reload(self) -> None:
        """Reload soon, whether the file changed or not."""
        self._requested.set()

    async def watch(self, group: ProcessGroup, clock: Clock) -> None:
        """Reload after each change or request, until cancelled."""
        self._last_stamps = await clock.offload(file_stamps, self._files)
        while True:
            await wait_at_most(self._requested.wait(), POLL_INTERVAL_S if self._files else None)
            await self.refresh(group, clock)

    async def refresh(self, group: ProcessGroup, clock: Clock) -> None:
        """Reload if it was requested or a file changed."""
        async with self._lock:
            stamps = await clock.offload(file_stamps, self._files)
            changed = stamps.items() - self._last_stamps.items()
            requested = self._requested.is_set()
            self._requested.clear()
            if requested or changed:
                self._last_stamps = {**self._last_stamps, **stamps}
                await self._reload(group, clock)

    async def _reload(self, group: ProcessGroup, clock: Clock) -> None:
        try:
            specs = await clock.offload(self._read_specs)
        except DynamoError as error:
            fields = {"error": error.message, "hint": error.hint}
            text = "settings not reloaded; the old settings remain"
            log.error(text, extra={"fields": fields})  # noqa: TRY400
            return
        specs = group.tuned.apply(specs)
        group.update_specs(specs)
        by_role = {(spec.role, spec.stop_order): spec for spec in specs}
        by_kind = {kind_of_process(spec.name): spec for spec in specs}
        changes: dict[str, SettingChange] = {}
        for child in group.children:
            spec = by_role.get((child.spec.role, child.spec.stop_order))
            own = by_kind.get(kind_of_process(child.spec.name))
            if new_spec := own or spec:
                for change in _apply(child, new_spec):
                    if change.applied or own is not None:
                        changes[change.key] = change
        _log_changes(list(changes.values()))
        served = {child.spec.model for child in group.children}
        models = dict.fromkeys(spec.model for spec in specs if spec.model)
        for model in models if len(models) > 1 else ():
            if model not in served:
                fields = {"model": model, "hint": "`dynamo add` starts it, or a restart"}
                log.warning("a model of the file is not served", extra={"fields": fields})


def file_stamps(files: Sequence[str]) -> Mapping[str, FileStamp]:
    """Values that change when a file is written or replaced, without missing files. Blocks."""
    stamps = {}
    for file in files:
        with suppress(OSError):
            status = Path(file).expanduser().stat()
            stamps[file] = (status.st_mtime_ns, status.st_size, status.st_ino)
    return stamps


def has_terminal() -> bool:
    """Whether the process has a controlling terminal, whose end sends SIGHUP."""
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
    if child.spec.role != "worker":  # a sum over all models
        changes = tuple(change for change in changes if change.key != "engine.workers")
    if spec.task != child.spec.task:
        return [
            *changes,
            SettingChange(f"configuration of {child.spec.name}", "", "", applied=False),
        ]
    return changes


def _log_changes(changes: Sequence[SettingChange]) -> None:
    if not changes:
        log.info("settings reloaded: nothing changed")
    for change in changes:
        fields = {"setting": change.key, "before": change.before, "after": change.after}
        if change.applied:
            log.info("setting changed", extra={"fields": fields})
        else:
            log.warning("a changed setting needs a restart", extra={"fields": fields})
