"""The namespaces of a cluster that have frontends, as a worker sees them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from dynamo.communication.directory import RecordChange, follow_records
from dynamo.runtime.deployment import ProcessRecord
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.processes.process_record import PROCESSES_PREFIX

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
        self._namespaces: dict[str, str] = {}
        self._text = ""
        runtime.health.add_limitation(LIMITATION, lambda: self._text)

    async def run(self) -> None:
        """Follow the announced frontends until cancelled."""
        runtime = self._runtime
        await follow_records(runtime.discovery, _FRONTENDS_PREFIX, self._apply, runtime.clock)

    def _apply(self, batch: Sequence[RecordChange], replaces: bool) -> None:
        if replaces:
            self._namespaces.clear()
        for change in batch:
            self._namespaces.pop(change.key, None)
            if change.value is not None:
                with suppress(msgspec.DecodeError):
                    self._namespaces[change.key] = _decode(change.value).namespace
        namespaces = set(self._namespaces.values())
        before, self._text = self._text, ""
        if namespaces and self._namespace not in namespaces:
            self._text = (
                f"no frontend follows namespace {self._namespace}; frontends of this cluster "
                f"follow {', '.join(sorted(namespaces))} (runtime.namespace)"
            )
        if self._text and self._text != before:
            log.warning("%s", self._text)
