"""Records of dead children: a server would show them until their leases end."""

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
"""Planes whose records end with their process."""


class DeadRecords:
    """Takes records out of discovery as soon as its server is there, one after the other, on a
    thread of its own."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._background: ThreadBackground | None = None
        self._lock = asyncio.Lock()

    def delete(self, key: str) -> None:
        """The process that put the record `key` is dead; "": it has put none."""
        planes = planes_of(self._settings)
        if not key or planes.discovery.startswith(SELF_EXPIRING_PLANES):
            return
        if self._background is None:
            self._background = ThreadBackground("dynamo-burials")
        self._background.submit(self._delete(planes, key))

    async def close(self) -> None:
        """Who is not buried yet is forgotten with his lease."""
        if self._background is not None:
            await self._background.close()

    async def _delete(self, planes: Planes, key: str) -> None:
        async with self._lock:
            plane = await open_discovery(planes.discovery, planes.discovery_options)
            try:
                await plane.revoke_lease_of(key)
            except PlaneUnavailable as error:
                fields = {"key": key, "error": error.message}
                log.warning("a dead process stays listed", extra={"fields": fields})
            finally:
                await plane.close()
