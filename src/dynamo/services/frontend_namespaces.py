"""The namespaces of a cluster that have frontends, as a worker sees them."""

from __future__ import annotations

import logging
from contextlib import suppress

import msgspec

from dynamo.core.errors import PlaneUnavailable
from dynamo.runtime.deployment import ProcessRecord
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.processes.process_record import PROCESSES_PREFIX, REFRESH_INTERVAL_S

log = logging.getLogger(__name__)

LIMITATION: str = "namespace"
_FRONTENDS_PREFIX = f"{PROCESSES_PREFIX}frontend/"
_decode = msgspec.json.Decoder(ProcessRecord).decode


class FrontendNamespaces:
    """Reports in the log and in /health that frontends follow other namespaces and none follows
    that of this worker, which then gets no requests."""

    def __init__(self, runtime: DistributedRuntime) -> None:
        self._runtime = runtime
        self._namespace = runtime.settings.runtime.namespace
        self._text = ""
        runtime.health.add_limitation(LIMITATION, lambda: self._text)

    async def run(self) -> None:
        """Look at the announced frontends until cancelled. An unreachable plane changes nothing."""
        while True:
            with suppress(PlaneUnavailable):
                await self.update()
            await self._runtime.clock.sleep(REFRESH_INTERVAL_S)

    async def update(self) -> None:
        """Look once. Raises `PlaneUnavailable`."""
        namespaces = set()
        for value in (await self._runtime.discovery.get(_FRONTENDS_PREFIX)).values():
            with suppress(msgspec.DecodeError):
                namespaces.add(_decode(value).namespace)
        before, self._text = self._text, ""
        if namespaces and self._namespace not in namespaces:
            self._text = (
                f"no frontend follows namespace {self._namespace}; frontends of this cluster "
                f"follow {', '.join(sorted(namespaces))} (runtime.namespace)"
            )
        if self._text and self._text != before:
            log.warning("%s", self._text)
