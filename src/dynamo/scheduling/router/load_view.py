"""What workers say of themselves: their last load report each."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from dynamo.communication.events import Event, Events
from dynamo.core.clock import Clock
from dynamo.core.values import Load

log = logging.getLogger(__name__)

LOAD_METRICS_SUFFIX = ".load_metrics"

LoadListener = Callable[[str, Load, float], None]
"""(worker, load, now)."""

_decode = msgspec.msgpack.Decoder(Load).decode


class LoadView:
    """Last reports by worker; a worker that is gone has none."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._listeners: list[LoadListener] = []
        self._unsubscribe: Callable[[], None] | None = None
        self.loads: dict[str, Load] = {}

    async def subscribe(self, events: Events, component: str) -> None:
        """Hear the load reports of `namespace.component`, until `close`."""
        self._unsubscribe = await events.subscribe(
            component + LOAD_METRICS_SUFFIX, self.update_scores
        )

    def close(self) -> None:
        """Hear no more."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None

    def add_listener(self, listener: LoadListener) -> None:
        """Call `listener` with every report."""
        self._listeners.append(listener)

    def update_scores(self, event: Event) -> None:
        """One `load_metrics` event."""
        if event.kind == "gone":
            self.loads.pop(event.publisher, None)
        if not event.payload:
            return
        try:
            load = _decode(event.payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            fields = {"worker": event.publisher, "error": str(error)}
            log.warning("bad load report", extra={"fields": fields})
            return
        self.loads[event.publisher] = load
        now = self._clock.now()
        for listener in self._listeners:
            listener(event.publisher, load, now)
