"""The trial of other settings on one process of a deployment: then on all of its kind, or on none.

The one who tries keeps a connection open. Without its word to keep the settings, such as after its
death, they are taken back. A supervisor that dies ends its processes, and starts with the settings
that it is given. So all processes of a kind have the old or the new settings in the end.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import TYPE_CHECKING

from dynamo.core.errors import ConfigError, DynamoError, InvalidRequest
from dynamo.core.settings.keys import setting_specs_by_key
from dynamo.core.settings.values import parse_value
from dynamo.runtime.processes.process_names import kind_of_process
from dynamo.runtime.processes.tuned_settings import Values, values_of, with_values

if TYPE_CHECKING:
    from dynamo.runtime.processes.child import ChildProcess
    from dynamo.runtime.processes.process_group import ControlProgressCallback, ProcessGroup

log = logging.getLogger(__name__)

KEEP = "keep"
"""The line that keeps the settings of a trial. Any other line, and the end, take them back."""
CHECK_INTERVAL_S = 0.5


class SettingTrial:
    """Runs trials in a supervisor, one at a time."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._running = False

    async def run(
        self,
        name: str,
        raw: Values,
        read: Callable[[], Awaitable[bytes]],
        limit_s: float,
        progress: ControlProgressCallback,
    ) -> None:
        """Run the least busy process of a kind with other settings until `read` returns a line,
        then all of them, or none. Nothing is kept if any process has changed meanwhile. Raises
        `ConfigError`, `NotFound`, `InvalidRequest` if processes start or drain, and
        `ModelUnavailable` if a process cannot start with the settings."""
        if self._running:
            raise InvalidRequest("another trial is running", hint="wait for its end")
        replicas = self._require_quiet(name)
        kind, values = kind_of_process(replicas[0].spec.name), _parse(raw)
        before = values_of(replicas[0].spec.settings, values)
        if before == values:
            raise ConfigError(f"{kind} has these settings already")
        self._running = True
        try:
            await self._change(min(replicas, key=attrgetter("calls")), values)
            tried, state = self._others(kind, before), self._state()
            progress(tried[0].instance if tried else "")
            await self._wait(state, read, limit_s)
            self._group.change_settings(kind, before, values)
            while others := self._others(kind, values):
                await self._change(others[0], values)
        except Exception:
            await self._take_back(kind, values, before)
            raise
        finally:
            self._running = False
        progress(f"{kind}: {', '.join(f'{key} = {value}' for key, value in values.items())}")

    def _require_quiet(self, name: str) -> Sequence[ChildProcess]:
        """Return the processes of a kind, if all processes serve and none drains."""
        replicas = self._group.replicas(name)
        if len(replicas) < 2:
            raise ConfigError(
                f"there is {len(replicas)} process {name}; a trial compares one with its siblings",
                hint=f"dynamo scale {name}=2",
            )
        if any(child.spec.settings.engine.urls for child in replicas):
            raise ConfigError("servers of URLs have settings of their own")
        for child in self._group.children:
            if not (child.ready and child.desired):
                raise InvalidRequest(
                    f"{child.spec.name} starts or drains; a trial waits until all serve",
                    hint="try again later",
                )
        return replicas

    async def _wait(
        self, state: object, read: Callable[[], Awaitable[bytes]], limit_s: float
    ) -> None:
        """Wait for the verdict. Raises `InvalidRequest` unless the settings are kept."""
        reason = f"there was no verdict after {limit_s:g} s"
        for _ in range(math.ceil(limit_s / CHECK_INTERVAL_S)):
            line: bytes | None = None
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_INTERVAL_S):
                    line = await read()
            if self._state() != state:
                reason = "processes have started or left during the trial"
                break
            if line is not None:
                if line.decode().strip() == KEEP:
                    return
                reason = "nobody keeps them"
                break
        raise InvalidRequest(f"{reason}: the settings are taken back")

    def _state(self) -> object:
        """Return what changes if a process is started, drained or replaced, or dies."""
        return [
            (child.spec.name, child.instance, child.restarts, child.ready, child.desired)
            for child in self._group.children
        ]

    def _others(self, kind: str, values: Values) -> Sequence[ChildProcess]:
        """Return the processes of a kind that have other values."""
        replicas = self._group.replicas(kind)
        return [each for each in replicas if values_of(each.spec.settings, values) != values]

    async def _take_back(self, kind: str, values: Values, before: Values) -> None:
        self._group.change_settings(kind, values, before)
        for child in self._others(kind, before):
            try:
                await self._change(child, before)
            except DynamoError as error:
                fields = {"name": child.spec.name, "error": error.message}
                log.error("settings are not taken back", extra={"fields": fields})  # noqa: TRY400

    async def _change(self, child: ChildProcess, values: Values) -> None:
        """Let a process have other values: at once if all of them reload, else by replacing it."""
        specs = setting_specs_by_key()
        if all(specs[key].meta.reload for key in values):
            child.reload_settings(with_values(child.spec, values).settings)
        else:
            await self._group.replace_child(child, lambda _: None, values)


def _parse(raw: Values) -> Values:
    """Return checked values. Raises `ConfigError` for settings that are not tuned."""
    specs, values = setting_specs_by_key(), {}
    for key, value in raw.items():
        if key not in specs or not specs[key].meta.tuned:
            raise ConfigError(f"{key} cannot be changed while the deployment serves")
        try:
            values[key] = parse_value(specs[key], value)
        except ValueError as error:
            raise ConfigError(f"{key} = {value}: {error}") from None
    if not values:
        raise ConfigError("a trial needs settings")
    return values
