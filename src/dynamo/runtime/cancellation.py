"""A cancellation token with children."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class CancellationToken:
    """Can be cancelled once, together with its children. Belongs to one event loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called on this token or a parent."""
        return self._event.is_set()

    def cancel(self) -> None:
        """Cancel this token and its children. A second call does nothing."""
        if self._event.is_set():
            return
        self._event.set()
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener()

    def child(self) -> CancellationToken:
        """Create a token that is cancelled with this one and may be cancelled alone."""
        child = CancellationToken()
        self.on_cancel(child.cancel)
        return child

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Call `callback` on cancellation, or at once if the token is cancelled already."""
        if self._event.is_set():
            callback()
        else:
            self._listeners.append(callback)

    async def wait(self) -> None:
        """Return when cancelled."""
        await self._event.wait()
