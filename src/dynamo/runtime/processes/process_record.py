"""That a process lives, in its deployment's folder."""

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
"""So often a living process looks whether it still stands in its folder."""


class ProcessRecordWriter:
    """One process's record, from its first word to its last."""

    def __init__(self, deployment: Deployment, record: ProcessRecord, clock: Clock) -> None:
        self.record = record
        self._deployment = deployment
        self._clock = clock
        self._write_lock = threading.Lock()

    async def update(self, **about: Any) -> None:
        """Change these fields and write the record. Raises `ConfigError`."""
        self.record = replace(self.record, **about)
        await self._clock.offload(self._write)

    async def keep_alive(self, beside: Callable[[], Awaitable[None]] | None = None) -> None:
        """See to it until cancelled that the record stays, and call `beside` after each look."""
        while True:
            await self._clock.sleep(REFRESH_INTERVAL_S)
            with suppress(ConfigError, OSError):  # serving does not need it
                await self._clock.offload(self._deployment.refresh_record, self.record)
                if beside is not None:
                    await beside()

    async def remove(self) -> None:
        """Take the record away."""
        await self._clock.offload(self._deployment.remove_record, self.record)

    def _write(self) -> None:
        """What is so now: a write that was cancelled may come after the next."""
        with self._write_lock:
            self._deployment.write_record(self.record)
