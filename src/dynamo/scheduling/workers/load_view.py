"""The last load report of each worker of a component."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import msgspec

from dynamo.communication.events import Event, Events
from dynamo.core.clock import Clock
from dynamo.core.errors import DECODE_ERRORS
from dynamo.core.kv_events import LOAD_METRICS_SUBJECT, model_subject
from dynamo.core.values import Load

log = logging.getLogger(__name__)

LOAD_METRICS_SUFFIX = f".{LOAD_METRICS_SUBJECT}"

LoadListener = Callable[[str, Load, float], None]
"""Called with (worker, load, now in seconds of the router's clock)."""

_decode = msgspec.msgpack.Decoder(Load).decode


class LoadView:
    """Subscribe to load reports; `loads` maps each live worker to its last report."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._listeners: list[LoadListener] = []
        self._unsubscribe: Callable[[], None] | None = None
        self.loads: dict[str, Load] = {}

    async def subscribe(self, events: Events, component: str, model: str = "") -> None:
        """Receive the load reports of the workers of `namespace.component` that serve `model`, or
        of all, until `close`."""
        subject = model_subject(component, LOAD_METRICS_SUBJECT, model)
        self._unsubscribe = await events.subscribe(subject, self.update_scores)

    def close(self) -> None:
        """End the subscription."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None

    def add_listener(self, listener: LoadListener) -> None:
        """Call `listener` with every report."""
        self._listeners.append(listener)

    def update_scores(self, event: Event) -> None:
        """Apply one `load_metrics` event. An invalid payload is logged and skipped."""
        if event.kind == "gone":
            self.loads.pop(event.publisher, None)
        if not event.payload:
            return
        try:
            load = _decode(event.payload)
        except DECODE_ERRORS as error:
            fields = {"worker": event.publisher, "error": str(error)}
            log.warning("invalid load report skipped", extra={"fields": fields})
            return
        self.loads[event.publisher] = load
        self._notify(event.publisher, load)

    def repeat(self, workers: Iterable[str]) -> None:
        """Call the listeners with the last reports of workers that they did not know before. An
        idle worker sends no further report."""
        for worker in workers:
            if (load := self.loads.get(worker)) is not None:
                self._notify(worker, load)

    def _notify(self, worker: str, load: Load) -> None:
        now = self._clock.now()
        for listener in self._listeners:
            listener(worker, load, now)
