"""Records of processes: written to the deployment's folder while a process lives, and deleted from
discovery after its death. A server would otherwise list them until leases expire."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from dynamo.communication.discovery import open_discovery
from dynamo.core.clock import Clock
from dynamo.core.errors import ConfigError, PlaneUnavailable
from dynamo.core.settings import Settings
from dynamo.runtime.background import ThreadBackground
from dynamo.runtime.deployment import Deployment, ProcessRecord
from dynamo.runtime.planes import Planes, planes_of

log = logging.getLogger(__name__)

REFRESH_INTERVAL_S = 15.0
"""Interval at which a process checks that its record still exists."""
SELF_EXPIRING_PLANES = ("file:", "memory:")
"""Planes that drop the records of a process when it dies."""


class ProcessRecordWriter:
    """Writes, refreshes and removes the record of a process."""

    def __init__(self, deployment: Deployment, record: ProcessRecord, clock: Clock) -> None:
        self.record = record
        self._deployment = deployment
        self._clock = clock
        self._write_lock = threading.Lock()
        self._written: ProcessRecord | None = None
        self._removed = False

    async def create(self, **fields: Any) -> None:
        """Change fields of the record and write it. Raises `ConfigError`."""
        self.record = replace(self.record, **fields)
        await self._clock.offload(self._write)

    async def update(self, **fields: Any) -> None:
        """Change fields of the record and write it. A failure is logged, and the next refresh tries
        again: only `dynamo ps` and `dynamo stop` need the record."""
        try:
            await self.create(**fields)
        except ConfigError as error:
            text = "the process record was not written; the process serves without it"
            log.warning(text, extra={"fields": {"error": error.message}})

    async def keep_alive(self, on_refresh: Callable[[], Awaitable[None]] | None = None) -> None:
        """Refresh the record until cancelled, and call `on_refresh` each time."""
        while True:
            await self._clock.sleep(REFRESH_INTERVAL_S)
            with suppress(ConfigError, OSError):  # the process can serve without its record
                await self._clock.offload(self._write)
                if on_refresh is not None:
                    await on_refresh()

    async def remove(self) -> None:
        """Delete the record. Nothing writes it afterwards."""
        await self._clock.offload(self._remove)

    def _write(self) -> None:
        """Write the present record, or refresh it if it is written already. A cancelled call may
        run after its successor, and after `remove`."""
        with self._write_lock:
            record = self.record
            if self._removed:
                return
            if record is self._written:
                self._deployment.refresh_record(record)
                return
            self._deployment.write_record(record)
            self._written = record

    def _remove(self) -> None:
        with self._write_lock:
            self._removed = True
            self._deployment.remove_record(self.record)


class DeadRecords:
    """Deletes the records of dead children one after the other, on a thread of its own."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._background: ThreadBackground | None = None
        self._lock = asyncio.Lock()

    def delete(self, key: str) -> None:
        """Delete the record `key` of a dead process and all records under the same lease, as soon
        as the server is reachable. An empty key is ignored."""
        planes = planes_of(self._settings)
        if not key or planes.discovery.startswith(SELF_EXPIRING_PLANES):
            return
        if self._background is None:
            self._background = ThreadBackground("dynamo-dead-records")
        self._background.submit(self._delete(planes, key))

    async def close(self) -> None:
        """Stop. Records that could not be deleted expire with their leases."""
        if self._background is not None:
            await self._background.close()

    async def _delete(self, planes: Planes, key: str) -> None:
        async with self._lock:
            plane = await open_discovery(planes.discovery, planes.discovery_options)
            try:
                await plane.revoke_lease_of(key)
            except PlaneUnavailable as error:
                fields = {"key": key, "error": error.message}
                log.warning("the record of a dead process stays", extra={"fields": fields})
            finally:
                await plane.close()
