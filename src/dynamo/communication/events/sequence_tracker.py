"""Tracks the event sequence of one source for one subscription and repairs gaps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from dynamo.communication.events.plane import Event, EventKind, EventListener
from dynamo.communication.events.source import CatchUp

log = logging.getLogger(__name__)


class SequenceTracker:
    """Passes events to the listener in order and none twice.

    `request_catch_up(after)` must lead to a call of `on_catch_up`. Events received before that are
    dropped, because the catch-up contains them. `replaces` is the tracker of the publisher's former
    epoch.
    """

    def __init__(
        self,
        subject: str,
        publisher: str,
        epoch: int,
        listener: EventListener,
        request_catch_up: Callable[[int], object],
        replaces: SequenceTracker | None = None,
    ) -> None:
        self._subject = subject
        self._publisher = publisher
        self.epoch = epoch
        self._listener = listener
        self._request_catch_up = request_catch_up
        self._last_sequence = -1
        self._catching_up = True
        self._stale = False
        self._replaced_epoch: int | None = None if replaces is None else replaces.epoch
        self.lost_events: int = 0 if replaces is None else replaces.lost_events

    def start(self) -> None:
        """Request missing events. Called at first and after each reconnect."""
        self._catching_up = True
        self._request_catch_up(self._last_sequence)

    def on_events(self, first: int, payloads: Sequence[bytes]) -> None:
        """Handle new events, of which `first` is the first sequence."""
        if self._catching_up:
            return
        known_count = self._last_sequence + 1 - first
        if known_count < 0:
            self._on_gap()
            return
        self._deliver(first, payloads, known_count)

    def on_skipped(self, last: int) -> None:
        """Handle the source's last sequence, sent after events were withheld."""
        if not self._catching_up and last > self._last_sequence:
            self._on_gap()

    def on_disconnected(self) -> None:
        """Mark the source as stale because its connection was lost."""
        if not self._catching_up:
            self._catching_up = True
            if self._last_sequence >= 0:
                self._mark_stale()

    def on_catch_up(self, catch_up: CatchUp) -> None:
        """Handle the answer to a catch-up request."""
        self._catching_up = False
        if catch_up.dump:
            self._replaced_epoch = None
            self._stale = False
            self._last_sequence = catch_up.last
            first, *rest = catch_up.payloads or (b"",)
            self._emit("dump", catch_up.last, first)
            for payload in rest:
                self._emit("event", catch_up.last, payload)
            return
        if self._replaced_epoch is not None:
            self._emit("gone", 0, b"", self._replaced_epoch)
        if self._last_sequence >= 0:
            self.lost_events += max(0, catch_up.first - 1 - self._last_sequence)
        self._last_sequence = max(self._last_sequence, catch_up.first - 1)
        self._replaced_epoch = None
        stale, self._stale = self._stale, False
        known_count = self._last_sequence + 1 - catch_up.first
        self._deliver(catch_up.first, catch_up.payloads, known_count)
        if stale and len(catch_up.payloads) <= known_count:
            self._emit("repaired", self._last_sequence, b"")

    def on_source_gone(self) -> None:
        """Report that the source disappeared."""
        self._emit("gone", max(self._last_sequence, 0), b"")

    def _on_gap(self) -> None:
        self._catching_up = True
        self._mark_stale()
        self._request_catch_up(self._last_sequence)

    def _mark_stale(self) -> None:
        self._stale = True
        self._emit("stale", self._last_sequence, b"")

    def _deliver(self, first: int, payloads: Sequence[bytes], known_count: int) -> None:
        sequence = first + known_count
        for payload in payloads[known_count:] if known_count else payloads:
            self._last_sequence = sequence
            self._emit("event", sequence, payload)
            sequence += 1

    def _emit(
        self, kind: EventKind, sequence: int, payload: bytes, epoch: int | None = None
    ) -> None:
        epoch = self.epoch if epoch is None else epoch
        event = Event(self._subject, self._publisher, epoch, sequence, payload, kind)
        try:
            self._listener(event)
        except Exception:  # a listener's bug must not stop the plane
            log.exception("listener failed", extra={"fields": {"subject": self._subject}})
