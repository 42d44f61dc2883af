"""Records of dead children: a server would show them until their leases end."""

from __future__ import annotations

import asyncio
import logging

from dynamo.communication.discovery import open_discovery
from dynamo.core.errors import PlaneAway
from dynamo.core.settings import Settings
from dynamo.runtime.background import ThreadBackground
from dynamo.runtime.planes import Planes, planes_of

log = logging.getLogger(__name__)

END_BY_THEMSELVES = ("file:", "memory:")
"""Planes whose records end with their process."""


class Burials:
    """Takes records out of discovery as soon as its server is there, one after the other, on a
    thread of its own."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._background: ThreadBackground | None = None
        self._one_at_a_time = asyncio.Lock()

    def bury(self, key: str) -> None:
        """The process that put the record `key` is dead; "": it has put none."""
        planes = planes_of(self._settings)
        if not key or planes.discovery.startswith(END_BY_THEMSELVES):
            return
        if self._background is None:
            self._background = ThreadBackground("dynamo-burials")
        self._background.start(self._bury(planes, key))

    async def close(self) -> None:
        """Who is not buried yet is forgotten with his lease."""
        if self._background is not None:
            await self._background.close()

    async def _bury(self, planes: Planes, key: str) -> None:
        async with self._one_at_a_time:
            plane = await open_discovery(planes.discovery, planes.etcd)
            try:
                await plane.bury(key)
            except PlaneAway as error:
                fields = {"key": key, "error": error.message}
                log.warning("a dead process stays listed", extra={"fields": fields})
            finally:
                await plane.close()
