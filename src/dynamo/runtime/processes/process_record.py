"""Writes the record of a process to its deployment's folder and refreshes it."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from dynamo.core.clock import Clock
from dynamo.core.errors import ConfigError
from dynamo.runtime.deployment import Deployment, ProcessRecord

REFRESH_INTERVAL_S = 15.0
"""Interval at which a process checks that its record still exists."""


class ProcessRecordWriter:
    """Writes, refreshes and removes the record of a process."""

    def __init__(self, deployment: Deployment, record: ProcessRecord, clock: Clock) -> None:
        self.record = record
        self._deployment = deployment
        self._clock = clock
        self._write_lock = threading.Lock()

    async def update(self, **fields: Any) -> None:
        """Change fields of the record and write it. Raises `ConfigError`."""
        self.record = replace(self.record, **fields)
        await self._clock.offload(self._write)

    async def keep_alive(self, on_refresh: Callable[[], Awaitable[None]] | None = None) -> None:
        """Refresh the record until cancelled, and call `on_refresh` each time."""
        while True:
            await self._clock.sleep(REFRESH_INTERVAL_S)
            with suppress(ConfigError, OSError):  # the process can serve without its record
                await self._clock.offload(self._deployment.refresh_record, self.record)
                if on_refresh is not None:
                    await on_refresh()

    async def remove(self) -> None:
        """Delete the record."""
        await self._clock.offload(self._deployment.remove_record, self.record)

    def _write(self) -> None:
        """Write the present record: a cancelled write may run after its successor."""
        with self._write_lock:
            self._deployment.write_record(self.record)
