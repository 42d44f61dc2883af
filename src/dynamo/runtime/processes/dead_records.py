"""Deletes the discovery records of dead children; a server would list them until leases expire."""

from __future__ import annotations

import asyncio
import logging

from dynamo.communication.discovery import open_discovery
from dynamo.core.errors import PlaneUnavailable
from dynamo.core.settings import Settings
from dynamo.runtime.background import ThreadBackground
from dynamo.runtime.planes import Planes, planes_of

log = logging.getLogger(__name__)

SELF_EXPIRING_PLANES = ("file:", "memory:")
"""Planes that drop the records of a process when it dies."""


class DeadRecords:
    """Deletes records one after the other, on a thread of its own."""

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
