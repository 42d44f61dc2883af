"""What one subscription knows of one source: order, gaps, repair."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from dynamo.communication.events.plane import Event, EventKind, EventListener
from dynamo.communication.events.source import CatchUp

log = logging.getLogger(__name__)


class SequenceTracker:
    """Passes events on, in order and none twice. `ask(after)` must bring a `CatchUp` to `repair`;
    what arrives before that is dropped, because the answer holds it. `replaces`: the tracker of the
    same publisher's former epoch."""

    def __init__(
        self,
        subject: str,
        publisher: str,
        epoch: int,
        listener: EventListener,
        ask: Callable[[int], None],
        replaces: SequenceTracker | None = None,
    ) -> None:
        self._subject = subject
        self._publisher = publisher
        self.epoch = epoch
        self._listener = listener
        self._request_catch_up = ask
        self._last_sequence = -1
        self._catching_up = True
        self._stale = False
        self._replaced_epoch: int | None = None if replaces is None else replaces.epoch
        self.lost_events: int = 0 if replaces is None else replaces.lost_events

    def start(self) -> None:
        """Ask for what is not known yet: at first, and whenever a connection was made."""
        self._catching_up = True
        self._request_catch_up(self._last_sequence)

    def on_events(self, first: int, payloads: Sequence[bytes]) -> None:
        """Live events."""
        if self._catching_up:
            return
        known = self._last_sequence + 1 - first
        if known < 0:
            self._on_gap()
            return
        self._deliver(first, payloads, known)

    def on_skipped(self, last: int) -> None:
        """The source's last sequence, where events were withheld from us."""
        if not self._catching_up and last > self._last_sequence:
            self._on_gap()

    def on_disconnected(self) -> None:
        """The connection broke: what comes is not heard until it is made again."""
        if not self._catching_up:
            self._catching_up = True
            if self._last_sequence >= 0:
                self._mark_stale()

    def on_catch_up(self, answer: CatchUp) -> None:
        """The answer to `ask`."""
        self._catching_up = False
        if answer.dump:
            self._replaced_epoch = None
            self._stale = False
            self._last_sequence = answer.last
            first, *rest = answer.payloads or (b"",)
            self._emit("dump", answer.last, first)
            for payload in rest:
                self._emit("event", answer.last, payload)
            return
        if self._replaced_epoch is not None:
            self._emit("gone", 0, b"", self._replaced_epoch)
        if self._last_sequence >= 0:
            self.lost_events += max(0, answer.first - 1 - self._last_sequence)
        self._last_sequence = max(self._last_sequence, answer.first - 1)
        self._replaced_epoch = None
        stale, self._stale = self._stale, False
        known = self._last_sequence + 1 - answer.first
        self._deliver(answer.first, answer.payloads, known)
        if stale and len(answer.payloads) <= known:
            self._emit("repaired", self._last_sequence, b"")

    def on_source_gone(self) -> None:
        """The source disappeared."""
        self._emit("gone", max(self._last_sequence, 0), b"")

    def _on_gap(self) -> None:
        self._catching_up = True
        self._mark_stale()
        self._request_catch_up(self._last_sequence)

    def _mark_stale(self) -> None:
        self._stale = True
        self._emit("stale", self._last_sequence, b"")

    def _deliver(self, first: int, payloads: Sequence[bytes], known: int) -> None:
        sequence = first + known
        for payload in payloads[known:] if known else payloads:
            self._last_sequence = sequence
            self._emit("event", sequence, payload)
            sequence += 1

    def _emit(
        self,
        kind: EventKind,
        sequence: int,
        payload: bytes,
        epoch: int | None = None,
    ) -> None:
        event = Event(
            self._subject,
            self._publisher,
            self.epoch if epoch is None else epoch,
            sequence,
            payload,
            kind,
        )
        try:
            self._listener(event)
        except Exception:  # a listener's bug must not stop the plane
            log.exception("listener failed", extra={"fields": {"subject": self._subject}})
