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

KEEP_S = 15.0
"""So often a living process looks whether it still stands in its folder."""


class Standing:
    """One process's record, from its first word to its last."""

    def __init__(self, deployment: Deployment, record: ProcessRecord, clock: Clock) -> None:
        self.record = record
        self._deployment = deployment
        self._clock = clock
        self._writing = threading.Lock()

    async def tell(self, **about: Any) -> None:
        """Change these fields and write the record. Raises `ConfigError`."""
        self.record = replace(self.record, **about)
        await self._clock.offload(self._write)

    async def keep(self, beside: Callable[[], Awaitable[None]] | None = None) -> None:
        """See to it until cancelled that the record stays, and call `beside` after each look."""
        while True:
            await self._clock.sleep(KEEP_S)
            with suppress(ConfigError, OSError):  # serving does not need it
                await self._clock.offload(self._deployment.keep, self.record)
                if beside is not None:
                    await beside()

    async def end(self) -> None:
        """Take the record away."""
        await self._clock.offload(self._deployment.remove, self.record)

    def _write(self) -> None:
        """What is so now: a write that was cancelled may come after the next."""
        with self._writing:
            self._deployment.write(self.record)
