"""The supervisor's view of the disk of the state folder: keeps the reserve filled, and tells when
the disk is full."""

from __future__ import annotations

import logging
from threading import Lock

from dynamo.core.clock import Clock
from dynamo.core.errors import ModelUnavailable
from dynamo.runtime.deployment import Deployment

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 5.0


class DiskSpaceMonitor:
    """Fills the reserve of a deployment again and again. `warning` is empty unless the disk of the
    state folder is full."""

    def __init__(self, deployment: Deployment, clock: Clock) -> None:
        self._folder = deployment.folder
        self._reserve = deployment.reserve
        self._clock = clock
        self._fill_lock = Lock()
        self._closed = False
        self.warning = ""

    async def watch(self) -> None:
        """Check the disk until cancelled."""
        while True:
            await self.check()
            await self._clock.sleep(CHECK_INTERVAL_S)

    async def check(self) -> None:
        """Fill the reserve and update `warning`."""
        has_room = await self._clock.offload(self._fill_unless_closed)
        fields = {"folder": str(self._folder)}
        if has_room and self.warning:
            log.info("the disk of the state folder has space again", extra={"fields": fields})
            self.warning = ""
        elif not has_room and not self.warning:
            text = "no space left on the disk of the state folder; free some space"
            log.warning(text, extra={"fields": fields})
            self.warning = f"no space left on the disk of the state folder {self._folder}"

    def close(self) -> None:
        """Fill no more, so that the state folder can be deleted. Waits for a thread that fills."""
        with self._fill_lock:
            self._closed = True

    def _fill_unless_closed(self) -> bool:
        with self._fill_lock:
            return self._closed or self._reserve.fill()

    async def require_space(self) -> None:
        """Raise `ModelUnavailable` if the disk is too full for additional processes."""
        await self.check()
        if self.warning:
            raise ModelUnavailable(
                f"no process can be added: {self.warning}",
                hint="free space on that disk; processes that die are still replaced",
            )
