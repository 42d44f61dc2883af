"""A cancellation token."""

from __future__ import annotations

import asyncio


class CancellationToken:
    """Can be cancelled once. Belongs to one event loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._event.is_set()

    def cancel(self) -> None:
        """Cancel the token. A second call does nothing."""
        self._event.set()

    async def wait(self) -> None:
        """Return when cancelled."""
        await self._event.wait()
